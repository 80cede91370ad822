"""Following the switchboard's erasures: what is done when, what is told when, and what happens while the switchboard is away."""

import asyncio
import threading
import time

import pytest

from cluster.config import parse
from cluster.fleet.erasures import Erasures, News
from cluster.values import EncodeRequest
from deployments.fleet import erasure_follower
from deployments.fleet.erasure_follower import ErasureFollower
from deployments.fleet.heartbeat import Heartbeat
from deployments.fleet.switchboard import SwitchboardDeployment
from deployments.replicas.encoder import Encoder
from tests.broken_backends import Sound
from tests.bundles import random_sequence
from tests.fakes.clock import Clock
from tests.fakes.handles import Handle
from tests.fakes.processes import only
from tests.waiting import until

NOW = 1_760_000_000.0


EVERYTHING = (None, None)


class Keeper:
    """Keeps something of users. `erasures`: the switchboard's, None while that is away; `told`: what it was told to forget, and which of
    that `again`, in so many `calls`; `dropped`: of which it was to drop the answers alone; `error` is raised instead, and `busy` has it
    wait.
    """

    def __init__(self, clock):
        self.erasures = Erasures(now=NOW - 60)
        self.told, self.again, self.dropped, self.error, self.busy, self.calls = [], [], [], None, None, 0
        self._follower = ErasureFollower(self._forget, drop_answers=self._drop_answers, again_after_s=10, clock=clock)

    def serve(self):
        """From now on."""
        self._follower.serving = True

    async def exchange(self):
        """As a heartbeat."""
        since = self._follower.place
        if self.erasures:
            self.erasures.report("encoder/a", since)
        await self._follower.follow(self.erasures.since(since, under_way_since=NOW - 10) if self.erasures else News(since), since)

    def erase(self, tenant, user):
        return self.erasures.erase(tenant, user, now=NOW)

    def erased(self, number):
        self.erasures.answered(self.erasures.question(), {"encoder/a": True})
        return self.erasures.erased(number)

    async def _forget(self, users, again):
        if self.busy:
            await self.busy.wait()
        if self.error:
            raise self.error
        self.calls += 1
        self.told += [*users, *again]
        self.again += [*(False for _ in users), *(True for _ in again)]

    def _drop_answers(self, tenant, user):
        self.dropped.append((tenant, user))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def _without_rest(monkeypatch):
    """The tests' clock stands still, and a process would rest by the real one."""
    monkeypatch.setattr(erasure_follower, "REST_S", 0)


@pytest.fixture
async def keeper(clock, _without_rest):
    """One that has found its place."""
    made = Keeper(clock)
    await made.exchange()
    assert made.told.pop() == EVERYTHING, "a process that knows no place may have missed anything"
    return made


async def test_what_is_new_is_forgotten_once_and_told_with_the_next_exchange(keeper):
    number = keeper.erase("default", "ada")
    await keeper.exchange()
    assert keeper.told == [("default", "ada")]
    assert not keeper.erased(number)
    await keeper.exchange()
    assert keeper.erased(number)
    assert keeper.told == [("default", "ada")]


async def test_once_more_when_the_requests_of_that_time_are_over(keeper, clock):
    keeper.erase("default", "ada")
    await keeper.exchange()
    clock.advance(9.9)
    await keeper.exchange()
    assert len(keeper.told) == 1
    clock.advance(0.1)
    for _ in range(3):
        await keeper.exchange()
    assert keeper.told == [("default", "ada")] * 2
    assert keeper.again[-2:] == [False, True]


async def test_erasures_that_came_together_are_one_call_and_so_is_what_comes_with_those_that_are_due_again(keeper, clock):
    calls, numbers = keeper.calls, [keeper.erase("default", f"user-{number}") for number in range(100)]
    await keeper.exchange()
    assert (keeper.calls - calls, len(keeper.told)) == (1, 100)
    await keeper.exchange()
    assert keeper.erased(numbers[-1])
    clock.advance(10)
    keeper.erase("default", "ada")
    await keeper.exchange()
    assert (keeper.calls - calls, len(keeper.told), keeper.again.count(True)) == (2, 201, 100)


