"""The framework controller: who is asked, who is not and why, and how what broke comes back."""

import asyncio
import errno
import logging
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from cluster.engines import managed_backend, probing
from cluster.engines.controller import FrameworkController, Served
from cluster.engines.fastest import TIMES_HOLD_S
from cluster.engines.roster import Choice, Roster
from cluster.engines.skipped import NoBackendAnswered
from cluster.engines.stage_rules import StageRules
from cluster.errors import BackendFailed, BundleError, ConfigError, UnknownChoice
from cluster.few_lines import MOST_PER_S, TOLD_EVERY_S
from cluster.fleet.switchboard import Switchboard
from cluster.metrics import BACKEND_REQUESTS
from cluster.traffic.breaker import BreakerSettings, BreakerState
from cluster.values import Availability, SkippedBackend
from deployments.telemetry.metrics import StageRecorder
from tests.fakes import scripted_backends
from tests.fakes.scripted_backends import CLOCK, RULES, TABLE, First, Keeping, Second, Third
from tests.noted import Noted
from tests.waiting import settled, until

ORDER = ("first", "second", "third")
CHOICE = Choice(TABLE, ORDER)
BREAKER = BreakerSettings(failures_to_open=3, pause_s=1, growth=2, longest_pause_s=8)


@pytest.fixture(autouse=True)
def _pristine() -> Iterator[None]:
    scripted_backends.reset()
    yield
    scripted_backends.reset()


@pytest.fixture
def controller(tmp_path: Path) -> FrameworkController[int, float]:
    return make(tmp_path)


def make(tmp_path: Path, rules: StageRules[int, float] = RULES, retries: int = 2, **choice: object) -> FrameworkController[int, float]:
    bundle, given = scripted_backends.opaque_bundle(tmp_path / "model"), {"breaker": BREAKER, "clock": CLOCK, "retries": retries}
    return FrameworkController("doubler", replace(CHOICE, **choice), bundle, rules, **given)


def by(outcomes: list[Served[float] | NoBackendAnswered]) -> list[str]:
    return [outcome.backend if isinstance(outcome, Served) else "error" for outcome in outcomes]


def from_a_thread(controller: FrameworkController[int, float]) -> Callable[[list[int]], Future[list[Served[float] | NoBackendAnswered]]]:
    """Call it on this event loop, from the thread that loads an engine."""
    loop = asyncio.get_running_loop()
    return lambda requests: asyncio.run_coroutine_threadsafe(controller.call(requests), loop)


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def snapshot_of(controller: FrameworkController[int, float], name: str):
    return next(backend for backend in controller.snapshot().backends if backend.name == name)


def may_be_asked(controller: FrameworkController[int, float], name: str) -> bool:
    """An engine that was loaded may not be asked yet: it answers the samples first."""
    backend = snapshot_of(controller, name)
    return backend.loaded and not backend.reason


class TestChoice:
    async def test_the_first_in_the_order_answers(self, controller):
        served = await controller.call_one(4)
        assert (served.answer, served.backend, served.fallback_from) == (8.0, "first", ())
        assert controller.explain() == "doubler=first"

    async def test_answers_come_in_the_order_asked(self, controller):
        assert [served.answer for served in await controller.call([3, 1, 2])] == [6, 2, 4]

    async def test_a_batch_costs_one_walk_over_the_order_and_one_hop_to_the_engine_thread(self, controller, monkeypatch):
        await controller.warm_up([1])
        await controller.refresh()
        First.log.clear()
        hops, walks, run, ranked = [], [], controller.thread.run, Roster.ranked
        monkeypatch.setattr(controller.thread, "run", lambda work: (hops.append(work), run(work))[1])
        monkeypatch.setattr(Roster, "ranked", lambda roster: (walks.append(1), ranked(roster))[1])
        assert by(await controller.call([*range(16)])) == ["first"] * 16
        assert (First.log, len(hops), len(walks)) == (["batch of 16"], 1, 1)

    async def test_what_a_brief_engine_soon_computes_is_computed_on_the_event_loop_and_all_else_in_the_engine_thread(
        self, controller, monkeypatch
    ):
        monkeypatch.setattr("cluster.engines.engine.thread_time", CLOCK)
        await controller.warm_up([1])
        await controller.refresh()
        threads, infer = [], First.batch_infer
        monkeypatch.setattr(First, "batch_infer", lambda self, batch: (threads.append(threading.current_thread()), infer(self, batch))[1])

        async def here(*requests, seconds=0.0):
            monkeypatch.setattr(First, "seconds", seconds)
            assert by(await controller.call([*requests])) == ["first"] * len(requests)
            return threads.pop() is threading.current_thread()

        assert [await here(1) for _ in range(2)] == [False, False], "it does not say that it is brief"
        monkeypatch.setattr(First, "brief", True, raising=False)
        assert [await here(1) for _ in range(2)] == [False, True], "how long a call takes is not known before the first"
        assert [await here(1, 2) for _ in range(2)] == [True, True]
        assert await here(1, seconds=0.004)
        assert [await here(1) for _ in range(4)] == [False, False, False, True], "one was not brief, of late"
        assert await here(1, 2, seconds=0.004)
        assert [await here(1, 2), await here(1)] == [False, True]

        async def beside_work(leaves):
            entered, working = threading.Event(), threading.Event()
            caller = asyncio.create_task(controller.thread.run(lambda: (entered.set(), working.wait())))
            await asyncio.to_thread(entered.wait)  # a caller that leaves earlier takes its work along
            if leaves:
                caller.cancel()
            lone = asyncio.create_task(here(1))
            await until(lambda: lone.done() or controller.thread.pending == 2)
            working.set()
            await asyncio.wait([caller])
            return await lone

        assert not await beside_work(leaves=False), "another engine computes in the thread"
        assert await here(1)
        assert not await beside_work(leaves=True), "the thread still computes what its caller waits for no longer"

    async def test_a_call_of_many_rows_is_not_computed_on_the_event_loop_after_brief_ones(self, controller, monkeypatch):
        """Here a request is as many rows as its number says."""
        threads = []

        async def here(*requests):
            await controller.call(requests)
            return threads.pop() is threading.current_thread()

        def batch_infer(self, batch):
            threads.append(threading.current_thread())
            CLOCK.advance(10e-6 * sum(batch))
            return [2.0 * rows for rows in batch]

        monkeypatch.setattr("cluster.engines.engine.thread_time", CLOCK)
        monkeypatch.setattr(First, "batch_infer", batch_infer)
        monkeypatch.setattr(First, "brief", True, raising=False)
        monkeypatch.setattr(First, "rows", lambda self, batch: sum(batch), raising=False)
        await controller.warm_up([1])
        await controller.refresh()
        assert [await here(5) for _ in range(3)] == [False, True, True]
        assert [await here(rows) for rows in (500, 500, 5)] == [False, False, True]
        returning, new = [1] * 16, [200] * 16
        assert [await here(*returning) for _ in range(3)] == [True] * 3
        assert [await here(*returning[1:], new[0]) for _ in range(3)] == [True] * 3
        assert [await here(*new), await here(*new), await here(*returning)] == [False, False, True]

    async def test_a_call_beside_other_work_is_not_asked_for_its_rows_and_says_nothing_of_those_that_are(self, controller, monkeypatch):
        asked = []
        monkeypatch.setattr("cluster.engines.engine.thread_time", CLOCK)
        monkeypatch.setattr(First, "brief", True, raising=False)
        monkeypatch.setattr(First, "rows", lambda self, batch: (asked.append(batch), sum(batch))[1], raising=False)
        await controller.warm_up([1])
        await controller.refresh()
        await controller.call_one(5)
        working = threading.Event()
        beside = asyncio.create_task(controller.thread.run(working.wait))
        await until(lambda: controller.thread.pending == 1)
        monkeypatch.setattr(First, "seconds", 1.0)
        call = asyncio.create_task(controller.call_one(6))
        await until(lambda: controller.thread.pending == 2)
        working.set()
        await asyncio.gather(beside, call)
        await until(lambda: not controller.thread.pending)
        monkeypatch.setattr(First, "seconds", 0.0)
        threads, infer = [], First.batch_infer
        monkeypatch.setattr(First, "batch_infer", lambda self, batch: (threads.append(threading.current_thread()), infer(self, batch))[1])
        await controller.call_one(7)
        assert (threads, [[*batch] for batch in asked]) == ([threading.current_thread()], [[5], [7]])

    async def test_a_backend_that_cannot_say_how_many_rows_a_request_has_answers_it(self, controller, monkeypatch):
        monkeypatch.setattr(First, "brief", True, raising=False)
        monkeypatch.setattr(First, "rows", lambda self, batch: 1 / 0, raising=False)
        await controller.warm_up([1])
        assert [(await controller.call_one(number)).backend for number in range(3)] == ["first"] * 3

    async def test_how_many_rows_a_request_has_is_said_by_the_backend_that_would_be_asked_first(self, controller, monkeypatch):
        said = [controller.rows(5, otherwise=200)]
        await controller.warm_up([1])
        said.append(controller.rows(5, otherwise=200))
        monkeypatch.setattr(First, "rows", lambda self, batch: sum(batch), raising=False)
        monkeypatch.setattr(Second, "rows", lambda self, batch: 1 / 0, raising=False)
        said.append(controller.rows(5, otherwise=200))
        controller.disable("first")
        said.append(controller.rows(5, otherwise=200))
        assert said == [200, 200, 5, 200]

    async def test_nothing_is_loaded_before_it_is_needed(self, controller):
        assert First.log == []
        await controller.call_one(1)
        assert (First.log, Second.log) == (["load", "batch of 1"], [])

    async def test_an_unavailable_backend_is_passed_over_with_its_reason(self, controller):
        First.missing = "no engine for sm_90 in models/ml-1m/3; run: genrec compile"
        served = await controller.call_one(4)
        assert (served.backend, served.answer) == ("second", 8)
        assert served.fallback_from == (SkippedBackend("first", First.missing),)
        assert controller.explain() == "doubler=second (first: no engine for sm_90 in models/ml-1m/3; run: genrec compile)"

    async def test_a_package_that_is_not_installed_is_a_reason_not_an_error(self, tmp_path):
        controller = make(tmp_path, table={**TABLE, "first": "no_such_engine:Encoder"})
        (skipped,) = (await controller.call_one(1)).fallback_from
        assert skipped.reason == "no_such_engine:Encoder cannot be imported: No module named 'no_such_engine'"
        assert not skipped.failed

    async def test_a_probe_that_breaks_is_a_reason(self, controller, monkeypatch):
        monkeypatch.setattr(First, "get_availability", lambda self, bundle: 1 / 0)
        assert (await controller.call_one(1)).fallback_from[0].reason == "its probe broke: ZeroDivisionError"
        assert snapshot_of(controller, "first").reason == "its probe broke: ZeroDivisionError: division by zero"

    @pytest.mark.parametrize("said", [True, False, None, "no GPU"])
    async def test_a_probe_that_answers_with_something_else_is_a_reason(self, controller, monkeypatch, said):
        monkeypatch.setattr(First, "get_availability", lambda self, bundle: said)
        served = await controller.call_one(1)
        told = f"its probe broke: get_availability returned a {type(said).__name__}, not an Availability"
        assert (served.backend, served.fallback_from) == ("second", (SkippedBackend("first", told),))

    async def test_a_probe_that_gives_an_error_as_its_reason_is_told_by_its_text(self, controller, monkeypatch):
        monkeypatch.setattr(First, "get_availability", lambda self, bundle: Availability.no(OSError("no device")))
        served = await controller.call_one(1)
        assert (served.backend, served.fallback_from) == ("second", (SkippedBackend("first", "no device"),))
        assert msgspec.json.decode(msgspec.json.encode(served.fallback_from))[0]["reason"] == "no device"

    async def test_a_probe_that_says_no_as_text_does_not_count_as_a_yes(self, controller, monkeypatch):
        monkeypatch.setattr(First, "get_availability", lambda self, bundle: Availability("no"))
        served = await controller.call_one(1)
        told = "its probe broke: get_availability returned an Availability with ok='no', not True or False"
        assert (served.backend, served.fallback_from) == ("second", (SkippedBackend("first", told),))

    async def test_a_disabled_backend_is_passed_over_until_it_is_enabled(self, controller):
        controller.disable("first")
        served = await controller.call_one(1)
        assert served.fallback_from == (SkippedBackend("first", "switched off by the operator"),)
        controller.enable("first")
        assert (await controller.call_one(1)).backend == "first"

    async def test_all_backends_of_the_table_are_probed_also_those_left_out_of_the_order(self, tmp_path):
        Third.missing = "not here"
        found = await make(tmp_path, order=["second"]).probe()
        assert {name: availability.reason for name, availability in found.items()} == {"first": "", "second": "", "third": "not here"}

    async def test_what_the_order_leaves_out_is_not_probed_until_it_is_asked_first(self, tmp_path):
        Third.missing, controller = "no GPU", make(tmp_path, order=["second"])
        left_out = "the order leaves it out, so it is not probed"
        await controller.warm_up([1])
        assert [(one.available, one.reason) for one in controller.snapshot().backends] == [(True, ""), (False, left_out), (False, left_out)]
        controller.prefer("third")
        await controller.refresh()
        assert snapshot_of(controller, "third").reason == "no GPU"
        controller.prefer("first")
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "first"
        assert snapshot_of(controller, "third").reason == left_out

    async def test_an_empty_batch_has_no_answers(self, controller):
        assert await controller.call([]) == []

    @pytest.mark.parametrize("order", [[], ["first", "first"]])
    def test_an_order_that_makes_no_sense_is_refused(self, tmp_path, order):
        with pytest.raises(ConfigError, match="name each backend that may serve once"):
            make(tmp_path, order=order)

    def test_unknown_names_are_refused_with_the_choices(self, tmp_path, controller):
        for wrong in (lambda: make(tmp_path, order=["trt"]), lambda: controller.enable("trt"), lambda: controller.disable("trt")):
            with pytest.raises(UnknownChoice, match="unknown doubler 'trt'; choose from first, second, third"):
                wrong()
        with pytest.raises(UnknownChoice, match="unknown selection 'quickest'; choose from fastest, ordered"):
            make(tmp_path, selection="quickest")


