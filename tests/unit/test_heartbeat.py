"""A process's heartbeat, beside a real switchboard in this process: what is read, held, told and followed, and in how many calls."""

import asyncio
import errno
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cluster.bundle import WEIGHTS
from cluster.bundle_store import BundleStore
from cluster.config import Settings, parse
from cluster.engines.snapshots import StageSnapshot
from cluster.errors import BundleError
from cluster.fleet.board import READY, Presence
from cluster.fleet.heartbeat import Report
from cluster.fleet.rollout import ROLLOUT, Arm, Rollout, RolloutStore, Trial
from cluster.fleet.trial_guard import VersionFigures
from deployments.fleet import heartbeat as module
from deployments.fleet.heartbeat import Heartbeat
from deployments.fleet.model_cache import ModelCache
from deployments.fleet.switchboard import JUDGE_INTERVAL_S, KEEP_ERASURES_S, TTL_S, SwitchboardDeployment
from tests.bundles import make_bundle
from tests.fakes.clock import Clock
from tests.fakes.handles import Handle
from tests.fakes.processes import only
from tests.unit.test_switchboard import backend
from tests.waiting import settled, until

NOW = 1_760_000_000.0
KEEP_S = 60.0


@pytest.fixture
def rollouts(three_versions):
    """Version 1 is stable, of 3."""
    store = BundleStore(three_versions)
    store.promote(1)
    return RolloutStore(store)


@pytest.fixture
def clock():
    return Clock(NOW)


@pytest.fixture
def board(three_versions, clock):
    """A switchboard that has heard of every process that lives."""
    made = SwitchboardDeployment({"model_dir": str(three_versions)}, clock, only("a"))
    clock.advance(2 * TTL_S)
    return made


@pytest.fixture
def handle(board):
    return Handle(board)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(module, "LOOK_INTERVAL_S", 0.01)


async def made(bundle):
    return SimpleNamespace(bundle=bundle)


async def discarded(model):
    pass


class Member:
    """A role that holds bundles, and remembers what it was told."""

    def __init__(self, store, role="encoder", uses=(), figures=None):
        self.role, self.uses, self.figures = role, frozenset(uses), figures or {}
        self.model_cache = ModelCache(store, made, discarded, keep_s=KEEP_S)
        self.rollout = self.orders = None
        self.engines, self.forgotten, self.dropped, self.followed = [backend()], [], [], 0

    async def load(self, versions, *, only):
        await self.model_cache.fill(versions, only=only)

    def presence(self, rollout):
        return Presence(self.role, self.model_cache.holds, self.uses, rollout.period, self.figures if rollout.trial else {})

    def snapshot(self):
        return StageSnapshot(self.role, f"{self.role}=torch", tuple(self.engines)) if self.model_cache.models else None

    def follow(self, rollout, orders):
        self.rollout, self.orders = rollout, orders
        self.followed += 1

    async def forget(self, users, again):
        self.forgotten += [*users, *again]

    def drop_answers(self, tenant, user):
        self.dropped.append((tenant, user))

    @property
    def stable(self):
        return self.rollout.stable


@pytest.fixture
async def process(handle, rollouts):
    """Makes a process of these members, which have not started; ends its heartbeat with the test."""
    beating = []

    def make(*members, version=None, name="a"):
        heartbeat = Heartbeat(parse({"model_dir": str(rollouts.store.root), "version": version}), handle, name)
        for member in members:
            heartbeat.join(member.role, member)
        beating.append(heartbeat)
        return heartbeat

    yield make
    for heartbeat in beating:
        heartbeat.close()


def beats(handle):
    """Every report that was told."""
    return [report for method, _, report, *_ in handle.calls if method == "beat"]


async def test_what_serves_is_held_before_anything_is_served_and_the_switchboard_told_so(process, handle, rollouts):
    member = Member(rollouts.store)
    await process(member).start()
    assert member.model_cache.holds == {1: READY}
    assert [dict(report.presences["encoder/a"].holds) for report in beats(handle)] == [{}, {}, {1: READY}]
    assert member.orders.fleet.ready == {1}


