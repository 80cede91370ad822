"""RWKV: the form that is trained and the form that serves are one model, and its beam is that of brute force."""

import runpy
import sys

import numpy as np
import pytest
import torch

from cluster.errors import BackendFailed, DeadlineExceeded
from cluster.trie import Trie
from cluster.values import GenerateRequest, SamplingOptions, UserState
from tests.bundles import make_generative_bundle, random_sequence
from tests.examples import make_importable
from tests.histories import taste_data

make_importable()

from genrec_rwkv import RwkvGenerator  # noqa: E402
from genrec_rwkv.model import Rwkv  # noqa: E402
from genrec_rwkv.recurrent import Recurrent  # noqa: E402
from genrec_rwkv.search import search  # noqa: E402
from genrec_rwkv.train import Options, save, train  # noqa: E402

ITEMS = 60


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_generative_bundle(tmp_path_factory.mktemp("rwkv") / "tiny", items=ITEMS, sizes=(6,))


def random_model(vocabulary, *, channels=16, layers=3, seed=0, scale=3.0):
    """With weights large enough that what was read matters, and keys beyond the bound."""
    torch.manual_seed(seed)
    model = Rwkv(vocabulary, channels, layers).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("k.weight", "head")):
                parameter.mul_(scale if "k." in name else 30)
            elif name.endswith((".u", "log_w")):
                parameter.add_(torch.randn_like(parameter))
    return model


def recurrent(model):
    return Recurrent({name: weight.numpy() for name, weight in model.state_dict().items()})


@pytest.mark.parametrize("length", [1, 2, 7, 60])
@pytest.mark.parametrize("scale", [1.0, 12.0], ids=["small keys", "clipped keys"])
def test_all_positions_at_once_and_one_after_another_are_the_same(length, scale):
    model, rng = random_model(40, scale=scale), np.random.default_rng(length)
    tokens = rng.integers(0, 40, (3, length))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).numpy()
    served = recurrent(model)
    state = served.start(3)
    for position in range(length):
        logits, state = served.step(state, tokens[:, position])
        assert logits == pytest.approx(expected[:, position], abs=2e-3)
    assert expected.std() > 0.5


def test_a_state_is_as_large_after_a_thousand_tokens_and_a_snapshot_can_be_returned_to():
    served = recurrent(random_model(40))
    state = served.start(1)
    for token in np.random.default_rng(0).integers(0, 40, 1000):
        _, state = served.step(state, np.array([token]))
    assert state.shape == (3, 4, 1, 16)
    snapshot = state.copy()
    first, _ = served.step(state, np.array([5]))
    served.step(state, np.array([6]))
    assert (state == snapshot).all()
    assert (served.step(snapshot, np.array([5]))[0] == first).all()


@pytest.fixture(scope="module")
def weights(bundle, tmp_path_factory):
    """A file of random ones."""
    path = tmp_path_factory.mktemp("weights") / "random.safetensors"
    save(random_model(bundle.semantic_ids.vocabulary), bundle, path)
    return str(path)


@pytest.fixture(scope="module")
def generator(bundle, weights):
    loaded = RwkvGenerator(weights)
    loaded.load(bundle)
    return loaded


def asked(length, *, k=10, beam=ITEMS, seed=0, blocked=(), among=None, **rest):
    sequence = random_sequence(length, items=ITEMS, seed=seed)
    user = UserState(np.zeros((length, 16), np.float32), sequence)
    return GenerateRequest(user, k, beam, np.array(blocked, np.int32), None if among is None else np.array(among, np.int32), **rest)


def brute_force(model, bundle, request):
    """log p of every item by the trained form, one sequence an item, renormalised over the codes that lead to an item."""
    tokens, blocked = bundle.semantic_ids.tokens.astype(np.int64), set(request.blocked.tolist())
    allowed = [item for item in range(1, ITEMS + 1) if item not in blocked]
    history, scores = [0, *tokens[request.state.sequence.items].ravel().tolist()], {}
    for item in allowed:
        with torch.no_grad():
            logits = model(torch.tensor([history + tokens[item].tolist()]))[0].double().numpy()
        total = 0.0
        for level, token in enumerate(tokens[item]):
            follow = sorted({int(tokens[other][level]) for other in allowed if (tokens[other][:level] == tokens[item][:level]).all()})
            row = logits[len(history) - 1 + level]
            total += row[token] - np.logaddexp.reduce(row[follow])
        scores[item] = total
    return scores


@pytest.mark.parametrize("blocked", [(), range(1, 40)], ids=["nothing", "most"])
def test_a_beam_that_cuts_nothing_finds_what_brute_force_finds(blocked, generator, bundle):
    request = asked(6, k=ITEMS, blocked=blocked)
    answer, truth = generator.infer(request), brute_force(random_model(bundle.semantic_ids.vocabulary), bundle, request)
    assert set(answer.items.tolist()) == set(truth)
    assert answer.log_probs == pytest.approx([truth[item] for item in answer.items.tolist()], abs=2e-3)
    assert np.exp(answer.log_probs).sum() == pytest.approx(1, abs=1e-3)


