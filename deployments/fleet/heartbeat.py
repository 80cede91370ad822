"""A process's exchange with the switchboard, one call every few seconds for all that runs in the process.

rollout.json, current -> the versions that serve -> members load them
members -> report: what they hold, how their engines do, which users are forgotten -> switchboard
switchboard -> orders: switches, suspicions, the versions of other processes, erasures -> members
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ray.serve.handle import DeploymentHandle

from cluster.bundle_store import BundleStore
from cluster.config import Settings
from cluster.engines.forgetting import Scope
from cluster.engines.snapshots import StageSnapshot
from cluster.errors import BackendError, BundleError
from cluster.few_lines import TOLD_EVERY_S, FewLines
from cluster.fleet.board import READY, Presence, Role
from cluster.fleet.erasures import News, Place
from cluster.fleet.heartbeat import Orders, Report
from cluster.fleet.rollout import Rollout, RolloutStore
from deployments.calls.remote import ask
from deployments.fleet.erasure_follower import ErasureFollower
from deployments.fleet.model_cache import ModelCache
from deployments.fleet.switchboard import REPORT_INTERVAL_S, TTL_S

LOOK_INTERVAL_S = 0.5
"""How often a process looks whether it has something to report, and reads the rollout."""
ANSWER_WITHIN_S = 3.0
logger = logging.getLogger("ray.serve")


class Member(Protocol):
    """A role of the process: the gateway, or a replica of a stage."""

    @property
    def model_cache(self) -> ModelCache[Any]:
        """The versions of the model that the member holds."""
        ...

    async def load(self, versions: Sequence[int], *, only: bool) -> None:
        """Load these versions before any request comes; if none can be, the first of the store's `fallbacks` that can. `only`: raise
        BundleError if the first cannot. Where it is cancelled while a version is loaded, it is called again with others.
        """
        ...

    def presence(self, rollout: Rollout) -> Presence:
        """What other processes have to know of the member."""
        ...

    def snapshot(self) -> StageSnapshot | None:
        """The state of the member's engines; None where it has none, or has not loaded any yet."""
        ...

    def follow(self, rollout: Rollout, orders: Orders) -> None:
        """Act upon what has changed. Called every half second, and as soon as there are new orders; idempotent."""
        ...

    async def forget(self, users: Collection[Scope], again: Collection[Scope]) -> None:
        """Erase these users. Erase those in `again` once more: requests under way at the first erasure may have kept something, and have
        ended by now.
        """
        ...

    def drop_answers(self, tenant: str | None, user: str | None) -> None:
        """Drop the answers that are kept here of these users, if any, and nothing else."""
        ...