async def test_a_process_that_starts_in_the_middle_of_a_rollout_holds_what_others_still_answer_with_too(process, board, rollouts):
    await board.beat("b", Report({"gateway/b": Presence("gateway", {}, frozenset({2}))}), 0, 0.0)
    rollouts.promote(3)
    member = Member(rollouts.store)
    await process(member).start()
    assert member.model_cache.holds == {3: READY, 2: READY}


class Hangs(Member):
    """Has the version `on` only once that `may_end`. `times`: how often it has begun to load it."""

    def __init__(self, store, role="encoder", on=3):
        super().__init__(store, role)
        self.on, self.may_end, self.times = on, asyncio.Event(), 0
        self.model_cache = ModelCache(store, self.made, discarded, keep_s=KEEP_S)

    async def made(self, bundle):
        if bundle.manifest.version == self.on:
            self.times += 1
            await self.may_end.wait()
        return await made(bundle)


@pytest.fixture
def looked(monkeypatch):
    """Waits until the process that starts knows the rollout as it is now."""
    read, reads = RolloutStore.read, []

    def noted(store):
        rollout = read(store)
        reads.append(rollout)
        return rollout

    async def wait():
        before = len(reads)
        await until(lambda: len(reads) >= before + 3, "one was under way, the next is known, as another has begun since")

    monkeypatch.setattr(RolloutStore, "read", noted)
    return wait


@pytest.mark.parametrize("trial", [None, Trial(version=3, share=0.5)], ids=["promoted", "on trial"])
async def test_a_process_that_starts_waits_no_longer_for_a_version_that_is_rolled_back(process, board, rollouts, trial):
    """Gateways answer by it and by the one before."""
    await board.beat("b", Report({"gateway/b": Presence("gateway", {}, frozenset({1, 3}))}), 0, 0.0)
    rollouts.promote(3, trial)
    members = encoder, _ = Hangs(rollouts.store), Hangs(rollouts.store, "gateway")
    starting = asyncio.create_task(process(*members).start())
    await until(lambda: 3 in encoder.model_cache.holds)
    rollouts.rollback("it hangs")
    async with asyncio.timeout(120):
        await starting
    assert [one.model_cache.holds[1] for one in members] == [READY, READY]


async def test_all_members_of_a_process_start_with_one_version_whatever_is_promoted_meanwhile(process, rollouts, looked):
    """Else they have none to answer by until the first one has loaded another."""
    members = encoder, _ = Hangs(rollouts.store, on=1), Member(rollouts.store, "gateway")
    starting = asyncio.create_task(process(*members).start())
    await until(lambda: encoder.times)
    rollouts.promote(3)
    await looked()
    encoder.may_end.set()
    await starting
    assert [one.model_cache.holds.get(1) for one in members] == [READY, READY]
    await until(lambda: [one.model_cache.holds.get(3) for one in members] == [READY, READY], "it is followed afterwards")


async def test_all_members_of_a_process_have_the_version_to_which_one_was_rolled_back_that_one_of_them_held(process, rollouts):
    rollouts.promote(3)
    members = _, generator, _ = Member(rollouts.store), Hangs(rollouts.store, "generator"), Member(rollouts.store, "gateway")
    starting = asyncio.create_task(process(*members).start())
    await until(lambda: generator.times)
    rollouts.rollback("it hangs")
    async with asyncio.timeout(120):
        await starting
    assert [one.model_cache.holds.get(1) for one in members] == [READY] * 3


async def test_a_process_that_starts_waits_no_longer_for_the_version_before_either_once_that_is_rolled_back(process, rollouts):
    rollouts.promote(2)
    rollouts.promote(3)
    members = encoder, generator = Hangs(rollouts.store, on=2), Hangs(rollouts.store, "generator")
    starting = asyncio.create_task(process(*members).start())
    for one in (generator, encoder):
        await until(lambda one=one: one.times)
        rollouts.rollback("it hangs")
    async with asyncio.timeout(120):
        await starting
    assert [one.model_cache.holds.get(1) for one in members] == [READY, READY]