class TestFallback:
    async def test_a_broken_call_goes_to_the_next_backend_with_the_reason(self, controller):
        First.error = RuntimeError("CUDA error: out of memory")
        served = await controller.call_one(4)
        assert (served.backend, served.answer) == ("second", 8)
        assert served.fallback_from == (SkippedBackend("first", "broke: RuntimeError", failed=True),)

    async def test_what_an_engine_says_of_one_request_is_told_to_operators_and_to_no_other_caller(self, controller):
        """The text of a foreign error may quote the request that met it."""
        First.error = RuntimeError("cannot compute the history of ada")
        for _ in range(5):  # beyond what opens the breaker
            served = await controller.call_one(4)
            assert served.fallback_from[0].reason.startswith("broke: RuntimeError")
            assert "ada" not in served.fallback_from[0].reason
        assert "ada" in controller.snapshot().backends[0].last_error

    async def test_a_failed_load_goes_to_the_next_backend_and_opens_the_breaker_at_once(self, controller):
        First.load_error = BackendFailed("the engine file is truncated; run: genrec compile")
        served = await controller.call_one(4)
        assert served.fallback_from == (
            SkippedBackend("first", "could not be loaded: the engine file is truncated; run: genrec compile", failed=True),
        )
        assert snapshot_of(controller, "first").breaker is BreakerState.OPEN

    @pytest.mark.parametrize("found", ["by the load", "by the probe", "by a probe that breaks"])
    async def test_where_a_damaged_file_is_stands_in_what_operators_read_alone(self, controller, monkeypatch, caplog, found):
        caplog.set_level(logging.INFO)
        damaged = BundleError("/srv/models/shop/3/encoder.onnx does not match the checksum in the manifest")
        if found == "by the load":
            First.load_error = damaged
        elif found == "by the probe":
            monkeypatch.setattr(First, "get_availability", lambda self, bundle: Availability.because(damaged))
        else:
            monkeypatch.setattr(First, "get_availability", raising(damaged))
        told = [(await controller.call_one(4)).fallback_from[0].reason for _ in range(2)] + [controller.explain()]
        assert all("files of the model are missing, altered or incomplete" in one and "/srv" not in one for one in told)
        where = "/srv/models/shop/3/encoder.onnx does not match the checksum"
        assert where in snapshot_of(controller, "first").reason
        assert where in controller.explain(whole=True)
        await controller.probe()
        assert sum(where in record.getMessage() for record in caplog.records) == 1, "not with each probe"

    async def test_when_all_fail_the_error_holds_every_reason(self, controller):
        First.missing, Second.error = "not installed", ValueError("bad shape")
        controller.disable("third")
        with pytest.raises(NoBackendAnswered) as caught:
            await controller.call_one(1)
        reasons = "first: not installed; second: broke: ValueError; third: switched off by the operator"
        assert str(caught.value) == f"no doubler could answer ({reasons})"
        assert [one.failed for one in caught.value.skipped] == [False, True, False]
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.skipped) == (str(caught.value), caught.value.skipped)

    async def test_explains_that_nobody_would_be_asked(self, controller):
        First.missing = Second.missing = "not installed"
        controller.disable("third")
        await controller.probe()
        assert controller.explain() == "doubler=none (first: not installed; second: not installed; third: switched off by the operator)"

    @pytest.mark.parametrize(
        ("answers", "reason"),
        [
            ([1.0], "returned 1 answers for 2 requests"),
            ([1.0, 2.0, 3.0], "returned 3 answers for 2 requests"),
            ("nonsense", "returned a str for 2 requests"),
            ([float("nan"), float("nan")], "answered with NaN"),
        ],
    )
    async def test_nonsense_is_not_passed_on_as_an_answer(self, tmp_path, answers, reason):
        First.answers = answers
        outcomes = await make(tmp_path, retries=0).call([1, 2])
        assert by(outcomes) == ["second", "second"]
        assert {outcome.fallback_from[0].reason for outcome in outcomes} == {reason}

    async def test_only_the_request_answered_with_nan_goes_on(self, controller):
        First.answers = [2.0, float("nan")]
        assert by(await controller.call([1, 2])) == ["first", "second"]

    async def test_a_bug_of_our_own_is_not_taken_for_a_broken_backend(self, tmp_path):
        def buggy(request: int, answer: float) -> str:
            raise TypeError("our bug")

        with pytest.raises(TypeError, match="our bug"):
            await make(tmp_path, rules=StageRules(buggy, RULES.disagreement)).call_one(1)

    async def test_the_duration_includes_what_the_broken_backend_took(self, controller):
        First.error, First.seconds, Second.seconds = RuntimeError("late"), 0.5, 0.25
        await controller.warm_up([1])
        assert (await controller.call_one(1)).duration_ms >= 750

    async def test_what_broke_is_logged_once_with_its_traceback(self, controller, caplog):
        First.error = RuntimeError("gone")
        for _ in range(2):
            await controller.call_one(1)
        records = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert [record.getMessage() for record in records] == ["backend first broke: RuntimeError: gone"]
        assert records[0].exc_info[1] is First.error


