"""Following the switchboard's erasures: what is done when, what is told when, and what happens while the switchboard is away."""

import asyncio
import threading

import pytest

from cluster.config import parse
from cluster.switchboard import Switchboard
from cluster.values import EncodeRequest
from deployments import following
from deployments.encoder import Encoder
from deployments.following import Follower
from deployments.switchboard import SwitchboardDeployment
from tests.broken_backends import Sound
from tests.bundles import random_sequence
from tests.fakes.clock import Clock
from tests.fakes.handles import Handle
from tests.waiting import until

NOW = 1_760_000_000.0


class Keeper:
    """Remembers what it was told; `error` is raised instead, and `busy` has it wait."""

    def __init__(self):
        self.told, self.error, self.busy = [], None, None

    async def on_erasure(self, tenant, user):
        if self.busy:
            await self.busy.wait()
        if self.error:
            raise self.error
        self.told.append((tenant, user))

    async def on_lost_track(self):
        self.told.append("everything")


@pytest.fixture
def handle():
    return Handle(Switchboard(now=NOW - 60), now=NOW)


@pytest.fixture
def keeper():
    return Keeper()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def follower(handle, keeper, clock):
    """One that has found its place."""
    made = Follower(handle, "encoder/a", keeper.on_erasure, keeper.on_lost_track, again_after_s=10, clock=clock)
    await made.exchange()
    assert keeper.told.pop() == "everything", "who knows no place may have missed anything"
    return made


async def test_what_is_new_is_forgotten_once_and_told_with_the_next_exchange(follower, handle, keeper):
    number = handle.replica.erase("default", "ada", now=NOW)
    await follower.exchange()
    assert keeper.told == [("default", "ada")]
    assert not handle.replica.erased(number, now=NOW)
    await follower.exchange()
    assert handle.replica.erased(number, now=NOW)
    assert keeper.told == [("default", "ada")]


async def test_once_more_when_the_requests_of_that_time_are_over(follower, handle, keeper, clock):
    handle.replica.erase("default", "ada", now=NOW)
    await follower.exchange()
    clock.advance(9.9)
    await follower.exchange()
    assert len(keeper.told) == 1
    clock.advance(0.1)
    for _ in range(3):
        await follower.exchange()
    assert keeper.told == [("default", "ada")] * 2


async def test_the_second_time_comes_also_while_the_switchboard_is_away(follower, handle, keeper, clock):
    handle.replica.erase("default", "ada", now=NOW)
    await follower.exchange()
    handle.replica = None
    clock.advance(10)
    await follower.exchange()
    assert keeper.told == [("default", "ada")] * 2


async def test_after_a_restart_of_the_switchboard_everything_is_forgotten_once(follower, handle, keeper):
    handle.replica = None
    await follower.exchange()
    assert keeper.told == []
    handle.replica = Switchboard(now=NOW - 30)
    for _ in range(3):
        await follower.exchange()
    assert keeper.told == ["everything"]


async def test_what_cannot_be_forgotten_is_not_told_and_tried_again(follower, handle, keeper, clock, caplog):
    keeper.error = RuntimeError("the engine is away")
    number = handle.replica.erase("default", "ada", now=NOW)
    for _ in range(2):
        await follower.exchange()
        assert not handle.replica.erased(number, now=NOW)
    assert "is tried again" in caplog.text
    keeper.error = None
    for _ in range(2):
        await follower.exchange()
    assert handle.replica.erased(number, now=NOW)
    keeper.error = RuntimeError("the engine is away")
    clock.advance(10)
    await follower.exchange()
    keeper.error = None
    await follower.exchange()
    assert keeper.told == [("default", "ada")] * 2, "the second time is not lost either"


async def test_while_the_engine_is_busy_it_reports_but_does_not_claim(follower, handle, keeper, monkeypatch):
    monkeypatch.setattr(following, "REPORT_INTERVAL_S", 0.01)
    keeper.busy = asyncio.Event()
    number, asked = handle.replica.erase("default", "ada", now=NOW), len(handle.calls)
    for _ in range(5):
        await follower.exchange()
    assert len(handle.calls) == asked + 5, "a silent one would count as gone"
    assert not handle.replica.erased(number, now=NOW)
    keeper.busy.set()
    for _ in range(2):
        await follower.exchange()
    assert keeper.told == [("default", "ada")]
    assert handle.replica.erased(number, now=NOW)


async def test_following_tells_at_once_what_is_done(handle, keeper, monkeypatch):
    monkeypatch.setattr(following, "REPORT_INTERVAL_S", 3600)
    number = handle.replica.erase("default", "ada", now=NOW)
    follower = Follower(handle, "gateway/a", keeper.on_erasure, keeper.on_lost_track, again_after_s=10)
    task = asyncio.create_task(follower.follow_forever())
    async with asyncio.timeout(10):
        while not (len(handle.calls) >= 2 and handle.replica.erased(number, now=NOW)):  # noqa: ASYNC110 - nothing tells when it has asked
            await asyncio.sleep(0)
    task.cancel()
    assert len(handle.calls) == 2


class Keeps(Sound):
    """Keeps a batch's users at its end, which is when the test says."""

    def __init__(self, kept: set[tuple[str, str]], begun: threading.Event, may_end: threading.Event) -> None:
        self.kept_users, self.begun, self.may_end = kept, begun, may_end

    def batch_infer(self, requests):
        users = {(request.tenant, request.user) for request in requests if request.user}
        if users:
            self.begun.set()
            self.may_end.wait(300)
        self.kept_users |= users
        return super().batch_infer(requests)

    def forget(self, tenant, user):
        self.kept_users.discard((tenant, user))
        return 1


async def test_a_replica_erases_in_its_engine_thread_after_the_batch_that_runs(three_versions):
    """The batch keeps what it computes at its end: were the user erased meanwhile, that would stay."""
    kept, begun, may_end = set(), threading.Event(), threading.Event()
    options = {"kept": kept, "begun": begun, "may_end": may_end}
    engine = {"backends": {"torch": f"{__name__}:Keeps"}, "order": ["torch"], "options": {"torch": options}}
    settings = {"model_dir": str(three_versions), "encoder": engine}
    clock = Clock(NOW - 60)
    handle = Handle(switchboard := SwitchboardDeployment({"model_dir": str(three_versions)}, clock))
    clock.advance(60)  # the switchboard has heard of every replica that lives
    replica = Encoder(parse(settings), handle, "a")
    await replica.start()
    try:
        asking = asyncio.create_task(replica.encode(EncodeRequest(random_sequence(3, items=20), 5, user="ada"), 300.0))
        await until(begun.is_set)
        number, asked = await switchboard.erase("default", "ada"), len(handle.calls)
        await until(lambda: [call[0] for call in handle.calls[asked:]].count("exchange") >= 2, "the replica knows of the erasure")
        assert not await switchboard.erased(number)
        may_end.set()
        await asking
        await until(lambda: switchboard.erased(number))
        assert kept == set()
    finally:
        may_end.set()
        await replica.close()