async def test_a_version_that_was_rolled_back_is_waited_for_where_it_serves_in_place_of_a_damaged_one(process, rollouts, looked):
    rollouts.promote(3)
    encoder = Hangs(rollouts.store)
    starting = asyncio.create_task(process(encoder).start())
    await until(lambda: encoder.times == 1)
    rollouts.rollback("it takes long")
    (rollouts.store.root / "1" / WEIGHTS).unlink()
    await until(lambda: encoder.times == 2)
    await looked()
    encoder.may_end.set()
    await starting
    assert (encoder.times, encoder.model_cache.holds[3]) == (2, READY)


async def others(board, gateways, encoder):
    """Another process's encoder that holds these versions, and gateways that answer by those."""
    presences = {"gateway/b": Presence("gateway", {}, frozenset(gateways)), "encoder/b": Presence("encoder", dict.fromkeys(encoder, READY))}
    await board.beat("b", Report(presences), 0, 0.0)


async def test_a_replica_that_starts_for_so_long_that_others_change_over_joins_with_what_gateways_answer_by_then(
    process, handle, board, rollouts
):
    await others(board, {1}, {1})
    encoder = Hangs(rollouts.store, on=1)
    starting = asyncio.create_task(process(encoder).start())
    await until(lambda: encoder.times)
    rollouts.promote(3)
    await others(board, {3}, {3})
    encoder.may_end.set()
    await starting
    assert encoder.model_cache.holds == {1: READY, 3: READY}
    assert [dict(report.presences["encoder/a"].holds) for report in beats(handle)] == [{}, {}, {}, {1: READY, 3: READY}]


@pytest.fixture
def three_damaged(rollouts, monkeypatch):
    """Version 3 is stable, and cannot be loaded where a process starts now."""
    monkeypatch.setattr(module, "TTL_S", 0.5)
    rollouts.promote(3)
    (rollouts.store.root / "3" / WEIGHTS).unlink()


@pytest.mark.usefixtures("three_damaged")
async def test_a_replica_that_can_serve_nothing_by_which_gateways_answer_does_not_join_others_that_can(process, handle, board, rollouts):
    await others(board, {3}, {3})
    with pytest.raises(BundleError, match=r"encoder/a cannot serve what gateways answer by .* does not join: version 3: .*is missing"):
        await process(Member(rollouts.store)).start()
    told = [why for report in beats(handle) for why in report.presences["encoder/a"].holds.values()]
    assert (READY in told, "it left no room for a version by which gateways answer" in told) == (False, True), (
        "others change over without it"
    )
    assert (await board.beat("b", Report(), 0, 0.0)).fleet.ready == {3}


@pytest.mark.usefixtures("three_damaged")
async def test_a_replica_that_can_serve_the_version_on_trial_alone_does_not_join_others_that_can_serve_the_stable_one(
    process, board, rollouts
):
    rollouts.promote(1, Trial(version=1, share=0.05))
    await others(board, {3, 1}, {3, 1})
    with pytest.raises(BundleError, match=r"encoder/a cannot serve what gateways answer by .* does not join: version 3: .*is missing"):
        await process(Member(rollouts.store)).start()
    rollouts.promote(1, Trial(version=1, share=1))
    await process(encoder := Member(rollouts.store)).start()
    assert encoder.model_cache.holds[1] == READY


@pytest.mark.usefixtures("three_damaged")
@pytest.mark.parametrize(("beside", "stands_in"), [("others without it", 2), ("its own gateway", 1), ("a pin", 2)])
async def test_a_version_stands_in_for_a_damaged_one_where_no_other_replica_has_that_or_none_is_asked(
    process, board, rollouts, beside, stands_in
):
    await others(board, {3}, {2} if beside == "others without it" else {3})
    encoder = Member(rollouts.store)
    members = [encoder, Member(rollouts.store, "gateway")] if beside == "its own gateway" else [encoder]
    await process(*members, version=2 if beside == "a pin" else None).start()
    assert encoder.model_cache.holds[stands_in] == READY


