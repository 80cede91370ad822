"""vLLM's engine killed and loaded anew, and fed what it dies of. What a service makes of both: tests/integration/test_generation.py."""

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from cluster.errors import BackendFailed
from cluster.values import GenerateRequest, UserState
from integrations.vllm import library
from integrations.vllm.generator import VllmGenerator
from integrations.vllm.requests import Words
from tests.bundles import make_generative_bundle, random_sequence
from tests.chaos.rows import Row
from tests.waiting import eventually

pytestmark = [
    pytest.mark.chaos,  # in short: tests/contract/test_generators.py
    pytest.mark.skipif(bool(library.obstacle()), reason=library.obstacle()),
]


def engine_pid() -> int:
    (process,) = [child for child in multiprocessing.active_children() if child.name == "EngineCore"]
    assert process.pid is not None
    return process.pid


def asked() -> GenerateRequest:
    states = np.random.default_rng(5).normal(size=(8, 16)).astype(np.float32)
    user = UserState(states / np.linalg.norm(states, axis=1, keepdims=True), random_sequence(8))
    return GenerateRequest(user, 10, 20, np.array([], np.int32))


def test_an_engine_is_loaded_anew_after_it_was_killed_and_one_that_dies_of_a_prompt_leaves_no_process(
    record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: int
):
    fault, must = "kill -9 vLLM's engine, then a prompt it dies of", "the same answer once it is loaded anew; no process is left"
    bundle, generator = make_generative_bundle(tmp_path / "tiny"), VllmGenerator("float32", kv_cache_bytes=2**22)
    generator.load(bundle)
    with record(Row(fault, must, run)) as row:
        before, killed = generator.infer(asked()), engine_pid()
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: not generator.alive(), "its death is noticed")
        with pytest.raises(BackendFailed, match="has died"):
            generator.infer(asked())
        generator.close()
        generator.close()
        generator.load(bundle)
        after = generator.infer(asked())
        row.claim("another process", engine_pid() != killed, least=1)
        row.claim("items that differ", int((before.items != after.items).sum()), most=0)
        row.claim("greatest difference of log p", float(np.abs(before.log_probs - after.log_probs).max()), most=1e-4)
        prompt = Words.prompt
        monkeypatch.setattr(Words, "prompt", lambda self, rows, suffix, salt: prompt(self, rows[:, :-1], suffix, salt))
        with pytest.raises(BackendFailed):
            generator.infer(asked())
        generator.close()
        row.claim("processes that are left", sum(child.name == "EngineCore" for child in multiprocessing.active_children()), most=0)
