"""Event stores that are opened by a call: one that need not be there when its gateway starts, and one that is switched off."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from cluster.errors import BackendUnavailable, ConfigError
from cluster.events.store import Event, ServedEvents, Stored, StoredHistory, StoredUser, driver_of, open_event_store
from cluster.few_lines import TOLD_EVERY_S, FewLines

T = TypeVar("T")
UNSURE = "; what was to be stored or erased may be or not: send it again"
logger = logging.getLogger(__name__)


class StoreOpenedLater:
    """The event store at `url`, for one gateway and its event loop. Until it is open, each call tries to open it, and raises
    BackendUnavailable where that fails. What the store then says of its place, its file or its user is for operators: it is logged, once in
    TOLD_EVERY_S, and callers are told that the store does not answer.
    """

    readers = 2  # until it is open: for an answer, and for a caller that asks for histories

    def __init__(self, url: str, open_store: Callable[[str], Awaitable[ServedEvents]] = open_event_store) -> None:
        self._url, self._open_store = url, open_store
        self.name = url.partition("://")[0]
        self._opening: asyncio.Future[ServedEvents] | None = None
        self._closed = False
        self._lines = FewLines(most=1, within_s=TOLD_EVERY_S)

    async def open(self) -> str:
        """Open the store; returns why that is not possible now, or ""."""
        try:
            await self._opened()
        except BackendUnavailable as error:
            return str(error)
        return ""

    async def append(self, events: Sequence[Event]) -> list[Stored]:
        return await self._asked(lambda store: store.append(events), UNSURE)

    async def history(self, tenant: str, user_id: str, limit: int, until: int | None = None) -> StoredHistory:
        return await self._asked(lambda store: store.history(tenant, user_id, limit, until))

    async def version(self, tenant: str, user_id: str) -> str:
        return await self._asked(lambda store: store.version(tenant, user_id))

    async def erase(self, tenant: str, user_id: str) -> int:
        return await self._asked(lambda store: store.erase(tenant, user_id), UNSURE)

    async def digest(self, tenant: str, user_id: str) -> str:
        return await self._asked(lambda store: store.digest(tenant, user_id))

    async def users(self, tenant: str, limit: int) -> list[StoredUser]:
        return await self._asked(lambda store: store.users(tenant, limit))

    async def close(self) -> None:
        """As every store's. An attempt to open the store is given up, and the calls that wait for it raise."""
        self._closed = True
        if self._opening is None:
            return
        if not self._opening.done():
            self._opening.cancel()
        elif not self._opening.cancelled() and self._opening.exception() is None:
            await self._opening.result().close()

    @contextmanager
    def guarded(self, more: str = "") -> Iterator[None]:
        """A BackendUnavailable of the block tells callers that the store does not answer, and `more`."""
        try:
            yield
        except BackendUnavailable as error:
            if (left_out := self._lines.more()) is not None:
                first = str(error).partition("\n")[0]  # PostgreSQL's details, which may name a user, come after it
                logger.warning("the event store does not answer%s: %s", left_out, first)
            raise BackendUnavailable(str(error), told=f"the event store ({self.name}) does not answer{more}") from error

    async def _asked(self, question: Callable[[ServedEvents], Awaitable[T]], more: str = "") -> T:
        with self.guarded(more):
            return await question(await self._opened())

    async def _opened(self) -> ServedEvents:
        """The store. Calls made while it is being opened wait for the same attempt, which goes on when a caller leaves."""
        if self._closed:
            raise self._gone()
        if self._opening is None or (self._opening.done() and (self._opening.cancelled() or self._opening.exception())):
            self._opening = asyncio.ensure_future(self._open_store(self._url))
            self._opening.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, though all callers may have left
        if not (opening := self._opening).done():
            await asyncio.wait([opening])
        if opening.cancelled():
            raise self._gone()
        store = opening.result()
        self.readers = store.readers
        return store

    def _gone(self) -> BackendUnavailable:
        return BackendUnavailable(f"the event store ({self.name}) is closed; open it again")


class SwitchedOffStore:
    """The event store at `url` while events are switched off, for erasures of what it holds from before. The first one opens it; a store
    that is not there is not made.
    """

    def __init__(self, url: str) -> None:
        self._url, self._store = url, StoreOpenedLater(url)

    async def erase(self, tenant: str, user_id: str) -> int:
        return await self._store.erase(tenant, user_id) if await self._is_there() else 0

    async def digest(self, tenant: str, user_id: str) -> str:
        if not await self._is_there():
            raise BackendUnavailable("events are switched off, and there is no event store to make digests by the key of")
        return await self._store.digest(tenant, user_id)

    async def close(self) -> None:
        await self._store.close()

    async def _is_there(self) -> bool:
        """Raises BackendUnavailable where that is not known."""
        try:
            with self._store.guarded():
                await driver_of(self._url).require_there(self._url)
        except ConfigError:
            return False
        return True
