"""The semantic-ID decoder: its training loss is the mean of what it would score step by step, and it can be learnt, resumed and loaded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from cluster.bundle import DECODER, SOFT_PROMPT
from cluster.bundle_store import BundleStore
from cluster.dataset import Interactions
from cluster.errors import BackendFailed, BundleError, DataError
from cluster.trie import Trie
from cluster.values import UserState
from integrations.decoder.config import PRESETS, DecoderConfig
from integrations.decoder.files import load_soft_prompt
from integrations.decoder.model import SemanticIdDecoder
from integrations.decoder.published import verified_decoder
from integrations.decoder.soft_prompt import pause_codes, rating_codes
from integrations.hstu.config import HSTUConfig
from integrations.hstu.model import HSTU
from pipelines import batches, train_decoder
from pipelines.epochs import load_checkpoint, save_checkpoint
from pipelines.train_decoder import DecoderOptions, DecoderTrainer, pieces
from tests.bundles import make_generative_bundle, random_semantic_ids, random_sequence
from tests.windows import CountedWindows

ITEMS = 40


def make_decoder(ids, dim=16, *, prompt_length=6, seed=0):
    torch.manual_seed(seed)
    config = DecoderConfig(
        vocabulary=ids.vocabulary, levels=ids.levels, state_dim=dim, prompt_length=prompt_length, hidden=32, heads=1, layers=2,
        feedforward=48, dropout=0.0,
    )  # fmt: skip
    vectors = torch.nn.functional.normalize(torch.randn(ids.items + 1, dim)).numpy()
    return SemanticIdDecoder(config, ids, vectors)


def windows(decoder, lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        history = random_sequence(length, items=ITEMS, seed=seed)
        targets = torch.randint(1, ITEMS + 1, (length,), generator=generator)
        made.append(decoder.columns(history, torch.randn(length, 16, generator=generator), targets))
    return made


def step_by_step(decoder, window, stop):
    """-log P of the target after row `stop` of a window, one token at a time, with the trie as the only guide."""
    trie = Trie.of(decoder.ids)
    view, node, total = trie.view(), 0, 0.0
    rows = decoder.prompt(*(window[name][None, :stop] for name in ("states", "items", "ratings", "pauses")))
    path = trie.view().paths([int(window["targets"][stop - 1])])[0]
    for level in range(trie.levels):
        children = view.children(level, node)
        logits = decoder.lm(inputs_embeds=rows).logits[0, -1]
        allowed = torch.from_numpy(view.tokens(level, children).astype(np.int64))
        node = int(path[level])
        total -= logits[allowed].log_softmax(0)[int(np.flatnonzero(children == node)[0])]
        token = torch.from_numpy(view.tokens(level, np.array([node])).astype(np.int64))
        rows = torch.cat([rows, decoder.lm.model.embed_tokens(token)[None]], dim=1)
    return total


@pytest.mark.parametrize("sizes", [(4, 4), (8,), (3, 3, 3)])
def test_the_loss_of_a_batch_of_windows_is_the_mean_of_all_its_paths_scored_alone(sizes):
    decoder = make_decoder(random_semantic_ids(ITEMS, sizes)).eval()
    batch = windows(decoder, [6, 3, 1])
    with torch.inference_mode():
        alone = [step_by_step(decoder, window, stop) for window in batch for stop in range(1, len(window["targets"]) + 1)]
        assert decoder.loss(decoder.batch(batch)).item() == pytest.approx(torch.stack(alone).mean().item(), abs=1e-5)


def test_a_target_of_0_is_not_learnt():
    decoder = make_decoder(random_semantic_ids(ITEMS, (4, 4))).eval()
    (window,) = windows(decoder, [5])
    only_last = {**window, "targets": torch.where(torch.arange(5) == 4, window["targets"], 0)}
    with torch.inference_mode():
        assert decoder.loss(decoder.batch([only_last])).item() == pytest.approx(step_by_step(decoder, window, 5).item(), abs=1e-5)


def walks(users=60, length=14, seed=0):
    """Each user walks the items in a circle from somewhere: the next item is certain."""
    starts = np.random.default_rng(seed).integers(0, ITEMS, users)
    items = ((starts[:, None] + np.arange(length)) % ITEMS + 1).astype(np.int32).ravel()
    count = users * length
    return Interactions(
        user_ids=[str(user) for user in range(users)],
        offsets=np.arange(0, count + 1, length),
        items=items,
        timestamps=np.tile(np.arange(length) * 3600, users),
        actions=np.zeros(count, np.int8),
        values=np.full(count, np.nan, np.float32),
    )


def trainer_of(options, seed=0, interactions=None):
    torch.manual_seed(seed)
    encoder = HSTU(HSTUConfig(items=ITEMS, dim=16, layers=1, heads=1, attention_dim=8, linear_dim=8, max_length=31, max_history=20))
    ids = random_semantic_ids(ITEMS, (8, 8))
    return DecoderTrainer(make_decoder(ids, prompt_length=8), encoder, interactions or walks(), options, device="cpu")


def test_learns_which_item_follows_which():
    trainer = trainer_of(DecoderOptions(epochs=12, batch_windows=8, learning_rate=0.01))
    best = trainer.fit()
    assert best.validation["loss"] < 1.0 < trainer.history[0].validation["loss"]


def test_validation_holds_the_states_of_no_more_users_than_a_batch_takes(monkeypatch):
    monkeypatch.setattr(train_decoder, "ENCODED_AT_ONCE", 4)
    trainer, calls = trainer_of(DecoderOptions(epochs=1, batch_windows=4)), []

    def note(of, name):
        call = getattr(of, name)

        def noted(*given):
            if not trainer.decoder.training:  # it validates
                calls.append(name)
            return call(*given)

        monkeypatch.setattr(of, name, noted)

    note(trainer.encoder, "collate")
    note(trainer.decoder, "loss")
    trainer.run_epoch()
    assert calls[:4] == ["collate", "loss"] * 2


def test_an_epoch_learns_from_and_is_validated_on_so_many_users_at_most(monkeypatch):
    trainer, encoded = trainer_of(DecoderOptions(epochs=1, users_an_epoch=7)), {True: 0, False: 0}
    collate = trainer.encoder.collate

    def counted(histories):
        encoded[trainer.decoder.training] += len(histories)
        return collate(histories)

    monkeypatch.setattr(trainer.encoder, "collate", counted)
    trainer.run_epoch()
    assert encoded == {True: 7, False: 7}


@pytest.mark.parametrize(("most", "learnt"), [(500, 500), (4_000, 1_008)])
def test_a_user_with_most_of_the_events_has_a_small_share_of_the_targets(most, learnt):
    lengths = [40_000, *[10] * 1_000]
    users, offsets = [str(user) for user in range(len(lengths))], np.r_[0, np.cumsum(lengths)]
    options = DecoderOptions(epochs=1, users_an_epoch=most, validate_every=0)
    trainer = trainer_of(options, interactions=replace(walks(1, sum(lengths)), user_ids=users, offsets=offsets))
    windows, collate = [], trainer.encoder.collate

    def counted(histories):
        windows.extend(len(history) for history in histories)
        return collate(histories)

    trainer.encoder.collate = counted
    trainer.run_epoch()
    assert len(windows) == learnt
    assert sum(length for length in windows if length == 20) / sum(windows) < 0.04, "it has 85 % of the events"


def test_an_epoch_makes_the_windows_of_no_more_users_than_it_learns_from(monkeypatch):
    counted = CountedWindows(monkeypatch)
    trainer = trainer_of(DecoderOptions(epochs=1, users_an_epoch=7, validate_every=0))
    assert counted.made == 0
    trainer.run_epoch()
    assert counted.made == 7


def test_an_epoch_holds_no_more_states_than_there_is_room_for(monkeypatch):
    five_users = 5 * 11 * 16 * 4  # with 11 events each, and states of 16 numbers
    monkeypatch.setattr(train_decoder, "MOST_STATE_BYTES", five_users + 1)
    trainer, held = trainer_of(DecoderOptions(epochs=2)), []
    batch = trainer.decoder.batch

    def counted(windows):
        if trainer.decoder.training:
            held.append({memory.data_ptr(): memory.nbytes() for memory in (columns["states"].untyped_storage() for columns in windows)})
        return batch(windows)

    monkeypatch.setattr(trainer.decoder, "batch", counted)
    trainer.fit()
    assert [sum(memories.values()) for memories in held] == [five_users] * 2


def test_of_long_histories_few_are_encoded_at_a_time(monkeypatch):
    monkeypatch.setattr(batches, "MOST_PAIRS", 3 * 12**2)
    trainer, shapes = trainer_of(DecoderOptions(epochs=1)), []
    trainer.encoder.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    trainer.run_epoch()
    assert {(3, 11), (3, 12)} >= set(shapes)


def test_a_run_resumed_from_a_checkpoint_is_equal_to_one_that_was_never_interrupted(tmp_path):
    options = DecoderOptions(epochs=3, batch_windows=8)
    whole = trainer_of(options)
    whole.fit()
    first = trainer_of(options)
    first.run_epoch()
    save_checkpoint(first, tmp_path / "run")
    second = trainer_of(options, seed=0)
    load_checkpoint(second, tmp_path / "run")
    second.fit()
    assert [report.loss for report in second.history] == [report.loss for report in whole.history]
    for name, weights in whole.decoder.state_dict().items():
        assert torch.equal(weights, second.decoder.state_dict()[name]), name


def test_bf16_training_stays_near_fp32():
    losses = [trainer_of(DecoderOptions(epochs=1, precision=precision)).run_epoch().loss for precision in ("fp32", "bf16")]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] != losses[0]


def test_refuses_data_in_which_nobody_has_events_enough():
    lonely = walks(users=3, length=2)
    encoder = HSTU(HSTUConfig(items=ITEMS, dim=16, layers=1, heads=1, attention_dim=8, linear_dim=8, max_length=31, max_history=20))
    with pytest.raises(DataError, match="none of the 3 users"):
        DecoderTrainer(make_decoder(random_semantic_ids(ITEMS, (8,))), encoder, lonely, DecoderOptions())


def test_pieces_of_a_window_are_of_the_prompts_length_and_end_at_its_end_or_a_little_before():
    columns = {"targets": torch.arange(1, 101)}
    for seed in range(20):
        cut = pieces(columns, 32, np.random.default_rng(seed))
        assert all(len(piece["targets"]) == 32 for piece in cut)
        assert 84 <= cut[0]["targets"][-1] <= 100
        assert cut[-1]["targets"][0] == 1
    assert pieces(columns, 100, np.random.default_rng(0)) == [columns]


def test_a_published_decoder_is_loaded_by_hugging_faces_from_pretrained(tmp_path):
    bundle = make_generative_bundle(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(verified_decoder(bundle))
    assert model.config.vocab_size == bundle.semantic_ids.vocabulary
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, bundle.semantic_ids.vocabulary)


def test_a_damaged_or_foreign_generative_part_is_refused_by_name(tmp_path):
    bundle = make_generative_bundle(tmp_path / "tiny")
    (bundle.path / SOFT_PROMPT).write_bytes(b"x" * (bundle.path / SOFT_PROMPT).stat().st_size)
    with pytest.raises(BundleError, match="does not match the checksum"):
        verified_decoder(bundle)
    with pytest.raises(BundleError, match="soft_prompt"):
        load_soft_prompt(bundle)
    (bundle.path / SOFT_PROMPT).unlink()
    with pytest.raises(BundleError, match=r"soft_prompt\.safetensors is missing"):
        verified_decoder(bundle)


def test_a_decoder_of_a_family_this_release_does_not_know_is_refused(tmp_path):
    bundle = make_generative_bundle(tmp_path / "tiny")
    record = bundle.manifest.decoder.model_copy(update={"family": "mamba"})
    with pytest.raises(BundleError, match="is a 'mamba'; this release serves llama"):
        verified_decoder(replace(bundle, manifest=bundle.manifest.model_copy(update={"decoder": record})))


def test_recompiling_keeps_the_generative_part(tmp_path):
    bundle = make_generative_bundle(tmp_path / "tiny")
    store = BundleStore(tmp_path / "tiny")
    with store.recompile(bundle):
        pass
    again = store.open()
    assert again.manifest.decoder == bundle.manifest.decoder
    assert verified_decoder(again) == again.path / DECODER
    assert again.semantic_ids.version == bundle.semantic_ids.version


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda user: UserState(user.states[:-1], user.sequence), r"states of shape \(4, 16\); \(5, 16\) is needed"),
        (lambda user: UserState(user.states[:, :-1], user.sequence), r"\(5, 15\)"),
        (lambda user: UserState(np.where(np.arange(16) == 3, np.nan, user.states), user.sequence), "NaN or infinite"),
        (lambda user: UserState(user.states, random_sequence(5, items=900, seed=3)), r"outside of 1\.\.200"),
    ],
)
def test_a_prompt_that_would_break_an_engine_is_refused_before_it_gets_there(tmp_path, change, problem):
    prompt = load_soft_prompt(make_generative_bundle(tmp_path / "tiny"))
    user = UserState(np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32), random_sequence(5))
    assert prompt.of([user])[0].shape == (5, 64)
    with pytest.raises(BackendFailed, match=problem):
        prompt.of([change(user)])


def test_ratings_and_pauses_become_codes_within_their_tables():
    sequence = random_sequence(6)
    assert rating_codes(sequence).tolist() == [0] * 6
    rated = type(sequence)(sequence.items, sequence.timestamps, sequence.actions, np.array([1, 4.4, 5, -3, 1e9, np.nan], "f"), 2**40)
    assert rating_codes(rated).tolist() == [1, 4, 5, 0, 11, 0]
    assert pause_codes(rated)[-1] == 31
    assert (pause_codes(sequence) > 0).all()


def test_the_presets_have_heads_that_vllm_serves_and_others_are_refused():
    for sizes in PRESETS.values():
        DecoderConfig(vocabulary=300, levels=3, state_dim=50, **sizes)
    with pytest.raises(ValidationError, match="must be one of 32, 64"):
        DecoderConfig(vocabulary=300, levels=3, state_dim=50, hidden=64, heads=4)


@pytest.mark.parametrize("preset", ["tiny", "base"])
def test_counts_every_parameter_of_the_real_decoder(preset):
    ids = random_semantic_ids(50, (8, 8))
    config = DecoderConfig(levels=ids.levels, state_dim=16, vocabulary=ids.vocabulary, **PRESETS[preset])
    decoder = SemanticIdDecoder(config, ids, np.zeros((51, 16), np.float32))
    assert config.parameters == sum(parameter.numel() for parameter in decoder.lm.parameters())