@pytest.mark.virtual_time
async def test_erasures_that_come_one_after_the_other_are_carried_out_a_few_times_a_second_and_one_that_comes_alone_at_once():
    keeper = Keeper(time.monotonic)
    await keeper.exchange()
    await asyncio.sleep(1)
    began = time.monotonic()
    keeper.erase("default", "ada")
    await keeper.exchange()
    assert (keeper.told[-1], time.monotonic()) == (("default", "ada"), began)
    calls, until = keeper.calls, time.monotonic() + 5
    while time.monotonic() < until:
        following = asyncio.create_task(keeper.exchange())
        while not following.done():
            number = keeper.erase("default", f"user-{time.monotonic()}")
            await asyncio.sleep(0.01)
    for _ in range(2):
        await keeper.exchange()
    assert keeper.erased(number)
    assert len(keeper.told) > 400
    assert keeper.calls - calls <= 5 / erasure_follower.REST_S + 2


async def test_answers_are_dropped_once_and_nothing_is_forgotten_by_that(keeper, clock):
    number, started = keeper.erasures.erase("default", "ada", now=NOW, answers_only=True), Keeper(clock)
    started.erasures = keeper.erasures
    for _ in range(2):
        await keeper.exchange()
        await started.exchange()
    assert keeper.erased(number)
    clock.advance(10)
    for _ in range(3):
        await keeper.exchange()
        await started.exchange()
    assert (keeper.told, keeper.dropped) == ([], [("default", "ada")])
    assert (started.told, started.dropped) == ([EVERYTHING], []), "it had none to drop"


async def test_the_second_time_comes_also_while_the_switchboard_is_away(keeper, clock):
    keeper.erase("default", "ada")
    await keeper.exchange()
    keeper.erasures = None
    clock.advance(10)
    await keeper.exchange()
    assert keeper.told == [("default", "ada")] * 2


async def test_after_a_restart_of_the_switchboard_everything_is_forgotten_once(keeper):
    keeper.erasures = None
    await keeper.exchange()
    assert keeper.told == []
    keeper.erasures = Erasures(now=NOW - 30)
    for _ in range(3):
        await keeper.exchange()
    assert keeper.told == [EVERYTHING]


@pytest.mark.usefixtures("_without_rest")
async def test_what_has_served_before_the_switchboard_came_forgets_everything_again_when_its_requests_are_over(clock):
    keeper = Keeper(clock)
    board, keeper.erasures = keeper.erasures, None
    await keeper.exchange()
    keeper.serve()
    keeper.erasures = board
    await keeper.exchange()
    assert keeper.told == [EVERYTHING]
    clock.advance(10)
    for _ in range(3):
        await keeper.exchange()
    assert keeper.told == [EVERYTHING] * 2


async def test_what_starts_after_an_erasure_carries_it_out_when_the_requests_of_that_time_are_over(keeper, clock):
    """One of them may have come to it, as an entry of a batch that waited for its turn."""
    keeper.erase("default", "ada")
    started = Keeper(clock)
    started.erasures = keeper.erasures
    await started.exchange()
    started.serve()
    assert started.told == [EVERYTHING]
    clock.advance(10)
    for _ in range(3):
        await started.exchange()
    assert started.told == [EVERYTHING, ("default", "ada")]
    assert started.again == [False, True]


async def test_what_cannot_be_forgotten_is_not_told_and_tried_again(keeper, clock, caplog):
    keeper.error = RuntimeError("the engine is away")
    number = keeper.erase("default", "ada")
    for _ in range(2):
        await keeper.exchange()
        assert not keeper.erased(number)
    assert "is tried again" in caplog.text
    keeper.error = None
    for _ in range(2):
        await keeper.exchange()
    assert keeper.erased(number)
    keeper.error = RuntimeError("the engine is away")
    clock.advance(10)
    await keeper.exchange()
    keeper.error = None
    await keeper.exchange()
    assert keeper.told == [("default", "ada")] * 2, "the second time is not lost either"