@pytest.mark.usefixtures("three_damaged")
async def test_a_version_stands_in_for_a_damaged_one_once_the_last_replica_that_held_that_counts_as_gone(
    process, board, rollouts, clock, monkeypatch
):
    monkeypatch.setattr(module, "TTL_S", 10.0)  # it is gone meanwhile
    await others(board, {3}, {3})
    encoder = Member(rollouts.store)
    starting = asyncio.create_task(process(encoder).start())
    await until(lambda: encoder.model_cache.holds.get(1) == READY)
    clock.advance(2 * TTL_S)
    await others(board, {3}, {})
    await starting
    assert encoder.model_cache.holds[1] == READY


async def test_a_promoted_version_is_loaded_and_told_of_once_it_is_there(process, rollouts):
    member = Member(rollouts.store)
    await process(member).start()
    rollouts.promote(2)
    await until(lambda: member.orders.fleet.ready == {1, 2})
    assert (member.stable, member.model_cache.holds) == (2, {1: READY, 2: READY})


async def test_a_version_that_cannot_be_served_is_told_with_the_reason(process, handle, rollouts):
    member = Member(rollouts.store)
    await process(member).start()
    rollouts.promote(2)
    (rollouts.store.root / "2" / WEIGHTS).unlink()
    await until(lambda: "weights.safetensors is missing" in beats(handle)[-1].presences["encoder/a"].holds.get(2, ""))
    assert member.orders.fleet.ready == {1}


async def test_a_version_on_trial_is_held_beside_the_stable_one_and_its_figures_are_told_during_the_trial_only(
    process, handle, board, rollouts
):
    figures = {Arm(2, tried=True): VersionFigures(requests=5)}
    member = Member(rollouts.store, "gateway", uses={1, 2}, figures=figures)
    await process(member).start()
    told = beats(handle)[-1].presences["gateway/a"]
    assert (told.period, told.figures, told.uses) == ("", {}, {1, 2})
    rollout = rollouts.promote(2, Trial(version=2, share=0.5))
    await until(lambda: member.model_cache.holds == {1: READY, 2: READY})
    await until(lambda: beats(handle)[-1].presences["gateway/a"].period == rollout.period)
    _, fleet = await board.versions()
    assert fleet.figures == figures


async def test_a_pinned_version_is_the_only_one_whatever_is_promoted(process, rollouts):
    pinned, free = Member(rollouts.store), Member(rollouts.store)
    await process(pinned, version=3).start()
    await process(free, name="b").start()
    rollouts.promote(2)
    await until(lambda: free.stable == 2 and free.model_cache.holds.get(2) == READY)
    assert (pinned.model_cache.holds, pinned.rollout.versions) == ({3: READY}, (3,))


async def test_while_the_switchboard_is_away_the_rollout_is_followed_and_the_last_orders_stay(process, handle, board, rollouts, caplog):
    member = Member(rollouts.store)
    await process(member).start()
    await board.set("encoder", "torch", "off")
    await until(lambda: member.orders.switches)
    fleet, handle.replica = member.orders.fleet, None
    rollouts.promote(2)
    await until(lambda: member.model_cache.holds == {1: READY, 2: READY})
    await until(lambda: "the switchboard does not answer, its last orders stay in force" in caplog.text)
    assert (member.stable, member.orders.fleet, dict(member.orders.switches)) == (2, fleet, {("encoder", "torch"): "off"})


async def test_a_restarted_switchboard_learns_from_the_processes_and_has_their_users_forgotten(process, handle, board, rollouts, clock):
    member = Member(rollouts.store)
    await process(member).start()
    version = await board.set("encoder", "torch", "first")
    await until(lambda: member.orders.switches_version == version)
    member.forgotten.clear()
    handle.replica = restarted = SwitchboardDeployment({"model_dir": str(rollouts.store.root)}, clock)
    await until(lambda: member.forgotten == [(None, None)])
    await until(lambda: restarted.applied(version))
    assert dict(member.orders.switches) == {("encoder", "torch"): "first"}