class TestPoison:
    async def test_only_the_poisoned_request_of_a_batch_goes_on(self, controller):
        First.poison = frozenset({13})
        outcomes = await controller.call([*range(20)])
        assert by(outcomes) == ["first"] * 13 + ["second"] + ["first"] * 6
        assert [outcome.answer for outcome in outcomes] == [2 * request for request in range(20)]

    @pytest.mark.parametrize("number", [2, 7, 31, 32])
    async def test_the_healthy_ones_beside_two_that_are_poisoned_stay(self, controller, number):
        await controller.warm_up([1])
        batch = [*range(100, 100 + number)]
        for pair in combinations(batch, 2):
            First.poison = frozenset()
            await controller.call([1])
            First.poison = frozenset(pair)
            assert by(await controller.call(batch)) == ["second" if request in pair else "first" for request in batch]

    async def test_it_takes_few_calls_to_find(self, controller):
        await controller.warm_up([1])
        First.log.clear()
        First.poison = frozenset({13})
        await controller.call([*range(64)])
        assert len(First.log) <= 2 + 2 * 6

    async def test_a_request_poisonous_to_all_fails_alone(self, controller):
        First.poison = Second.poison = Third.poison = frozenset({13})
        outcomes = await controller.call([12, 13, 14])
        assert by(outcomes) == ["first", "error", "first"]
        assert [skipped.backend for skipped in outcomes[1].skipped] == ["first", "second", "third"]

    async def test_a_lone_poisoned_request_again_and_again_does_not_open_the_breaker(self, controller):
        await controller.warm_up([1])
        First.poison = frozenset({13})
        for _ in range(10):
            assert (await controller.call_one(13)).backend == "second"
        assert (await controller.call_one(1)).backend == "first"
        assert snapshot_of(controller, "first").breaker is BreakerState.CLOSED
        assert snapshot_of(controller, "first").failures == 10

    async def test_a_batch_of_nothing_but_poison_does_not_open_the_breaker_either(self, controller):
        await controller.warm_up([1])
        First.poison = frozenset({13, 14})
        for _ in range(10):
            assert by(await controller.call([13, 14, 13])) == ["second"] * 3
        assert snapshot_of(controller, "first").breaker is BreakerState.CLOSED

    async def test_a_batch_too_large_for_the_engine_is_answered_in_parts(self, controller):
        First.largest_batch = 5
        assert by(await controller.call([*range(16)])) == ["first"] * 16

    async def test_a_dead_backend_is_not_asked_for_every_request_of_a_batch(self, controller):
        await controller.warm_up([1])
        First.log.clear()
        First.error = RuntimeError("dead")
        assert by(await controller.call([*range(64)])) == ["second"] * 64
        assert First.log == ["batch of 64", "batch of 1"]

    async def test_the_search_in_a_dead_backend_never_used_before_is_bounded(self, controller):
        First.error = RuntimeError("dead")
        assert by(await controller.call([*range(64)])) == ["second"] * 64
        assert sum(entry.startswith("batch") for entry in First.log) <= 1 + 2 * 7
        assert snapshot_of(controller, "first").breaker is BreakerState.OPEN, "so many broken calls in a row"

    async def test_with_no_retries_a_broken_batch_goes_on_whole(self, tmp_path):
        controller = make(tmp_path, retries=0)
        First.poison = frozenset({13})
        assert by(await controller.call([12, 13])) == ["second", "second"]

    async def test_a_hiccup_is_retried_on_the_same_backend(self, controller, monkeypatch):
        await controller.warm_up([1])
        working = First.batch_infer
        hiccups = iter([True, False, False])
        monkeypatch.setattr(First, "batch_infer", lambda self, requests: 1 / 0 if next(hiccups) else working(self, requests))
        assert (await controller.call_one(4)).backend == "first"