async def test_while_the_engine_is_busy_it_reports_but_does_not_claim(keeper, monkeypatch):
    monkeypatch.setattr(erasure_follower, "PATIENCE_S", 0.01)
    keeper.busy = asyncio.Event()
    number = keeper.erase("default", "ada")
    async with asyncio.timeout(60):  # a silent process would count as gone
        for _ in range(5):
            await keeper.exchange()
    assert not keeper.erased(number)
    keeper.busy.set()
    for _ in range(2):
        await keeper.exchange()
    assert keeper.told == [("default", "ada")]
    assert keeper.erased(number)


class Keeps(Sound):
    """Keeps a batch's users at its end, which is when the test says."""

    def __init__(self, kept: set[tuple[str, str]], begun: threading.Event, may_end: threading.Event) -> None:
        self.kept_users, self.begun, self.may_end = kept, begun, may_end

    def batch_infer(self, requests):
        users = {(request.tenant, request.user_id) for request in requests if request.user_id}
        if users:
            self.begun.set()
            self.may_end.wait(300)
        self.kept_users |= users
        return super().batch_infer(requests)

    def forget(self, tenant, user):
        self.kept_users.discard((tenant, user))
        return 1


class Resets(Sound):
    """Keeps what it computes without its users, as vLLM does."""

    def __init__(self, resets: list[str]) -> None:
        self.resets = resets

    def forget_everything(self):
        self.resets.append("forget everything")
        return 0


async def test_a_hundred_erasures_at_once_cost_a_replica_one_reset_of_an_engine_that_knows_no_users(three_versions):
    engine = {"backends": {"torch": f"{__name__}:Resets"}, "order": ["torch"], "options": {"torch": {"resets": (resets := [])}}}
    settings = {"model_dir": str(three_versions), "encoder": engine}
    switchboard = SwitchboardDeployment({"model_dir": str(three_versions)}, live=only("a"))
    replica = Encoder(tree := parse(settings), Heartbeat(tree, Handle(switchboard), "a"))
    await replica.start()
    try:
        before = len(resets)
        for number in range(100):
            last = await switchboard.erase("default", f"user-{number}")
        assert not await switchboard.erased(last)
        await until(lambda: switchboard.erased(last))
        assert len(resets) == before + 1
    finally:
        await replica.close()


async def test_a_replica_erases_in_its_engine_thread_after_the_batch_that_runs(three_versions):
    """The batch keeps what it computes at its end: were the user erased meanwhile, that would stay."""
    kept, begun, may_end = set(), threading.Event(), threading.Event()
    options = {"kept": kept, "begun": begun, "may_end": may_end}
    engine = {"backends": {"torch": f"{__name__}:Keeps"}, "order": ["torch"], "options": {"torch": options}}
    settings = {"model_dir": str(three_versions), "encoder": engine}
    handle = Handle(switchboard := SwitchboardDeployment({"model_dir": str(three_versions)}, live=only("a")))
    replica = Encoder(tree := parse(settings), Heartbeat(tree, handle, "a"))
    await replica.start()
    try:
        asking = asyncio.create_task(replica.answer(EncodeRequest(random_sequence(3, items=20), 5, user_id="ada"), 300.0))
        await until(begun.is_set)
        number, asked = await switchboard.erase("default", "ada"), len(handle.calls)
        await until(lambda: len(handle.calls) > asked, "the replica knows of the erasure")
        assert not await switchboard.erased(number)
        may_end.set()
        await asking
        await until(lambda: switchboard.erased(number))
        assert kept == set()
    finally:
        may_end.set()
        await replica.close()
