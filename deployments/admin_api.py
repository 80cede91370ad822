"""An operator's calls to the running system: which backends serve, to switch one, whether the system is ready."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from time import monotonic
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.background import Background
from cluster.bundle import Bundle
from cluster.engines.skipped import kind_of
from cluster.errors import BackendError, BackendUnavailable
from cluster.fleet.switchboard import Position, StageStatus
from deployments.calls.remote import ask
from deployments.http.messages import BackendOut, BackendsOut, ReadyOut, StageOperationOut, StageReadyOut, SwitchOut
from deployments.http.models import ModelsOut

APPLY_WITHIN_S = 3.0
FOLLOWED_INTERVAL_S = 0.1
SWITCHBOARD_DEADLINE_S = 2.0
HELD_S = 900.0
"""For how long a caller's turn lasts at most: a switchboard that starts anew on a clock set back may not count so far for years."""


class AdminApi:
    """Asks the switchboard; `served` gives the model that serves at the time.

    Every method raises BackendUnavailable where the switchboard does not answer, except `readiness`; once it has taken a switch or an
    erasure, it may be silent about the replicas that follow.
    """

    def __init__(self, switchboard: DeploymentHandle[Any], served: Callable[[], Bundle]) -> None:
        self._switchboard, self._served = switchboard, served
        self._were_ready: set[str] = set()
        self._background = Background()
        self._erasures = FollowedErasures(partial(self._ask, "erased"), self._background)

    async def close(self) -> None:
        self._erasures.close()
        await self._background.close()

    async def backends(self) -> BackendsOut:
        return BackendsOut(model_version=self._served().version, stages=[_stage_out(status) for status in await self.statuses()])

    async def switch(self, stage: str, name: str, to: Position) -> SwitchOut:
        """Switch a backend in every replica and wait until they follow. Raises UnknownChoice."""
        version: int = await self._ask("set", stage, name, to)
        return SwitchOut(stage=stage, name=name, enabled=to != "off", first=to == "first", applied=await self._followed("applied", version))

    async def forget(self, tenant: str | None, user_id: str | None, turn: ExitStack) -> bool:
        """Have a user forgotten in every replica, or all of a tenant, or all users; returns whether all live processes have done so in
        time. `turn` is closed once they have, however late that is and though this call is cancelled, or where the switchboard does not
        take the erasure; after HELD_S seconds in any case.
        """
        followed = await asyncio.shield(self._background.start(self._order(tenant, user_id, turn.pop_all())))
        await asyncio.wait({followed}, timeout=APPLY_WITHIN_S)
        return followed.done() and not followed.cancelled()

    async def drop_answers(self, tenant: str | None, user_id: str | None) -> bool:
        """As `forget`, but only answers that gateways keep."""
        number: int = await self._ask("drop_answers", tenant, user_id)
        return await self._followed("erased", number)

    async def models(self) -> ModelsOut:
        """Which versions serve, which processes hold them, and how the trial goes. Raises BundleError where that cannot be read."""
        rollout, fleet = await self._ask("versions")
        return ModelsOut.from_values(self._served().manifest.name, rollout, fleet)

    @property
    def _stages(self) -> tuple[str, ...]:
        """The stages that the serving model needs."""
        return self._served().manifest.stages

    async def statuses(self) -> tuple[StageStatus, ...]:
        """Every stage that a live replica has reported."""
        statuses: tuple[StageStatus, ...] = await self._ask("status")
        return statuses

    async def readiness(self) -> ReadyOut:
        """Ready once a replica of each stage has reported that its first choice is loaded, or has failed; to this gateway or to the
        switchboard before it, as where the generator was scaled to zero since.

        After that, it is as long as an encoder is not known to be gone: a lost switchboard, or one too young to have heard of all replicas,
        stops no request, without a generator retrieved items are the answer, and without a ranker they stay in their order.
        """
        try:
            statuses = {status.stage: status for status in await self.statuses()}
            if set(self._stages) - self._were_ready - statuses.keys() - {"encoder"}:
                self._were_ready |= await self._ask("once_settled") - {"encoder"}
            if "encoder" in self._were_ready - statuses.keys() and await self._ask("settled"):
                self._were_ready.discard("encoder")
        except BackendUnavailable as error:
            stages = [StageReadyOut(stage=stage, ready=stage in self._were_ready, detail=kind_of(error)) for stage in self._stages]
        else:
            stages = [self._stage_ready(stage, statuses.get(stage)) for stage in dict.fromkeys((*self._stages, *statuses))]
        ready = all(one.ready or (one.stage != "encoder" and one.stage in self._were_ready) for one in stages)
        return ReadyOut(ready=ready, model_version=self._served().version, stages=stages)

    def _stage_ready(self, stage: str, status: StageStatus | None) -> StageReadyOut:
        if status is None:
            if stage == "encoder" and stage in self._were_ready:
                return StageReadyOut(stage=stage, ready=True, detail="the switchboard has just started; no replica has reported to it")
            return StageReadyOut(stage=stage, ready=False, detail="no replica reports; it may still be loading its engines")
        ready = status.settled or stage not in self._stages or stage in self._were_ready
        if ready:
            self._were_ready.add(stage)
        return StageReadyOut(stage=stage, ready=ready, detail="; ".join(status.explanations))

    async def _order(self, tenant: str | None, user_id: str | None, turn: ExitStack) -> asyncio.Future[None]:
        """Order an erasure; the future is done, and `turn` closed, once all live processes have carried it out."""
        with turn:
            return self._erasures.wait_for(await self._ask("erase", tenant, user_id), turn.pop_all())

    async def _followed(self, question: str, number: int) -> bool:
        """Whether every replica is known to have come so far; asks until all have, or they are long overdue."""
        deadline = monotonic() + APPLY_WITHIN_S
        while True:
            with suppress(BackendUnavailable):  # it may itself wait for Serve to say which processes live
                if await self._ask(question, number):
                    return True
            if monotonic() >= deadline:
                return False
            await asyncio.sleep(FOLLOWED_INTERVAL_S)

    async def _ask(self, method: str, *args: Any) -> Any:
        return await ask(self._switchboard, method, *args, within_s=SWITCHBOARD_DEADLINE_S, tries=2)


