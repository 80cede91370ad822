"""What one replica learns from the others' breakers: a backend that broke there is not trusted here, and never more than that helps."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.engines.controller import FrameworkController, Served
from cluster.engines.roster import Choice
from cluster.engines.skipped import NoBackendAnswered
from cluster.engines.snapshots import BackendSnapshot, StageSnapshot
from cluster.errors import DeadlineExceeded
from cluster.fleet.switchboard import Switchboard
from cluster.traffic.breaker import BreakerSettings, BreakerState
from cluster.traffic.latency import LatencySummary
from tests.fakes import scripted_backends
from tests.fakes.scripted_backends import CLOCK, RULES, TABLE, First, Second, Third

NOW = 1_760_000_000.0


@pytest.fixture(autouse=True)
def _pristine() -> Iterator[None]:
    scripted_backends.reset()
    yield
    scripted_backends.reset()


def make(root: Path, **settings: object) -> FrameworkController[int, float]:
    given = {"breaker": BreakerSettings(), "clock": CLOCK, **settings}
    choice = Choice(TABLE, ("first", "second", "third"))
    return FrameworkController("doubler", choice, scripted_backends.opaque_bundle(root / "model"), RULES, **given)


@pytest.fixture
def controller(tmp_path: Path) -> FrameworkController[int, float]:
    return make(tmp_path)


def breaker_of(controller: FrameworkController[int, float], name: str) -> BreakerState:
    return next(one for one in controller.snapshot().backends if one.name == name).breaker


async def test_one_failure_of_a_suspect_opens_its_breaker(controller):
    await controller.warm_up([1])
    assert (await controller.call_one(1)).backend == "first"
    controller.suspect({"first"})
    First.error = RuntimeError("out of memory")
    assert (await controller.call_one(1)).backend == "second"
    assert breaker_of(controller, "first") is BreakerState.OPEN


async def test_without_suspicion_it_takes_as_many_as_configured(controller):
    await controller.warm_up([1])
    First.error = RuntimeError("out of memory")
    await controller.call_one(1)
    assert breaker_of(controller, "first") is BreakerState.CLOSED


async def test_a_replica_that_has_just_started_does_not_ask_a_suspect_first(controller):
    controller.suspect({"first"})
    await controller.warm_up([1])
    assert (await controller.call_one(1)).backend == "second"
    assert First.log == []
    assert controller.explain() == "doubler=second"


async def test_one_that_serves_well_here_goes_on_serving_though_it_is_suspected(controller):
    await controller.call_one(1)
    controller.suspect({"first"})
    assert (await controller.call_one(1)).backend == "first"


async def test_one_that_was_late_with_every_request_here_has_not_served_well(controller):
    await controller.warm_up([1])
    First.error = DeadlineExceeded("the time was over")
    with pytest.raises(NoBackendAnswered):
        await controller.call_one(1)
    First.error = None
    controller.suspect({"first"})
    assert (await controller.call_one(1)).backend == "second"


async def test_when_the_suspicion_is_over_the_first_choice_is_asked_first_again(controller):
    controller.suspect({"first"})
    controller.suspect(())
    assert (await controller.call_one(1)).backend == "first"


async def test_of_backends_that_are_all_suspected_the_last_one_is_judged_as_ever(controller):
    controller.suspect(TABLE)
    First.error = Second.error = Third.error = RuntimeError("out of memory")
    await controller.call([1])
    states = [breaker_of(controller, name) for name in ("first", "second", "third")]
    assert states == [BreakerState.OPEN, BreakerState.OPEN, BreakerState.CLOSED]
    First.error = Second.error = Third.error = None
    assert (await controller.call_one(1)).backend == "third"


async def test_a_suspect_is_asked_where_nobody_else_can(controller):
    controller.suspect({"first"})
    Second.missing = Third.missing = "not here"
    assert (await controller.call_one(1)).backend == "first"


def reported(breaker: BreakerState = BreakerState.CLOSED, calls: int = 10, failures: int = 0, enabled: bool = True) -> StageSnapshot:
    one = BackendSnapshot("torch", "my:Torch", True, "", enabled, 0, True, breaker, "", calls, failures, 0, LatencySummary())
    return StageSnapshot("encoder", "", (one,))


def suspects(*snapshots: StageSnapshot) -> frozenset[str]:
    board = Switchboard()
    for number, snapshot in enumerate(snapshots):
        board.report("encoder", str(number), snapshot, 0, {}, now=NOW)
    return board.suspects("encoder", now=NOW)


OPEN, TRIED, SOUND, NEW = reported(BreakerState.OPEN), reported(BreakerState.HALF_OPEN), reported(), reported(calls=0)


@pytest.mark.parametrize(
    ("snapshots", "expected"),
    [
        ([], set()),
        ([SOUND, SOUND], set()),
        ([OPEN, SOUND], set()),
        ([OPEN, OPEN, SOUND], {"torch"}),
        ([OPEN, TRIED, SOUND], {"torch"}),
        ([OPEN, SOUND, SOUND], set()),
        ([OPEN, OPEN, NEW, NEW, NEW], {"torch"}),
        ([reported(BreakerState.OPEN, enabled=False)] * 3, set()),
    ],
)
def test_a_backend_is_suspected_where_it_broke_on_most_replicas_that_have_asked_it(snapshots, expected):
    assert suspects(*snapshots) == expected


def test_a_replica_that_is_gone_suspects_nobody():
    board = Switchboard(ttl_s=5)
    board.report("encoder", "a", OPEN, 0, {}, now=NOW)
    assert board.suspects("encoder", now=NOW) == {"torch"}
    assert board.suspects("generator", now=NOW) == frozenset()
    assert board.suspects("encoder", now=NOW + 6) == frozenset()


async def test_replicas_that_report_find_and_lose_a_suspicion_together(tmp_path):
    """Three replicas, of which two break; the third is told, and told again when they are repaired."""
    board, replicas = Switchboard(), [make(tmp_path / name) for name in "abc"]
    for controller in replicas:
        await controller.warm_up([1])
    for controller in replicas[:2]:
        await controller.call([1])
        First.error = RuntimeError("out of memory")
        for _ in range(3):
            await controller.call([1])
        First.error = None

    def exchange() -> None:
        for name, controller in zip("abc", replicas, strict=True):
            board.report("doubler", name, controller.snapshot(), 0, {}, now=CLOCK())
        for controller in replicas:
            controller.suspect(board.suspects("doubler", now=CLOCK()))

    exchange()
    assert [(await controller.call_one(1)).backend for controller in replicas] == ["second", "second", "second"]
    CLOCK.advance(2)
    for controller in replicas[:2]:
        await controller.refresh()
    exchange()
    assert [(await controller.call_one(1)).backend for controller in replicas] == ["first", "first", "first"]


async def test_a_backend_that_fails_every_call_opens_soon_is_answered_for_always_and_is_back_soon_after_its_repair(tmp_path):
    """With the settings that are the default: a refresh a second, and a long time broken."""
    controller = make(tmp_path)
    await controller.warm_up([1])
    await controller.call_one(1)
    First.error = First.load_error = RuntimeError("the device is lost")
    broken_calls = 0
    for _ in range(600):
        CLOCK.advance(1)
        before = First.log.count("batch of 1")
        outcome = (await controller.call([1]))[0]
        broken_calls += (First.log.count("batch of 1") - before) > 0
        assert isinstance(outcome, Served)
        assert outcome.backend == "second"
        await controller.refresh()
    assert broken_calls <= 5
    assert breaker_of(controller, "first") is not BreakerState.CLOSED
    First.error = First.load_error = None
    repaired = CLOCK()
    while (await controller.call_one(1)).backend != "first":
        CLOCK.advance(1)
        await controller.refresh()
        assert CLOCK() - repaired <= 30
