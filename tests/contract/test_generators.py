"""What every generator must do, run over all that are registered. A backend that cannot run here is skipped with its own reason.

The truth is found without a trie, a cache or a beam: `Oracle` lets transformers score the path of every item in double precision.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaForCausalLM

from cluster.bundle import DECODER
from cluster.engines.stage_rules import generator_rules
from cluster.errors import BackendFailed, BackendUnavailable, DeadlineExceeded
from cluster.protocols import Backend
from cluster.registry import backends, resolve
from cluster.trie import Trie
from cluster.values import GenerateRequest, SamplingOptions, UserState
from integrations.decoder.files import load_soft_prompt
from integrations.torch_beam.generator import TorchBeamGenerator
from integrations.vllm.generator import VllmGenerator
from tests.bundles import DECODER_SIZES, make_bundle, make_generative_bundle, random_sequence
from tests.repetitions import times
from tests.waiting import eventually

ITEMS, WIDTH, LONGEST = 200, 16, 64
TOLERANCE = 1e-4
LOADS_SLOWLY = {"vllm"}
BLOCK_BYTES = 2 * 32 * DECODER_SIZES["hidden"] * DECODER_SIZES["layers"] * 4
OPTIONS = {"vllm": {"dtype": "float32", "kv_cache_bytes": 128 * BLOCK_BYTES}}
"""The type for which TOLERANCE is meant, on a GPU too; and so much memory that the longest prompt and all its paths find room, a block of
the cache each and two in common, but not those of many users.
"""
SHAPES = {"two levels": (24,), "four levels": (4, 4, 4), "a first level of one code": (1, 12), "a second level of one code": (12, 1)}
RULES = generator_rules(ITEMS)


def case(name, sizes, label):
    return pytest.param((name, sizes), id=f"{name}-{label}", marks=[pytest.mark.slow] if name in LOADS_SLOWLY else [])


EVERY = [case(name, (8, 8), "three levels") for name in backends("generator")]
EVERY_SHAPE = [case(name, sizes, label) for name in backends("generator") for label, sizes in SHAPES.items()]


def bundle_of(sizes, directory):
    """Whatever the shape of its tree, its decoder is the same file by file, so that all share vLLM's engine."""
    rows = LONGEST + 3
    return make_generative_bundle(directory / "tiny", items=ITEMS, sizes=sizes, vocabulary=64, prompt_length=rows - len(sizes) - 1)


def loaded(name, bundle):
    """A generator; skips where it cannot be had."""
    try:
        generator = resolve(backends("generator")[name])(**OPTIONS.get(name, {}))
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
    if not (availability := generator.get_availability(bundle)).ok:
        pytest.skip(f"{name}: {availability.reason}")
    generator.load(bundle)
    return generator


@pytest.fixture(scope="session")
def vllm_bundle(tmp_path_factory):
    return bundle_of((8, 8), tmp_path_factory.mktemp("generates"))


@pytest.fixture(scope="session")
def vllm(vllm_bundle):
    """It holds the engine as long as any test needs one."""
    generator = loaded("vllm", vllm_bundle)
    yield generator
    generator.close()


@pytest.fixture(scope="session", params=EVERY)
def served(request, tmp_path_factory):
    """(a generator that is loaded, its bundle)."""
    name, sizes = request.param
    if name in LOADS_SLOWLY:
        request.getfixturevalue(name)
    bundle = bundle_of(sizes, tmp_path_factory.mktemp("generates"))
    generator = loaded(name, bundle)
    yield generator, bundle
    generator.close()


@pytest.fixture
def generator(served):
    return served[0]


@pytest.fixture
def oracle(served):
    return Oracle(served[1])