class TestRecovery:
    async def break_first(self, controller):
        await controller.warm_up([1])
        First.error = RuntimeError("dead")
        for _ in range(BREAKER.failures_to_open):
            await controller.call_one(1)

    async def test_after_some_failures_in_a_row_it_is_no_longer_asked(self, controller):
        await self.break_first(controller)
        First.log.clear()
        CLOCK.advance(0.25)
        assert (await controller.call_one(1)).fallback_from == (
            SkippedBackend("first", "broke: RuntimeError; next trial in 0.8 s", failed=True),
        )
        assert First.log == []

    async def test_every_broken_call_counts_also_that_by_which_it_is_found_out(self, controller):
        await controller.warm_up([1])
        First.log.clear()
        First.error = RuntimeError("dead")
        for _ in range(BREAKER.failures_to_open):
            await controller.call([2, 3])
        assert First.log == ["batch of 2", "batch of 1", "batch of 2", "batch of 1", "close"]

    async def test_broken_calls_on_both_sides_of_an_answer_are_not_in_a_row(self, controller):
        await controller.warm_up([1])
        for _ in range(3):
            First.error = RuntimeError("hiccup")
            assert (await controller.call_one(1)).backend == "second"
            First.error = None
            assert (await controller.call_one(1)).backend == "first"
        assert snapshot_of(controller, "first").breaker is BreakerState.CLOSED

    async def test_comes_back_by_itself_after_repair_newly_loaded(self, controller):
        await self.break_first(controller)
        assert First.log[-1] == "close"
        First.error = None
        CLOCK.advance(1)
        First.log.clear()
        assert (await controller.call_one(1)).backend == "first"
        assert First.log == ["load", "batch of 1"]
        assert snapshot_of(controller, "first").breaker is BreakerState.CLOSED

    async def test_a_failed_trial_costs_one_call_and_doubles_the_pause(self, controller):
        await self.break_first(controller)
        CLOCK.advance(1)
        First.log.clear()
        assert by(await controller.call([*range(8)])) == ["second"] * 8
        assert First.log == ["load", "batch of 8", "close"]
        assert "next trial in 2.0 s" in snapshot_of(controller, "first").reason

    async def test_a_refresh_tries_it_with_the_samples_before_a_user_does(self, controller):
        await self.break_first(controller)
        First.error = None
        First.log.clear()
        await controller.refresh()
        assert First.log == [], "not before the pause is over"
        CLOCK.advance(1)
        calls = snapshot_of(controller, "first").calls
        await controller.refresh()
        assert First.log == ["load", "batch of 1"]
        assert (snapshot_of(controller, "first").breaker, snapshot_of(controller, "first").calls) == (BreakerState.CLOSED, calls)
        await controller.refresh()
        assert First.log == ["load", "batch of 1"], "one that is ready is left alone"

    async def test_a_refresh_keeps_the_status_true_without_traffic(self, controller):
        await controller.warm_up([1])
        First.missing = "no engine"
        CLOCK.advance(5)
        await controller.refresh()
        assert controller.explain() == "doubler=second (first: no engine)"

    async def test_calls_go_to_the_next_one_while_a_refresh_loads_it(self, controller, monkeypatch):
        await self.break_first(controller)
        First.error = None
        CLOCK.advance(1)
        loading, may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(First, "load", lambda self, bundle: (loading.set(), may_end.wait(300)))
        refresh = asyncio.create_task(controller.refresh())
        await until(loading.is_set)
        served = await controller.call_one(1)
        assert served.backend == "second"
        assert served.fallback_from == (SkippedBackend("first", "broke: RuntimeError; it is being loaded again", failed=True),)
        await controller.probe()
        may_end.set()
        await refresh
        assert (await controller.call_one(1)).backend == "first"

    async def test_refreshes_load_every_engine_of_the_order_and_a_call_then_never_does(self, controller, monkeypatch):
        await controller.warm_up([1], ready=1)
        working, call = Third.load, from_a_thread(controller)
        monkeypatch.setattr(Third, "load", lambda self, bundle: by(call([1]).result(300)) == ["first"] and working(self, bundle))
        await controller.refresh()
        assert [snapshot_of(controller, name).loaded for name in ORDER] == [True, True, True]
        First.poison = Second.poison = frozenset({13})
        assert (await controller.call_one(13)).backend == "third", "what two engines break on, the third answers"

    async def test_while_nothing_is_loaded_the_reason_says_so(self, controller, monkeypatch):
        await controller.warm_up([1], ready=1)
        controller.disable("first")
        outcomes, call = [], from_a_thread(controller)
        monkeypatch.setattr(Second, "load", lambda self, bundle: outcomes.extend(call([1]).result(300)))
        await controller.refresh()
        assert isinstance(outcomes[0], NoBackendAnswered)
        assert outcomes[0].skipped[1:] == (SkippedBackend("second", "is being loaded"), SkippedBackend("third", "is being loaded"))

    async def test_no_user_is_served_by_a_reloaded_backend_before_the_samples_were(self, controller, monkeypatch):
        await self.break_first(controller)
        First.error = None
        CLOCK.advance(1)
        First.log.clear()
        waiting, call = [], from_a_thread(controller)
        monkeypatch.setattr(First, "load", lambda self, bundle: waiting.append(call([7, 7])))
        await controller.refresh()
        await asyncio.wrap_future(waiting[0])
        assert First.log[0] == "batch of 1", "the sample; the user's two come later, to whomever"

    async def test_a_missing_artifact_that_is_restored_is_found_by_the_next_probe(self, controller):
        await controller.call_one(1)
        First.missing = "no engine"
        assert (await controller.call_one(1)).backend == "first", "probed only every probe_interval_s"
        CLOCK.advance(5)
        assert (await controller.call_one(1)).backend == "second"
        assert First.log[-1] == "close"
        First.missing = ""
        CLOCK.advance(5)
        assert (await controller.call_one(1)).backend == "first"

    async def test_a_loaded_one_stays_while_its_files_cannot_be_read_and_one_that_is_not_loaded_is_not(self, controller, monkeypatch):
        await controller.warm_up([1], ready=1)
        away = OSError(errno.ESTALE, "Stale file handle")
        for backend in (First, Second):
            monkeypatch.setattr(backend, "get_availability", lambda self, bundle: Availability.because(away))
        monkeypatch.setattr(Third, "get_availability", raising(away))
        await controller.probe()
        assert (await controller.call_one(1)).backend == "first"
        first, second, third = (snapshot_of(controller, name) for name in ORDER)
        assert (first.available, first.loaded) == (True, True)
        assert first.last_error == "stays loaded, though it cannot be checked: [Errno 116] Stale file handle"
        assert (second.available, second.reason) == (False, "[Errno 116] Stale file handle")
        assert third.reason == "its probe broke: OSError: [Errno 116] Stale file handle"

    async def test_a_probe_that_hangs_holds_up_no_call(self, controller, monkeypatch):
        """Not even while it is waited for, in the first refresh after the start."""
        await controller.warm_up([1])
        hangs, may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(probing, "PROBE_WITHIN_S", 300)
        monkeypatch.setattr(First, "get_availability", lambda self, bundle: (hangs.set(), Availability(ok=may_end.wait(300)))[1])
        CLOCK.advance(5)
        refresh = asyncio.create_task(controller.refresh())
        await until(hangs.is_set)
        async with asyncio.timeout(60):
            assert (await controller.call_one(1)).backend == "first"
            await controller.thread.run(lambda: None)  # what a health check waits for
        assert not refresh.done()
        may_end.set()
        await refresh

    async def test_a_probe_that_hangs_unloads_nothing(self, controller, monkeypatch):
        """As where a file server hangs under all of them."""
        await controller.warm_up([1])
        may_end, probes = threading.Event(), []
        monkeypatch.setattr(probing, "PROBE_WITHIN_S", 0.01)

        def hang(self, bundle):
            probes.append(type(self))
            assert may_end.wait(300)
            return Availability.no("the disk is gone")

        for backend in (First, Second, Third):
            monkeypatch.setattr(backend, "get_availability", hang)
        async with asyncio.timeout(60):
            for _ in range(2):
                CLOCK.advance(5)
                await controller.refresh()
        await until(lambda: len(probes) >= 3, "the probes' threads have begun")
        assert sorted(cls.__name__ for cls in probes) == ["First", "Second", "Third"], "no second one beside one that hangs"
        assert (await controller.call_one(1)).backend == "first"
        first = snapshot_of(controller, "first")
        assert (first.available, first.last_error) == (True, "stays loaded, though it cannot be checked: its probe did not end in 0.01 s")
        may_end.set()

        async def told():
            CLOCK.advance(5)
            await controller.refresh()
            return snapshot_of(controller, "first").reason == "the disk is gone"

        await until(told)
        assert First.log[-1] == "close"

    async def test_an_engine_that_a_call_loads_stays_where_a_probe_meanwhile_says_nothing_certain(self, controller, monkeypatch):
        await controller.probe()
        loading, may_end, probed = threading.Event(), threading.Event(), threading.Event()
        monkeypatch.setattr(First, "load", lambda self, bundle: (loading.set(), may_end.wait(300)))
        away = Availability.because(OSError(errno.ESTALE, "Stale file handle"))
        monkeypatch.setattr(First, "get_availability", lambda self, bundle: (probed.set(), away)[1])
        call = asyncio.create_task(controller.call_one(1))
        await until(loading.is_set)
        probe = asyncio.create_task(controller.probe())
        await until(probed.is_set)
        await until(lambda: controller._roster.named("first")._probing._asking is None)  # noqa: SLF001 - it waits for the backend's turn
        may_end.set()
        served, _ = await asyncio.gather(call, probe)
        first = snapshot_of(controller, "first")
        assert (served.backend, first.loaded, first.available, First.log) == ("first", True, True, ["batch of 1"])

    async def test_a_probe_that_hangs_at_the_start_keeps_no_other_backend_from_serving(self, controller, monkeypatch):
        may_end = threading.Event()
        monkeypatch.setattr(probing, "PROBE_WITHIN_S", 2.0)  # for those that do not hang, too
        monkeypatch.setattr(First, "get_availability", lambda self, bundle: Availability(ok=may_end.wait(300)))
        async with asyncio.timeout(60):
            assert await controller.warm_up([1]) == "doubler=second (first: its probe did not end in 2 s)"
        assert (await controller.call_one(1)).backend == "second"
        may_end.set()

        async def back():
            CLOCK.advance(5)
            await controller.refresh()
            return (await controller.call_one(1)).backend == "first"

        await until(back)

    @pytest.mark.parametrize("first_says", ["yes", "no", "nothing"])
    async def test_where_all_probes_are_slow_the_warm_up_waits_for_the_first_that_says_yes(self, controller, monkeypatch, first_says):
        may_end = {backend: threading.Event() for backend in (First, Second)}
        said = {First: Availability(ok=first_says == "yes", reason="no engine"), Second: Availability.yes()}
        monkeypatch.setattr(probing, "PROBE_WITHIN_S", 0.01)
        for backend in (First, Second):
            monkeypatch.setattr(backend, "get_availability", lambda self, bundle: may_end[type(self)].wait(300) and said[type(self)])
        monkeypatch.setattr(Third, "get_availability", lambda self, bundle: may_end[First].wait(300) and Availability.no("is broken"))
        warm_up = asyncio.create_task(controller.warm_up([1]))
        try:
            await until(lambda: snapshot_of(controller, "third").probing)
            await settled()
            assert not warm_up.done()
            assert not controller.snapshot().settled
            if first_says != "nothing":
                may_end[First].set()
            if first_says != "yes":
                may_end[Second].set()
            async with asyncio.timeout(60):
                await warm_up
            assert controller.snapshot().settled
            assert (await controller.call_one(1)).backend == ("first" if first_says == "yes" else "second")
        finally:
            for event in may_end.values():
                event.set()

    async def test_where_all_probes_are_slow_and_say_no_the_warm_up_ends(self, controller, monkeypatch):
        may_end = threading.Event()
        monkeypatch.setattr(probing, "PROBE_WITHIN_S", 0.01)
        for backend in (First, Second, Third):
            monkeypatch.setattr(backend, "get_availability", lambda self, bundle: may_end.wait(300) and Availability.no("no engine"))
        warm_up = asyncio.create_task(controller.warm_up([1]))
        await until(lambda: snapshot_of(controller, "third").probing)
        may_end.set()
        async with asyncio.timeout(60):
            assert await warm_up == "doubler=none (first: no engine; second: no engine; third: no engine)"
        assert controller.snapshot().settled

    async def test_a_probe_that_ends_after_its_backend_is_gone_does_not_bring_it_back(self, controller, monkeypatch):
        await controller.warm_up([1])
        hangs, may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(First, "get_availability", lambda self, bundle: (hangs.set(), Availability(ok=may_end.wait(300)))[1])
        CLOCK.advance(5)
        refresh = asyncio.create_task(controller.refresh())
        await until(hangs.is_set)
        gone = controller._roster.named("first")  # noqa: SLF001 - as a call that is under way holds it
        change = asyncio.create_task(controller.reconfigure(replace(CHOICE, table={"second": TABLE["second"]}, order=["second"])))
        await until(lambda: not gone.loaded)
        may_end.set()
        await asyncio.gather(refresh, change)
        assert await gone.ask([1]) == [SkippedBackend("first", "is no longer configured")]

    async def test_backends_that_take_long_to_fail_keep_no_healthy_one_from_being_loaded(self, controller, monkeypatch):
        await controller.warm_up([1], ready=1)
        controller.disable("first")

        def fail(self, bundle):
            self.log.append("load")
            CLOCK.advance(100)  # the other's breaker lets it be tried again
            raise RuntimeError("no memory")

        for backend in (First, Second):
            monkeypatch.setattr(backend, "load", fail)
        First.missing = "no engine"
        await controller.probe()
        First.missing = ""
        await controller.probe()
        controller.enable("first")
        async with asyncio.timeout(60):
            await controller.refresh()
        assert [cls.log.count("load") for cls in (First, Second, Third)] == [2, 1, 1]
        assert (await controller.call_one(1)).backend == "third"

    async def test_a_load_that_hangs_keeps_no_other_from_being_repaired(self, controller, monkeypatch):
        await controller.warm_up([1])
        monkeypatch.setattr("cluster.engines.controller.LOADS_ALONE_S", 0.01)
        hangs, may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(Third, "load", lambda self, bundle: (hangs.set(), may_end.wait(300)))
        await controller.refresh()
        await until(hangs.is_set)
        Second.missing = "no engine"
        await controller.probe()
        Second.missing = ""
        await controller.probe()
        assert [snapshot_of(controller, name).loaded for name in ORDER] == [True, False, False]

        async def repaired():
            await controller.refresh()
            return snapshot_of(controller, "second").loaded

        await until(repaired)
        assert snapshot_of(controller, "third").reason == "is being loaded"
        may_end.set()
        await until(lambda: may_be_asked(controller, "third"))
        assert await controller.refresh(), "that it was loaded is told by the next one"

    async def test_loads_that_hang_leave_threads_to_others(self, controller, monkeypatch):
        """The event loop's own pool has few: here, one."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        monkeypatch.setattr("cluster.engines.controller.LOADS_ALONE_S", 0.01)
        may_end = threading.Event()
        monkeypatch.setattr(First, "load", lambda self, bundle: may_end.wait(300))
        try:
            async with asyncio.timeout(60):
                await controller.warm_up([1])
            assert snapshot_of(controller, "first").reason == "is being loaded"
            assert (await controller.call_one(1)).backend in ORDER[1:]
        finally:
            may_end.set()
        await until(lambda: may_be_asked(controller, "first"))

    async def test_a_close_that_hangs_keeps_no_other_from_being_repaired(self, controller, monkeypatch):
        await controller.warm_up([1], ready=3)
        monkeypatch.setattr("cluster.engines.controller.LOADS_ALONE_S", 0.01)
        hangs, may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(Third, "close", lambda self: (hangs.set(), may_end.wait(300)))
        await controller.reconfigure(replace(CHOICE, order=["first", "second"]))

        async def are_asked(*names):
            await controller.refresh()
            return all(may_be_asked(controller, name) for name in names)

        try:
            async with asyncio.timeout(60):
                await controller.refresh()
                await until(hangs.is_set)
                Second.missing = "no engine"
                await controller.probe()
                Second.missing = ""
                await controller.probe()
                assert not snapshot_of(controller, "second").loaded
                await until(lambda: are_asked("first", "second"))
                CLOCK.advance(5)
                await controller.refresh()
                await controller.reconfigure(CHOICE)
                await controller.refresh()
            assert snapshot_of(controller, "third").reason == "its engine is being closed"
        finally:
            may_end.set()
        await until(lambda: are_asked(*ORDER))

    async def test_a_close_that_hangs_holds_up_no_change_of_the_configuration(self, controller, monkeypatch):
        await controller.warm_up([1], ready=3)
        await controller.refresh()
        monkeypatch.setattr("cluster.engines.controller.LOADS_ALONE_S", 0.01)
        hangs, may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(First, "close", lambda self: (hangs.set(), may_end.wait(300)))
        try:
            async with asyncio.timeout(60):
                await controller.reconfigure(replace(CHOICE, table={name: TABLE[name] for name in ORDER[1:]}, order=ORDER[1:]))
                await until(hangs.is_set)
                await controller.refresh()
                assert (await controller.call_one(1)).backend == "second"
        finally:
            may_end.set()

    @pytest.mark.parametrize("cause", ["its probe says no", "its breaker opens"])
    async def test_an_engine_that_hangs_as_it_is_closed_because_it_fails_holds_up_nothing_else(self, controller, monkeypatch, cause):
        await controller.warm_up([1], ready=3)
        await controller.refresh()
        for name in ("CLOSED_WITHIN_S", "CALL_WAITS_S"):
            monkeypatch.setattr(managed_backend, name, 0.01)
        hangs, may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(First, "close", lambda self: (hangs.set(), may_end.wait(300)))
        try:
            async with asyncio.timeout(60):
                if cause == "its probe says no":
                    First.missing = "no engine"
                    CLOCK.advance(5)
                    await controller.refresh()
                else:
                    First.error = RuntimeError("dead")
                    for _ in range(BREAKER.failures_to_open):
                        assert (await controller.call_one(1)).backend == "second"
                await until(hangs.is_set)
                First.missing, First.error = "", None
                CLOCK.advance(5)
                await controller.refresh()
                await controller.reconfigure(CHOICE)
                assert (await controller.call_one(1)).backend == "second"
                await controller.thread.run(lambda: None)  # what a health check waits for
            assert not snapshot_of(controller, "first").loaded, "not beside an engine of its own that is still there"
            assert First.log.count("load") == 1
        finally:
            may_end.set()

        async def is_back():
            CLOCK.advance(5)
            await controller.refresh()
            return may_be_asked(controller, "first")

        await until(is_back)

    async def test_a_backend_that_hangs_on_the_samples_and_leaves_the_order_keeps_no_other_from_being_loaded(self, controller, monkeypatch):
        monkeypatch.setattr("cluster.engines.controller.LOADS_ALONE_S", 0.01)
        may_end = threading.Event()
        monkeypatch.setattr(First, "batch_infer", lambda self, requests: may_end.wait(300) and [2.0 * request for request in requests])
        await controller.warm_up([1], ready=2)
        await until(lambda: snapshot_of(controller, "first").loaded)
        await controller.reconfigure(replace(CHOICE, order=["second", "third"]))

        async def are_loaded(*names):
            await controller.refresh()
            return [name for name in ORDER if snapshot_of(controller, name).loaded] == [*names]

        async with asyncio.timeout(60):  # a refresh would wait for as long as the first one hangs
            await until(lambda: are_loaded(*ORDER))
            may_end.set()
            await until(lambda: are_loaded("second", "third"))
        assert First.log == ["load", "close"]

    async def test_a_repaired_backend_does_not_wait_for_its_breaker(self, controller):
        First.load_error = RuntimeError("truncated")
        await controller.call_one(1)
        First.missing = "no engine"
        await controller.probe()
        First.missing, First.load_error = "", None
        await controller.probe()
        assert (await controller.call_one(1)).backend == "first"

    async def test_a_package_installed_meanwhile_is_found(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(tmp_path / "site")
        controller = make(tmp_path, table={**TABLE, "late": "late_engine:Engine"}, order=["late", "first"])
        assert (await controller.call_one(1)).backend == "first"
        (tmp_path / "site").mkdir()
        (tmp_path / "site/late_engine.py").write_text("from tests.fakes.scripted_backends import Second as Engine\n")
        CLOCK.advance(5)
        assert (await controller.call_one(1)).backend == "late"

    async def test_a_load_that_raises_stop_iteration_ends_and_is_told_like_any_other(self, controller):
        """Asyncio's futures take no StopIteration: what waits for one would wait for ever."""
        First.load_error = StopIteration("no weights")
        async with asyncio.timeout(60):
            await controller.warm_up([1])
            assert snapshot_of(controller, "first").last_error == "could not be loaded: RuntimeError: StopIteration: no weights"
            CLOCK.advance(1)
            await controller.refresh()
        assert First.log.count("load") == 2, "in the engine thread, and beside it"
        assert (await controller.call_one(1)).backend == "second"

    @pytest.mark.parametrize("kind", [asyncio.CancelledError, CancelledError])
    async def test_a_backend_whose_own_work_is_cancelled_as_it_is_loaded_closed_or_probed_is_passed_over(
        self, controller, monkeypatch, kind
    ):
        """As a task of an event loop of its own, or a future, may be; the refresh and the load, which wait for it, were not cancelled."""
        monkeypatch.setattr(First, "load", raising(kind("its own")))
        async with asyncio.timeout(60):
            await controller.warm_up([1])
            assert snapshot_of(controller, "first").last_error == "could not be loaded: RuntimeError: CancelledError: its own"
            CLOCK.advance(1)
            await controller.refresh()
            assert (await controller.call_one(1)).backend == "second"
            monkeypatch.undo()
            CLOCK.advance(8)
            await controller.refresh()
            assert (await controller.call_one(1)).backend == "first"
            for name in ("close", "get_availability"):
                monkeypatch.setattr(First, name, raising(kind("its own")))
            CLOCK.advance(5)
            await controller.refresh()
        assert snapshot_of(controller, "first").reason == "its probe broke: CancelledError: its own"
        assert (await controller.call_one(1)).backend == "second"

    async def test_a_backend_that_would_end_the_process_is_passed_over(self, controller, monkeypatch):
        """A SystemExit, as of a library that parses a command line, ends the event loop that it reaches."""
        monkeypatch.setattr(First, "get_availability", lambda self, bundle: sys.exit("usage: first"))
        assert (await controller.call_one(1)).fallback_from == (SkippedBackend("first", "its probe broke: SystemExit: usage: first"),)
        monkeypatch.undo()
        CLOCK.advance(5)
        First.load_error = SystemExit(2)
        await controller.probe()
        assert (await controller.call_one(1)).fallback_from[0].reason == "could not be loaded: RuntimeError"
        assert snapshot_of(controller, "first").last_error == "could not be loaded: RuntimeError: SystemExit: 2"
        First.load_error, First.error = None, SystemExit(3)
        CLOCK.advance(1)
        served = await controller.call_one(1)
        assert (served.backend, served.fallback_from[0].reason) == ("second", "broke: RuntimeError")
        assert snapshot_of(controller, "first").last_error == "broke: RuntimeError: SystemExit: 3"

    async def test_a_backend_that_breaks_while_closing_is_still_replaced(self, controller, monkeypatch, caplog):
        monkeypatch.setattr(First, "close", lambda self: 1 / 0)
        await self.break_first(controller)
        First.error = None
        CLOCK.advance(1)
        assert (await controller.call_one(1)).backend == "first"
        assert "broke while it was closed" in caplog.text


