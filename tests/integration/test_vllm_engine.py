"""A vLLM engine in bfloat16 with the least memory it may have, in a process that is killed in the end; and one that cannot start.

What an engine in float32 does is told by tests/contract/test_generators.py, how one is replaced behind a service by test_generation.py.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from cluster.bundle import DECODER
from cluster.bundle_store import BundleStore
from cluster.errors import BackendUnavailable
from cluster.values import Availability, GenerateRequest, UserState
from integrations.decoder.files import load_soft_prompt
from integrations.vllm import library
from integrations.vllm.generator import VllmGenerator
from tests.bundles import make_generative_bundle, random_sequence
from tests.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle()),
]
ITEMS, LONGEST = 120, 64
BLOCK_BYTES = 2 * 32 * 64 * 2 * 2
LEAST = 4 * BLOCK_BYTES
"""Of the KV cache in bfloat16: the longest prompt with its codes, and the block that vLLM keeps for itself."""
CLOSE, BEST = 0.08, 20
"""bfloat16 keeps 8 bits, and the levels add up: of so many of the best items, log p is as close."""


class Host:
    """A process that loads a VllmGenerator and hands it what comes."""

    generator = VllmGenerator("bfloat16", kv_cache_bytes=LEAST)

    def __init__(self, model_dir: Path) -> None:
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self.pid, self.engine = self._process.submit(loaded, model_dir).result()

    def run(self, work, *arguments):
        return self._process.submit(work, *arguments).result()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.shutdown()


def loaded(model_dir):
    """The process that this runs in, and the engine's."""
    Host.generator.load(BundleStore(model_dir).open())
    (engine,) = multiprocessing.active_children()
    return os.getpid(), engine.pid


def answered(requests):
    return Host.generator.batch_infer(requests)


def is_idle():
    return Host.generator.queue()["running"] + Host.generator.queue()["waiting"] == 0


def cancelled(requests):
    """Once most of them wait. How many there were then, when the engine is idle again."""

    async def ask_and_go():
        crowd = [asyncio.ensure_future(Host.generator.ainfer(request)) for request in requests]
        await asyncio.to_thread(eventually, lambda: Host.generator.queue()["waiting"] > len(requests), every_s=0.005)
        for one in crowd:
            one.cancel()
        return sum(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*crowd, return_exceptions=True))

    gone = asyncio.run(ask_and_go())
    eventually(is_idle, "the engine is idle", every_s=0.01)
    return gone


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_generative_bundle(tmp_path_factory.mktemp("generates") / "tiny", items=ITEMS, sizes=(6, 6), prompt_length=LONGEST)


@pytest.fixture(scope="module")
def host(bundle):
    one = Host(bundle.path.parent)
    yield one
    if alive(one.pid):
        one.kill()


def asked(length, seed=0, *, k=ITEMS, beam=ITEMS):
    states = np.random.default_rng([seed, length]).normal(size=(length, 16)).astype(np.float32)
    user = UserState(states / np.linalg.norm(states, axis=1, keepdims=True), random_sequence(length, items=ITEMS, seed=seed))
    return GenerateRequest(user, k, beam, np.array([], np.int32))


def whole_pass(bundle, user):
    """Item -> log p, all items' prompts and codes through transformers in one go; renormalised over all siblings."""
    ids, lm = bundle.semantic_ids, LlamaForCausalLM.from_pretrained(bundle.path / DECODER).eval()
    tokens = torch.from_numpy(ids.tokens[1:]).long()
    with torch.no_grad():
        rows = load_soft_prompt(bundle).of([user])[0].expand(ITEMS, -1, -1)
        logits = lm(inputs_embeds=torch.cat([rows, lm.model.embed_tokens(tokens)], dim=1)).logits[:, len(user) - 1 : -1]
    scores = np.zeros(ITEMS)
    for item, path in enumerate(tokens):
        for level in range(ids.levels):
            siblings = sorted({int(other[level]) for other in tokens if torch.equal(other[:level], path[:level])})
            scores[item] += float(logits[item, level, path[level]] - logits[item, level, siblings].logsumexp(0))
    return scores


def test_the_least_memory_is_what_a_bundle_is_told_to_need(bundle):
    assert VllmGenerator("bfloat16", kv_cache_bytes=LEAST).get_availability(bundle).ok
    assert f"{LEAST} are needed" in VllmGenerator("bfloat16", kv_cache_bytes=LEAST - 1).get_availability(bundle).reason


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33, LONGEST])
def test_steps_after_one_prefill_in_bfloat16_are_close_to_one_whole_pass_of_transformers(host, bundle, length):
    (answer,) = host.run(answered, [asked(length)])
    assert sorted(answer.items.tolist()) == list(range(1, ITEMS + 1))
    expected = whole_pass(bundle, asked(length).state)[answer.items - 1]
    assert answer.log_probs[:BEST] == pytest.approx(expected[:BEST], abs=CLOSE)


def test_with_room_for_one_prompt_requests_wait_and_are_answered(host, bundle):
    requests = [asked(length, seed, k=10, beam=20) for seed, length in enumerate((64, 64, 40, 64, 1, 64))]
    for request, answer in zip(requests, host.run(answered, requests), strict=True):
        assert len(answer.items) == 10
        assert answer.log_probs == pytest.approx(whole_pass(bundle, request.state)[answer.items - 1], abs=CLOSE)


def test_a_crowd_that_goes_while_it_waits_leaves_nothing_behind(host, bundle):
    assert host.run(cancelled, [asked(LONGEST, seed, k=10, beam=20) for seed in range(40)]) == 40
    (answer,) = host.run(answered, [asked(LONGEST, k=10, beam=20)])
    assert answer.log_probs == pytest.approx(whole_pass(bundle, asked(LONGEST).state)[answer.items - 1], abs=CLOSE)


def test_the_engine_ends_with_the_process_that_started_it_even_if_that_is_killed(host):
    """The last test of this engine."""
    assert alive(host.engine)
    host.kill()
    eventually(lambda: not alive(host.engine), "its process is gone")


def alive(pid):
    """Not a zombie either, which an orphan may stay where nobody waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_engine_process_that_cannot_start_leaves_nothing_behind(bundle, monkeypatch):
    generator = VllmGenerator(kv_cache_bytes=BLOCK_BYTES)
    monkeypatch.setattr(generator, "get_availability", lambda bundle: Availability.yes())
    before = {*multiprocessing.active_children(), *threading.enumerate()}
    with pytest.raises(BackendUnavailable, match="did not start"):
        generator.load(bundle)
    assert {*multiprocessing.active_children(), *(one for one in threading.enumerate() if one.name == "vllm")} <= before
