"""What a real vLLM engine does when it is killed, stopped, fed nonsense or has no memory left; torch_beam says what it should have said."""

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.errors import BackendFailed, BackendUnavailable, DeadlineExceeded
from cluster.values import Availability, GenerateRequest, UserState
from integrations.torch_beam.generator import TorchBeamGenerator
from integrations.vllm.generator import VllmGenerator
from tests.bundles import make_generative_bundle, random_sequence
from tests.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # Inductor's own remarks, as vllm imports it
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq:ResourceWarning"),  # vllm leaves one at each shutdown
]
LONGEST, BLOCK_BYTES = 64, 2 * 32 * 64 * 2 * 4
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_generative_bundle(tmp_path_factory.mktemp("generates") / "tiny", prompt_length=LONGEST)


@pytest.fixture(scope="module")
def loaded(bundle):
    generator = VllmGenerator()
    if not (availability := generator.get_availability(bundle)).ok:
        pytest.skip(availability.reason)
    generator.load(bundle)
    yield generator
    generator.close()
    gc.collect()


@pytest.fixture
def generator(loaded, bundle):
    """Loaded anew where the test before killed it."""
    if not loaded.alive():
        loaded.load(bundle)
    return loaded


@pytest.fixture(scope="module")
def reference(bundle):
    generator = TorchBeamGenerator()
    generator.load(bundle)
    return generator


def asked(length=LONGEST, seed=0, **rest):
    states = np.random.default_rng([seed, length]).normal(size=(length, 16)).astype(np.float32)
    user = UserState(states / np.linalg.norm(states, axis=1, keepdims=True), random_sequence(length, seed=seed))
    return GenerateRequest(user, **{"k": 10, "beam": 20, "blocked": np.array([], np.int32), **rest})


def assert_same(answer, expected):
    assert answer.items.tolist() == expected.items.tolist()
    assert answer.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


def idle(generator):
    return generator.queue()["running"] + generator.queue()["waiting"] == 0


def engine_pid():
    (process,) = [child for child in multiprocessing.active_children() if child.name == "EngineCore"]
    return process.pid


def rows_found(generator, request):
    before = generator.queue()["prefix_cache_hits"]
    answer = generator.infer(request)
    return answer, generator.queue()["prefix_cache_hits"] - before


def test_users_and_tenants_share_nothing_and_who_returns_finds_their_prompt_again(generator, reference):
    one, other = asked(seed=1), asked(seed=2)
    answer, within = rows_found(generator, one)
    again, returning = rows_found(generator, one)
    of_tenant, elsewhere = rows_found(generator, replace(one, tenant="another"))
    assert returning > within == elsewhere
    for given in (answer, again, of_tenant):
        assert_same(given, reference.infer(one))
    assert_same(generator.infer(other), reference.infer(other))


async def test_after_it_was_told_to_forget_nothing_is_found_again_and_who_waits_meanwhile_is_answered(generator, reference):
    one = asked(seed=11)
    _, fresh = await asyncio.to_thread(rows_found, generator, one)
    _, returning = await asyncio.to_thread(rows_found, generator, one)
    waiting = [asyncio.create_task(generator.ainfer(asked(seed=20 + user))) for user in range(8)]
    await asyncio.sleep(0)
    await asyncio.to_thread(generator.forget_everything)
    for user, answer in enumerate(await asyncio.gather(*waiting)):
        assert_same(answer, reference.infer(asked(seed=20 + user)))
    answer, found = await asyncio.to_thread(rows_found, generator, one)
    assert found == fresh < returning
    assert_same(answer, reference.infer(one))


async def test_answers_users_who_ask_at_the_same_time_each_as_if_alone(generator, reference):
    requests = [asked(length, seed) for seed, length in enumerate((1, 8, 31, 32, 33, 63, 64, 64, 64, 64, 20, 40))]
    for request, answer in zip(requests, await asyncio.gather(*map(generator.ainfer, requests)), strict=True):
        assert_same(answer, reference.infer(request))


async def test_a_stream_gives_the_items_of_the_answer_piece_by_piece(generator, reference):
    pieces = [piece async for piece in generator.astream(asked(seed=3))]
    pairs = {item: score for piece in pieces for item, score in zip(piece.items.tolist(), piece.log_probs.tolist(), strict=True)}
    assert len(pieces) > 1
    assert sorted(pairs, key=lambda item: -pairs[item])[:10] == reference.infer(asked(seed=3)).items.tolist()


def test_a_prompt_with_nan_fails_alone_among_others(generator, reference):
    good, bad = asked(seed=4), replace(asked(seed=5), user=replace(asked(seed=5).user, states=np.full((LONGEST, 16), np.nan, np.float32)))
    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(generator.infer, request) for request in (good, bad, good)]
        with pytest.raises(BackendFailed, match="NaN"):
            answers[1].result()
        for answer in (answers[0], answers[2]):
            assert_same(answer.result(), reference.infer(good))
    assert generator.alive()


