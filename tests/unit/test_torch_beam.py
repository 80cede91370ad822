"""What is torch_beam's own: its rule for ties, what it does not compute, what it recalls, and which files it refuses."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from cluster.bundle import DECODER, FileRecord
from cluster.checksums import sha256
from cluster.engines.controller import FrameworkController
from cluster.engines.roster import Choice
from cluster.engines.skipped import NoBackendAnswered
from cluster.engines.stage_rules import generator_disagreement, generator_rules
from cluster.errors import BackendFailed, BackendUnavailable, BundleError, DeadlineExceeded, UnknownChoice
from cluster.semantic_ids import SemanticIds
from cluster.traffic.breaker import BreakerSettings, BreakerState
from cluster.trie import Trie
from cluster.values import GenerateRequest, SamplingOptions, UserState
from integrations.torch_beam.beam import Search, best, search
from integrations.torch_beam.drawing import Draw, draw
from integrations.torch_beam.generator import TorchBeamGenerator
from integrations.torch_beam.llama import Llama
from integrations.torch_beam.logits_cache import LogitsCache
from integrations.torch_beam.recall import Prompted, Recalled
from integrations.torch_beam.sampling import Sampler
from tests.bundles import make_generative_bundle, random_semantic_ids, random_sequence

IDS = random_semantic_ids(60, (5, 4))
TRIE = Trie.of(IDS)


class Scripted:
    """Logits that depend on the path alone, made up as they are asked for; counts how often. `constant`: the same for all."""

    def __init__(self, users, ids=IDS, *, constant=None):
        self.ids, self.constant, self.asked = ids, constant, 0
        self.paths = [[()] for _ in range(users)]

    def branch(self, parents, tokens):
        self.paths = [
            [(*before[parent], token) for parent, token in zip(row, chosen, strict=True)]
            for before, row, chosen in zip(self.paths, parents.tolist(), tokens.tolist(), strict=True)
        ]

    def logits(self, level):
        self.asked += 1
        return torch.stack([torch.stack([self.row(path, level) for path in paths]) for paths in self.paths])

    def row(self, path, level):
        size = self.ids.sizes[level]
        if self.constant is not None:
            return torch.full((size,), self.constant)
        return torch.from_numpy(np.random.default_rng([7, *path]).normal(size=size).astype(np.float32))


def user(length=5, seed=0):
    states = np.random.default_rng([seed, length]).normal(size=(length, 16)).astype(np.float32)
    return UserState(states / np.linalg.norm(states, axis=1, keepdims=True), random_sequence(length, seed=seed))


def asked(length=5, *, k=10, beam=20, seed=0, **rest):
    return GenerateRequest(user(length, seed), k, beam, **{"blocked": np.empty(0, np.int32), **rest})


def found(answers):
    return [(one.items.tolist(), one.log_probs.tolist()) for one in answers]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_generative_bundle(tmp_path_factory.mktemp("beam") / "tiny")


@pytest.fixture(scope="module")
def generator(bundle):
    generator = TorchBeamGenerator()
    generator.load(bundle)
    return generator


@given(st.lists(st.lists(st.sampled_from([-np.inf, -2.0, -1.0, 0.0]), min_size=6, max_size=6), min_size=1, max_size=4), st.data())
def test_keeps_the_highest_scores_and_of_equal_ones_the_first(scores, data):
    counts = data.draw(st.lists(st.integers(1, 8), min_size=len(scores), max_size=len(scores)))
    kept = best(np.array(scores, np.float32), np.array(counts))
    for row, count, mask in zip(scores, counts, kept, strict=True):
        ranked = sorted((place for place in range(6) if row[place] > -np.inf), key=lambda place: (-row[place], place))
        assert np.flatnonzero(mask).tolist() == sorted(ranked[:count])


def test_gives_the_lower_nodes_where_all_items_are_equally_probable():
    ids = SemanticIds(np.array([(0, 0), *((code // 3, code % 3) for code in range(9))], np.int32), (3, 3))
    view = Trie.of(ids).view()
    (answer,) = search([Search(view, beam=2, k=4)], ids, Scripted(1, ids, constant=1.0), lambda: None)
    assert answer.items.tolist() == [1, 2, 3, 4]
    assert answer.log_probs == pytest.approx([-2 * np.log(3)] * 4)


def test_asks_the_model_nothing_where_there_is_nothing_to_choose():
    model = Scripted(2)
    views = [TRIE.view(among=np.array([item], np.int32)) for item in (7, 31)]
    answers = search([Search(view, beam=4, k=3) for view in views], IDS, model, lambda: None)
    assert found(answers) == [([7], [0.0]), ([31], [0.0])]
    assert model.asked == 0


def test_asks_only_at_the_levels_where_someone_has_a_choice():
    first_codes_differ = [int(np.flatnonzero(IDS.codes[1:, 0] == code)[0]) + 1 for code in range(5)]
    model = Scripted(1)
    (answer,) = search([Search(TRIE.view(among=np.array(first_codes_differ, np.int32)), 5, 5)], IDS, model, lambda: None)
    assert set(answer.items.tolist()) == set(first_codes_differ)
    assert model.asked == 1


def test_stops_between_levels():
    model, ticks = Scripted(1), iter([None, None])

    def tick():
        if next(ticks, "over") == "over":
            raise DeadlineExceeded

    with pytest.raises(DeadlineExceeded):
        search([Search(TRIE.view(), 4, 3)], IDS, model, tick)
    assert model.asked == 2


@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
def test_refuses_logits_that_are_not_numbers(logit):
    with pytest.raises(BackendFailed, match="level 0 are NaN or infinite"):
        search([Search(TRIE.view(), 4, 3)], IDS, Scripted(1, constant=logit), lambda: None)


def test_draws_every_item_as_often_as_it_is_probable():
    view = TRIE.view(among=np.arange(1, 13, dtype=np.int32))
    (everything,) = search([Search(view, 12, 12)], IDS, Scripted(1), lambda: None)
    draws = 3000
    one_each = [Draw(view, 1, SamplingOptions(samples=1, seed=seed)) for seed in range(draws)]
    drawn = [int(answer.items[0]) for answer in draw(one_each, IDS, Scripted(draws), Sampler(), lambda: None)]
    for item, log_prob in zip(everything.items.tolist(), everything.log_probs.tolist(), strict=True):
        expected = np.exp(log_prob)
        assert drawn.count(item) / draws == pytest.approx(expected, abs=5 * np.sqrt(expected / draws))


def test_recalls_what_it_computed_for_the_same_prompt_and_paths_without_asking_the_model():
    cache, searches = LogitsCache(1 << 20), [Search(TRIE.view(), 4, 6), Search(TRIE.view(among=np.arange(1, 9, dtype=np.int32)), 20, 3)]
    prompts = [Prompted.of("model", "tenant", torch.full((3, 4), number)) for number in (1.0, 2.0)]
    fresh, again = Scripted(2), Scripted(2)
    before = search(searches, IDS, Recalled(fresh, cache, prompts), lambda: None)
    assert found(before) == found(search(searches, IDS, Scripted(2), lambda: None))
    assert found(search(searches[::-1], IDS, Recalled(again, cache, prompts[::-1]), lambda: None)) == found(before[::-1])
    assert (fresh.asked, again.asked) == (3, 0)


@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
def test_does_not_recall_logits_that_are_not_numbers(logit):
    cache, one, prompts = LogitsCache(1 << 20), [Search(TRIE.view(), 4, 6)], [Prompted.of("model", "tenant", torch.ones(3, 4))]
    with pytest.raises(BackendFailed, match="NaN or infinite"):
        search(one, IDS, Recalled(Scripted(1, constant=logit), cache, prompts), lambda: None)
    again = search(one, IDS, Recalled(Scripted(1), cache, prompts), lambda: None)
    assert found(again) == found(search(one, IDS, Scripted(1), lambda: None))


@pytest.mark.parametrize(
    "other",
    [
        Prompted.of("other model", "tenant", torch.ones(3, 4)),
        Prompted.of("model", "other tenant", torch.ones(3, 4)),
        Prompted.of("model", "tenant", torch.ones(3, 4), "ada"),
        Prompted.of("model", "tenant", torch.ones(4, 3)),
        Prompted.of("model", "tenant", torch.ones(3, 4) + 1e-6),
    ],
    ids=["model", "tenant", "user", "shape", "rows"],
)
def test_recalls_nothing_for_another_prompt(other):
    cache, one = LogitsCache(1 << 20), [Search(TRIE.view(), 4, 6)]
    search(one, IDS, Recalled(Scripted(1), cache, [Prompted.of("model", "tenant", torch.ones(3, 4))]), lambda: None)
    model = Scripted(1)
    search(one, IDS, Recalled(model, cache, [other]), lambda: None)
    assert model.asked == 3


def test_answers_the_same_with_a_cache_that_is_off_small_or_large(bundle):
    requests = [
        asked(length, blocked=np.arange(1, 60 * seed, dtype=np.int32), seed=seed, user_id="ada") for seed in range(3) for length in (1, 8)
    ]
    requests += [replace(one, sampling=SamplingOptions(seed=1)) for one in requests]
    answers = []
    for cache_bytes in (0, 3000, 1 << 20):
        generator = TorchBeamGenerator(cache_bytes=cache_bytes)
        generator.load(bundle)
        answers += map(generator.batch_infer, (requests, requests[::-1], [replace(one, k=3) for one in requests]))
    for first, reversed_, narrow in zip(answers[::3], answers[1::3], answers[2::3], strict=True):
        for one, other in zip(first + first, reversed_[::-1] + answers[0], strict=True):
            assert one.items.tolist() == other.items.tolist()
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        assert [one.items.tolist() for one in narrow] == [one.items[:3].tolist() for one in first]


def test_answers_one_who_came_late_while_a_neighbour_waits(generator):
    late, patient = (asked(5, deadline=time.monotonic() + seconds) for seconds in (-1, 60))
    alone = generator.infer(asked(5))
    assert [answer.items.tolist() for answer in generator.batch_infer([late, patient])] == [alone.items.tolist()] * 2
    assert [answer.items.tolist() for answer in generator.batch_infer([late, asked(5)])] == [alone.items.tolist()] * 2
    with pytest.raises(DeadlineExceeded, match="ms ago"):
        generator.batch_infer([late, late])


def test_a_wide_request_is_not_computed_with_narrow_ones_whose_work_it_would_multiply(generator, monkeypatch):
    engine, groups = generator._loaded, []  # noqa: SLF001 - the groups of a batch are seen by the engine alone
    working = engine._run  # noqa: SLF001 - as above
    monkeypatch.setattr(engine, "_run", lambda jobs, in_time: groups.append([job.request.width for job in jobs]) or working(jobs, in_time))
    wide = [asked(4, k=200, beam=200, seed=9), asked(4, seed=9, sampling=SamplingOptions(samples=1000, seed=1))]
    narrow = [asked(4, beam=10, seed=7), asked(4, beam=12, seed=8)]
    answers = generator.batch_infer([narrow[0], *wide, narrow[1]])
    assert groups == [[10, 12], [200], [1000]]
    assert [len(answer.items) for answer in answers[:2]] == [10, 200]


def test_tells_how_much_of_what_was_asked_had_been_asked_before(bundle):
    generator = TorchBeamGenerator()
    generator.load(bundle)
    generator.infer(asked(5, user_id="ada"))
    first = generator.kept()
    generator.infer(asked(5, user_id="ada"))
    second = generator.kept()
    assert (first["logits_hits"], first["logits_misses"] > 0) == (0, True)
    assert (second["logits_hits"], second["logits_misses"]) == (first["logits_misses"], first["logits_misses"])


def test_forgets_every_prompt_and_tells_what_it_keeps_of_them(bundle):
    generator = TorchBeamGenerator(prompt_bytes=0)
    assert generator.kept() == {}
    generator.load(bundle)
    generator.infer(asked(5, user_id="ada"))
    kept = generator.kept()
    assert kept["logits_entries"] > 0
    assert kept["logits_used_bytes"] > 0
    assert generator.forget_everything() == kept["logits_entries"]
    assert (generator.kept()["logits_entries"], generator.kept()["logits_used_bytes"]) == (0, 0)
    generator.infer(asked(5, user_id="ada"))
    assert generator.kept()["logits_hits"] == 0, "it had to be computed again"
    uncached = TorchBeamGenerator(cache_bytes=0, prompt_bytes=0)
    uncached.load(bundle)
    assert (uncached.forget_everything(), uncached.kept()) == (0, {})


def test_forgetting_leaves_nothing_of_the_last_draw(bundle):
    generator = TorchBeamGenerator()
    generator.load(bundle)
    drawn, buffers = asked(5, user_id="ada", sampling=SamplingOptions(seed=1)), generator._loaded._sampler.buffers  # noqa: SLF001
    before = generator.infer(drawn)
    for forget in (lambda: generator.forget("default", "ada"), lambda: generator.forget_tenant("default"), generator.forget_everything):
        assert buffers.statistics()["buffer_held_bytes"] > 0
        forget()
        assert buffers.statistics()["buffer_held_bytes"] == 0
        assert found([generator.infer(drawn)]) == found([before])


def test_nothing_is_recalled_of_no_user_in_particular_also_in_a_batch_with_users(bundle):
    generator = TorchBeamGenerator(prompt_bytes=0)
    generator.load(bundle)
    no_user, ada = asked(5), asked(6, user_id="ada")
    alone = [generator.infer(one) for one in (no_user, ada)]
    for _ in range(2):
        for answer, expected in zip(generator.batch_infer([no_user, ada]), alone, strict=True):
            assert answer.items.tolist() == expected.items.tolist()
            assert answer.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
    of_ada = generator.kept()["logits_entries"]
    assert generator.forget_everything() == of_ada == IDS.levels
    generator.infer(no_user)
    assert generator.kept()["logits_entries"] == 0


async def test_an_engine_that_breaks_is_found_out_by_a_sample_that_is_computed_again(bundle, monkeypatch):
    table, patient = (
        {"torch_beam": "integrations.torch_beam.generator:TorchBeamGenerator"},
        BreakerSettings(pause_s=3600, longest_pause_s=3600),
    )
    controller = FrameworkController("generator", Choice(table, ["torch_beam"]), bundle, generator_rules(200), breaker=patient)
    await controller.warm_up([asked(1), asked(5)])

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Llama, "prefill", out_of_memory)
    for _ in range(10):
        (outcome,) = await controller.call([asked(5, seed=3, user_id="ada")])
        assert isinstance(outcome, NoBackendAnswered)
    (backend,) = controller.snapshot().backends
    assert backend.breaker is BreakerState.OPEN
    controller.close()


def test_refuses_a_prompt_longer_than_the_decoder_takes(generator):
    with pytest.raises(BackendFailed, match="9 states; this decoder takes the latest 8"):
        generator.infer(asked(9))


def test_bfloat16_agrees_with_float32_where_the_model_is_not_extreme(tmp_path):
    bundle = make_generative_bundle(tmp_path / "gentle")
    soften(bundle)
    exact, rounded = TorchBeamGenerator(), TorchBeamGenerator("bfloat16")
    for generator in (exact, rounded):
        generator.load(bundle)
    requests = [asked(length, k=200, beam=200) for length in (1, 4, 8)]
    for one, other in zip(exact.batch_infer(requests), rounded.batch_infer(requests), strict=True):
        assert generator_disagreement(one, other) == ""
        assert other.log_probs.dtype == np.float32
        assert not np.array_equal(one.log_probs, other.log_probs)


def soften(bundle):
    """Divide the weights of the decoder by six, the factor that made it extreme, and accept the change."""
    path = bundle.path / DECODER / "model.safetensors"
    save_file({name: weight if "norm" in name else weight / 6 for name, weight in load_file(path).items()}, path)

    bundle.manifest.files[f"{DECODER}/model.safetensors"] = FileRecord(size=path.stat().st_size, sha256=sha256(path))


def test_an_unknown_dtype_is_refused_with_the_choices():
    with pytest.raises(UnknownChoice, match="unknown dtype 'float16'; choose from bfloat16, float32"):
        TorchBeamGenerator("float16")


def test_says_that_it_is_not_loaded():
    with pytest.raises(BackendUnavailable, match=r"call load\(bundle\)"):
        TorchBeamGenerator().infer(asked())


def test_is_unavailable_where_the_decoder_was_altered(tmp_path):
    bundle = make_generative_bundle(tmp_path / "altered")
    (bundle.path / DECODER / "model.safetensors").write_bytes(b"nonsense")
    availability = TorchBeamGenerator().get_availability(bundle)
    assert "model.safetensors has 8 bytes" in availability.reason
    with pytest.raises(BackendUnavailable, match="has 8 bytes"):
        TorchBeamGenerator().load(bundle)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_act": "gelu"}, "'hidden_act': 'gelu'"),
        ({"num_key_value_heads": 1}, "'num_key_value_heads': 1"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "'rope_type': 'llama3'"),
        ({"rms_norm_eps": None, "rope_parameters": None}, "not the configuration of a decoder"),
    ],
    ids=["activation", "shared keys", "rope", "nothing"],
)
def test_refuses_a_model_that_it_would_compute_wrongly(bundle, tmp_path, change, problem):
    config = json.loads((bundle.path / DECODER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(BundleError, match=problem):
        Llama.read(tmp_path, 12, torch.float32, torch.device("cpu"))


def test_refuses_weights_of_which_one_is_missing(bundle, tmp_path):
    weights = load_file(bundle.path / DECODER / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if name != "lm_head.weight"}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((bundle.path / DECODER / "config.json").read_text())
    with pytest.raises(BundleError, match="lm_head"):
        Llama.read(tmp_path, 12, torch.float32, torch.device("cpu"))


def test_probing_loads_no_torch_and_serving_neither_transformers_nor_vllm(bundle):
    script = f"""
import sys
from pathlib import Path
from cluster.bundle_store import BundleStore
from integrations.torch_beam.generator import TorchBeamGenerator
generator, bundle = TorchBeamGenerator(), BundleStore(Path({str(bundle.path.parent)!r})).open()
assert generator.get_availability(bundle).ok
assert "torch" not in sys.modules
generator.load(bundle)
assert "torch" in sys.modules and not {{"transformers", "vllm"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_number_of_threads_holds_in_the_thread_that_asks_whatever_it_computed_with_before(bundle):
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as asks, ThreadPoolExecutor(1) as loads:
        try:
            for threads in (before + 1, before):
                asks.submit(torch.ones(8, 8).matmul, torch.ones(8, 8)).result()
                generator = TorchBeamGenerator(threads=threads)
                loads.submit(generator.load, bundle).result()
                asks.submit(generator.infer, asked()).result()
                assert asks.submit(torch.get_num_threads).result() == threads
        finally:
            torch.set_num_threads(before)
