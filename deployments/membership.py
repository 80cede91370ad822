"""A process's part in a rollout: it reads which versions serve, holds them, and tells the switchboard and learns from it who else does.

rollout.json, current -> wanted versions -> shelf ; shelf.holds -> switchboard -> what is ready everywhere, what is in use anywhere
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.errors import BackendError, BundleError
from cluster.fleet import FleetNews, Presence, Role
from cluster.rollout import Rollout, RolloutStore, VersionFigures
from deployments.remote import ask
from deployments.shelf import ModelShelf
from deployments.switchboard import REPORT_INTERVAL_S

EXCHANGE_DEADLINE_S = 2.0
logger = logging.getLogger("ray.serve")


class Membership:
    """`pinned`: the only version that is ever served, None to follow the rollout. `uses` and `figures` are a gateway's."""

    def __init__(
        self,
        role: Role,
        name: str,
        switchboard: DeploymentHandle[Any],
        rollouts: RolloutStore,
        shelf: ModelShelf[Any],
        *,
        pinned: int | None = None,
        uses: Callable[[], frozenset[int]] = frozenset,
        figures: Callable[[], dict[int, VersionFigures]] = dict,
    ) -> None:
        self._role, self._name, self._switchboard = role, name, switchboard
        self._rollouts, self._shelf, self._pinned = rollouts, shelf, pinned
        self._uses, self._figures = uses, figures
        self.rollout = Rollout(stable=pinned or 1)
        self.news = FleetNews()

    async def join(self) -> None:
        """Hold what serves, before anything is served. Raises BundleError where no version can be."""
        await self._read()
        await self._exchange()  # also the versions that others give answers of, in the middle of a rollout
        await self._shelf.fill((*self.rollout.versions, *sorted(self.news.used)), only=self._pinned is not None)
        await self._exchange()

    async def follow_forever(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            await self.follow()

    async def follow(self) -> None:
        """Once: read, want, tell."""
        await self._read()
        self._shelf.want((*self.rollout.versions, *self.news.used))
        await self._exchange()

    async def _read(self) -> None:
        """What cannot be read leaves everything as it is."""
        if self._pinned is not None:
            return
        try:
            self.rollout = await asyncio.to_thread(self._rollouts.read)
        except (BundleError, OSError) as error:
            logger.warning("the rollout stays as it is: %s", error)

    async def _exchange(self) -> None:
        trial = self.rollout.trial
        presence = Presence(self._role, self._shelf.holds, self._uses(), trial.name if trial else "", self._figures() if trial else {})
        try:
            news: FleetNews = await ask(self._switchboard, "exchange_versions", self._name, presence, within_s=EXCHANGE_DEADLINE_S)
        except BackendError as error:
            logger.warning("it is not known who else holds which version: %s", error)
        else:  # a switchboard that has just been restarted has heard of few gateways, which would each take a larger share of the rates
            self.news = news if news.settled else replace(news, gateways=max(news.gateways, self.news.gateways))