async def test_a_process_that_was_silent_for_longer_than_erasures_are_kept_is_told_to_forget_everything(board, clock):
    before = (await board.beat("a", Report(), 0, 0.0)).erasures.place
    await board.erase("shop", "ada")
    clock.advance(KEEP_ERASURES_S - 1)
    assert [one.user for one in (await board.beat("a", Report(place=before), 0, 0.0)).erasures.erasures] == ["ada"]
    clock.advance(2)
    told = (await board.beat("a", Report(place=before), 0, 0.0)).erasures
    assert (told.lost_track, told.erasures) == (True, ())
    assert not (await board.beat("a", Report(place=told.place), 0, 0.0)).erasures.lost_track


async def test_what_began_to_serve_without_a_switchboard_has_its_users_forgotten_twice(process, handle, board, rollouts, monkeypatch):
    """Requests were under way the first time."""
    monkeypatch.setattr(Settings, "longest_request_s", 0.1)
    handle.replica = None
    await process(member := Member(rollouts.store)).start()
    monkeypatch.setattr(module, "REPORT_INTERVAL_S", 0.05)
    handle.replica = board
    await until(lambda: member.forgotten == [(None, None)] * 2)


async def test_a_restarted_switchboard_has_heard_of_few_gateways_and_does_not_enlarge_their_share(process, handle, board, rollouts, clock):
    await board.beat("b", Report({"gateway/b": Presence("gateway", {1: READY})}), 0, 0.0)
    heartbeat = process(member := Member(rollouts.store, "gateway"))
    await heartbeat.start()
    assert heartbeat.gateways == 2
    handle.replica = SwitchboardDeployment({"model_dir": str(rollouts.store.root)}, clock)
    asked = len(handle.calls)
    await until(lambda: len(handle.calls) >= asked + 2)
    assert (heartbeat.gateways, member.orders.fleet.settled) == (2, False)
    clock.advance(2 * TTL_S)
    await until(lambda: heartbeat.gateways == 1)


async def test_a_rollout_that_cannot_be_read_stays_as_it_is(process, rollouts, caplog):
    member = Member(rollouts.store)
    await process(member).start()
    (rollouts.store.root / ROLLOUT).write_text("{")
    await until(lambda: "the rollout stays as it is" in caplog.text)
    assert (member.stable, member.model_cache.holds) == (1, {1: READY})
    (rollouts.store.root / ROLLOUT).unlink()
    rollouts.promote(2)
    await until(lambda: member.stable == 2)


async def test_a_rollout_that_cannot_be_read_for_long_is_told_once_in_a_while_and_the_process_knows_that_it_does_not_know(
    process, rollouts, caplog, monkeypatch
):
    monkeypatch.setattr(module, "TOLD_EVERY_S", 1e9)
    heartbeat, reads = process(Member(rollouts.store)), []
    await heartbeat.start()
    assert heartbeat.knows_rollout

    def refused():
        reads.append(1)
        raise PermissionError(errno.EACCES, "may not be read")

    with monkeypatch.context() as unreadable:
        unreadable.setattr(heartbeat._rollouts, "read", refused)  # noqa: SLF001 - as for another user than the tests'
        await until(lambda: len(reads) == 20)
    assert not heartbeat.knows_rollout
    assert caplog.text.count("the rollout stays as it is") == 1
    await until(lambda: heartbeat.knows_rollout)


@pytest.mark.parametrize(("file", "holds", "stable"), [(ROLLOUT, '{"of": "a later release"}', 2), ("current", "two", 1)])
async def test_a_process_that_starts_while_the_rollout_cannot_be_read_serves_the_current_version_or_else_the_one_before(
    process, rollouts, caplog, file, holds, stable
):
    rollouts.promote(2)
    (rollouts.store.root / file).write_text(holds)
    member = Member(rollouts.store)
    await process(member).start()
    await until(lambda: member.rollout is not None)
    assert (member.stable, member.model_cache.holds) == (stable, {stable: READY})
    assert "the rollout stays as it is" in caplog.text
    (rollouts.store.root / file).unlink()
    rollouts.store.promote(3)
    await until(lambda: member.stable == 3)