def test_nan_out_of_the_engine_is_no_answer_and_stays_in_no_cache(generator, reference, monkeypatch):
    rows = VllmGenerator._rows
    with monkeypatch.context() as patch:
        patch.setattr(VllmGenerator, "_rows", lambda self, user: rows(self, user) * float("nan"))
        with pytest.raises(BackendFailed):
            generator.infer(asked(seed=6))
    if not generator.alive():
        pytest.skip("this vllm dies of NaN; that it is loaded again is tested below")
    assert_same(generator.infer(asked(seed=6)), reference.infer(asked(seed=6)))


async def test_who_cancels_or_is_out_of_time_leaves_nothing_behind_in_the_engine(generator, reference):
    os.kill(engine_pid(), signal.SIGSTOP)
    try:
        cancelled = asyncio.ensure_future(generator.ainfer(asked(seed=7)))
        await asyncio.to_thread(eventually, lambda: not idle(generator), every_s=0.01)
        cancelled.cancel()
        with pytest.raises(DeadlineExceeded):
            await generator.ainfer(asked(seed=8, deadline=time.monotonic() + 0.3))
        await asyncio.to_thread(eventually, lambda: idle(generator), every_s=0.01)
    finally:
        os.kill(engine_pid(), signal.SIGCONT)
    assert_same(await generator.ainfer(asked(seed=7)), reference.infer(asked(seed=7)))


def test_a_killed_engine_fails_all_who_wait_at_once_and_answers_again_once_it_is_loaded_anew(generator, bundle, reference):
    pid = engine_pid()
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(generator.infer, asked(seed=seed)) for seed in range(8)]
        eventually(lambda: generator.queue()["waiting"] + generator.queue()["running"] >= 8, "they are in the engine")
        os.kill(pid, signal.SIGKILL)
        for one in waiting:
            with pytest.raises(BackendFailed, match="has died"):
                one.result(30)
    assert not generator.alive()
    assert idle(generator)
    with pytest.raises(BackendFailed, match="has died"):
        generator.infer(asked())
    generator.close()
    generator.load(bundle)
    assert engine_pid() != pid
    assert_same(generator.infer(asked()), reference.infer(asked()))


def test_an_engine_that_dies_of_a_prompt_fails_and_leaves_no_process(generator, monkeypatch):
    rows = VllmGenerator._rows
    monkeypatch.setattr(VllmGenerator, "_rows", lambda self, user: rows(self, user)[:, :-1])
    with pytest.raises(BackendFailed):
        generator.infer(asked())
    generator.close()
    assert not [child for child in multiprocessing.active_children() if child.name == "EngineCore"]


def test_with_room_for_one_prompt_everybody_waits_and_is_answered(bundle, reference):
    generator = VllmGenerator(kv_cache_bytes=4 * BLOCK_BYTES)
    generator.load(bundle)
    requests, most_waiting, over = [asked(length, seed) for seed, length in enumerate((64, 64, 40, 64, 1, 64))], [0.0], threading.Event()

    def watch():
        while not over.is_set():
            most_waiting[0] = max(most_waiting[0], generator.queue()["waiting"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    answers = generator.batch_infer(requests)
    over.set()
    watcher.join()
    assert most_waiting[0] > 20
    for request, answer in zip(requests, answers, strict=True):
        assert_same(answer, reference.infer(request))
    crowd = [asked(seed=seed, deadline=time.monotonic() + 0.05) for seed in range(40)]
    with pytest.raises(DeadlineExceeded):
        generator.batch_infer(crowd)
    eventually(lambda: idle(generator), "the engine is idle")
    assert_same(generator.infer(asked()), reference.infer(asked()))
    generator.close()


def test_an_engine_process_that_cannot_start_leaves_nothing_behind(bundle, monkeypatch):
    generator = VllmGenerator(kv_cache_bytes=BLOCK_BYTES)
    monkeypatch.setattr(generator, "get_availability", lambda bundle: Availability.yes())
    before = set(multiprocessing.active_children())
    with pytest.raises(BackendUnavailable, match="did not start"):
        generator.load(bundle)
    assert set(multiprocessing.active_children()) <= before
    assert len([thread for thread in threading.enumerate() if thread.name == "vllm"]) <= 1


SERVER = """
import multiprocessing, sys, time
from pathlib import Path
from cluster.bundle import BundleStore
from integrations.vllm.generator import VllmGenerator
if __name__ == "__main__":
    VllmGenerator().load(BundleStore(Path(sys.argv[1])).open())
    print(multiprocessing.active_children()[0].pid, flush=True)
    time.sleep(600)
"""


def test_the_engine_ends_with_the_process_that_started_it_even_if_that_is_killed(bundle, tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    command, environment = [sys.executable, str(script), str(bundle.path.parent)], {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        pid = int(server.stdout.readline())
        assert alive(pid)
        server.kill()
    eventually(lambda: not alive(pid), "its process is gone")


def alive(pid):
    """Not a zombie either, which an orphan may stay where nobody waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
