"""The load driver: when requests are due, what is counted as what, and a stall that every request it held up has seen."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from benchmarks.load import NO_ANSWER, Load, Phase, Plan, Results, run, starts
from tests.waiting import eventually

ANSWER = (
    b'{"user_id":"1","items":[{"item_id":"7"},{"item_id":"3"}],"stages":[{"stage":"encode","backend":"torch","duration_ms":1.5},'
    b'{"stage":"generate","backend":"vllm","duration_ms":2.5}],"degraded":true,"model_version":"m/2","cache":{"tier":"l1"}}'
)


def plan(*phases: Phase, **options) -> Plan:
    return Plan("http://127.0.0.1:1", phases, ("{}",), **options)


@contextmanager
def server(*responses: bytes, stall_s: float = 0.0, asked: list[bytes] | None = None) -> Iterator[str]:
    """Answers the requests with these in turns, the last one for ever; the first only after a stall, in which it does nothing else.
    `asked`: gets the head of each request.
    """
    left, loop, ready, port = list(responses), asyncio.new_event_loop(), threading.Event(), []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal stall_s
        while (head := await reader.readuntil(b"\r\n\r\n")) if not reader.at_eof() else b"":
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            if asked is not None:
                asked.append(head)
            stall_s, stalled = 0.0, stall_s
            threading.Event().wait(stalled)
            writer.write(left.pop(0) if len(left) > 1 else left[0])

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def serve() -> None:
        listening = await asyncio.start_server(quietly, "127.0.0.1", 0)
        port.append(listening.sockets[0].getsockname()[1])
        ready.set()
        stopped = asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(stopped.set))
        await stopped.wait()
        listening.close()

    stop = []
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(120)
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        while not stop:
            ready.wait(0.01)
        stop[0]()
        thread.join(300)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def http(status: str, body: bytes = b"{}", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def test_constant_arrivals_are_evenly_spaced_phase_after_phase():
    due = plan(Phase("a", 2, 2), Phase("b", 4, 1)).due()
    assert due.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.25, 2.5, 2.75]


def test_poisson_arrivals_are_as_many_within_their_phase_and_the_same_for_a_seed():
    due = plan(Phase("a", 100, 5), Phase("b", 10, 5), arrivals="poisson", seed=3).due()
    assert np.array_equal(due, plan(Phase("a", 100, 5), Phase("b", 10, 5), arrivals="poisson", seed=3).due())
    assert (np.diff(due) >= 0).all()
    assert ((due < 5).sum(), len(due)) == (500, 550)
    gaps = np.diff(due[:500])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.2), "as with gaps that are exponential"


def test_a_plan_survives_being_written():
    written = plan(Phase("a", 1, 1), headers={"x-api-key": "k"}, retries=1)
    assert Plan.parse(written.dump()) == written
    assert starts((Phase("a", 1, 3), Phase("b", 1, 4), Phase("a", 1, 1))) == {"a": 0.0, "b": 3.0}


def results_of(*responses: bytes, stall_s: float = 0.0, **options) -> Results:
    with server(*responses, stall_s=stall_s) as url:
        return run(Plan(url, (Phase("load", 20, 0.5),), ("{}",), **options))


def test_an_answer_is_told_by_who_gave_it():
    found = results_of(http("200 OK", ANSWER), examine=True)
    assert (len(found), found.ok.all(), found.degraded.all()) == (10, True, True)
    assert found.named("stages") == {"encode=torch generate=vllm": 10}
    assert (found.named("version"), found.named("tier")) == ({"m/2": 10}, {"l1": 10})
    assert found.model_ms.tolist() == [4.0] * 10
    assert len(set(found.items.tolist())) == 1


def test_a_rejection_says_when_to_come_back_and_an_error_is_a_failure():
    found = results_of(http("503 Busy", headers="Retry-After: 2\r\n"), http("503 Busy"), http("500 Broken"), http("200 OK"), connections=1)
    assert found.statuses() == {"200": 7, "500": 1, "503": 2}
    assert (found.rejected.sum(), found.failed.sum()) == (1, 2)
    assert found.retry_after[found.rejected].tolist() == [2.0]


def test_a_request_is_sent_again_where_that_may_help():
    found = results_of(http("503 Busy"), http("200 OK"), retries=1, retry_pause_s=0.0, connections=1)
    assert found.ok.all()
    assert found.attempts.sum() == len(found) + 1
    assert results_of(http("500 Broken"), retries=1).attempts.max() == 1


def test_where_nobody_listens_every_request_fails():
    found = run(plan(Phase("load", 20, 0.2)))
    assert set(found.status.tolist()) == {NO_ANSWER}
    assert found.failed.all()
    assert np.isnan(found.percentile(50))


def test_a_driver_that_ends_before_it_sends_anything_is_told_with_its_status(capfd):
    with pytest.raises(RuntimeError, match="the load driver ended with status 1; what it printed says why"):
        run(Plan("http://127.0.0.1:none", (Phase("load", 20, 0.2),), ("{}",)))
    assert "ValueError: Port could not be cast" in capfd.readouterr().err


def test_a_driver_is_made_nicer_than_what_starts_it_and_never_less_nice(monkeypatch):
    """As a user that is not root may."""
    own, given = os.getpriority(os.PRIO_PROCESS, 0), []

    def as_another_user(which: int, process: int, niceness: int) -> None:
        if niceness < os.getpriority(which, process):
            raise PermissionError
        given.append(niceness)

    monkeypatch.setattr(os, "setpriority", as_another_user)
    for asked in (own - 1, own + 1):
        with Load(plan(Phase("load", 20, 0.1)), asked) as load:
            assert len(load.results()) == 2
    assert given == [own + 1]


def test_a_stall_is_seen_by_every_request_that_was_due_in_it():
    found = results_of(http("200 OK"), stall_s=0.4)
    waited = found.latency + found.due
    assert (waited[found.due < 0.4] >= 0.4 - 0.05).all(), "counted from when it was due"
    assert (found.due < 0.4).sum() == 8


def test_callers_who_never_wait_for_their_turn_are_as_many_as_asked():
    with server(http("200 OK")) as url:
        found = run(Plan(url, (Phase("load", 0, 1.5),), ("{}",), clients=3))
    assert found.ok.all()
    assert len(found) >= 3


def test_a_caller_who_never_waits_asks_again_as_soon_as_it_is_answered():
    asked = list[bytes]()
    with server(http("200 OK"), asked=asked) as url, Load(Plan(url, (Phase("load", 0, 600),), ("{}",), clients=3)):
        eventually(lambda: len(asked) > 3, "more requests than callers")
