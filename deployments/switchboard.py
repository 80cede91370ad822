"""The switchboard as a deployment: one replica, seldom called, whose loss costs nothing but a little delay."""

import asyncio
import logging
from collections.abc import Callable
from time import time
from typing import Any, TypeAlias

from cluster.bundle import BundleStore
from cluster.config import parse
from cluster.controller import StageSnapshot
from cluster.erasures import News, Place
from cluster.errors import BundleError
from cluster.fleet import FleetBoard, FleetNews, FleetStatus, Presence
from cluster.rollout import Rollout, RolloutStore
from cluster.switchboard import Position, StageStatus, Switchboard, Switches

REPORT_INTERVAL_S = 0.5
"""How often every replica of a stage reports; a switch is in force everywhere after two reports."""
JUDGE_INTERVAL_S = 1.0
Guidance: TypeAlias = tuple[int, Switches, frozenset[str]]
TTL_S = 10 * REPORT_INTERVAL_S
logger = logging.getLogger("ray.serve")


class SwitchboardDeployment:
    """Adds the time of day to `Switchboard` and `FleetBoard`, and ends trials that go badly."""

    def __init__(self, settings: dict[str, Any], clock: Callable[[], float] = time) -> None:
        self._clock = clock
        self._board, self._fleet = Switchboard(TTL_S, now=clock()), FleetBoard(TTL_S, now=clock())
        tree = parse(settings)
        self._rollouts, self._pinned = RolloutStore(BundleStore(tree.model_dir)), tree.version
        self._judged_at = 0.0

    async def report(self, stage: str, replica: str, snapshot: StageSnapshot, version: int, switches: Switches) -> Guidance:
        self._board.report(stage, replica, snapshot, version, switches, now=self._clock())
        return await self.guidance(stage)

    async def guidance(self, stage: str) -> Guidance:
        """What a replica should follow: the switches and their version, and which backends broke elsewhere."""
        return (*self._board.switches(), self._board.suspects(stage, now=self._clock()))

    async def set(self, stage: str, name: str, position: Position) -> int:
        return self._board.set(stage, name, position, now=self._clock())

    async def applied(self, version: int) -> bool:
        return self._board.applied(version, now=self._clock())

    async def erase(self, tenant: str | None, user: str | None) -> int:
        return self._board.erase(tenant, user, now=self._clock())

    async def exchange(self, follower: str, place: Place) -> News:
        return self._board.exchange(follower, place, now=self._clock())

    async def erased(self, number: int) -> bool:
        return self._board.erased(number, now=self._clock())

    async def status(self) -> tuple[StageStatus, ...]:
        return self._board.status(now=self._clock())

    async def exchange_versions(self, name: str, presence: Presence) -> FleetNews:
        news = self._fleet.exchange(name, presence, now=self._clock())
        if presence.trial and self._clock() - self._judged_at >= JUDGE_INTERVAL_S:
            self._judged_at = self._clock()
            await self._judge()
        return news

    async def versions(self) -> tuple[Rollout, FleetStatus]:
        """Raises BundleError where the rollout cannot be read."""
        rollout = Rollout(stable=self._pinned) if self._pinned else await asyncio.to_thread(self._rollouts.read)
        return rollout, self._fleet.status(rollout, now=self._clock())

    async def _judge(self) -> None:
        try:
            rollout = await asyncio.to_thread(self._rollouts.read)
            if rollout.trial and (reason := self._fleet.judge(rollout)):
                logger.error("the trial of version %d ends: %s", rollout.trial.version, reason)
                await asyncio.to_thread(self._rollouts.end, rollout.trial, reason)
        except (BundleError, OSError):
            logger.exception("whether the trial may go on is not known")