class Heartbeat:
    """One for each process. Roles `join`; `start` has them load what serves; from then on they report and follow."""

    def __init__(self, settings: Settings, switchboard: DeploymentHandle[Any], replica_id: str) -> None:
        self._switchboard, self._process = switchboard, replica_id
        self._rollouts, self._pinned = RolloutStore(BundleStore(settings.model_dir)), settings.version
        self._last_read, self._orders = Rollout(stable=settings.version or 1), Orders()
        self._members: dict[str, Member] = {}
        self._follower = ErasureFollower(self._forget, drop_answers=self._drop_answers, again_after_s=settings.longest_request_s)
        self._joined = False
        self.knows_rollout = True  # false while it cannot be read, or not soon: another version may be promoted by now
        self._unread = FewLines(most=1, within_s=TOLD_EVERY_S)
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[Rollout] | None = None

    @property
    def gateways(self) -> int:
        """How many gateways live and hold a version, as far as this process knows; one at least."""
        return self._orders.fleet.gateways

    def join(self, role: Role, member: Member) -> None:
        self._members[f"{role}/{self._process}"] = member

    async def start(self) -> None:
        """Returns once every member holds the versions that serve. Raises BundleError where no version can be served, and where a replica
        can serve none by which gateways answer and others of its stage do: it would refuse its share of the requests.
        """
        if not await self._read_rollout(within_s=None):
            bundle, _ = await asyncio.to_thread(self._rollouts.store.open_last_good)
            self._last_read = Rollout(stable=bundle.manifest.version)
        await self._tell()  # the orders say what to load: the backends switched on, and the versions in use during a rollout
        left, wanted = set[int](), self._wanted  # the same for all, as they answer together: a promotion is followed afterwards
        for member in self._members.values():
            await self._load(member, member.load, wanted, left)
        for member in self._members.values() if left else ():  # one may hold nothing but what was rolled back while another loaded it
            await self._load(member, member.model_cache.fill, self._wanted, left)
        await self._catch_up(left)
        self._joined = True
        await self._tell()
        self._follower.serving = True
        self._task = asyncio.create_task(self._beat_forever())

    def check(self) -> None:
        """Raises the error that ended the heartbeat: a process without one would keep erased users, and serve outdated versions."""
        if self._task is not None and self._task.done():
            self._task.result()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def place(self) -> Place:
        """How far the process has carried out erasures."""
        return self._follower.place

    async def leave(self) -> Place:
        """To be called after the last beat, when no request is under way: carry out all erasures that wait. Returns up to which place they
        are done. Raises what erasing raises.
        """
        self.close()
        return await self._follower.finish()

    @property
    def _rollout(self) -> Rollout:
        """What serves, as it was read last, without a trial that the guard has ended since."""
        return self._last_read.without(self._orders.ended)

    @property
    def _wanted(self) -> tuple[int, ...]:
        """The versions that serve, those by which some gateway still answers and, where replicas hold none that serves, the newest that all
        of them hold; where they hold none in common, the newest that all replicas of such a stage hold, once all are heard of.
        """
        fleet, versions = self._orders.fleet, self._rollout.versions
        if self._pinned is not None or not fleet.ready.isdisjoint(versions):
            return (*versions, *sorted(fleet.used))
        stages = fleet.common.values() if fleet.settled else ()
        alike = [fleet.ready] if fleet.ready else [common for common in stages if common and common.isdisjoint(versions)]
        return (*versions, *sorted(fleet.used), *sorted(max(common) for common in alike))

    async def _load(self, member: Member, load: Callable[..., Coroutine[Any, Any, None]], wanted: Sequence[int], left: set[int]) -> None:
        """Have the member `load` the `wanted` versions or, where one of these was `left` since the start by a rollback, what is wanted now
        but for that. Adds to `left`: such a version is not waited for, as its engine may hang, though the latest orders may still tell that
        it is in use. It is where it serves in place of others, all of which were refused.
        """
        while True:
            versions = [version for version in (self._wanted if left.intersection(wanted) else wanted) if version not in left]
            loading = asyncio.create_task(load(versions, only=self._pinned is not None))
            try:
                while not (await asyncio.wait({loading}, timeout=LOOK_INTERVAL_S))[0]:
                    before = self._rollout
                    await self._read_rollout()
                    left |= self._rollout.rolled_back_since(before)
                    left -= set(self._rollout.versions)
                    if member.model_cache.loading in left.intersection(versions):
                        break
                else:
                    return loading.result()
            finally:
                loading.cancel()
            await asyncio.wait({loading})

    async def _catch_up(self, left: set[int]) -> None:
        """Have a replica that gateways of other processes ask hold a version by which they answer, where others of its stage do: since the
        start gateways may have changed over, or it may hold another in place of those. What no gateway answers by makes room for it.
        Raises BundleError where all of them are refused.
        """
        roles = {name: member.presence(self._rollout).role for name, member in self._members.items()}
        if self._pinned is not None or "gateway" in roles.values():
            return
        for name, member in self._members.items():
            lacking = await self._try_lacking(roles[name], member, left)
            if lacking:
                await asyncio.sleep(TTL_S)  # a replica that is just gone still counts
                lacking = await self._try_lacking(roles[name], member, left)
            if lacking:
                await self._make_room_for(lacking, member, left)
                lacking = await self._try_lacking(roles[name], member, left)
            if lacking:
                why = "; ".join(f"version {version}: {member.model_cache.holds[version]}" for version in sorted(lacking))
                raise BundleError(f"{name} cannot serve what gateways answer by and others of its stage can, and does not join: {why}")

    async def _try_lacking(self, role: Role, member: Member, left: set[int]) -> frozenset[int]:
        """Have the member load what it lacks until it lacks nothing, or has tried all of it; returns what it lacks then."""
        while True:
            lacking = await self._lacking(role, member) - left
            untried = lacking.difference(member.model_cache.holds)
            if not untried:
                return lacking
            await self._load(member, member.model_cache.fill, sorted(untried), left)

    async def _make_room_for(self, versions: Collection[int], member: Member, left: set[int]) -> None:
        """Have the member let go of what no gateway answers by, and load these `versions` once more."""
        cache, used = member.model_cache, self._orders.fleet.used
        for needless in {bundle.manifest.version for bundle in cache.bundles} - used:
            cache.refuse(needless, "it left no room for a version by which gateways answer")
        await self._load(member, cache.fill, sorted(versions), left)

    async def _lacking(self, role: Role, member: Member) -> frozenset[int]:
        """The versions by which gateways answer now and that replicas of the stage hold, where the member holds none of these. That on
        trial alone does not do where they hold another: the member would have to refuse users outside of the trial.
        """
        await self._tell()
        there, trial = self._orders.fleet.used & self._orders.fleet.anywhere.get(role, frozenset()), self._rollout.trial
        if trial is not None and trial.version != self._rollout.stable and (trial.kind == "shadow" or trial.share < 1):
            there = (there - {trial.version}) or there
        return frozenset() if any(map(member.model_cache.get, there)) else there

    async def _beat_forever(self) -> None:
        while True:
            if not await self._tell(wait_s=REPORT_INTERVAL_S):
                await asyncio.sleep(LOOK_INTERVAL_S)
            await self._look()

    async def _tell(self, wait_s: float = 0.0) -> bool:
        """Report, wait for new orders for `wait_s` at most, and follow them. The wait ends early where the process has something urgent to
        report. False: the switchboard has not answered.
        """
        report = self._report()
        call = asyncio.create_task(self._beat(report, wait_s))
        try:
            while not (await asyncio.wait({call}, timeout=LOOK_INTERVAL_S))[0]:
                await self._look()
                if self._report().urgent != report.urgent:
                    await self._follower.follow(News(report.place), report.place)  # what is to be erased again may be due
                    return True
            answered = await call
        finally:
            call.cancel()
        if answered:
            fleet = answered.fleet  # a restarted switchboard has heard of few gateways: each would take too large a share of the rates
            gateways = fleet.gateways if fleet.settled else max(fleet.gateways, self.gateways)
            self._orders = replace(answered, fleet=replace(fleet, gateways=gateways))
            self._follow()
        await self._follower.follow(answered.erasures if answered else News(report.place), report.place)
        return answered is not None

    async def _beat(self, report: Report, wait_s: float) -> Orders | None:
        """The switchboard's orders; None where it does not answer, and the last orders stay in force."""
        told = self._process, report, self._orders.mark, wait_s
        try:
            orders: Orders = await ask(self._switchboard, "beat", *told, within_s=wait_s + ANSWER_WITHIN_S)
        except BackendError as error:
            logger.warning("the switchboard does not answer, its last orders stay in force: %s", error)
            return None
        return orders

    def _report(self) -> Report:
        presences = {name: member.presence(self._rollout) for name, member in self._members.items()}
        if not self._joined:  # no request comes yet, whatever is held
            for name, one in presences.items():
                presences[name] = replace(one, holds={version: why for version, why in one.holds.items() if why != READY})
        return Report(
            presences=presences,
            snapshots={name: snapshot for name, member in self._members.items() if (snapshot := member.snapshot())},
            switches_version=self._orders.switches_version,
            switches=self._orders.switches,
            place=self._follower.place,
        )

    async def _look(self) -> None:
        """Follow the rollout, which needs no switchboard."""
        if self._task is None:  # members load what serves first
            return
        self.knows_rollout = await self._read_rollout()
        for member in self._members.values():
            member.model_cache.want(self._wanted)
        self._follow()

    def _follow(self) -> None:
        for member in self._members.values():
            member.follow(self._rollout, self._orders)

    async def _read_rollout(self, within_s: float | None = LOOK_INTERVAL_S) -> bool:
        """Read the rollout; returns whether it is known now. Where it cannot be read, or not soon, nothing changes: the process goes on to
        report while a file server hangs.
        """
        if self._pinned is not None:
            return True
        reading = self._reading = self._reading or asyncio.create_task(asyncio.to_thread(self._rollouts.read))
        if not (await asyncio.wait([reading], timeout=within_s))[0]:
            self._say_unread(f"its file is not read within {within_s} s")
            return False
        self._reading = None
        try:
            self._last_read = reading.result()
        except (BundleError, OSError) as error:
            self._say_unread(error)
            return False
        return True

    def _say_unread(self, why: object) -> None:
        if (more := self._unread.more()) is not None:
            logger.warning("the rollout stays as it is%s: %s", more, why)

    async def _forget(self, users: Collection[Scope], again: Collection[Scope]) -> None:
        await asyncio.gather(*(member.forget(users, again) for member in self._members.values()))

    def _drop_answers(self, tenant: str | None, user: str | None) -> None:
        for member in self._members.values():
            member.drop_answers(tenant, user)