class Oracle:
    """Scores of all items, each path by itself."""

    def __init__(self, bundle):
        self.lm = LlamaForCausalLM.from_pretrained(bundle.path / DECODER).double().eval()
        self.prompt, self.ids = load_soft_prompt(bundle), bundle.semantic_ids

    def answer(self, request):
        """What the rule of the beam yields: [(item, log p)], best first."""
        allowed = sorted(set(range(1, ITEMS + 1) if request.among is None else request.among.tolist()) - set(request.blocked.tolist()))
        scores = self.scores(request, [item for item in allowed if 1 <= item <= ITEMS])
        paths = {self.path(item): item for item in scores}
        kept = {()}
        for level in range(1, self.ids.levels + 1):
            last = level == self.ids.levels
            reached = {path[:level]: scores[item][level - 1] for path, item in paths.items() if path[: level - 1] in kept}
            kept = sorted(reached, key=lambda path: (-reached[path], path))[: request.k if last else request.beam]
        return [(paths[path], reached[path]) for path in kept] if scores else []

    def scores(self, request, allowed):
        """Item -> log p of its path's first code, first two codes, and so on, among what is allowed."""
        logits = self.logits(request.state)
        sums = {item: [] for item in allowed}
        for item in allowed:
            path, total = self.path(item), 0.0
            for level, token in enumerate(path):
                siblings = sorted({self.path(other)[level] for other in allowed if self.path(other)[:level] == path[:level]})
                total += (logits[item - 1, level, token] - logits[item - 1, level, siblings].logsumexp(0)).item()
                sums[item].append(total)
        return sums

    def path(self, item):
        return tuple(self.ids.tokens[item].tolist())

    @torch.no_grad()
    def logits(self, user):
        """(items, levels, vocabulary)."""
        rows = self.prompt.of([user])[0].double().expand(ITEMS, -1, -1)
        codes = self.lm.model.embed_tokens(torch.from_numpy(self.ids.tokens[1:, :-1]).long())
        return self.lm(inputs_embeds=torch.cat([rows, codes], dim=1)).logits[:, rows.shape[1] - 1 :]


def user(length, seed=0):
    states = np.random.default_rng([seed, length, 7]).normal(size=(length, WIDTH)).astype(np.float32)
    return UserState(states / np.linalg.norm(states, axis=1, keepdims=True), random_sequence(length, items=ITEMS, seed=seed))


def asked(length=5, *, k=10, beam=20, seed=0, blocked=(), among=None, **rest):
    among = None if among is None else np.array(among, np.int32)
    return GenerateRequest(user(length, seed), k, beam, np.array(blocked, np.int32), among, **rest)


def assert_is(answer, expected):
    assert answer.items.tolist() == [item for item, _ in expected]
    assert answer.log_probs == pytest.approx([score for _, score in expected], abs=TOLERANCE)


def assert_same(answer, other):
    assert_is(answer, list(zip(other.items.tolist(), other.log_probs.tolist(), strict=True)))


def test_has_the_methods_of_a_backend(generator):
    assert isinstance(generator, Backend)


def test_says_that_a_bundle_without_a_decoder_cannot_be_served_and_how_to_make_one(generator, tmp_path):
    another, bundle = type(generator)(), make_bundle(tmp_path / "retrieves")
    availability = another.get_availability(bundle)
    assert not availability.ok
    assert "genrec train" in availability.reason
    with pytest.raises(BackendUnavailable, match="decoder"):
        another.load(bundle)


@pytest.mark.parametrize("length", range(1, 9))
def test_finds_the_items_that_brute_force_finds_for_a_prompt_of_any_length(generator, oracle, length):
    request = asked(length)
    assert_is(generator.infer(request), oracle.answer(request))


@pytest.mark.parametrize("served", EVERY_SHAPE, indirect=True)
@pytest.mark.parametrize("beam", [3, 20])
def test_finds_them_in_trees_of_other_shapes(served, beam):
    generator, bundle = served
    oracle = Oracle(bundle)
    requests = [asked(3, beam=beam), asked(8, beam=beam, blocked=range(1, 100, 2)), asked(1, beam=beam, among=range(40, 60))]
    for request, answer in zip(requests, generator.batch_infer(requests), strict=True):
        assert_is(answer, oracle.answer(request))


@pytest.mark.parametrize("beam", [1, 2, 5, 50])
def test_keeps_as_many_paths_as_the_beam_is_wide(generator, oracle, beam):
    request = asked(6, beam=beam, k=30)
    assert_is(generator.infer(request), oracle.answer(request))