def test_a_narrow_beam_follows_the_best_paths_only(generator):
    wide, narrow = generator.infer(asked(6)), generator.infer(asked(6, beam=1, k=3))
    assert 1 <= len(narrow.items) <= 3
    assert narrow.log_probs[0] <= wide.log_probs[0] + 1e-5


def first(request, count):
    sequence = request.state.sequence
    columns = (column[:count] for column in (sequence.items, sequence.timestamps, sequence.actions, sequence.values))
    return type(request)(UserState(request.state.states[:count], type(sequence)(*columns, 0)), 10, 20, request.blocked, user_id="ada")


def test_of_a_history_that_grew_only_the_new_events_are_read(generator, bundle, monkeypatch):
    generator.forget_everything()
    whole, steps = asked(8), []
    step = Recurrent.step
    monkeypatch.setattr(Recurrent, "step", lambda self, state, tokens: steps.append(len(tokens)) or step(self, state, tokens))
    for count, read in ((5, 5), (6, 1), (6, 0), (8, 2), (3, 3)):
        steps.clear()
        answer = generator.infer(first(whole, count))
        prompt_steps = len(steps) - (bundle.semantic_ids.levels - 1)  # the rest is the beam's
        assert prompt_steps == read * bundle.semantic_ids.levels
        fresh = generator.infer(type(whole)(first(whole, count).state, 10, 20, whole.blocked))
        assert answer.items.tolist() == fresh.items.tolist()
    assert generator.kept()["users"] == 1
    assert (generator.forget("default", "ada"), generator.forget("default", "ada")) == (1, 0)


def test_of_more_users_than_are_kept_the_one_asked_for_longest_ago_goes(weights, bundle):
    few = RwkvGenerator(weights, keep_users=2)
    few.load(bundle)
    for user in ("ann", "bob", "ann", "cy"):
        few.infer(asked(3, user_id=user))
    assert few.kept()["users"] == 2
    assert [few.forget("default", user) for user in ("ann", "bob", "cy")] == [1, 0, 1]


def test_what_is_late_stands_in_its_place_and_costs_its_neighbours_nothing(generator):
    late, good = asked(3, deadline=-1.0), asked(4)
    answers = generator.batch_infer([late, good])
    assert isinstance(answers[0], DeadlineExceeded)
    assert answers[1].items.tolist() == generator.infer(good).items.tolist()
    with pytest.raises(DeadlineExceeded):
        generator.infer(late)


def test_declines_to_draw_and_refuses_strangers(generator):
    drawn = asked(3, sampling=SamplingOptions())
    assert generator.declines(drawn)
    with pytest.raises(BackendFailed, match="draws nothing"):
        generator.infer(drawn)
    with pytest.raises(BackendFailed, match=r"outside of 1\.\.60"):
        generator.infer(stranger())


def stranger():
    request = asked(3)
    items = request.state.sequence.items.copy()
    items[0] = ITEMS + 1
    sequence = request.state.sequence
    moved = type(sequence)(items, sequence.timestamps, sequence.actions, sequence.values, 0)
    return type(request)(UserState(request.state.states, moved), 10, 20, request.blocked)


def test_learns_what_follows(bundle):
    data, losses = taste_data(users=80, items=ITEMS), []
    options = Options(channels=32, epochs=6, events=12, learning_rate=1e-2)
    model = train(bundle, data, options, lambda epoch, loss, held_out: losses.append((loss, held_out)))
    assert losses[-1][0] < losses[0][0] - 0.3
    assert losses[-1][1] < losses[0][1] - 0.3
    served, ids = recurrent(model), bundle.semantic_ids
    hits = 0
    for user in range(20):
        state = served.start(1)
        logits, state = served.step(state, np.array([0]))
        for token in ids.tokens[data.interactions.sequence(user, drop_last=1).items[-12:]].ravel():
            logits, state = served.step(state, np.array([token]))
        found = search(served, state, logits, Trie.of(ids).view(), beam=20, k=6, in_time=lambda: None)
        hits += int(data.interactions.sequence(user).items[-1] in found.items)
    assert hits >= 8  # by chance it would be 2 of 20


def test_an_error_that_is_meant_for_people_is_told_in_a_line(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "genrec_rwkv.__main__", raising=False)
    monkeypatch.setattr(sys, "argv", ["", "train", "ml-100k", "--model-dir", str(tmp_path / "none"), "--out", str(tmp_path / "x")])
    with pytest.raises(SystemExit, match=r"^genrec_rwkv: no model has been published in .*none"):
        runpy.run_module("genrec_rwkv", run_name="__main__")