class TestWarmUp:
    async def test_loads_the_first_choice_and_its_stand_in(self, controller):
        Second.missing = "not here"
        assert await controller.warm_up([1, 2]) == "doubler=first"
        assert (First.log, Second.log, Third.log) == (["load", "batch of 2"], [], ["load", "batch of 2"])

    @pytest.mark.parametrize("others", [True, False])
    async def test_waits_for_a_load_that_hangs_only_where_no_other_backend_serves(self, controller, monkeypatch, others):
        monkeypatch.setattr("cluster.engines.controller.LOADS_ALONE_S", 0.01)
        may_end = threading.Event()
        monkeypatch.setattr(First, "load", lambda self, bundle: may_end.wait(300))
        Second.missing = Third.missing = "" if others else "not here"
        warming = asyncio.create_task(controller.warm_up([1]))
        await until(lambda: snapshot_of(controller, "first").reason == "is being loaded")
        if others:
            assert "first: is being loaded" in await warming
            assert (await controller.call_one(1)).backend in ORDER[1:]
        may_end.set()
        await warming
        await until(lambda: may_be_asked(controller, "first"))
        assert (await controller.call_one(1)).backend == "first"

    async def test_a_backend_that_breaks_on_the_samples_does_not_count_as_ready(self, controller):
        First.error = RuntimeError("dead")
        await controller.warm_up([1], ready=1)
        assert Second.log == ["load", "batch of 1"]

    async def test_is_not_counted_as_calls(self, controller):
        await controller.warm_up([1, 2])
        first = snapshot_of(controller, "first")
        assert (first.calls, first.latency.count, first.loaded) == (0, 0, True)

    async def test_needs_samples(self, controller):
        with pytest.raises(ConfigError, match="give at least one"):
            await controller.warm_up([])