@pytest.mark.parametrize("length", [1, 4, 31, 32, 33, LONGEST])
def test_gives_every_item_once_and_probabilities_that_sum_to_one_where_the_beam_cuts_nothing(generator, oracle, length):
    request = asked(length, beam=ITEMS, k=ITEMS)
    answer = generator.infer(request)
    assert sorted(answer.items.tolist()) == list(range(1, ITEMS + 1))
    assert np.exp(answer.log_probs.astype(np.float64)).sum() == pytest.approx(1, abs=1e-3)
    assert answer.log_probs == pytest.approx([score for _, score in oracle.answer(request)], abs=TOLERANCE)


def test_answers_a_mixed_batch_as_it_answers_each_alone_and_in_the_order_asked(generator):
    requests = [
        asked(1),
        asked(8, k=3),
        asked(2, beam=4, k=7),
        asked(5, blocked=range(1, 150)),
        asked(8, among=[5, 6, 7, 8, 150], k=4),
        asked(3, among=[]),
        asked(8, seed=3, beam=40, k=40),
    ]
    for request, answer in zip(requests, generator.batch_infer(requests), strict=True):
        assert_same(answer, generator.infer(request))


def test_answers_an_empty_batch_with_nothing(generator):
    assert generator.batch_infer([]) == []


def test_answers_in_the_types_of_the_interface(generator):
    for answer in generator.batch_infer([asked(), asked(among=[])]):
        assert (answer.items.dtype, answer.log_probs.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize(
    "restrictions",
    [{"blocked": range(20, 190)}, {"among": [3, 50, 7, 120, 199, 200, 1]}, {"among": range(1, 90), "blocked": range(5, 80)}],
    ids=["blocked", "among", "both"],
)
def test_renormalises_over_what_may_be_named(generator, oracle, restrictions):
    request = asked(**restrictions)
    assert_is(generator.infer(request), oracle.answer(request))


def test_names_the_only_item_that_may_be_named_with_certainty(generator):
    assert_is(generator.infer(asked(among=[42])), [(42, 0.0)])
    assert_is(generator.infer(asked(blocked=[item for item in range(1, ITEMS + 1) if item != 42])), [(42, 0.0)])


def test_names_nothing_where_nothing_may_be_named(generator):
    assert len(generator.infer(asked(among=[])).items) == 0
    assert len(generator.infer(asked(among=[4, 5], blocked=[4, 5])).items) == 0
    assert len(generator.infer(asked(blocked=range(1, ITEMS + 1))).items) == 0


def test_passes_over_strangers_among_the_items_to_block_or_to_choose_from(generator):
    known = generator.infer(asked(among=[3, 50], blocked=[7]))
    assert_same(generator.infer(asked(among=[0, -4, 3, 50, ITEMS + 1, 10**9], blocked=[7, 0, -1, 10**9])), known)


def test_gives_what_there_is_where_more_is_asked_for(generator):
    answer = generator.infer(asked(among=range(1, 16), beam=15, k=100))
    assert sorted(answer.items.tolist()) == list(range(1, 16))


def test_says_the_same_again_when_it_is_asked_again(generator):
    before = generator.infer(asked(7))
    assert_same(generator.infer(asked(7)), before)
    assert_same(generator.infer(asked(7, tenant="another")), before)
    assert_same(generator.infer(asked(7, k=4)), replace(before, items=before.items[:4], log_probs=before.log_probs[:4]))


@pytest.fixture
def drawer(generator):
    """A generator that takes requests to draw; one that does not is skipped with its own reason."""
    if reason := declined(generator, asked(sampling=SamplingOptions())):
        pytest.skip(reason)
    return generator


def declined(generator, request):
    return generator.declines(request) if hasattr(generator, "declines") else ""


def test_draws_items_with_the_log_probability_that_brute_force_gives_them(drawer, oracle):
    requests = [asked(4, sampling=SamplingOptions(samples=24, seed=5)), asked(7, blocked=range(1, 170), sampling=SamplingOptions(seed=6))]
    for request, answer in zip(requests, drawer.batch_infer(requests), strict=True):
        truth = dict(oracle.answer(replace(request, beam=ITEMS, k=ITEMS)))
        assert 1 < len(answer.items) <= request.k
        assert RULES.problem(request, answer) == ""
        assert answer.log_probs == pytest.approx([truth[item] for item in answer.items.tolist()], abs=TOLERANCE)


def test_the_same_seed_draws_the_same_whoever_else_asks_and_another_seed_draws_other_items(drawer):
    first, second = (asked(6, k=20, sampling=SamplingOptions(samples=20, temperature=2.0, seed=seed)) for seed in (1, 2))
    alone = drawer.infer(first)
    among_others = drawer.batch_infer([second, asked(8), first, asked(2, sampling=SamplingOptions(samples=50))])
    assert_same(among_others[2], alone)
    assert set(among_others[0].items.tolist()) != set(alone.items.tolist())


def test_without_a_temperature_it_draws_what_a_beam_of_one_finds(drawer, oracle):
    request = asked(6, sampling=SamplingOptions(samples=3, temperature=0.0))
    greedy = oracle.answer(replace(request, beam=1, k=1))
    assert_is(drawer.infer(request), greedy)


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (lambda good: replace(good, states=np.full_like(good.states, np.nan)), "NaN"),
        (lambda good: replace(good, states=good.states[:, :-1]), r"\(5, 15\)"),
        (lambda good: replace(good, states=good.states[:-1]), r"\(4, 16\)"),
        (lambda good: replace(good, sequence=replace(good.sequence, items=good.sequence.items + ITEMS)), "outside of 1..200"),
    ],
    ids=["NaN", "another width", "a state too few", "unknown items"],
)
def test_refuses_a_prompt_that_could_take_an_engine_down_and_answers_the_next(generator, broken, problem):
    good = asked(5)
    before = generator.infer(good)
    with pytest.raises(BackendFailed, match=problem):
        generator.infer(replace(good, state=broken(good.state)))
    assert_same(generator.infer(good), before)


