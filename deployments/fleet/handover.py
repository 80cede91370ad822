"""A replica's part in handing users' states over, by way of the switchboard.

The replica gives states when it stops. It takes states when it starts, when other replicas stop, and when it loads another engine.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from time import monotonic
from typing import Any, Protocol

from ray.serve.handle import DeploymentHandle

from cluster.config import HandoverSettings
from cluster.engines.forgetting import Scope
from cluster.engines.kept_users import KeptUser, StateCapacity, chunk_of
from cluster.errors import BackendError
from cluster.fleet.erasures import NO_PLACE, Place
from cluster.fleet.heartbeat import Orders
from cluster.fleet.held_states import Given, Taken
from deployments.calls.remote import ask
from deployments.fleet.heartbeat import Heartbeat

logger = logging.getLogger("ray.serve")


class Keeper(Protocol):
    """The part of a FrameworkController that keeps states."""

    def openings(self) -> dict[str, StateCapacity]: ...
    def hand_over(self) -> AsyncGenerator[list[KeptUser], None]: ...
    async def take_over(self, states: Sequence[KeptUser], wanted: Callable[[KeptUser], bool]) -> int: ...


class Handover:
    """One for each replica. `process` is its id, by which Serve's router knows it as a home."""

    def __init__(self, settings: HandoverSettings, switchboard: DeploymentHandle[Any], process: str, heartbeat: Heartbeat) -> None:
        self._settings, self._switchboard, self._process, self._heartbeat = settings, switchboard, process, heartbeat
        self._erased: set[Scope] = set()  # while states are on their way
        self._looked_at: Any = None
        self._taking: asyncio.Task[None] | None = None

    def erase(self, users: Collection[Scope]) -> None:
        """Drop states of the users that are on their way here. To be called before the engines forget the users."""
        if self._is_taking:
            self._erased.update(users)

    def look(self, orders: Orders, keepers: Sequence[Keeper]) -> None:
        """Take states over in the background, where there may be new ones for this replica: others were handed over, the replicas are
        others, or another engine is loaded. A failed attempt is repeated at the next call.
        """
        if not orders.handed_over or self._is_taking or self._heartbeat.place == NO_PLACE:
            return
        kinds = frozenset(kind for keeper in keepers for kind in keeper.openings())
        seen = orders.handed_over, orders.fleet.replicas.get("encoder", ()), kinds
        if kinds and seen != self._looked_at:
            self._looked_at = seen
            self._taking = asyncio.create_task(self._take(keepers))

    async def start(self, keepers: Sequence[Keeper]) -> None:
        """Take states over before the first request comes, waiting `within_s` at most."""
        taking = self._taking = asyncio.create_task(self._take(keepers))
        await asyncio.wait({taking}, timeout=self._settings.within_s)

    def close(self) -> None:
        if self._taking is not None:
            self._taking.cancel()

    async def give(self, keepers: Sequence[Keeper]) -> None:
        """Hand over the keepers' states, within the time and the bytes of the settings. Other states are computed anew elsewhere."""
        self.close()
        began, given = monotonic(), [0, 0]
        try:
            async with asyncio.timeout(self._settings.within_s):
                place = await self._heartbeat.leave()
                for keeper in keepers:
                    await self._give(keeper, place, given)
        except TimeoutError:
            logger.warning("states are handed over for %g s at most, which were not enough for all", self._settings.within_s)
        except BackendError as error:
            logger.warning("states could not be handed over: %s", error)
        except Exception:
            logger.exception("states could not be handed over, for a reason that is not known")
        logger.info("%d users' states handed over, %d bytes, in %.3f s", *given, monotonic() - began)

    @property
    def _is_taking(self) -> bool:
        return self._taking is not None and not self._taking.done()

    async def _give(self, keeper: Keeper, place: Place, given: list[int]) -> None:
        room = self._settings.max_bytes
        async with aclosing(keeper.hand_over()) as chunks:
            async for chunk in chunks:
                if not (states := [one for one in chunk if len(one.data) <= room]):
                    continue
                answer: Given = await self._ask("hand_over", place, states)
                given[0] += answer.held
                given[1] += sum(len(one.data) for one in states)
                room = answer.room
                if not room or given[1] >= self._settings.max_bytes:
                    return

    async def _take(self, keepers: Sequence[Keeper]) -> None:
        self._erased.clear()
        states, are_all = await self._arrived({kind: room for keeper in keepers for kind, room in keeper.openings().items()})
        if not are_all:
            self._looked_at = None
        coldest_first, count = _popped(states), 0  # what is kept first is the first to be given up
        while chunk := chunk_of(coldest_first):
            count += sum([await keeper.take_over(chunk, self._wanted) for keeper in keepers])
        self._erased.clear()
        if count:
            logger.info("%d users' states taken over", count)

    async def _arrived(self, rooms: dict[str, StateCapacity]) -> tuple[list[KeptUser], bool]:
        """The states held for this replica, the hottest first, of each kind as many as there is room for; and whether those are all. The
        last call brings none: it says that those before have arrived.
        """
        states, after = list[KeptUser](), 0
        try:
            while (wanted := tuple(kind for kind, room in rooms.items() if room.left > 0)) or after:
                if self._heartbeat.place == NO_PLACE:
                    return states, False
                found: Taken = await self._ask("take_over", self._heartbeat.place, wanted, after)
                for one in found.states:
                    if rooms[one.kind].left > 0:
                        states.append(one)
                        rooms[one.kind] = rooms[one.kind].less(one)
                if not wanted or found.after == after:
                    break
                after = found.after
        except BackendError as error:
            logger.warning("states that were handed over cannot be taken: %s", error)
            return states, False
        return states, True

    def _wanted(self, state: KeptUser) -> bool:
        return self._erased.isdisjoint(state.erased_by)

    async def _ask(self, method: str, *args: Any) -> Any:
        return await ask(self._switchboard, method, self._process, *args, within_s=self._settings.within_s)


def _popped(states: list[KeptUser]) -> Iterator[KeptUser]:
    """The states from the last to the first, each taken out of the list."""
    while states:
        yield states.pop()
