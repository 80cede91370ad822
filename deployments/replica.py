"""What the replicas of every stage have in common: a framework controller over engines, in step with the switchboard.

warm up -> serve ; beside that, forever: report <-> switches (switchboard), refresh (probe, load, try again), forget erased users
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.bundle import BundleStore
from cluster.config import StageSettings, parse
from cluster.controller import FrameworkController
from cluster.errors import BackendError
from cluster.stage_rules import RULES
from cluster.switchboard import Switches
from cluster.values import UserSequence
from deployments.following import Follower
from deployments.remote import ask
from deployments.switchboard import REPORT_INTERVAL_S

ControllerT = TypeVar("ControllerT", bound=FrameworkController[Any, Any])
Result = TypeVar("Result")
REFRESH_INTERVAL_S = 1.0
STUCK_AFTER_S = 30.0
REPORT_DEADLINE_S = 5.0
GRACE_S = 1.0
"""How much later than at its deadlines a request may still have an engine compute."""
logger = logging.getLogger("ray.serve")


class StageReplica(Generic[ControllerT]):
    """One replica of the stage `stage`. Engines run in one thread of their own, so that the event loop stays free to take requests."""

    stage: ClassVar[str]
    controller_type: ClassVar[type[FrameworkController[Any, Any]]]

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: dict[str, Any], switchboard: DeploymentHandle[Any]
    ) -> None:
        self._settings = parse(settings)
        self._bundle = BundleStore(self._settings.model_dir).open(self._settings.version)
        rules = RULES[self.stage](len(self._bundle.catalogue))
        controller = self.controller_type.configured(self._settings.engines(self.stage), self._bundle, rules)
        self._controller = cast(ControllerT, controller)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._switchboard = switchboard
        self._switches_version = 0
        self._switches: Switches = {}
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._follower = self._make_follower()
        self._set_up()
        await self._ask_for_switches("switches")  # first, so that what is loaded now is what will be asked
        await self._follower.exchange()  # while nothing is loaded, there is nothing to forget
        logger.info("%s", await self._in_thread(lambda: self._controller.warm_up(self._samples())))
        self._reporting = asyncio.create_task(self._report_forever())
        self._refreshing = asyncio.create_task(self._refresh_forever())
        self._following = asyncio.create_task(self._follower.follow_forever())

    def _set_up(self) -> None:
        """Whatever else a stage needs before its engines are loaded."""

    def _samples(self) -> list[Any]:
        """Requests that no user made, for the warm-up and for trials."""
        raise NotImplementedError

    def __del__(self) -> None:
        """Serve calls it when it stops a replica."""
        if controller := getattr(self, "_controller", None):
            controller.close()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take a new order, selection or list of disabled backends while requests are served; what is not given is as in `args`."""
        wanted = StageSettings.model_validate({**self._settings.engines(self.stage).stage().model_dump(), **user_config})
        enabled = {name: name not in wanted.disabled for name in wanted.order}
        await self._in_thread(lambda: self._controller.reconfigure(order=wanted.order, selection=wanted.selection, enabled=enabled))
        self._apply(self._switches)  # what an operator has switched by hand outlives a deploy

    async def check_health(self) -> None:
        """Unhealthy only where the engine thread is stuck or gone: a broken engine is the controller's business."""
        await asyncio.wait_for(self._in_thread(lambda: None), timeout=STUCK_AFTER_S)
        for task in (self._reporting, self._refreshing, self._following):
            if task.done():
                task.result()

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _report_forever(self) -> None:
        """Push statistics to the switchboard and pull its switches; while it is away, the last switches stay in force."""
        while True:
            following = (self._switches_version, self._switches)
            await self._ask_for_switches("report", self.stage, self._replica_id, self._controller.snapshot(), *following)
            self._show_figures()
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _make_follower(self) -> Follower:
        """Erasures are carried out in the engine thread: after the batch that runs, so that nothing of a user is kept by it later."""
        edge, controller = self._settings.gateway, self._controller
        return Follower(
            self._switchboard,
            f"{self.stage}/{self._replica_id}",
            on_erasure=lambda tenant, user: self._in_thread(lambda: controller.forget(tenant, user)),
            on_lost_track=lambda: self._in_thread(controller.forget_all),
            again_after_s=edge.deadline_s + edge.generation_deadline_s + GRACE_S,
        )

    def _show_figures(self) -> None:
        """Whatever else a stage tells of itself twice a second."""

    async def _ask_for_switches(self, method: str, *args: Any) -> None:
        try:
            self._follow(*await ask(self._switchboard, method, *args, within_s=REPORT_DEADLINE_S))
        except BackendError as error:
            logger.warning("switches stay as they are: %s", error)

    async def _refresh_forever(self) -> None:
        """Probe and load beside the calls, so that the first choice returns, and the status stays true, without traffic too."""
        while True:
            await asyncio.to_thread(self._controller.refresh)
            await asyncio.sleep(REFRESH_INTERVAL_S)

    def _follow(self, version: int, switches: Switches) -> None:
        if version != self._switches_version:
            self._switches_version, self._switches = version, switches
            self._apply(switches)

    def _apply(self, switches: Switches) -> None:
        """Follow the switches of this stage; one may name a backend of an earlier configuration, which is not here any more."""
        here = {backend.name for backend in self._controller.snapshot().backends}
        for (stage, name), enabled in switches.items():
            if stage == self.stage and name in here:
                (self._controller.enable if enabled else self._controller.disable)(name)


def sample_history(length: int, items: int) -> UserSequence:
    """A history that no user has: real items, an event an hour."""
    steps = np.arange(length)
    return UserSequence(
        items=(steps % items + 1).astype(np.int32),
        timestamps=(1_700_000_000 + 3600 * steps).astype(np.int64),
        actions=np.zeros(length, np.int8),
        values=np.full(length, np.nan, np.float32),
        request_time=1_700_000_000 + 3600 * length,
    )
