"""What is kept of users, played."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from cluster.events.store import Event, StoredUser
from deployments.http.event_messages import CacheOut, ErasedOut, EventsOut, HistoryOut, InvalidatedOut, StoredEventOut


class Data:
    """It remembers the `events` that it was given, all of unknown items, and the `tenants` that it stored, read or erased events of.
    Events are stored while `stores` is set. An erasure raises `error`, and a digest `digest_error`, where there is one. Of erasures that
    begin while processes are `silent`, the `turns` are kept.
    """

    def __init__(self) -> None:
        self.events, self.tenants, self.turns = list[Event](), list[str](), list[ExitStack]()
        self.stores, self.silent = asyncio.Event(), False
        self.error: Exception | None = None
        self.digest_error: Exception | None = None
        self.stores.set()

    async def append(self, events: Sequence[Event]) -> EventsOut:
        self.events += events
        self.tenants += [event.tenant for event in events]
        await self.stores.wait()
        return EventsOut(
            stored=len(events),
            duplicates=0,
            unknown_items=[event.behaviour.item_id for event in events],
            events=[StoredEventOut(sequence=number, duplicate=False) for number, _ in enumerate(events)],
        )

    async def history(self, tenant: str, user_id: str, limit: int, until: int | None) -> bytes:
        self.tenants.append(tenant)
        return HistoryOut(user_id=user_id, tenant=tenant, version="", total=0, events=[]).model_dump_json().encode()

    async def example_users(self, tenant: str, limit: int) -> list[StoredUser]:
        return [StoredUser("ada", 3)]

    async def digest(self, tenant: str, user_id: str) -> str:
        if self.digest_error:
            raise self.digest_error
        return f"digest-{len(user_id)}"

    async def erase(self, tenant: str, user_id: str, turn: ExitStack) -> ErasedOut:
        self.tenants.append(tenant)
        if self.error:
            raise self.error
        if self.silent:
            self.turns.append(turn.pop_all())
        return ErasedOut(user_id=user_id, tenant=tenant, events=3, cached_answers=1, everywhere=not self.silent)

    async def caches(self) -> CacheOut:
        states: dict[str, dict[str, dict[str, float]]] = {"encoder": {}}
        return CacheOut(enabled=True, policy="lru", tiers=[], computed=0, joined=0, refreshed=0, dropped=0, hot=[], user_states=states)

    async def invalidate(self, tenant: str | None, user_id: str | None) -> InvalidatedOut:
        return InvalidatedOut(dropped=2, everywhere=True)