async def test_a_rollout_that_takes_for_ever_to_be_read_silences_no_process(process, handle, rollouts, monkeypatch):
    """As where the file server that has the models hangs."""
    heartbeat, may_end = process(Member(rollouts.store)), threading.Event()
    await heartbeat.start()
    monkeypatch.setattr(heartbeat._rollouts, "read", lambda: may_end.wait(300) and Rollout(stable=2))  # noqa: SLF001 - it hangs
    asked = len(handle.calls)
    await until(lambda: len(handle.calls) >= asked + 3, "it goes on to report")
    may_end.set()
    await until(lambda: heartbeat._rollout.stable == 2)  # noqa: SLF001 - what was read at last


async def test_orders_are_given_while_the_file_server_by_which_a_trial_is_judged_hangs(board, rollouts, clock, monkeypatch):
    trial = rollouts.promote(2, Trial(version=2, share=0.5))
    bad = {Arm(1): VersionFigures(1000), Arm(2, tried=True): VersionFigures(1000, degraded=500)}
    may_end, reads = threading.Event(), []
    report = Report({"gateway/a": Presence("gateway", {1: READY}, frozenset({1}), trial.period, bad)})
    monkeypatch.setattr(board._rollouts, "read", lambda: reads.append(1) or (may_end.wait(300) and trial))  # noqa: SLF001 - it hangs
    try:
        for _ in range(3):
            clock.advance(2 * JUDGE_INTERVAL_S)
            number = await board.erase("shop", "ada")
            told = await asyncio.wait_for(board.beat("a", report, 0, 0.0), 60)
            assert told.erasures.place.number == number
        assert len(reads) == 1, "one thread waits, and no other"
    finally:
        may_end.set()
    await until(lambda: rollouts.read().trial is None, "the trial ends once its file can be read")


async def test_a_trial_that_goes_badly_ends_at_once_though_the_models_directory_cannot_be_written(
    process, board, handle, rollouts, clock, monkeypatch, caplog
):
    bad, written, tries = {Arm(1): VersionFigures(1000), Arm(2, tried=True): VersionFigures(1000, degraded=500)}, rollouts.end, []
    trial = rollouts.promote(2, Trial(version=2, share=0.5)).trial

    def end_on_a_full_disk(trial, reason):
        tries.append(reason)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), ROLLOUT)

    monkeypatch.setattr(board._rollouts, "end", end_on_a_full_disk)  # noqa: SLF001 - as RolloutStore has it
    member = Member(rollouts.store, "gateway", uses={1, 2}, figures=bad)
    await process(member).start()
    for number in range(1, 4):
        clock.advance(2 * JUDGE_INTERVAL_S)
        await until(lambda number=number: len(tries) >= number, "it is tried again, though no gateway takes part any more")
    await until(lambda: member.rollout.trial is None)
    assert (rollouts.read().trial, beats(handle)[-1].presences["gateway/a"].period) == (trial, "")
    assert caplog.text.count("which cannot be written") == 1
    await process(late := Member(rollouts.store), name="b").start()
    await until(lambda: late.rollout is not None)
    assert (late.rollout.trial, (await board.versions())[0].trial) == (None, None)
    monkeypatch.setattr(board._rollouts, "end", written)  # noqa: SLF001
    clock.advance(2 * JUDGE_INTERVAL_S)
    await until(lambda: rollouts.read().trial is None, "its file says so once it can be written")
    assert rollouts.read().ended[-1].reason == tries[0]
    again = rollouts.promote(2, Trial(version=2, share=0.5)).trial
    await until(lambda: member.rollout.trial == again, "a trial that an operator begins anew is another one")


async def test_a_file_server_that_hangs_takes_one_thread_of_the_switchboards_however_often_versions_are_asked_for(
    board, rollouts, monkeypatch
):
    may_end, reads = threading.Event(), []
    monkeypatch.setattr(board._rollouts, "read", lambda: reads.append(1) or (may_end.wait(300) and Rollout(stable=2)))  # noqa: SLF001
    asked = [asyncio.create_task(board.versions()) for _ in range(3)]
    try:
        await until(lambda: reads)
        asked[0].cancel()  # as where its caller waits no longer
        asked.append(asyncio.create_task(board.versions()))
        await settled()
        assert len(reads) == 1
    finally:
        may_end.set()
    assert [rollout.stable for rollout, _ in await asyncio.gather(*asked[1:])] == [2, 2, 2]