def breaking_as_it_is_timed(backend, monkeypatch):
    """Have a backend raise at its third and fourth batch; returns the list of all batches."""
    asked, answer = [], backend.batch_infer

    def breaks_as_it_is_timed(self, requests):
        asked.append(requests)
        if len(asked) in (3, 4):  # after the samples as it was loaded, and once more for the measurement
            raise RuntimeError("hiccup")
        return answer(self, requests)

    monkeypatch.setattr(backend, "batch_infer", breaks_as_it_is_timed)
    return asked


USERS = {"keeping": "tests.fakes.scripted_backends:Keeping", "second": TABLE["second"]}
MEASURED = {"selection": "fastest", "table": USERS, "order": tuple(USERS)}


def measuring_users(tmp_path, **more):
    """`keeping` takes 300 ms, for a user who returns 50; `second` always 200."""
    Keeping.seconds, Keeping.again_s, Second.seconds = 0.3, 0.05, 0.2
    rules = replace(RULES, returning=lambda request, number: 1000 + number)
    return make(tmp_path, rules, **MEASURED, **more)


class TestFastest:
    async def test_the_fastest_that_agrees_with_the_last_is_asked_first(self, tmp_path):
        First.seconds, Second.seconds, Third.seconds = 0.3, 0.1, 0.2
        controller = make(tmp_path, selection="fastest")
        assert await controller.warm_up([1, 2]) == "doubler=second"
        assert [backend.name for backend in controller.snapshot().backends] == ["second", "third", "first"]
        assert (await controller.call_one(1)).backend == "second"

    async def test_one_that_disagrees_is_excluded_with_the_reason(self, tmp_path):
        First.seconds, Second.seconds, Third.seconds = 0.3, 0.1, 0.2
        Second.offset = 0.5
        controller = make(tmp_path, selection="fastest")
        assert await controller.warm_up([1, 2]) == "doubler=third (second: disagrees with third: 2.5 is not 2.0)"

    async def test_without_the_last_the_last_but_one_is_the_reference(self, tmp_path):
        First.seconds, Third.missing, First.offset = 0.1, "not here", 0.5
        controller = make(tmp_path, selection="fastest")
        await controller.warm_up([1])
        assert "disagrees with second" in snapshot_of(controller, "first").reason

    async def test_one_that_appears_later_is_measured_before_it_is_preferred(self, tmp_path):
        First.seconds, Second.seconds, Third.seconds = 0.1, 0.2, 0.3
        First.missing = "no engine"
        controller = make(tmp_path, selection="fastest")
        assert await controller.warm_up([1]) == "doubler=second (first: no engine)" or (await controller.call_one(1)).backend == "second"
        First.missing = ""
        CLOCK.advance(5)
        First.log.clear()
        assert (await controller.call_one(1)).backend == "second", "a call never measures"
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "first"

    async def test_one_that_appears_in_a_busy_hour_is_compared_with_the_times_of_that_hour(self, tmp_path):
        First.seconds, Second.seconds, Third.seconds = 0.1, 0.2, 0.3
        First.missing = "no engine"
        controller = make(tmp_path, selection="fastest")
        await controller.warm_up([1])
        First.seconds, Second.seconds, Third.seconds = 0.4, 0.8, 1.2
        First.missing = ""
        CLOCK.advance(TIMES_HOLD_S)
        await controller.refresh()
        assert [backend.name for backend in controller.snapshot().backends] == ["first", "second", "third"]

    async def test_a_new_reference_has_everything_measured_anew(self, tmp_path):
        First.offset, First.seconds, Second.seconds = 0.5, 0.1, 0.2
        Second.missing = Third.missing = "not here"
        controller = make(tmp_path, selection="fastest")
        assert (await controller.warm_up([1])).startswith("doubler=first")
        Second.missing = Third.missing = ""
        CLOCK.advance(5)
        await controller.refresh()
        assert "disagrees with third" in snapshot_of(controller, "first").reason

    async def test_one_that_is_excluded_is_not_asked_while_a_new_reference_has_everything_measured(self, tmp_path, monkeypatch):
        First.offset, First.seconds, Second.seconds, Third.seconds = 0.5, 0.1, 0.2, 0.3
        controller = make(tmp_path, selection="fastest")
        await controller.warm_up([1])
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "second"
        Third.missing, asked, answer, call = "not here", [], Second.batch_infer, from_a_thread(controller)

        def asked_meanwhile(self, requests):
            if not asked:
                asked.append(call([7]))
            return answer(self, requests)

        monkeypatch.setattr(Second, "batch_infer", asked_meanwhile)
        CLOCK.advance(5)
        await controller.refresh()
        assert by(await asyncio.wrap_future(asked[0])) == ["second"]
        assert "disagrees with second" in snapshot_of(controller, "first").reason
        First.offset = 0.0
        Third.missing = ""
        CLOCK.advance(5)
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "first", "measured anew, it agrees"

    async def test_those_that_disagree_with_one_that_can_answer_no_more_serve_in_its_place_until_it_is_back(self, tmp_path):
        First.offset, First.seconds, Third.seconds = 0.5, 0.1, 0.2
        controller = make(tmp_path, selection="fastest", order=["first", "third"])
        await controller.warm_up([1])
        assert (await controller.call_one(1)).backend == "third"
        for missing, backend in (("not here", "first"), ("", "third")):
            Third.missing = missing
            CLOCK.advance(5)
            await controller.refresh()
            assert (await controller.call_one(1)).backend == backend
        assert "disagrees with third" in snapshot_of(controller, "first").reason

    async def test_where_the_reference_is_gone_the_last_that_agreed_with_it_is_the_next_one(self, tmp_path):
        First.seconds, Second.seconds, Third.seconds, Second.offset = 0.1, 0.2, 0.3, 0.5
        controller = make(tmp_path, selection="fastest")
        await controller.warm_up([1])
        Third.missing = "not here"
        for _ in range(2):
            CLOCK.advance(5)
            await controller.refresh()
            assert "disagrees with first" in snapshot_of(controller, "second").reason
            assert (await controller.call_one(1)).backend == "first"

    async def test_a_reference_with_other_options_has_everything_measured_anew(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Third, "__init__", lambda self, offset=0.0: setattr(self, "offset", offset))
        First.offset, First.seconds, Third.seconds = 0.5, 0.1, 0.2
        controller = make(tmp_path, selection="fastest", order=["first", "third"])
        await controller.warm_up([1])
        await controller.refresh()
        await controller.reconfigure(replace(CHOICE, selection="fastest", order=["first", "third"], options={"third": {"offset": 0.5}}))
        assert (await controller.call_one(1)).answer == 2.0, "the third one answers on until its successor is loaded"
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "first"

    async def test_a_reference_that_was_loaded_again_has_everything_measured_anew(self, tmp_path):
        First.offset, First.seconds, Third.seconds = 0.5, 0.01, 0.02
        controller = make(tmp_path, selection="fastest", order=["first", "third"])
        await controller.warm_up([1])
        await controller.refresh()
        Third.error = RuntimeError("dead")
        for _ in range(BREAKER.failures_to_open):
            await controller.call([1])
        Third.error, Third.offset = None, 0.5
        CLOCK.advance(1)
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "first"

    async def test_one_that_breaks_while_it_is_timed_in_a_busy_hour_is_compared_with_that_hour_as_well(self, tmp_path, monkeypatch):
        asked = breaking_as_it_is_timed(First, monkeypatch)
        First.seconds, Second.seconds, Third.seconds = 0.1, 0.2, 0.3
        First.missing = "no engine"
        controller = make(tmp_path, selection="fastest")
        await controller.warm_up([1])
        First.seconds, Second.seconds, Third.seconds = 0.4, 0.8, 1.2
        First.missing = ""
        for seconds in (TIMES_HOLD_S, 5):
            CLOCK.advance(seconds)
            await controller.refresh()
        assert len(asked) > 5, "it was timed after all"
        assert [backend.name for backend in controller.snapshot().backends] == ["first", "second", "third"]

    async def test_one_that_comes_soon_has_no_other_timed_again(self, tmp_path):
        First.seconds, Second.seconds, Third.seconds = 0.1, 0.2, 0.3
        First.missing = "no engine"
        controller = make(tmp_path, selection="fastest")
        await controller.warm_up([1])
        First.missing = ""
        Third.log.clear()
        CLOCK.advance(5)
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "first"
        assert Third.log == ["batch of 1"], "the samples"

    async def test_a_reference_that_breaks_while_it_is_timed_has_no_other_timed_again(self, tmp_path, monkeypatch):
        First.seconds, Third.seconds = 0.1, 0.2
        asked = breaking_as_it_is_timed(Third, monkeypatch)
        controller = make(tmp_path, selection="fastest", order=["first", "third"])
        await controller.warm_up([1])
        First.log.clear()
        for _ in range(2):
            CLOCK.advance(5)
            await controller.refresh()
        assert First.log == ["batch of 1"], "the samples, as the third one is timed after all"
        assert len(asked) > 5, "it was"

    async def test_a_last_backend_that_fails_a_sample_has_no_other_timed_again(self, tmp_path, monkeypatch):
        def fails_at_two(self, requests, answer=Third.batch_infer):
            if 2 in requests:
                raise RuntimeError("no twos")
            return answer(self, requests)

        monkeypatch.setattr(Third, "batch_infer", fails_at_two)
        controller = make(tmp_path, selection="fastest", order=["first", "third"])
        await controller.warm_up([1, 2])
        First.log.clear()
        for _ in range(2):
            CLOCK.advance(5)
            await controller.refresh()
        assert First.log == ["batch of 2"] * 2, "the samples, by which the third one is judged each time"

    async def test_one_that_breaks_while_it_is_timed_is_not_the_fastest(self, tmp_path, monkeypatch):
        First.seconds, Second.seconds, Third.seconds = 0.1, 0.2, 0.3
        monkeypatch.setattr(
            First, "batch_infer", lambda self, requests, working=First.batch_infer, left=[2]: left.pop() and working(self, requests)
        )
        controller = make(tmp_path, selection="fastest")
        await controller.warm_up([1])
        assert (await controller.call_one(1)).backend == "second"

    @pytest.mark.parametrize(
        ("returning", "fastest"), [(0.0, "second"), (0.1, "second"), (0.9, "keeping"), (1.0, "keeping"), (None, "keeping")]
    )
    async def test_users_who_return_count_by_their_share_and_the_log_tells_the_figures(self, tmp_path, caplog, returning, fastest):
        caplog.set_level("INFO")
        controller = measuring_users(tmp_path, returning=returning)
        assert await controller.warm_up([1, 2]) == f"doubler={fastest}"
        mean = 300 - 250 * (0.5 if returning is None else returning)
        assert f"keeping {mean:.2f} ms (new 300.00, returning 50.00)" in caplog.text
        assert "second 200.00 ms (new 200.00, returning 200.00)" in caplog.text
        assert f"fastest doubler, {0.5 if returning is None else returning:.0%} of users returning: {fastest}" in caplog.text

    async def test_what_was_kept_of_the_user_who_was_made_up_is_forgotten(self, tmp_path):
        await measuring_users(tmp_path).warm_up([1, 2])
        assert Keeping.log.count("forget returning of genrec rehearses") == 1
        assert Keeping.log.index("forget returning of genrec rehearses") > max(n for n, done in enumerate(Keeping.log) if done == "user")

    async def test_the_share_of_users_who_return_is_the_one_that_is_seen_once_a_thousand_were_looked_up(self, tmp_path):
        controller = measuring_users(tmp_path)
        await controller.warm_up([1, 2])
        calls = len(Keeping.log)
        Keeping.hits, Keeping.misses = 20, 979
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "keeping", "too few to say"
        Keeping.misses = 980
        CLOCK.advance(5)
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "second"
        assert len(Keeping.log) == calls + 2, "nothing is timed again for that"

    async def test_requests_that_are_not_looked_up_are_of_users_who_do_not_return(self, tmp_path):
        controller = measuring_users(tmp_path)
        await controller.warm_up([1, 2])
        Keeping.hits, Keeping.misses, Keeping.not_looked_up = 90, 10, 900
        CLOCK.advance(5)
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "second"

    async def test_a_user_who_returns_is_timed_alone(self, tmp_path, monkeypatch):
        asked, answer = [], Keeping.batch_infer
        monkeypatch.setattr(Keeping, "batch_infer", lambda self, requests: asked.append(list(requests)) or answer(self, requests))
        await measuring_users(tmp_path).warm_up([1, 2, 3])
        assert [requests for requests in asked if max(requests) >= 1000] == [[1000 + number] for number in range(6)]
        assert {len(requests) for requests in asked[asked.index([1000]) :]} == {1}, "so are users that it never met"

    async def test_the_share_may_be_changed_while_it_serves(self, tmp_path):
        controller = measuring_users(tmp_path)
        await controller.warm_up([1, 2])
        await controller.reconfigure(replace(CHOICE, **MEASURED, returning=0.0))
        assert (await controller.call_one(1)).backend == "second"

    @pytest.mark.parametrize("ended", ["closed", "reconfigured"])
    async def test_a_measurement_does_not_load_again_what_is_given_up_meanwhile(self, tmp_path, monkeypatch, ended):
        controller = make(tmp_path, selection="fastest")
        measuring, may_go_on, answer = threading.Event(), threading.Event(), Third.batch_infer

        def slowly(self, requests):
            if "batch of 1" in self.log:  # the warm-up's own call is over
                measuring.set()
                assert may_go_on.wait(60)
            return answer(self, requests)

        monkeypatch.setattr(Third, "batch_infer", slowly)
        warm_up = asyncio.create_task(controller.warm_up([1]))
        await until(measuring.is_set)
        alone = replace(CHOICE, table={"third": TABLE["third"]}, order=["third"])
        end = asyncio.create_task(asyncio.to_thread(controller.close) if ended == "closed" else controller.reconfigure(alone))
        await until(lambda: ended == "closed" or "close" in First.log)
        may_go_on.set()
        await asyncio.gather(warm_up, end)
        assert First.log.count("load") == First.log.count("close") == 1

    async def test_measuring_is_not_counted_as_calls(self, tmp_path):
        controller = make(tmp_path, selection="fastest")
        await controller.warm_up([1])
        assert [backend.calls for backend in controller.snapshot().backends] == [0, 0, 0]