def test_gives_up_what_nobody_waits_for_any_more_and_answers_the_next(generator):
    before = generator.infer(asked())
    with pytest.raises(DeadlineExceeded):
        generator.infer(asked(deadline=time.monotonic() - 0.001))
    assert_same(generator.infer(asked(deadline=time.monotonic() + 60)), before)


def test_answers_from_other_threads_than_the_one_that_loaded_it(generator):
    requests = [asked(length) for length in (1, 5, 8)]
    here = [generator.infer(request) for request in requests]
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            for expected, actual in zip(here, thread.map(generator.infer, requests), strict=True):
                assert_same(actual, expected)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_names_nothing_invalid_in_thousands_of_random_requests(served, request):
    generator, _ = served
    asks = random_requests(times(300, 100) if request.node.callspec.params["served"][0] in LOADS_SLOWLY else times(10_000, 500))
    asks = [one for one in asks if not declined(generator, one)]
    for start in range(0, len(asks), 50):
        for one, answer in zip(asks[start : start + 50], generator.batch_infer(asks[start : start + 50]), strict=True):
            assert RULES.problem(one, answer) == ""
            assert len(answer.items) > 0


def random_requests(count):
    """With random lengths, widths and block lists that leave something to name; every third is drawn."""
    rng = np.random.default_rng(11)
    requests = []
    for index in range(count):
        blocked = rng.choice(np.arange(1, ITEMS + 1), int(rng.integers(0, ITEMS)), replace=False)
        sampling = SamplingOptions(samples=int(rng.integers(1, 12)), seed=index) if index % 3 == 0 else None
        length, k, beam = (int(rng.integers(1, most)) for most in (9, 20, 20))
        requests.append(asked(length, k=k, beam=beam, seed=index, blocked=blocked, sampling=sampling))
    return requests


