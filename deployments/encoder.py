"""The encoder deployment: batches requests from all gateways and asks the framework controller for their answers."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster import registry
from cluster.bundle import Bundle, BundleStore
from cluster.config import Settings, StageSettings, parse
from cluster.controller import FrameworkController, NoBackendAnswered, Served
from cluster.errors import BackendError
from cluster.stage_rules import encoder_rules
from cluster.switchboard import Switches
from cluster.values import EncodeAnswer, Encoded, EncodeRequest, StageReport, UserSequence
from deployments.batching import MicroBatcher
from deployments.remote import ask
from deployments.switchboard import REPORT_INTERVAL_S
from integrations.hstu.limits import limits

STAGE = "encoder"
Result = TypeVar("Result")
REFRESH_INTERVAL_S = 1.0
STUCK_AFTER_S = 30.0
REPORT_DEADLINE_S = 5.0
WARM_UP_LENGTHS = (1, 20, 200)
logger = logging.getLogger("ray.serve")


class Encoder:
    """One replica. Engines run in one thread of their own, so that the event loop stays free to take requests."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: dict[str, Any], switchboard: DeploymentHandle[Any]
    ) -> None:
        self._settings = parse(settings)
        self._bundle = BundleStore(self._settings.model_dir).open(self._settings.version)
        self._controller = create_controller(self._settings, self._bundle)
        self._longest = limits(self._bundle.manifest.model).max_history
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._batcher = MicroBatcher(self._answer, self._settings.encoder.batching, tokens=self._tokens)
        self._switchboard = switchboard
        self._switches_version = 0
        self._switches: Switches = {}
        await self._ask_for_switches("switches")  # first, so that what is loaded now is what will be asked
        logger.info("%s", await self._in_thread(lambda: self._controller.warm_up(warm_up_requests(self._bundle))))
        self._reporting = asyncio.create_task(self._report_forever())
        self._refreshing = asyncio.create_task(self._refresh_forever())

    async def encode(self, request: EncodeRequest) -> EncodeAnswer | NoBackendAnswered:
        """One user's state and nearest items, or why no engine gave them: a value, since for Ray this call did not fail."""
        served = await self._batcher.submit(request)
        if isinstance(served, NoBackendAnswered):
            return served
        report = StageReport("encode", served.backend, served.duration_ms, served.fallback_from)
        return EncodeAnswer(served.answer, report, self._bundle.version)

    def _tokens(self, request: EncodeRequest) -> int:
        """Behaviours that the engine computes: the model's window of them."""
        return min(len(request.sequence), self._longest)

    def __del__(self) -> None:
        """Serve calls it when it stops a replica."""
        if controller := getattr(self, "_controller", None):
            controller.close()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take a new order, selection or list of disabled backends while requests are served; what is not given is as in `args.encoder`."""
        wanted = StageSettings.model_validate({**self._settings.encoder.stage().model_dump(), **user_config})
        enabled = {name: name not in wanted.disabled for name in wanted.order}
        await self._in_thread(lambda: self._controller.reconfigure(order=wanted.order, selection=wanted.selection, enabled=enabled))
        self._apply(self._switches)  # what an operator has switched by hand outlives a deploy

    async def check_health(self) -> None:
        """Unhealthy only where the engine thread is stuck or gone: a broken engine is the controller's business."""
        await asyncio.wait_for(self._in_thread(lambda: None), timeout=STUCK_AFTER_S)
        for task in (self._reporting, self._refreshing):
            if task.done():
                task.result()

    async def _answer(self, requests: list[EncodeRequest]) -> Sequence[Served[Encoded] | NoBackendAnswered]:
        return await self._in_thread(lambda: self._controller.call(requests))

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _report_forever(self) -> None:
        """Push statistics to the switchboard and pull its switches; while it is away, the last switches stay in force."""
        replica = serve.get_replica_context().replica_id.unique_id
        while True:
            following = (self._switches_version, self._switches)
            await self._ask_for_switches("report", STAGE, replica, self._controller.snapshot(), *following)
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def _ask_for_switches(self, method: str, *args: Any) -> None:
        try:
            self._follow(*await ask(self._switchboard, method, *args, within_s=REPORT_DEADLINE_S))
        except BackendError as error:
            logger.warning("switches stay as they are: %s", error)

    async def _refresh_forever(self) -> None:
        """Probe and load beside the calls, so that the first choice returns, and the status stays true, without traffic too."""
        while True:
            await asyncio.sleep(REFRESH_INTERVAL_S)
            await asyncio.to_thread(self._controller.refresh)

    def _follow(self, version: int, switches: Switches) -> None:
        if version != self._switches_version:
            self._switches_version, self._switches = version, switches
            self._apply(switches)

    def _apply(self, switches: Switches) -> None:
        """Follow the switches of this stage; one may name a backend of an earlier configuration, which is not here any more."""
        here = {backend.name for backend in self._controller.snapshot().backends}
        for (stage, name), enabled in switches.items():
            if stage == STAGE and name in here:
                (self._controller.enable if enabled else self._controller.disable)(name)


def create_controller(settings: Settings, bundle: Bundle) -> FrameworkController[EncodeRequest, Encoded]:
    """The controller that the configuration describes, over `bundle`."""
    encoder = settings.encoder
    controller: FrameworkController[EncodeRequest, Encoded] = FrameworkController(
        STAGE,
        registry.backends(STAGE, encoder.backends),
        encoder.order,
        bundle,
        encoder_rules(len(bundle.catalogue)),
        selection=encoder.selection,
        breaker=encoder.breaker,
        probe_interval_s=encoder.probe_interval_s,
        retries=encoder.retries,
    )
    for name in encoder.disabled:
        controller.disable(name)
    return controller


def warm_up_requests(bundle: Bundle) -> list[EncodeRequest]:
    """Histories of several lengths over real items, so that every engine has run before the first user comes."""
    return [_history_of(length, len(bundle.catalogue)) for length in WARM_UP_LENGTHS]


def _history_of(length: int, items: int) -> EncodeRequest:
    steps = np.arange(length)
    sequence = UserSequence(
        items=(steps % items + 1).astype(np.int32),
        timestamps=(1_700_000_000 + 3600 * steps).astype(np.int64),
        actions=np.zeros(length, np.int8),
        values=np.full(length, np.nan, np.float32),
        request_time=1_700_000_000 + 3600 * length,
    )
    return EncodeRequest(sequence, top_n=min(100, items))
