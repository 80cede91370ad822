"""The framework controller over an event loop: engines that take many requests at once, beside those that take a batch at a time."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from cluster.engines import trying
from cluster.engines.controller import LOADS_ALONE_S, FrameworkController, Served
from cluster.engines.room import AskBatch, Joined
from cluster.engines.roster import Choice
from cluster.engines.skipped import Declined, NoBackendAnswered, OutOfTime
from cluster.errors import DeadlineExceeded
from cluster.traffic.breaker import BreakerSettings, BreakerState
from cluster.values import SkippedBackend
from tests.fakes import scripted_backends
from tests.fakes.scripted_backends import CLOCK, QUEUED_TABLE, RULES, First, Queued, Second
from tests.waiting import settled, until

BREAKER = BreakerSettings(failures_to_open=3, pause_s=1, growth=2, longest_pause_s=8)


@pytest.fixture(autouse=True)
def _pristine() -> Iterator[None]:
    scripted_backends.reset()
    yield
    scripted_backends.reset()


def each_alone(name: str, answer: AskBatch[int, float]) -> Joined[int, float]:
    async def ask(request: int) -> float | SkippedBackend:
        (result,) = await answer([request])
        return result

    return ask, lambda: 0.0


class Hanging(Queued):
    """Its load never ends: it does not answer the samples."""

    async def ainfer(self, request: int) -> float:
        await asyncio.Event().wait()
        return 0.0


class Stage:
    """What a replica of the generator does: a controller that joins the requests for each backend that takes batches; here, each alone."""

    def __init__(self, directory: Path, *, order=("queued", "first", "second"), retries=2, join=each_alone, table=QUEUED_TABLE):
        bundle = scripted_backends.opaque_bundle(directory / "model")
        given = {"breaker": BREAKER, "probe_interval_s": 5.0, "clock": CLOCK, "retries": retries, "join": join}
        self.controller: FrameworkController[int, float] = FrameworkController("doubler", Choice(table, order), bundle, RULES, **given)

    async def start(self):
        await self.controller.warm_up([1])
        await self.controller.refresh()
        for cls in (Queued, First, Second):
            cls.log.clear()
        Queued.most = 0
        return self

    async def serve(self, request: int) -> Served[float]:
        return await self.controller.call_one(request)

    async def stream(self, request: int, found: list | None = None) -> list[float | Served[float]]:
        found = [] if found is None else found
        async for one in self.controller.stream(request, sum):
            found.append(one)
        return found

    def of(self, name: str):
        return next(backend for backend in self.controller.snapshot().backends if backend.name == name)


@pytest.fixture
async def stage(tmp_path: Path) -> Stage:
    return await Stage(tmp_path).start()


class TestServe:
    async def test_many_requests_are_in_the_engine_at_the_same_time(self, stage):
        served = await asyncio.gather(*(stage.serve(number) for number in range(20)))
        assert [one.answer for one in served] == [2.0 * number for number in range(20)]
        assert {one.backend for one in served} == {"queued"}
        assert Queued.most == 20

    async def test_it_waits_for_no_batch_that_runs_and_neither_does_a_refresh(self, stage, monkeypatch):
        runs, may_end, working = threading.Event(), threading.Event(), First.batch_infer

        def held_up(self, requests):
            runs.set()
            assert may_end.wait(300)
            return working(self, requests)

        monkeypatch.setattr(First, "batch_infer", held_up)
        batch = asyncio.create_task(stage.controller.call([77]))
        await until(runs.is_set)
        CLOCK.advance(5)
        async with asyncio.timeout(60):
            await stage.controller.refresh()
        assert (await stage.serve(4)).answer == 8
        assert not batch.done()
        may_end.set()
        await batch

    async def test_a_request_it_declines_goes_on_and_is_neither_a_call_nor_a_failure(self, stage):
        served = await stage.serve(77)
        assert (served.backend, served.answer) == ("first", 154)
        assert served.fallback_from == (Declined("queued", "does not take odd tenants"),)
        assert (stage.of("queued").calls, stage.of("queued").failures) == (0, 0)

    async def test_a_request_that_the_engine_gives_up_by_itself_goes_on_and_counts_as_broken(self, stage, monkeypatch):
        """As where a task or a connection of its own has ended; the call was not cancelled."""

        async def cancelled(self, request):
            raise asyncio.CancelledError

        async def stream(self, request):
            yield 1.0
            raise asyncio.CancelledError

        reason = "broke: it gave the request up by itself"
        monkeypatch.setattr(Queued, "astream", stream)
        piece, again, streamed = await stage.stream(4)
        assert (piece, again, streamed.backend) == (1, 8, "first")
        monkeypatch.setattr(Queued, "ainfer", cancelled)
        served = await stage.serve(4)
        assert (served.answer, served.backend, [one.reason for one in served.fallback_from]) == (8, "first", [reason])
        assert stage.of("queued").failures == 2
        monkeypatch.setattr(First, "batch_infer", lambda self, requests: asyncio.run(cancelled(self, requests)))
        served = await stage.serve(4)
        assert (served.backend, [one.reason for one in served.fallback_from]) == ("second", [reason] * 2)

    async def test_an_engine_that_would_end_the_process_is_passed_over(self, stage, monkeypatch):
        async def exits(self, request):
            sys.exit("out of memory")

        async def stream(self, request):
            yield 1.0
            sys.exit("out of memory")

        monkeypatch.setattr(Queued, "astream", stream)
        piece, again, streamed = await stage.stream(4)
        assert (piece, again, streamed.backend) == (1, 8, "first")
        monkeypatch.setattr(Queued, "ainfer", exits)
        served = await stage.serve(4)
        assert (served.answer, served.backend) == (8, "first")
        assert served.fallback_from == (SkippedBackend("queued", "broke: RuntimeError", failed=True),)

    async def test_an_engine_that_takes_batches_is_given_those_it_does_not_decline(self, tmp_path, monkeypatch):
        monkeypatch.setattr(First, "declines", lambda self, request: "is odd" if request % 2 else "", raising=False)
        stage = await Stage(tmp_path, order=("first", "second"), join=None).start()
        served = await stage.controller.call([1, 2, 3, 4])
        assert [one.backend for one in served] == ["second", "first", "second", "first"]
        assert [one.answer for one in served] == [2, 4, 6, 8]
        assert served[0].fallback_from == (Declined("first", "is odd"),)
        assert (First.log, Second.log) == (["batch of 2"], ["batch of 2"])

    async def test_one_that_breaks_when_asked_whether_it_declines_is_passed_over(self, stage, monkeypatch):
        monkeypatch.setattr(Queued, "declines", lambda self, request: 1 / 0)
        (skipped,) = (await stage.serve(1)).fallback_from
        assert skipped.failed
        assert "ZeroDivisionError" in skipped.reason

    async def test_a_broken_call_goes_to_the_next_with_the_reason_and_is_counted(self, stage):
        Queued.error = RuntimeError("CUDA error")
        served = await stage.serve(4)
        assert (served.backend, served.answer) == ("first", 8)
        assert served.fallback_from == (SkippedBackend("queued", "broke: RuntimeError", failed=True),)
        assert (stage.of("queued").calls, stage.of("queued").failures, stage.of("first").fallbacks) == (1, 1, 1)

    async def test_nonsense_is_not_passed_on(self, stage):
        Queued.answers = [float("nan")]
        assert (await stage.serve(4)).fallback_from[0].reason == "answered with NaN"

    async def test_when_all_fail_the_error_holds_every_reason(self, stage):
        Queued.error = First.error = RuntimeError("dead")
        stage.controller.disable("second")
        with pytest.raises(NoBackendAnswered) as caught:
            await stage.serve(1)
        assert [one.backend for one in caught.value.skipped] == ["queued", "first", "second"]
        assert [one.failed for one in caught.value.skipped] == [True, True, False]

    async def test_a_poisoned_request_again_and_again_does_not_open_the_breaker(self, stage):
        Queued.poison = frozenset({13})
        served = await asyncio.gather(*(stage.serve(13) for _ in range(10)), stage.serve(1))
        assert [one.backend for one in served] == ["first"] * 10 + ["queued"]
        assert stage.of("queued").breaker is BreakerState.CLOSED

    @pytest.mark.parametrize(("retries", "server"), [(2, "queued"), (0, "first")])
    async def test_a_hiccup_is_retried_on_the_same_engine_unless_there_are_to_be_no_retries(self, tmp_path, monkeypatch, retries, server):
        stage = await Stage(tmp_path, retries=retries).start()
        working, hiccups = Queued.batch_infer, iter([True, False, False])
        monkeypatch.setattr(Queued, "batch_infer", lambda self, requests: 1 / 0 if next(hiccups) else working(self, requests))
        assert (await stage.serve(4)).backend == server

    async def test_a_hanging_engine_is_not_taken_for_a_sound_one(self, stage, monkeypatch):
        calls = []

        async def hang(self, request):
            calls.append(request)
            if len(calls) > 1:
                await asyncio.Event().wait()
            raise RuntimeError("stuck")

        monkeypatch.setattr(trying, "SAMPLE_WITHIN_S", 0.01)
        monkeypatch.setattr(Queued, "ainfer", hang)
        assert (await stage.serve(4)).backend == "first"
        assert calls == [4, 1], "the request, and the sample that shows whether the engine is sound"

    async def test_latency_is_that_of_its_calls(self, stage):
        Queued.seconds = 0.02
        await stage.serve(4)
        latency = stage.of("queued").latency
        assert latency.count == 1
        assert 20 <= latency.p50_ms <= 24


class TestDeadline:
    @pytest.mark.parametrize("name", ["queued", "first"])
    async def test_a_late_answer_ends_the_walk_and_counts_against_nobody(self, tmp_path, name):
        stage = await Stage(tmp_path, order=(name, "second")).start()
        for cls in (Queued, First):
            cls.error = DeadlineExceeded("had 5 ms, and 3 of 4 levels were done")
        for _ in range(10):
            with pytest.raises(NoBackendAnswered) as caught:
                await stage.serve(4)
        (skipped,) = caught.value.skipped
        assert (skipped.backend, skipped.failed, skipped.reason) == (name, False, "had 5 ms, and 3 of 4 levels were done")
        assert (stage.of(name).breaker, stage.of(name).failures, stage.of(name).calls) == (BreakerState.CLOSED, 0, 10)
        assert Second.log == []

    async def test_a_late_one_in_a_batch_does_not_make_the_others_late(self, tmp_path, monkeypatch):
        stage = await Stage(tmp_path, order=("first", "second"), join=None).start()
        working = First.batch_infer

        def late(self, requests):
            if 13 in requests:
                raise DeadlineExceeded("13 is late")
            return working(self, requests)

        monkeypatch.setattr(First, "batch_infer", late)
        before, late, *after = await stage.controller.call([12, 13, 14, 15])
        assert [(served.answer, served.backend) for served in (before, *after)] == [(24, "first"), (28, "first"), (30, "first")]
        assert late.skipped == (OutOfTime("first", "13 is late"),)

    async def test_a_backend_may_name_the_late_ones_of_a_batch_itself(self, tmp_path):
        stage = await Stage(tmp_path, order=("first", "second"), join=None).start()
        First.answers = [24.0, DeadlineExceeded("13 is late")]
        good, late = await stage.controller.call([12, 13])
        assert (good.answer, good.backend, late.skipped) == (24, "first", (OutOfTime("first", "13 is late"),))
        assert not late.skipped[0].failed
        assert stage.of("first").failures == 0


class TestLoading:
    async def test_the_warm_up_waits_for_what_is_quick_and_a_refresh_loads_the_rest_beside_the_calls(self, tmp_path, monkeypatch):
        stage = Stage(tmp_path)
        await stage.controller.warm_up([1])
        assert (First.log, Queued.log) == (["load", "batch of 1"], [])
        assert not stage.controller.snapshot().settled
        assert (await stage.serve(4)).fallback_from == (SkippedBackend("queued", "is being loaded"),)
        loading, may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(Queued, "load", lambda self, bundle: (loading.set(), may_end.wait(300)))
        refreshing = asyncio.create_task(stage.controller.refresh())
        await until(loading.is_set)
        assert (await stage.serve(4)).backend == "first"
        may_end.set()
        await refreshing
        assert (await stage.serve(4)).backend == "queued"
        assert stage.controller.snapshot().settled

    async def test_the_warm_up_waits_for_an_engine_with_a_queue_where_no_other_serves(self, tmp_path):
        First.load_error = RuntimeError("no memory")
        stage = Stage(tmp_path, order=("first", "queued"))
        assert (await stage.controller.warm_up([1])).startswith("doubler=queued (first: could not be loaded")
        assert (await stage.serve(4)).backend == "queued"

    async def test_the_warm_up_ends_where_such_an_engine_cannot_be_loaded_either(self, tmp_path):
        Queued.load_error = RuntimeError("no memory")
        stage = Stage(tmp_path, order=("queued",))
        assert (await stage.controller.warm_up([1])).startswith("doubler=none (queued: could not be loaded")
        assert Queued.log == ["load", "close"]

    @pytest.mark.virtual_time
    @pytest.mark.parametrize("hanging", [1, 2])
    async def test_an_engine_whose_load_does_not_end_keeps_no_other_with_a_queue_from_being_loaded(self, tmp_path, hanging):
        names = [f"hanging{number}" for number in range(hanging)]
        stage = Stage(tmp_path, order=(*names, "queued"), table={**QUEUED_TABLE, **dict.fromkeys(names, f"{__name__}:Hanging")})
        began = time.monotonic()
        async with asyncio.timeout(3600):
            assert (await stage.controller.warm_up([1])).startswith("doubler=queued (hanging0: is being loaded")
        assert time.monotonic() - began == pytest.approx(hanging * LOADS_ALONE_S)
        assert (await stage.serve(4)).backend == "queued"

    async def test_a_first_choice_that_cannot_be_loaded_is_settled_too(self, tmp_path):
        Queued.load_error = RuntimeError("no memory")
        stage = await Stage(tmp_path).start()
        assert stage.controller.snapshot().settled
        assert stage.controller.explain().startswith("doubler=first (queued: could not be loaded: RuntimeError; next trial in ")

    async def test_nobody_is_served_by_an_engine_that_the_samples_have_not_tried(self, tmp_path, monkeypatch):
        stage, working, seen = Stage(tmp_path), Queued.batch_infer, []
        await stage.controller.warm_up([1])

        def rehearse(self, requests):
            seen.append(stage.of("queued").reason)
            return working(self, requests)

        monkeypatch.setattr(Queued, "batch_infer", rehearse)
        await stage.controller.refresh()
        assert seen == ["is being loaded"]


class TestRecovery:
    async def test_a_dead_engine_is_out_at_once_and_comes_back_newly_loaded_without_traffic(self, stage):
        Queued.dead, Queued.error = True, RuntimeError("EngineDeadError")
        assert (await stage.serve(4)).backend == "first"
        assert stage.of("queued").breaker is BreakerState.OPEN
        assert Queued.log == ["batch of 1"], "the event loop closes no engine"
        await stage.controller.refresh()
        assert Queued.log == ["batch of 1", "close"]
        Queued.dead, Queued.error = False, None
        CLOCK.advance(1)
        await stage.controller.refresh()
        assert Queued.log[2:] == ["load", "batch of 1"]
        assert (await stage.serve(4)).backend == "queued"

    @pytest.mark.parametrize(
        ("cls", "fault"),
        [(Queued, {"dead": True}), (Queued, {"error": RuntimeError("flaky")}), (First, {"error": RuntimeError("flaky")})],
        ids=["dies", "breaks", "breaks on batches"],
    )
    async def test_an_engine_at_fault_is_condemned_before_it_is_closed(self, tmp_path, monkeypatch, cls, fault):
        monkeypatch.setattr(cls, "condemn", lambda self: self.log.append("condemn"), raising=False)
        stage = await Stage(tmp_path, order=(cls.__name__.lower(), "second")).start()
        for name, value in fault.items():
            setattr(cls, name, value)
        for _ in range(BREAKER.failures_to_open):
            await stage.serve(4)
        await stage.controller.refresh()
        assert cls.log[-2:] == ["condemn", "close"]
        assert cls.log.count("condemn") == 1

    async def test_one_that_breaks_as_it_is_condemned_is_closed_all_the_same(self, stage, monkeypatch):
        monkeypatch.setattr(Queued, "condemn", lambda self: 1 / 0, raising=False)
        Queued.dead = True
        await stage.controller.refresh()
        assert Queued.log == ["close"]

    async def test_a_sound_one_that_leaves_the_order_is_closed_and_not_condemned(self, stage, monkeypatch):
        monkeypatch.setattr(Queued, "condemn", lambda self: self.log.append("condemn"), raising=False)
        await stage.controller.reconfigure(Choice(QUEUED_TABLE, ["first"]))
        await stage.controller.refresh()
        assert Queued.log == ["close"]

    async def test_an_engine_that_dies_while_nobody_calls_is_found_by_the_refresh(self, stage):
        Queued.dead = True
        await stage.controller.refresh()
        assert Queued.log == ["close"]
        assert stage.of("queued").reason == "has lost its engine; next trial in 1.0 s"
        (skipped,) = (await stage.serve(4)).fallback_from
        assert skipped.failed

    async def test_one_that_breaks_when_it_is_asked_whether_it_lives_is_lost_and_says_how(self, stage, monkeypatch):
        monkeypatch.setattr(Queued, "alive", lambda self: 1 / 0)
        await stage.controller.refresh()
        assert Queued.log == ["close"]
        reason = "has lost its engine: asked whether it is alive, it broke: ZeroDivisionError: division by zero"
        assert stage.of("queued").reason == f"{reason}; next trial in 1.0 s"

    async def test_one_that_breaks_again_and_again_is_loaded_anew_and_users_do_not_try_it(self, stage):
        Queued.error = RuntimeError("flaky")
        for _ in range(BREAKER.failures_to_open):
            await stage.serve(4)
        CLOCK.advance(1)
        assert (await stage.serve(4)).fallback_from[0].reason == "broke: RuntimeError; it is being loaded again"
        Queued.error = None
        Queued.log.clear()
        await stage.controller.refresh()
        assert Queued.log == ["close", "load", "batch of 1"]
        assert (await stage.serve(4)).backend == "queued"

    async def test_every_broken_call_counts_also_that_by_which_it_is_found_out(self, stage, monkeypatch):
        asked = []

        async def broken(self, request):
            asked.append(request)
            raise RuntimeError("flaky")

        monkeypatch.setattr(Queued, "ainfer", broken)
        for _ in range(BREAKER.failures_to_open):
            await stage.serve(4)
        assert asked == [4, 1, 4, 1], "the request and a sample, until the breaker opened"
        assert stage.of("queued").breaker is BreakerState.OPEN

    @pytest.mark.virtual_time
    @pytest.mark.parametrize("stuck", [True, False])
    async def test_an_engine_that_only_lets_deadlines_pass_is_asked_a_sample(self, stage, monkeypatch, stuck):
        asked, working = [], Queued.ainfer

        async def late(self, request):
            asked.append(request)
            if request != 1:
                raise DeadlineExceeded("too late")
            return await (asyncio.Event().wait() if stuck else working(self, request))

        monkeypatch.setattr(trying, "SAMPLE_WITHIN_S", 0.05)
        monkeypatch.setattr(Queued, "ainfer", late)
        for number in range(trying.LATE_TO_BE_STUCK):
            await stage.controller.refresh()
            assert asked == [4] * number, "a late answer or two says nothing"
            with pytest.raises(NoBackendAnswered):
                await stage.serve(4)
        await stage.controller.refresh()
        assert asked[-1] == 1
        assert stage.of("queued").breaker is (BreakerState.OPEN if stuck else BreakerState.CLOSED)
        assert stage.of("queued").reason.startswith("is stuck: it was late again and again" if stuck else "")
        assert ("close" in Queued.log) == stuck

    @pytest.mark.virtual_time
    async def test_an_engine_that_answers_others_while_a_sample_waits_is_not_stuck(self, stage, monkeypatch):
        working, sample_waits = Queued.ainfer, asyncio.Event()

        async def behind_a_long_queue(self, request):
            if request == 5:
                raise DeadlineExceeded("too late")
            if request == 1:
                sample_waits.set()
                await asyncio.Event().wait()
            return await working(self, request)

        monkeypatch.setattr(Queued, "ainfer", behind_a_long_queue)
        for _ in range(trying.LATE_TO_BE_STUCK):
            with pytest.raises(NoBackendAnswered):
                await stage.serve(5)
        refreshed = asyncio.create_task(stage.controller.refresh())
        await sample_waits.wait()
        assert (await stage.serve(4)).backend == "queued"
        await refreshed
        assert (stage.of("queued").breaker, stage.of("queued").reason) == (BreakerState.CLOSED, "")
        assert "close" not in Queued.log

    @pytest.mark.virtual_time
    async def test_callers_who_leave_an_engine_that_does_not_answer_have_it_asked_a_sample_too(self, stage, monkeypatch):
        async def stuck(self, request):
            await asyncio.Event().wait()

        monkeypatch.setattr(trying, "SAMPLE_WITHIN_S", 0.05)
        monkeypatch.setattr(Queued, "ainfer", stuck)
        for _ in range(trying.LATE_TO_BE_STUCK):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stage.serve(4), 0.01)
        assert (stage.of("queued").failures, stage.of("queued").reason) == (0, "")
        await stage.controller.refresh()
        assert (await stage.serve(4)).fallback_from[0].reason.startswith("is stuck")

    async def test_a_call_that_ends_after_its_engine_was_replaced_is_not_held_against_the_new_one(self, stage, monkeypatch):
        asked, may_break, working = asyncio.Event(), asyncio.Event(), Queued.ainfer

        async def breaks_late(self, request):
            asked.set()
            await may_break.wait()
            raise RuntimeError("old engine")

        monkeypatch.setattr(Queued, "ainfer", breaks_late)
        old_calls = [asyncio.create_task(stage.serve(4)) for _ in range(5)]
        await asked.wait()
        for missing in ("its package is being replaced", ""):
            Queued.missing = missing
            await stage.controller.probe()
        monkeypatch.setattr(Queued, "ainfer", working)
        await stage.controller.refresh()
        may_break.set()
        assert {served.backend for served in await asyncio.gather(*old_calls)} == {"first"}
        assert stage.of("queued").last_error == ""
        assert stage.of("queued").breaker is BreakerState.CLOSED

    async def test_what_is_loaded_while_the_controller_closes_is_closed_too(self, tmp_path, monkeypatch):
        stage = Stage(tmp_path)
        await stage.controller.warm_up([1])
        monkeypatch.setattr(Queued, "load", lambda self, bundle: stage.controller.close())
        await stage.controller.refresh()
        assert Queued.log[-1] == "close"


class TestStream:
    async def test_pieces_come_as_they_are_found_and_the_whole_last(self, stage):
        *pieces, served = await stage.stream(4)
        assert pieces == [8, 9, 10]
        assert (served.answer, served.backend, served.fallback_from) == (27, "queued", ())
        assert (stage.of("queued").calls, stage.of("queued").latency.count) == (1, 1)

    async def test_an_engine_that_cannot_stream_gives_its_answer_at_once(self, stage):
        stage.controller.disable("queued")
        piece, served = await stage.stream(4)
        assert (piece, served.answer, served.backend) == (8, 8, "first")

    async def test_where_it_breaks_midway_all_that_the_next_one_finds_follows(self, stage):
        Queued.pieces = 2
        *pieces, served = await stage.stream(4)
        assert pieces == [8, 9, 8]
        assert (served.answer, served.backend) == (8, "first")
        assert served.fallback_from == (SkippedBackend("queued", "broke: RuntimeError", failed=True),)
        assert stage.of("queued").failures == 1

    async def test_a_stream_that_is_late_ends_the_walk_after_what_it_found(self, stage):
        Queued.pieces, Queued.error = 1, DeadlineExceeded("too late")
        found = []
        with pytest.raises(NoBackendAnswered, match="queued: too late"):
            await stage.stream(4, found)
        assert found == [8]
        assert stage.of("queued").failures == 0

    async def test_a_stream_may_be_any_async_iterator(self, stage, monkeypatch):
        class Pieces:
            def __init__(self, *pieces):
                self.left = iter(pieces)

            def __aiter__(self):
                return self

            async def __anext__(self):
                if (piece := next(self.left, None)) is None:
                    raise StopAsyncIteration
                return piece

        monkeypatch.setattr(Queued, "astream", lambda _, request: Pieces(request, request + 1))
        *pieces, served = await stage.stream(4)
        assert (pieces, served.answer, served.backend) == ([4, 5], 9, "queued")

    async def test_a_consumer_that_leaves_ends_the_engines_stream(self, stage, monkeypatch):
        ended = []

        async def stream(self, request):
            try:
                yield 1.0
                await asyncio.Event().wait()
            finally:
                ended.append(request)

        monkeypatch.setattr(Queued, "astream", stream)
        async with aclosing(stage.controller.stream(4, sum)) as found:
            assert await anext(found) == 1
        assert ended == [4]


async def test_queues_are_those_of_the_loaded_engines(tmp_path):
    stage = Stage(tmp_path)
    assert stage.controller.queues() == {}
    assert (await stage.start()).controller.queues() == {"queued": {"waiting": 3.0}}


@pytest.mark.parametrize(
    ("given", "shown", "error"),
    [
        ({"waiting": None}, {}, "TypeError: float() argument must be"),
        ({"waiting": "many"}, {}, "ValueError: could not convert string to float: 'many'"),
        ([3.0], {}, "TypeError: "),
        ({"waiting": float("nan"), "requests": np.float32(2)}, {"requests": 2.0}, ""),
    ],
)
async def test_figures_that_are_no_numbers_stop_no_others(stage, monkeypatch, given, shown, error):
    monkeypatch.setattr(Queued, "queue", lambda self: given)
    monkeypatch.setattr(First, "queue", lambda self: {"waiting": "2"}, raising=False)
    assert stage.controller.queues() == ({"queued": shown} if shown else {}) | {"first": {"waiting": 2.0}}
    assert error in stage.of("queued").last_error


class TestBatches:
    async def test_one_follows_the_other_in_the_engine_without_the_event_loop(self, stage, monkeypatch):
        begun, may_end, working = [threading.Event(), threading.Event()], threading.Event(), First.batch_infer

        def held_up(self, requests):
            begun[requests[0]].set()
            assert may_end.wait(300)
            return working(self, requests)

        monkeypatch.setattr(First, "batch_infer", held_up)
        stage.controller.disable("queued")
        batches = [asyncio.create_task(stage.serve(number)) for number in range(2)]
        await until(begun[0].is_set)
        await settled()
        may_end.set()
        assert begun[1].wait(300), "the loop stands still meanwhile"
        assert [one.answer for one in await asyncio.gather(*batches)] == [0.0, 2.0]

    async def test_what_breaks_beside_another_is_unloaded_once_both_are_through(self, stage, monkeypatch):
        begun, may_end = threading.Event(), threading.Event()

        def broken(self, requests):
            self.log.append("breaks")
            begun.set()
            assert may_end.wait(300)
            raise RuntimeError("broken")

        monkeypatch.setattr(First, "batch_infer", broken)
        stage.controller.disable("queued")
        batches = [asyncio.create_task(stage.serve(number)) for number in range(2)]
        await until(begun.is_set)
        await settled()
        erased = asyncio.create_task(stage.controller.forget([("shop", "ada")]))
        await settled()
        assert not erased.done()
        may_end.set()
        assert [one.backend for one in await asyncio.gather(*batches)] == ["second", "second"]
        assert await erased == 0
        assert (First.log.count("close"), First.log[-1]) == (1, "close")
        assert stage.of("first").breaker is BreakerState.OPEN
