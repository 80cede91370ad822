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
        """Ready once there is an encoder replica, whatever its engines do: from then on requests are answered at full speed."""
        try:
            statuses = await self._status()
        except BackendUnavailable as error:
            return ReadyOut(ready=False, model_version=self._model_version, stages=[_unready(str(error))])
        stages = [StageReadyOut(stage=s.stage, ready=s.replicas > 0, detail="; ".join(s.explanations)) for s in statuses]
        stages = stages or [_unready("no replica has reported yet; it may still be loading its engines")]
        return ReadyOut(ready=all(stage.ready for stage in stages), model_version=self._model_version, stages=stages)

    async def _status(self) -> tuple[StageStatus, ...]:
        statuses: tuple[StageStatus, ...] = await self._ask("status")
        return statuses

    async def _ask(self, method: str, *args: Any) -> Any:
        return await ask(self._switchboard, method, *args, within_s=SWITCHBOARD_DEADLINE_S, tries=2)


def _unready(detail: str) -> StageReadyOut:
    return StageReadyOut(stage="encoder", ready=False, detail=detail)


def _stage_out(status: StageStatus) -> StageOperationOut:
    return StageOperationOut(
        stage=status.stage,
        replicas=status.replicas,
        explanations=list(status.explanations),
        backends=[BackendOut.model_validate(backend.as_json()) for backend in status.backends],
    )
