"""Erasure through the framework controller: every loaded backend forgets, or is unloaded; and what they say they keep."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import ClassVar

import pytest

from cluster.engines import managed_backend
from cluster.engines.controller import FrameworkController
from cluster.engines.forgetting import forget, kept
from cluster.engines.roster import Choice
from cluster.errors import BackendFailed
from cluster.fleet.switchboard import Switchboard
from cluster.traffic.breaker import BreakerSettings
from tests.fakes import scripted_backends
from tests.fakes.scripted_backends import CLOCK, RULES, First, Queued
from tests.waiting import settled, until

BREAKER = BreakerSettings(failures_to_open=3, pause_s=1, growth=2, longest_pause_s=8)


class Keeping(First):
    """Keeps whatever users it is given."""

    log: ClassVar[list[str]] = []
    users: ClassVar[set[tuple[str, str]]] = set()
    broken: ClassVar[bool] = False

    def forget(self, tenant: str, user: str) -> int:
        if self.broken:
            raise RuntimeError("the store is damaged")
        before = len(self.users)
        self.users.discard((tenant, user))
        return before - len(self.users)

    def kept(self) -> dict[str, float]:
        if self.broken:
            raise RuntimeError("the store is damaged")
        return {"users": len(self.users), "hits": 3}

    def close(self) -> None:
        self.users.clear()
        super().close()


class Clearing(Keeping):
    log: ClassVar[list[str]] = []
    users: ClassVar[set[tuple[str, str]]] = set()

    def forget_tenant(self, tenant: str) -> int:
        self.log.append(f"forget {tenant}")
        return 1

    def forget_everything(self) -> int:
        self.log.append("forget everything")
        self.users.clear()
        return 1


class QueuedKeeping(Queued):
    log: ClassVar[list[str]] = []

    def forget_everything(self) -> int:
        self.log.append("forget everything")
        return 1


TABLE = {
    "keeping": f"{__name__}:Keeping",
    "clearing": f"{__name__}:Clearing",
    "second": "tests.fakes.scripted_backends:Second",
    "queued": f"{__name__}:QueuedKeeping",
}
ADA, BOB = ("default", "ada"), ("default", "bob")


@pytest.fixture(autouse=True)
def _pristine() -> Iterator[None]:
    scripted_backends.reset()
    for cls in (Keeping, Clearing, QueuedKeeping):
        cls.log.clear()
    for cls in (Keeping, Clearing):
        cls.users.clear()
        cls.users |= {ADA, BOB}
        cls.broken = False
    yield
    scripted_backends.reset()


def make(tmp_path: Path, *order: str) -> FrameworkController[int, float]:
    bundle = scripted_backends.opaque_bundle(tmp_path / "model")
    return FrameworkController("doubler", Choice(TABLE, order), bundle, RULES, breaker=BREAKER, clock=CLOCK)


@pytest.fixture
async def controller(tmp_path):
    made = make(tmp_path, "keeping", "clearing", "second")
    await made.warm_up([1], ready=3)
    for cls in (Keeping, Clearing):
        cls.log.clear()
    return made


def loaded(controller) -> list[str]:
    return [one.name for one in controller.snapshot().backends if one.loaded]


def kept_by(controller) -> dict[str, dict[str, float]]:
    return {one.name: dict(one.kept) for one in controller.snapshot().backends if one.kept}


async def test_every_backend_that_keeps_something_forgets_the_user_and_nobody_else(controller):
    assert await controller.forget([ADA]) == 2
    assert Keeping.users == Clearing.users == {BOB}
    assert loaded(controller) == ["keeping", "clearing", "second"]


async def test_one_that_breaks_over_it_is_unloaded_with_all_it_keeps_and_the_others_still_forget(controller, caplog):
    Keeping.broken = True
    assert await controller.forget([ADA]) == 1
    assert (Keeping.users, Clearing.users) == (set(), {BOB})
    assert loaded(controller) == ["clearing", "second"]
    assert "could not forget users" in caplog.text
    (broken,) = (one for one in controller.snapshot().backends if one.name == "keeping")
    assert "the store is damaged" in broken.last_error
    Keeping.broken = False
    assert (await controller.call_one(4)).backend == "keeping", "it is loaded again"


async def test_one_that_breaks_over_it_and_hangs_as_it_is_closed_holds_up_neither_the_erasure_nor_other_engines(controller, monkeypatch):
    monkeypatch.setattr(managed_backend, "CLOSED_WITHIN_S", 0.01)
    may_end, close = threading.Event(), Keeping.close
    monkeypatch.setattr(Keeping, "close", lambda self: may_end.wait(300) and close(self))
    Keeping.broken = True
    try:
        async with asyncio.timeout(60):
            assert await controller.forget([ADA]) == 1
            assert (await controller.call_one(4)).backend == "clearing"
    finally:
        may_end.set()
    await until(lambda: not Keeping.users)


@pytest.mark.parametrize("kind", [asyncio.CancelledError, CancelledError])
async def test_so_is_one_whose_own_work_is_cancelled_over_it(controller, monkeypatch, kind):
    def forget(self, tenant, user):
        raise kind("its own")

    monkeypatch.setattr(Keeping, "forget", forget)  # Clearing's, too
    assert await controller.forget([ADA]) == 0
    assert loaded(controller) == ["second"]
    assert Keeping.users == Clearing.users == set()


async def test_everybody_is_forgotten_by_the_widest_method_or_by_unloading(controller):
    assert await controller.forget([(None, None)]) == 1
    assert (Keeping.users, Clearing.users) == (set(), set())
    assert loaded(controller) == ["clearing", "second"], "one that keeps nothing stays, and one that can clear itself"


async def test_a_tenant_is_forgotten_by_the_narrowest_method_that_is_wide_enough(controller):
    await controller.forget([("default", None)])
    assert Clearing.log == ["forget default"]
    assert loaded(controller) == ["clearing", "second"]


async def test_what_is_not_loaded_is_not_told(tmp_path):
    controller = make(tmp_path, "keeping", "clearing")
    assert await controller.forget([ADA]) == 0
    assert (Keeping.users, Keeping.log) == ({ADA, BOB}, [])


async def test_an_erasure_waits_for_the_batch_that_runs(controller, monkeypatch):
    runs, may_end = threading.Event(), threading.Event()

    def batch_infer(self, requests):
        runs.set()
        assert may_end.wait(300)
        self.users.add(("default", "eve"))
        return [2.0 * request for request in requests]

    monkeypatch.setattr(Keeping, "batch_infer", batch_infer)
    batch = asyncio.create_task(controller.call([4]))
    await until(runs.is_set)
    erasure = asyncio.create_task(controller.forget([("default", "eve")]))
    await settled()
    assert not erasure.done()
    may_end.set()
    await asyncio.gather(batch, erasure)
    assert Keeping.users == {ADA, BOB}


@pytest.mark.parametrize("name", ["keeping", "queued"])
async def test_a_poisoned_request_after_an_erasure_does_not_bring_the_erased_user_back(tmp_path, monkeypatch, name):
    """What tells a broken engine from a poisoned request is a sample of the warm-up, never an earlier request of a user."""
    asked, cls = [], {"keeping": Keeping, "queued": QueuedKeeping}[name]
    working = cls.batch_infer
    monkeypatch.setattr(cls, "batch_infer", lambda self, requests: (asked.extend(requests), working(self, requests))[1])
    controller = make(tmp_path, name, "second")
    await controller.warm_up([1])
    await controller.refresh()
    assert (await controller.call_one(4)).backend == name
    await controller.forget([("default", "the user of request 4")])
    asked.clear()
    monkeypatch.setattr(cls, "poison", frozenset({13}))
    assert (await controller.call_one(13)).backend == "second"
    assert 1 in asked, "the engine was asked a sample"
    assert 4 not in asked


async def test_an_engine_with_a_queue_of_its_own_is_told_too(tmp_path):
    controller = make(tmp_path, "queued", "second")
    await controller.warm_up([1])
    await controller.refresh()
    assert await controller.forget([ADA]) == 1
    assert "forget everything" in QueuedKeeping.log, "it has nothing narrower"


async def test_a_hundred_users_are_forgotten_in_one_turn_and_by_one_call_where_that_forgets_all_of_them(tmp_path, monkeypatch):
    """vLLM begins all that it computes anew at each."""
    users, turns = [ADA, ("shop", None), *(("default", f"user-{number}") for number in range(98))], []
    controller = make(tmp_path, "queued", "clearing", "second")
    await controller.warm_up([1])
    await controller.refresh()
    run = controller.thread.run
    monkeypatch.setattr(controller.thread, "run", lambda work: turns.append(work) or run(work))
    assert await controller.forget(users) == 3
    assert QueuedKeeping.log.count("forget everything") == 1
    assert (Clearing.users, Clearing.log.count("forget shop")) == ({BOB}, 1), "what it has a narrower method for is forgotten by that"
    assert len(turns) == 3, "one for each backend"
    await controller.forget([ADA, (None, None), BOB])
    assert (Clearing.users, Clearing.log.count("forget everything")) == (set(), 1)


def test_what_is_kept_is_told_by_backend_and_added_up_over_replicas(controller):
    figures = {"users": 2.0, "hits": 3.0}
    assert kept_by(controller) == {"keeping": figures, "clearing": figures}
    board = Switchboard()
    for replica in ("a", "b"):
        board.report("doubler", replica, controller.snapshot(), 0, {}, now=0)
    (status,) = board.status(now=0)
    shown = {one.name: one.kept for one in status.backends}
    assert shown == {"keeping": {"users": 4.0, "hits": 6.0}, "clearing": {"users": 4.0, "hits": 6.0}, "second": {}, "queued": {}}
    assert "kept" not in status.backends[0].as_json(), "the caches show it"


async def test_one_that_cannot_tell_what_it_keeps_is_no_obstacle(controller):
    Keeping.broken = True
    assert set(kept_by(controller)) == {"clearing"}
    assert (await controller.call_one(4)).backend == "keeping"


def test_what_keeps_something_and_cannot_clear_it_says_so_and_what_keeps_nothing_has_nothing_to_do():
    with pytest.raises(BackendFailed, match="has no forget_tenant or forget_everything"):
        forget(Keeping(), [("default", None)])
    assert forget(First(), [ADA]) == 0
    assert kept(First()) == {}