def test_can_be_closed_twice_and_answers_again_after_it_is_loaded(served):
    generator, bundle = served
    before = generator.infer(asked(5))
    generator.close()
    generator.close()
    generator.load(bundle)
    assert_same(generator.infer(asked(5)), before)


# --- what only vLLM promises: an engine of its own, with a queue and a cache of prompts --------------------------------------------


@pytest.fixture(scope="session")
def torch_beam(vllm_bundle):
    generator = TorchBeamGenerator()
    generator.load(vllm_bundle)
    return generator


def long(seed=0, **rest):
    """A prompt that fills its blocks of the cache."""
    return asked(LONGEST, seed=seed, **rest)


def is_idle(generator):
    return generator.queue()["running"] + generator.queue()["waiting"] == 0


def engine_pid():
    (process,) = [child for child in multiprocessing.active_children() if child.name == "EngineCore"]
    return process.pid


def rows_found(generator, request):
    before = generator.queue()["prefix_cache_hits"]
    answer = generator.infer(request)
    return answer, generator.queue()["prefix_cache_hits"] - before


@pytest.mark.slow
def test_vllm_computes_a_prompts_whole_blocks_once_and_then_only_the_codes(vllm, vllm_bundle):
    before = vllm.queue()
    vllm.infer(long(seed=9, k=ITEMS, beam=ITEMS))
    after = vllm.queue()
    looked_up, found = (after[count] - before[count] for count in ("prefix_cache_queries", "prefix_cache_hits"))
    view = Trie.of(vllm_bundle.semantic_ids).view()
    questions = [
        sum(len(view.children(level, node)) > 1 for node in range(nodes))
        for level, nodes in enumerate((1, *map(len, view.trie.tokens[:-1])))
    ]
    assert looked_up == sum(count * (LONGEST + level) for level, count in enumerate(questions))
    assert looked_up - found == LONGEST + sum(count * level for level, count in enumerate(questions))


@pytest.mark.slow
def test_vllms_users_and_tenants_share_nothing_and_a_returning_user_finds_the_prompt_again(vllm, torch_beam):
    one, other = long(seed=1, user_id="ada"), long(seed=2, user_id="bob")
    answer, within = rows_found(vllm, one)
    again, returning = rows_found(vllm, one)
    of_tenant, elsewhere = rows_found(vllm, replace(one, tenant="another"))
    assert returning > within == elsewhere
    for given in (answer, again, of_tenant):
        assert_same(given, torch_beam.infer(one))
    assert_same(vllm.infer(other), torch_beam.infer(other))


@pytest.mark.slow
async def test_after_vllm_was_told_to_forget_nothing_is_found_again_and_waiting_requests_are_answered(vllm, torch_beam):
    one = long(seed=11, user_id="ada")
    _, fresh = await asyncio.to_thread(rows_found, vllm, one)
    _, returning = await asyncio.to_thread(rows_found, vllm, one)
    waiting = [asyncio.create_task(vllm.ainfer(long(seed=20 + user))) for user in range(8)]
    await asyncio.sleep(0)
    await asyncio.to_thread(vllm.forget_everything)
    for user, answer in enumerate(await asyncio.gather(*waiting)):
        assert_same(answer, torch_beam.infer(long(seed=20 + user)))
    answer, found = await asyncio.to_thread(rows_found, vllm, one)
    assert found == fresh < returning
    assert_same(answer, torch_beam.infer(one))


@pytest.mark.slow
async def test_vllm_answers_simultaneous_users_each_as_if_alone(vllm, torch_beam):
    requests = [asked(length, seed=seed) for seed, length in enumerate((1, 8, 31, 32, 33, 63, 64, 64, 64, 64, 20, 40))]
    for request, answer in zip(requests, await asyncio.gather(*map(vllm.ainfer, requests)), strict=True):
        assert_same(answer, torch_beam.infer(request))


@pytest.mark.slow
async def test_a_stream_of_vllm_gives_the_items_of_the_answer(vllm, torch_beam):
    pieces = [piece async for piece in vllm.astream(long(seed=3))]
    pairs = {item: score for piece in pieces for item, score in zip(piece.items.tolist(), piece.log_probs.tolist(), strict=True)}
    assert sorted(pairs, key=lambda item: -pairs[item])[:10] == torch_beam.infer(long(seed=3)).items.tolist()


