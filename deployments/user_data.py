"""The gateway's part in what is kept of users: store events, erase a user everywhere, tell what the caches do."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from cluster.background import Background
from cluster.cache.entry import CacheStatistics
from cluster.cache.shared import ShardHealth
from cluster.cache.shared_notes import KEPT_S
from cluster.cache.tier_values import KEPT_TIMES, Invalidated
from cluster.cache.tiered import TieredCache
from cluster.config import Settings
from cluster.errors import BackendUnavailable, InvalidRequest
from cluster.events.opened_later import SwitchedOffStore
from cluster.events.read_turns import ReadTurns
from cluster.events.store import Event, ServedEvents, StoredUser
from cluster.values import Recommendation
from deployments.admin_api import AdminApi
from deployments.anticipation import Anticipation
from deployments.http.answer_json import written_history
from deployments.http.event_messages import (
    CacheOut,
    CacheShardOut,
    CacheTierOut,
    ErasedOut,
    EventsOut,
    InvalidatedOut,
    TenantCacheOut,
)
from deployments.telemetry.metrics import GatewayRecorder
from deployments.unconfirmed_erasures import UnconfirmedErasures
from deployments.version_router import VersionRouter
from pipelines.remembered import UsualRequests
from pipelines.stored_history import SWITCHED_OFF

READ_TURN_S = 5.0
"""How long a call that reads the event store itself waits for its turn."""
logger = logging.getLogger("ray.serve")


class UserData:
    """`events` is None where they are switched off: then erasures alone reach the store that the settings name. `turns`: of all that is
    read of it. `cache` and `anticipation` are None where answers are not kept.
    """

    def __init__(
        self,
        settings: Settings,
        admin: AdminApi,
        versions: VersionRouter,
        *,
        cache: TieredCache[Recommendation] | None,
        events: ServedEvents | None,
        turns: ReadTurns | None = None,
        usual: UsualRequests | None = None,
        recorder: GatewayRecorder | None = None,
        anticipation: Anticipation | None = None,
    ) -> None:
        self._settings, self._admin, self._versions = settings, admin, versions
        self._cache, self._events, self._recorder = cache, events, recorder or GatewayRecorder()
        self._turns = turns or ReadTurns()
        self._stored = events or SwitchedOffStore(settings.event_store_url)
        self._usual = UsualRequests() if usual is None else usual
        self._anticipation, self._clearing = anticipation, Background()
        self._unconfirmed = UnconfirmedErasures(
            cache,
            admin,
            kept_s=max(settings.cache.ttl_s * KEPT_TIMES + settings.cache.stale_s, KEPT_S),  # answers, and usual requests
            drop_here=self.drop_answers,
        )

    async def append(self, events: Sequence[Event]) -> EventsOut:
        """Store events, durably. Raises BackendUnavailable, and InvalidRequest where a key was used for another event."""
        stored = await self._store().append(events)
        new = [event for event, place in zip(events, stored, strict=True) if not place.duplicate]
        for event in new:
            self._recorder.happened(event)
        if self._anticipation is not None:
            self._anticipation.expect({(event.tenant, event.user_id) for event in events})
        told = EventsOut.from_values(stored, list(events), self._versions.stable.catalogue)
        self._recorder.named({event.behaviour.item_id for event in new}, told.unknown_items)
        return told

    async def history(self, tenant: str, user_id: str, limit: int, until: int | None) -> bytes:
        store = self._store()
        stored = await self._turns.read(tenant, lambda: store.history(tenant, user_id, limit, until), READ_TURN_S)
        return await written_history(tenant, user_id, stored, self._versions.stable.catalogue)

    async def example_users(self, tenant: str, limit: int) -> list[StoredUser]:
        if (store := self._events) is None:
            return []
        return await self._turns.read(tenant, lambda: store.users(tenant, limit), READ_TURN_S)

    async def digest(self, tenant: str, user_id: str) -> str:
        """The user's digest, by which the audit log names it. Raises BackendUnavailable where there is no store to ask for its key."""
        return await self._stored.digest(tenant, user_id)

    async def erase(self, tenant: str, user_id: str, turn: ExitStack) -> ErasedOut:
        """Erase first the user's events, so that nothing more is computed from them, then what was computed; the latter even where the
        store does not answer, and though this call is cancelled. `turn` is closed once all live processes have followed, as
        `AdminApi.forget` does.
        """
        try:
            events = await self._stored.erase(tenant, user_id)
        except InvalidRequest:  # a name with NUL, which no store holds; what was computed from behaviours of the request may be kept
            events = 0
        finally:
            self._recorder.forget(tenant, user_id)
            dropped = await self._to_the_end(self._dropped_everywhere(tenant, user_id, turn.pop_all()))
        return ErasedOut(user_id=user_id, tenant=tenant, events=events, cached_answers=dropped.dropped, everywhere=dropped.everywhere)

    async def invalidate(self, tenant: str | None, user_id: str | None) -> InvalidatedOut:
        """Drop answers, here and in the shared cache at once, in every other gateway with its next report, though this call is cancelled.
        Engines keep their states.
        """
        return await self._to_the_end(self._dropped_everywhere(tenant, user_id))

    def drop_answers(self, tenant: str | None = None, user_id: str | None = None) -> None:
        """Drop the answers that this replica keeps of a user, of a tenant's users or of all, and the requests by which the next ones would
        be computed ahead. The replica that was asked clears the shared cache.
        """
        self._forget_usual(tenant, user_id)
        if self._cache:
            self._cache.forget(tenant, user_id)

    async def forget(self, tenant: str | None = None, user_id: str | None = None, *, again: bool = False) -> None:
        """Drop what this replica keeps of a user, of a tenant's users or of all. The replica that was asked clears the shared cache. A
        replica that wrote the user's usual request there clears it too, in the background: it may have written after the first clearing.
        `again`: the requests under way the first time have ended; their answers may have reached the shared cache after it was cleared.
        Each replica clears it of the user once more, as the one that wrote the answer may be gone.
        """
        told = tenant is not None and user_id is not None and self._usual.has_told(tenant, user_id)
        self.drop_answers(tenant, user_id)
        self._recorder.forget(tenant, user_id)
        if told or (again and user_id is not None):
            self._clearing.start(self._clear(tenant, user_id))

    async def caches(self) -> CacheOut:
        states = await self._user_states()
        settings = self._settings.cache
        if self._cache is None:
            return CacheOut(
                enabled=False, policy=settings.policy, tiers=[], computed=0, joined=0, refreshed=0, dropped=0, hot=[], user_states=states
            )
        figures = await self._cache.statistics()
        tiers = [_tier("l1", "memory", figures.l1)]
        if figures.l2 is not None:
            tiers.append(_tier("l2", settings.l2, figures.l2, figures.l2_failures))
        return CacheOut(
            enabled=True,
            policy=settings.policy,
            tiers=tiers,
            shards=[_shard(one) for one in figures.shards],
            computed=figures.computed,
            joined=figures.joined,
            refreshed=figures.refreshes,
            dropped=figures.dropped,
            hot=list(figures.hot_per_minute),
            user_states=states,
        )

    async def _user_states(self) -> dict[str, dict[str, dict[str, float]]]:
        """What engines keep of users, by stage and backend; empty while the switchboard cannot be reached."""
        try:
            statuses = await self._admin.statuses()
        except BackendUnavailable as error:
            logger.warning("what the engines keep of users is not known now: %s", error)
            return {}
        return {status.stage: {backend.name: dict(backend.kept) for backend in status.backends if backend.kept} for status in statuses}

    async def close(self) -> None:
        await self._clearing.finish()  # which may begin to insist
        await self._unconfirmed.close()
        if self._anticipation is not None:
            await self._anticipation.close()
        if self._usual.shared is not None:
            await self._usual.shared.flush()  # before the shared cache is closed with the cache
        if self._cache:
            await self._cache.close()
        await self._stored.close()

    async def _to_the_end(self, dropping: Coroutine[Any, Any, InvalidatedOut]) -> InvalidatedOut:
        """What it comes to; it goes on though this call is cancelled, and an error that no caller hears of by then is logged."""
        task = self._clearing.start(dropping)
        try:
            return await asyncio.shield(task)
        except BaseException:
            if (caller := asyncio.current_task()) and caller.cancelling():  # here, or before this began
                task.add_done_callback(_logged)
            raise

    async def _dropped_everywhere(self, tenant: str | None, user_id: str | None, turn: ExitStack | None = None) -> InvalidatedOut:
        """Drop answers here, in the caches and in every gateway; with the `turn` of an erasure, which is closed as `AdminApi.forget` does,
        all that any process keeps.
        """
        with turn or nullcontext():  # for where a cache breaks before the turn is handed on
            self._forget_usual(tenant, user_id)
            dropped = await self._clear(tenant, user_id, asked=True)
            followed = await (self._admin.forget(tenant, user_id, turn) if turn else self._admin.drop_answers(tenant, user_id))
        return InvalidatedOut(dropped=dropped.dropped, everywhere=followed and not dropped.unconfirmed)

    def _forget_usual(self, tenant: str | None, user_id: str | None) -> None:
        self._versions.forget(tenant, user_id)
        if self._anticipation is not None:
            self._anticipation.forget(tenant, user_id)

    async def _clear(self, tenant: str | None, user_id: str | None, *, asked: bool = False) -> Invalidated:
        """Drop what is kept in the caches, and insist where one does not answer. `asked`: by a caller, not by the switchboard."""
        dropped = await self._cache.invalidate(tenant, user_id) if self._cache else Invalidated(0)
        if dropped.unconfirmed:
            self._unconfirmed.add((tenant, user_id), dropped.unconfirmed, asked=asked)
        return dropped

    def _store(self) -> ServedEvents:
        if self._events is None:
            raise BackendUnavailable(SWITCHED_OFF)
        return self._events


def _logged(task: asyncio.Task[InvalidatedOut]) -> None:
    if not task.cancelled() and (error := task.exception()):
        logger.error("what a client that has left asked to have erased or dropped is not so everywhere: %s", error, exc_info=error)


def _shard(health: ShardHealth) -> CacheShardOut:
    return CacheShardOut.model_validate({name: getattr(health, name) for name in CacheShardOut.model_fields})


def _tier(tier: str, kind: str, figures: CacheStatistics, failures: int = 0) -> CacheTierOut:
    names = CacheTierOut.model_fields.keys() - {"tier", "kind", "failures", "tenants"}
    tenants = {
        name: TenantCacheOut(hits=one.hits, misses=one.misses, entries=one.entries, used_bytes=one.used_bytes)
        for name, one in figures.by_namespace.items()
    }
    given = {name: getattr(figures, name) for name in names}
    return CacheTierOut.model_validate({"tier": tier, "kind": kind, "failures": failures, "tenants": tenants, **given})