class TestReconfigure:
    async def test_takes_a_new_order_and_switches(self, controller):
        await controller.call_one(1)
        await controller.reconfigure(replace(CHOICE, order=["third", "second"], disabled=["third"]))
        assert (await controller.call_one(1)).backend == "second"
        assert snapshot_of(controller, "first").rank is None

    async def test_what_is_preferred_is_asked_before_the_order_and_even_where_that_leaves_it_out(self, controller):
        await controller.reconfigure(replace(CHOICE, order=["second"]))
        controller.prefer("third")
        assert (await controller.call_one(1)).backend == "third"
        assert [snapshot_of(controller, name).rank for name in ("third", "second", "first")] == [0, 1, None]
        controller.disable("third")
        served = await controller.call_one(1)
        assert (served.backend, [one.backend for one in served.fallback_from]) == ("second", ["third"])
        controller.prefer(None)
        assert snapshot_of(controller, "third").rank is None
        with pytest.raises(UnknownChoice):
            controller.prefer("fourth")

    async def test_changes_nothing_where_something_is_wrong(self, controller):
        with pytest.raises(UnknownChoice):
            await controller.reconfigure(replace(CHOICE, order=["third", "trt"]))
        with pytest.raises(UnknownChoice):
            await controller.reconfigure(replace(CHOICE, order=["third"], selection="quickest"))
        assert (await controller.call_one(1)).backend == "first"

    async def test_a_backend_that_is_added_is_loaded_beside_the_calls_and_the_others_stay_loaded(self, tmp_path):
        table = {"second": TABLE["second"]}
        controller = make(tmp_path, table=table, order=["second"])
        await controller.warm_up([1])
        await controller.refresh()
        await controller.reconfigure(replace(CHOICE, table={**table, "new": TABLE["third"]}, order=["new", "second"]))
        assert (await controller.call_one(1)).backend == "second", "calls wait for no load"
        assert await controller.refresh()
        assert (await controller.call_one(1)).backend == "new"
        assert Second.log.count("load") == 1

    async def test_a_backend_that_is_gone_is_unloaded_and_one_with_other_options_is_loaded_anew(self, tmp_path):
        controller = make(tmp_path)
        await controller.warm_up([1], ready=3)
        table = {name: TABLE[name] for name in ("first", "second")}
        await controller.reconfigure(replace(CHOICE, table={**table, "second": TABLE["third"]}, order=["first", "second"]))
        assert (First.log.count("close"), Second.log.count("close"), Third.log.count("close")) == (0, 1, 1)
        controller.disable("first")
        assert (await controller.call_one(1)).backend == "second"
        assert Third.log.count("load") == 2
        with pytest.raises(UnknownChoice):
            await controller.reconfigure(replace(CHOICE, table=table, order=["third"]))
        assert (await controller.call_one(1)).backend == "second", "what is wrong changes nothing"

    async def test_a_backend_that_does_not_take_its_options_is_not_available_and_says_why(self, tmp_path):
        controller = make(tmp_path, order=["third", "second"])
        await controller.warm_up([1])
        await controller.refresh()
        await controller.reconfigure(replace(CHOICE, order=["third", "second"], options={"third": {"nonsense": 1}}))
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "second"
        assert snapshot_of(controller, "third").reason == "its probe broke: TypeError: Third() takes no arguments"

    async def test_the_only_backend_answers_on_with_its_old_options_where_it_does_not_take_the_new_ones(self, tmp_path):
        controller = make(tmp_path, order=["second"])
        await controller.warm_up([1])
        await controller.refresh()
        await controller.reconfigure(replace(CHOICE, order=["second"], options={"second": {"nonsense": 1}}))
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "second"
        reason = "its probe broke: TypeError: Second() takes no arguments; its predecessor with the old settings answers"
        assert (snapshot_of(controller, "second").reason, Second.log.count("close")) == (reason, 0)

    async def test_a_backend_answers_until_its_successor_with_other_options_is_loaded_where_no_other_one_could(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Second, "__init__", lambda self, offset=0.0: setattr(self, "offset", offset))
        controller = make(tmp_path, order=["second"])
        await controller.warm_up([1])
        await controller.refresh()
        await controller.reconfigure(replace(CHOICE, order=["second"], options={"second": {"offset": 0.5}}))
        assert (await controller.call_one(1)).answer == 2.0
        Second.load_error = RuntimeError("no memory")
        await controller.refresh()
        assert (await controller.call_one(1)).answer == 2.0
        assert "no memory" in snapshot_of(controller, "second").reason
        Second.load_error = None
        CLOCK.advance(10)
        await controller.refresh()
        assert (await controller.call_one(1)).answer == 2.5
        await controller.refresh()
        assert Second.log.count("load") - Second.log.count("close") == 1
        assert [backend.name for backend in controller.snapshot().backends].count("second") == 1

    async def test_a_successor_for_which_there_is_no_memory_is_loaded_once_its_predecessor_was_switched_off(self, tmp_path, monkeypatch):
        in_memory = []

        def load(self, bundle):
            if in_memory:
                raise RuntimeError("no memory")
            in_memory.append(self)

        monkeypatch.setattr(Second, "__init__", lambda self, offset=0.0: setattr(self, "offset", offset))
        monkeypatch.setattr(Second, "load", load)
        monkeypatch.setattr(Second, "close", lambda self: self in in_memory and in_memory.remove(self))
        controller = make(tmp_path, order=["second"])
        await controller.warm_up([1])
        await controller.refresh()
        await controller.reconfigure(replace(CHOICE, order=["second"], options={"second": {"offset": 0.5}}))
        for _ in range(3):
            CLOCK.advance(10)
            await controller.refresh()
            reason = snapshot_of(controller, "second").reason
            assert reason.startswith("could not be loaded: RuntimeError: no memory; next trial in ")
            assert reason.endswith(" s; its predecessor with the old settings answers")
            assert (await controller.call_one(1)).answer == 2.0
        controller.disable("second")
        await controller.refresh()
        assert in_memory == []
        controller.enable("second")
        CLOCK.advance(10)
        await controller.refresh()
        assert (await controller.call_one(1)).answer == 2.5
        assert snapshot_of(controller, "second").reason == ""

    async def test_a_backend_that_stands_in_is_told_and_counted_as_one_with_its_successor(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Second, "__init__", lambda self, offset=0.0: setattr(self, "offset", offset))
        controller = make(tmp_path, order=["second"])
        await controller.warm_up([1])
        await controller.refresh()
        noted, board = Noted(), Switchboard()
        recorder = StageRecorder("doubler", noted)

        def report():
            recorder.count("tiny/1", controller.snapshot())
            board.report("doubler", "a", controller.snapshot(), 0, {}, now=0)
            (told,) = [one for stage in board.status(now=0) for one in stage.backends if one.name == "second"]
            return told.replicas, told.available_on, told.calls, told.breakers, noted.total(BACKEND_REQUESTS, backend="second")

        await controller.call([1, 2, 3])
        assert report() == (1, 1, 3, {"closed": 1}, 3)
        Second.load_error = RuntimeError("no memory")
        await controller.reconfigure(replace(CHOICE, order=["second"], options={"second": {"offset": 0.5}}))
        await controller.refresh()
        for calls in (4, 5, 6):
            await controller.call_one(1)
            assert report() == report() == (1, 1, calls, {"open": 1}, calls)
        assert snapshot_of(controller, "second").loaded
        assert controller.snapshot().settled
        Second.load_error = None
        CLOCK.advance(10)
        await controller.refresh()
        await controller.call_one(1)
        assert report() == report() == (1, 1, 1, {"closed": 1}, 7)

    async def test_a_backend_whose_options_come_back_before_the_others_are_loaded_stays(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Second, "__init__", lambda self, offset=0.0: setattr(self, "offset", offset))
        controller = make(tmp_path, order=["second"])
        await controller.warm_up([1])
        await controller.refresh()
        for options in ({"second": {"offset": 0.5}}, {}):
            await controller.reconfigure(replace(CHOICE, order=["second"], options=options))
        await controller.refresh()
        assert (await controller.call_one(1)).answer == 2.0
        assert (Second.log.count("load"), Second.log.count("close")) == (1, 0)

    async def test_no_backend_stands_in_for_its_successor_where_another_one_can_answer_or_it_is_switched_off(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Second, "__init__", lambda self, offset=0.0: setattr(self, "offset", offset))
        controller = make(tmp_path, order=["second", "third"])
        await controller.warm_up([1])
        await controller.refresh()
        await controller.reconfigure(replace(CHOICE, order=["second", "third"], options={"second": {"offset": 0.5}}))
        assert Second.log.count("close") == 1
        assert (await controller.call_one(1)).backend == "third"
        await controller.refresh()
        await controller.reconfigure(replace(CHOICE, order=["second"], disabled=["second"]))
        with pytest.raises(NoBackendAnswered, match="switched off by the operator"):
            await controller.call_one(1)

    async def test_a_backend_that_leaves_the_order_is_unloaded_by_the_next_refresh_unless_it_is_preferred(self, controller):
        await controller.warm_up([1], ready=3)
        controller.prefer("third")
        await controller.reconfigure(replace(CHOICE, order=["second"]))
        await controller.refresh()
        assert [snapshot_of(controller, name).loaded for name in ORDER] == [False, True, True]
        controller.prefer(None)
        await controller.refresh()
        assert [snapshot_of(controller, name).loaded for name in ORDER] == [False, True, False]
        await controller.reconfigure(replace(CHOICE, order=["first", "second"]))
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "first"

    async def test_a_backend_that_was_preferred_may_go(self, controller):
        controller.prefer("third")
        await controller.reconfigure(replace(CHOICE, table={"second": TABLE["second"]}, order=["second"]))
        assert (await controller.call_one(1)).backend == "second"

    async def test_switching_to_fastest_measures_with_the_samples_of_the_warm_up(self, controller):
        First.seconds, Second.seconds, Third.seconds = 0.3, 0.2, 0.1
        await controller.warm_up([1])
        await controller.reconfigure(replace(CHOICE, selection="fastest"))
        await controller.refresh()
        assert (await controller.call_one(1)).backend == "third"


