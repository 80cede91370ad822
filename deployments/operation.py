"""What an operator asks of the running system: which backends serve, switch one, is it ready."""

import asyncio
from time import monotonic
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.errors import BackendUnavailable
from cluster.switchboard import StageStatus
from deployments.messages import BackendOut, BackendsOut, ReadyOut, StageOperationOut, StageReadyOut, SwitchOut
from deployments.remote import ask
from deployments.switchboard import REPORT_INTERVAL_S

APPLY_WITHIN_S = 6 * REPORT_INTERVAL_S
SWITCHBOARD_DEADLINE_S = 2.0


class Operation:
    """Ask the switchboard. Every method raises BackendUnavailable where it cannot be reached, except `readiness`."""

    def __init__(self, switchboard: DeploymentHandle[Any], model_version: str) -> None:
        self._switchboard, self._model_version = switchboard, model_version
        self._was_ready = False

    async def backends(self) -> BackendsOut:
        return BackendsOut(model_version=self._model_version, stages=[_stage_out(status) for status in await self._status()])

    async def switch(self, stage: str, name: str, *, enabled: bool) -> SwitchOut:
        """Switch a backend in every replica and wait until they follow. Raises UnknownChoice."""
        version: int = await self._ask("set", stage, name, enabled)
        deadline = monotonic() + APPLY_WITHIN_S
        # what is waited for happens in other processes
        while not (applied := await self._ask("applied", version)) and monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(REPORT_INTERVAL_S / 4)
        return SwitchOut(stage=stage, name=name, enabled=enabled, applied=applied)

    async def readiness(self) -> ReadyOut:
        """Ready once an encoder replica has reported, and as long as none is known to be gone: a lost switchboard stops no request."""
        try:
            statuses = await self._status()
        except BackendUnavailable as error:
            return self._readiness([StageReadyOut(stage="encoder", ready=self._was_ready, detail=str(error))])
        stages = [StageReadyOut(stage=status.stage, ready=True, detail="; ".join(status.explanations)) for status in statuses]
        missing = StageReadyOut(stage="encoder", ready=False, detail="no replica reports; it may still be loading its engines")
        return self._readiness(stages or [missing])

    def _readiness(self, stages: list[StageReadyOut]) -> ReadyOut:
        self._was_ready = all(stage.ready for stage in stages)
        return ReadyOut(ready=self._was_ready, model_version=self._model_version, stages=stages)

    async def _status(self) -> tuple[StageStatus, ...]:
        statuses: tuple[StageStatus, ...] = await self._ask("status")
        return statuses

    async def _ask(self, method: str, *args: Any) -> Any:
        return await ask(self._switchboard, method, *args, within_s=SWITCHBOARD_DEADLINE_S, tries=2)


def _stage_out(status: StageStatus) -> StageOperationOut:
    return StageOperationOut(
        stage=status.stage,
        replicas=status.replicas,
        explanations=list(status.explanations),
        backends=[BackendOut.model_validate(backend.as_json()) for backend in status.backends],
    )