async def test_where_replicas_hold_no_version_that_serves_the_newest_that_all_hold_is_loaded_too(process, board, rollouts):
    await board.beat("b", Report({"encoder/b": Presence("encoder", {2: READY, 1: READY})}), 0, 0.0)
    rollouts.promote(3)
    member = Member(rollouts.store, "gateway")
    await process(member).start()
    assert member.model_cache.holds == {3: READY, 2: READY}


async def test_where_the_only_replica_of_a_stage_fell_back_every_process_loads_the_version_that_it_holds(process, rollouts):
    rollouts.promote(3)
    others = [Member(rollouts.store, "generator"), Member(rollouts.store, "gateway", uses={3})]
    await process(*others, name="b").start()
    (rollouts.store.root / "3" / WEIGHTS).unlink()
    await process(encoder := Member(rollouts.store)).start()
    assert [version for version, obstacle in encoder.model_cache.holds.items() if obstacle == READY] == [1]
    await until(lambda: all(one.model_cache.holds == {3: READY, 1: READY} for one in others))
    await until(lambda: encoder.orders.fleet.ready == {1})


async def test_what_a_restarted_switchboard_has_heard_of_few_replicas_has_no_process_load_another_version(process, handle, rollouts, clock):
    handle.replica = restarted = SwitchboardDeployment({"model_dir": str(rollouts.store.root)}, clock, only("a"))
    rollouts.promote(3)
    heard = Report({"encoder/b": Presence("encoder", {2: READY}), "generator/b": Presence("generator", {3: READY})})
    await restarted.beat("b", heard, 0, 0.0)
    await process(member := Member(rollouts.store, "gateway")).start()
    assert (member.model_cache.holds, set(member.orders.fleet.common)) == ({3: READY}, {"encoder", "generator"})
    clock.advance(2 * TTL_S)
    await restarted.beat("b", heard, 0, 0.0)
    await until(lambda: member.model_cache.holds == {3: READY, 2: READY}, "there are no others")


async def test_without_any_version_to_serve_starting_is_an_error(process, rollouts):
    for version in (1, 2, 3):
        (rollouts.store.root / str(version) / WEIGHTS).unlink()
    with pytest.raises(BundleError, match=r"no version in .* can be served"):
        await process(Member(rollouts.store)).start()


async def test_a_switch_is_followed_and_confirmed_while_the_process_waits_for_orders(process, handle, board, rollouts, monkeypatch):
    monkeypatch.setattr(module, "LOOK_INTERVAL_S", 3600)
    member = Member(rollouts.store)
    await process(member).start()
    asked = len(handle.calls)
    await until(lambda: len(handle.calls) > asked, "a call waits for orders")
    version = await board.set("encoder", "torch", "off")
    await until(lambda: board.applied(version))
    assert dict(member.orders.switches) == {("encoder", "torch"): "off"}


async def test_an_erasure_is_carried_out_by_every_member_and_confirmed_once_all_have_done_so(process, board, rollouts):
    encoder, gateway = Member(rollouts.store), Member(rollouts.store, "gateway")
    await process(encoder, gateway).start()
    number = await board.erase("default", "ada")
    await until(lambda: board.erased(number))
    assert encoder.forgotten[-1] == gateway.forgotten[-1] == ("default", "ada")


async def test_answers_are_dropped_by_every_member_once_and_no_user_is_forgotten_by_that(process, board, rollouts, monkeypatch):
    monkeypatch.setattr(module, "REPORT_INTERVAL_S", 0.05)
    monkeypatch.setattr(Settings, "longest_request_s", 0.1)
    encoder, gateway = members = Member(rollouts.store), Member(rollouts.store, "gateway")
    await process(*members).start()
    number = await board.drop_answers("default", "ada")
    await until(lambda: board.erased(number))
    await board.erase("default", "bob")
    await until(lambda: all(one.forgotten.count(("default", "bob")) == 2 for one in members), "the time of the second round is over")
    assert encoder.dropped == gateway.dropped == [("default", "ada")]
    assert ("default", "ada") not in encoder.forgotten + gateway.forgotten