@pytest.mark.slow
def test_a_prompt_with_nan_fails_alone_among_others(vllm, torch_beam):
    good, bad = long(seed=4), replace(long(seed=5), state=replace(long(seed=5).state, states=np.full((LONGEST, WIDTH), np.nan, np.float32)))
    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(vllm.infer, request) for request in (good, bad, good)]
        with pytest.raises(BackendFailed, match="NaN"):
            answers[1].result()
        for answer in (answers[0], answers[2]):
            assert_same(answer.result(), torch_beam.infer(good))
    assert vllm.alive()


@pytest.mark.slow
def test_where_vllm_has_no_room_for_all_at_once_requests_wait_and_are_answered(vllm, torch_beam):
    requests = [asked(length, seed=seed) for seed, length in enumerate((64, 64, 40, 64, 1, 64, 64, 64, 33, 64, 64, 50, 64, 64))]
    with watched(lambda: vllm.queue()["waiting"]) as waiting:
        answers = vllm.batch_infer(requests)
    assert max(waiting) > 20
    for request, answer in zip(requests, answers, strict=True):
        assert_same(answer, torch_beam.infer(request))


@contextmanager
def watched(look):
    """All that is seen meanwhile."""
    seen, over = [], threading.Event()

    def watch():
        while not over.is_set():
            seen.append(look())

    with ThreadPoolExecutor(1) as watcher:
        watching = watcher.submit(watch)
        try:
            yield seen
        finally:
            over.set()
    watching.result()


@pytest.mark.slow
async def test_a_request_that_is_cancelled_or_out_of_time_leaves_nothing_behind_in_vllm(vllm, torch_beam):
    os.kill(engine_pid(), signal.SIGSTOP)
    try:
        cancelled = asyncio.ensure_future(vllm.ainfer(long(seed=7)))
        await asyncio.to_thread(eventually, lambda: not is_idle(vllm), every_s=0.01)
        cancelled.cancel()
        with pytest.raises(DeadlineExceeded):
            await vllm.ainfer(long(seed=8, deadline=time.monotonic() + 0.3))
        await asyncio.to_thread(eventually, lambda: is_idle(vllm), every_s=0.01)
    finally:
        os.kill(engine_pid(), signal.SIGCONT)
    assert_same(await vllm.ainfer(long(seed=7)), torch_beam.infer(long(seed=7)))


@pytest.mark.slow
def test_nan_out_of_vllm_is_no_answer_and_stays_in_no_cache(vllm, torch_beam, monkeypatch):
    """The last test that asks this engine: blocks of its KV cache that held NaN can spoil what is computed in them later."""
    rows = VllmGenerator._rows  # noqa: SLF001 - the fault lies between the prompt and vLLM
    with monkeypatch.context() as patch:
        patch.setattr(VllmGenerator, "_rows", lambda self, user: rows(self, user) * float("nan"))
        with pytest.raises(BackendFailed):
            vllm.infer(long(seed=6))
    assert_same(vllm.infer(long(seed=6)), torch_beam.infer(long(seed=6)))


@pytest.mark.slow
def test_a_killed_engine_fails_all_waiting_requests_at_once_and_later_ones(vllm):
    """The last test of this engine. That another takes its place is told by tests/integration/test_generation.py, and tests/chaos too."""
    os.kill(engine_pid(), signal.SIGSTOP)
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(vllm.infer, long(seed=seed)) for seed in range(8)]
        eventually(lambda: vllm.queue()["waiting"] + vllm.queue()["running"] >= 8, "they are in the engine")
        os.kill(engine_pid(), signal.SIGKILL)
        for one in waiting:
            with pytest.raises(BackendFailed, match="has died"):
                one.result(60)
    assert not vllm.alive()
    assert is_idle(vllm)
    with pytest.raises(BackendFailed, match="has died"):
        vllm.infer(long())