class FollowedErasures:
    """The erasures that are not known to be followed everywhere yet. `is_followed` asks the switchboard whether that of a number is; what
    waits for it runs in `background`.
    """

    def __init__(self, is_followed: Callable[[int], Awaitable[bool]], background: Background) -> None:
        self._is_followed, self._background = is_followed, background
        self._awaited = dict[int, asyncio.Future[None]]()  # by their numbers
        self._watching: asyncio.Task[None] | None = None

    def wait_for(self, number: int, turn: ExitStack) -> asyncio.Future[None]:
        """A future that is done once the erasure is followed everywhere, or cancelled after HELD_S seconds; `turn` is closed with it."""
        loop = asyncio.get_running_loop()
        followed = self._awaited.setdefault(number, loop.create_future())
        held = loop.call_later(HELD_S, self._give_up, number)
        followed.add_done_callback(lambda _: held.cancel())
        followed.add_done_callback(lambda _: turn.close())
        if self._watching is None or self._watching.done():
            self._watching = self._background.start(self._watch())
        return followed

    def close(self) -> None:
        """Wait for none any more: else the watch might go on, as a call that ends while it is cancelled does not tell."""
        for number in list(self._awaited):
            self._give_up(number)

    def _give_up(self, number: int) -> None:
        if followed := self._awaited.pop(number, None):
            followed.cancel()

    async def _watch(self) -> None:
        """Look which erasures are followed everywhere, the oldest first: no later one is before. One call at a time, however many wait."""
        while self._awaited:
            oldest = min(self._awaited)
            with suppress(BackendError):
                if await self._is_followed(oldest):
                    if followed := self._awaited.pop(oldest, None):
                        followed.set_result(None)
                    continue
            await asyncio.sleep(FOLLOWED_INTERVAL_S)


def _stage_out(status: StageStatus) -> StageOperationOut:
    return StageOperationOut(
        stage=status.stage,
        replicas=status.replicas,
        explanations=list(status.explanations),
        backends=[BackendOut.model_validate(backend.as_json()) for backend in status.backends],
    )