class TestSnapshot:
    async def test_counts_calls_failures_and_fallbacks(self, controller):
        await controller.warm_up([1])
        First.poison, First.seconds = frozenset({13}), 0.02
        await controller.call([1, 2, 13])
        first, second, third = controller.snapshot().backends
        assert (first.calls, first.failures, first.fallbacks, first.latency.count) == (3, 1, 0, 2)
        assert (second.calls, second.failures, second.fallbacks) == (1, 0, 1)
        assert (third.calls, third.reason, third.breaker) == (0, "", BreakerState.CLOSED)
        assert 20 <= first.latency.p99_ms <= 24

    async def test_can_be_taken_while_another_thread_calls(self, controller):
        stop, problems = threading.Event(), []

        def look() -> None:
            try:
                while not stop.is_set():
                    controller.snapshot()
                    controller.disable("first")
                    controller.enable("first")
            except Exception as error:  # noqa: BLE001 - handed to the test's own thread
                problems.append(error)

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            for number in range(300):
                First.error = RuntimeError("flaky") if number % 3 else None
                CLOCK.advance(0.5)
                assert (await controller.call([1, 2]))[0].answer == 2
        finally:
            stop.set()
            watcher.join()
        assert problems == []

    async def test_the_choice_is_logged_when_it_changes(self, controller, caplog):
        caplog.set_level(logging.INFO, "cluster.engines.controller")
        First.missing = "no engine"
        for _ in range(3):
            await controller.call_one(1)
        assert [record.getMessage() for record in caplog.records] == ["doubler=second (first: no engine)"]

    async def test_an_engine_that_declines_every_second_request_fills_no_log(self, controller, caplog, monkeypatch):
        monkeypatch.setattr(First, "declines", lambda self, request: "is odd" if request % 2 else "", raising=False)
        caplog.set_level(logging.INFO, "cluster.engines.controller")
        assert [(await controller.call_one(number)).backend for number in range(200)] == ["first", "second"] * 100
        assert [record.getMessage() for record in caplog.records] == ["doubler=first"]

    async def test_a_choice_that_changes_with_each_request_is_logged_a_few_times_a_minute(self, controller, caplog):
        await controller.warm_up([0], ready=2)
        First.poison = frozenset(range(1, 200, 2))
        caplog.set_level(logging.INFO, "cluster.engines.controller")
        CLOCK.now = 60_000.0
        for _ in range(2):
            assert [(await controller.call_one(number)).backend for number in range(199)] == ["first", "second"] * 99 + ["first"]
            CLOCK.advance(TOLD_EVERY_S)
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("doubler=")]
        assert len(lines) == 2 * MOST_PER_S
        assert lines[-1].startswith("doubler=second")
        await controller.call_one(0)
        assert caplog.records[-1].getMessage().startswith("doubler=first"), "what serves in the end is told"

    async def test_a_refresh_after_the_controller_was_closed_is_no_error_and_loads_nothing(self, controller):
        await controller.warm_up([1])
        controller.close()
        CLOCK.advance(5)
        First.log.clear()
        assert not await controller.refresh()
        assert First.log == []

    async def test_closing_frees_every_loaded_backend(self, controller):
        await controller.warm_up([1], ready=3)
        controller.close()
        assert [cls.log[-1] for cls in (First, Second, Third)] == ["close"] * 3
