"""The switchboard as a deployment: one replica, seldom called; while it is away, processes follow their last orders.

process -> beat(report, the orders it follows) -> new orders, at once or as soon as there are any
gateway -> set, erase, drop_answers, status, versions -> what an operator asked for
replica -> hand_over(states) as it stops; take_over -> the states of its users
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from cluster.bundle_store import BundleStore
from cluster.config import parse
from cluster.engines.kept_users import KeptUser
from cluster.errors import BackendUnavailable, BundleError
from cluster.few_lines import TOLD_EVERY_S, FewLines
from cluster.fleet.board import FleetBoard, FleetStatus
from cluster.fleet.cache_shards import CacheShards
from cluster.fleet.clock import steady
from cluster.fleet.erasures import Erasures, News, Place
from cluster.fleet.heartbeat import Orders, Report
from cluster.fleet.held_states import Given, HeldStates, Taken
from cluster.fleet.rollout import Rollout, RolloutStore
from cluster.fleet.switchboard import Position, StageStatus, Switchboard
from cluster.stages import STAGES
from deployments.fleet.processes import processes

REPORT_INTERVAL_S = 2.0
"""How often a process reports where nothing changes."""
JUDGE_INTERVAL_S = 1.0
JUDGE_WITHIN_S = 0.5
"""How long `beat` waits for the judgement of a trial: a file server that hangs keeps no orders back."""
ASK_INTERVAL_S = 0.5
"""While an erasure waits, Serve is asked at most once in this time which processes live."""
TTL_S = 3 * REPORT_INTERVAL_S
KEEP_ERASURES_S = 900.0
"""How long the ids of erased users are kept, or `longest_request_s` where that is more. A process that is silent for longer forgets all."""
logger = logging.getLogger("ray.serve")


class SwitchboardDeployment:
    """Passes the time to `Switchboard`, `FleetBoard` and `Erasures`, holds a process's call until there are new orders, asks Serve which
    processes live, and ends trials that go badly.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        clock: Callable[[], float] | None = None,
        live: Callable[[], Awaitable[Mapping[str, bool]]] = processes,
    ) -> None:
        self._clock = clock = clock or steady()
        self._live, self._asking, self._asked_at = live, asyncio.Lock(), -inf
        self._board, self._fleet = Switchboard(TTL_S), FleetBoard(TTL_S, now=clock())
        self._erasures = Erasures(now=clock())
        tree = parse(settings)
        self._longest_request_s = tree.longest_request_s
        handover = tree.encoder.handover
        self._states = HeldStates(handover.max_bytes, handover.keep_s)
        self._rollouts, self._pinned = RolloutStore(BundleStore(tree.model_dir)), tree.version
        self._shards = CacheShards(tree.cache.l2_shards, tree.cache.most_shards, TTL_S, now=clock())
        self._judged_at = 0.0
        self._judging: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[Rollout] | None = None
        self._ended = ""  # the name of the trial that the guard ended last
        self._unwritten = ""  # why, as long as its file does not say so
        self._few_lines = FewLines(self._clock, most=1, within_s=TOLD_EVERY_S)
        self._orders = Orders(mark=int(clock() * 1000))
        self._changed = asyncio.Event()

    async def beat(self, process: str, report: Report, mark: int, wait_s: float) -> Orders:
        """The orders for a process that follows those of `mark`: at once where they have changed since, else when they do, or after
        `wait_s`.
        """
        now = self._clock()
        for name, presence in report.presences.items():
            self._fleet.report(name, presence, now=now)
            if presence.shards is not None:
                self._shards.report(name, presence.shards, now=now)
        for name, snapshot in report.snapshots.items():
            stage, _, replica_id = name.partition("/")
            self._board.report(stage, replica_id, snapshot, report.switches_version, report.switches, now=now)
        self._erasures.report(process, report.place)
        self._erasures.expire(before=now - max(KEEP_ERASURES_S, self._longest_request_s))
        self._states.expire(now)
        await self._judge(presence.period for presence in report.presences.values())
        self._refresh_orders()
        if self._orders.mark == mark:
            await self._change(wait_s)
        under_way_since = self._clock() - self._longest_request_s
        return replace(self._orders, erasures=self._erasures.since(report.place, under_way_since=under_way_since))

    async def set(self, stage: str, name: str, position: Position) -> int:
        version = self._board.set(stage, name, position, now=self._clock())
        self._refresh_orders()
        return version

    async def applied(self, version: int) -> bool:
        return self._board.applied(version, now=self._clock())

    async def erase(self, tenant: str | None, user: str | None) -> int:
        number = self._erasures.erase(tenant, user, now=self._clock())
        self._states.forget(tenant, user)
        self._refresh_orders()
        return number

    async def drop_answers(self, tenant: str | None, user: str | None) -> int:
        """Have every gateway drop the answers that it keeps of a user, of a tenant's users or of all; returns the number for `erased`."""
        number = self._erasures.erase(tenant, user, now=self._clock(), answers_only=True)
        self._refresh_orders()
        return number

    async def erased(self, number: int) -> bool:
        """Whether every process that may keep something of the erased users has said that it is forgotten."""
        if not self._erasures.erased(number):
            await self._ask_which_live()
        return self._erasures.erased(number)

    async def hand_over(self, process: str, place: Place, states: Sequence[KeptUser]) -> Given:
        """Hold states of a replica that stops, for the users' new homes, as far as there is room. `place`: how far it has erased users."""
        self._fleet.leave(f"encoder/{process}")
        given = self._states.give(states, self._erasures.since(place), now=self._clock())
        self._refresh_orders()
        return given

    async def take_over(self, process: str, place: Place, kinds: Collection[str], after: int) -> Taken:
        """The next states of these kinds for the users that the process is the home of; the last call ended at `after`, and its
        answer has arrived. The process keeps something of users from now on: erasures wait for it.
        """
        now = self._clock()
        self._erasures.report(process, place)
        self._states.expire(now)
        homes = {process, *self._fleet.serving("encoder", now=now)}
        return self._states.take(process, kinds, sorted(homes), after)

    async def status(self) -> tuple[StageStatus, ...]:
        return self._board.status(now=self._clock())

    async def once_settled(self) -> frozenset[str]:
        return self._board.once_settled

    async def settled(self) -> bool:
        """Whether it has been here for long enough to have heard from every process."""
        return self._fleet.news(now=self._clock()).settled

    async def versions(self) -> tuple[Rollout, FleetStatus]:
        """The rollout, and which processes hold which version. Raises BundleError where the rollout cannot be read."""
        rollout = Rollout(stable=self._pinned) if self._pinned else (await self._read()).without(self._ended)
        return rollout, self._fleet.status(rollout, now=self._clock())

    async def _read(self) -> Rollout:
        """The rollout. Calls at one time share a read: a file server that hangs takes one thread, not those that erasures need too."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(asyncio.to_thread(self._rollouts.read))
        return await asyncio.shield(self._reading)

    async def _ask_which_live(self) -> None:
        """Ask Serve which processes live. Callers that come meanwhile wait for that answer; once it is too old, they ask anew."""
        async with self._asking:
            if self._clock() - self._asked_at < ASK_INTERVAL_S:
                return
            self._asked_at, question = self._clock(), self._erasures.question()
            try:
                self._erasures.answered(question, await self._live())
            except BackendUnavailable as error:
                logger.warning("whether erasures have reached every process is not known: %s", error)

    def _refresh_orders(self) -> None:
        """Where the orders have changed, give them a new mark, and wake every process that waits for new orders."""
        now = self._clock()
        suspects = {stage: self._board.suspects(stage, now=now) for stage in STAGES}
        news = self._fleet.news(now=now), News(self._erasures.place)
        orders = Orders(self._orders.mark, *self._board.switches(), suspects, *news, self._shards.layout, self._states.number, self._ended)
        if orders != self._orders:
            self._orders = replace(orders, mark=self._orders.mark + 1)
            self._changed.set()
            self._changed = asyncio.Event()

    async def _change(self, within_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), within_s)

    async def _judge(self, trials: Iterable[str]) -> None:
        """Where a process takes part in a trial, end the trial if its figures are too bad, and have its file say so; tried once a second at
        most.
        """
        under_way = self._judging is not None and not self._judging.done()
        if not (self._unwritten or any(trials)) or under_way or self._clock() - self._judged_at < JUDGE_INTERVAL_S:
            return
        self._judged_at, self._judging = self._clock(), asyncio.create_task(self._end_where_bad())
        await asyncio.wait({self._judging}, timeout=JUDGE_WITHIN_S)

    async def _end_where_bad(self) -> None:
        """Gateways stop a trial that goes badly at once, also where its file cannot be written."""
        trial = None
        try:
            rollout = await self._read()
            trial = rollout.trial
            if trial and trial.name != self._ended and (reason := self._fleet.judge(rollout)):
                logger.error("the trial of version %s is to end: %s", trial.tried, reason)
                self._ended, self._unwritten = trial.name, reason
                self._refresh_orders()
            if trial and trial.name == self._ended:
                await asyncio.to_thread(self._rollouts.end, trial, self._unwritten)
                logger.error("the trial of version %s has ended", trial.tried)
            self._unwritten = ""
        except (BundleError, OSError) as error:
            if (more := self._few_lines.more()) is not None:
                unwritten = trial and f"gateways have ended the trial of version {trial.tried}, which cannot be written"
                logger.error("%s: %s%s", unwritten or "whether the trial may go on is not known", error, more)  # noqa: TRY400