async def test_a_breaker_that_opens_is_told_at_once_though_no_orders_change(process, handle, board, rollouts, monkeypatch):
    monkeypatch.setattr(module, "REPORT_INTERVAL_S", 3600)
    member = Member(rollouts.store)
    await process(member).start()
    member.engines = [backend(breaker="open")]
    await until(lambda: beats(handle)[-1].snapshots["encoder/a"].backends[0].breaker == "open")
    await until(lambda: member.orders.suspects.get("encoder") == {"torch"}, "the answer to that report is followed")


class CountsDown(Member):
    """Its breaker is open, and each look finds fewer seconds until the next trial."""

    seconds = 3600

    def snapshot(self):
        self.seconds -= 1
        return StageSnapshot(self.role, f"encoder=none (torch: broke; next trial in {self.seconds} s)", (backend(breaker="open"),))


class Wavers(CountsDown):
    """Each look finds something urgent."""

    def snapshot(self):
        return replace(super().snapshot(), backends=(backend(loaded=self.seconds % 2 == 0),))


async def test_the_seconds_until_a_breakers_next_trial_are_no_reason_to_call(process, handle, rollouts, monkeypatch):
    monkeypatch.setattr(module, "REPORT_INTERVAL_S", 3600)
    await process(member := CountsDown(rollouts.store)).start()
    looked = member.followed
    await until(lambda: member.followed >= looked + 10 and member.orders.suspects.get("encoder"), "all is told that there is to tell")
    asked, looked = len(handle.calls), member.followed
    await until(lambda: member.followed >= looked + 50)
    assert len(handle.calls) == asked


@pytest.mark.parametrize("role", [CountsDown, Wavers])
async def test_an_erasure_is_carried_out_again_whatever_there_is_to_tell(process, board, rollouts, monkeypatch, role):
    monkeypatch.setattr(module, "REPORT_INTERVAL_S", 0.05)
    monkeypatch.setattr(Settings, "longest_request_s", 0.1)
    await process(member := role(rollouts.store)).start()
    await board.erase("default", "ada")
    await until(lambda: member.forgotten.count(("default", "ada")) == 2)


async def test_a_process_that_starts_after_an_erasure_carries_it_out_when_the_requests_of_that_time_are_over(
    process, board, rollouts, monkeypatch
):
    monkeypatch.setattr(module, "REPORT_INTERVAL_S", 0.05)
    monkeypatch.setattr(Settings, "longest_request_s", 0.1)
    await board.erase("default", "ada")
    await process(member := Member(rollouts.store)).start()
    await until(lambda: member.forgotten == [(None, None), ("default", "ada")])


async def test_an_idle_process_of_all_roles_makes_one_call_an_interval(process, handle, board, rollouts, monkeypatch):
    monkeypatch.setattr(module, "REPORT_INTERVAL_S", 3600)
    members = [Member(rollouts.store, role) for role in ("gateway", "encoder", "generator", "ranker")]
    await process(*members).start()
    await until(lambda: len(handle.calls) >= 3, "the start's two, and one that waits for orders")
    asked, looked = len(handle.calls), members[0].followed
    await until(lambda: members[0].followed >= looked + 50, "it looks whether there is something to tell")
    assert len(handle.calls) == asked


async def test_a_heartbeat_that_has_ended_is_unhealthy(process, rollouts):
    member = Member(rollouts.store)
    heartbeat = process(member)
    await heartbeat.start()
    heartbeat.check()

    def follow(rollout, orders):
        raise RuntimeError("a switch cannot be applied")

    member.follow = follow
    with pytest.raises(RuntimeError, match="cannot be applied"):
        await until(heartbeat.check)


async def test_where_a_version_is_pinned_it_is_the_one_that_is_told(tmp_path):
    root = tmp_path / "tiny"
    for _ in range(2):
        make_bundle(root)
    told = [await SwitchboardDeployment({"model_dir": str(root), **pinned}).versions() for pinned in ({}, {"version": 1})]
    assert [rollout.stable for rollout, _ in told] == [2, 1]
