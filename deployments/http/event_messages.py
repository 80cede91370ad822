"""The messages about events and about what is kept of users: events as they happen, histories, erasures, caches."""

import time
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag

from cluster.dataset import Catalogue
from cluster.events.rules import LARGEST_BATCH
from cluster.events.store import Event, Stored
from cluster.traffic.breaker import BreakerState
from cluster.values import LARGEST_VALUE, Action, Behaviour
from deployments.http.messages import ONE, SEVERAL, TENANT_SAID, ItemId, Message, Tenant, Timestamp, UserId

IdempotencyKey = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]{1,200}$")]
LATEST_S = 86_400
"""How far a sender's clock may be ahead: an event in the future would be every later request's present."""


def _not_in_the_future(value: int) -> int:
    if value > time.time() + LATEST_S:
        raise ValueError(f"{value} is more than a day ahead of this service's clock; send when it happened, in seconds since 1970")
    return value


class EventIn(Message):
    """Something a user did."""

    user_id: UserId
    item_id: ItemId
    action: Action = Action.VIEW
    value: float | None = Field(None, allow_inf_nan=False, ge=-LARGEST_VALUE, le=LARGEST_VALUE, description="a rating, price or dwell time")
    timestamp: Annotated[Timestamp, AfterValidator(_not_in_the_future)] | None = Field(None, description="when; default: as it arrives")
    tenant: Tenant | None = Field(None, description=TENANT_SAID)
    idempotency_key: IdempotencyKey | None = Field(
        None, description="an event sent again with the same key is stored once; unique within a tenant"
    )

    def to_value(self, key: str | None) -> Event:
        arrived = self.timestamp is None
        behaviour = Behaviour(self.item_id, int(time.time()) if self.timestamp is None else self.timestamp, self.action, self.value)
        return Event(self.user_id, behaviour, self.tenant or "default", self.idempotency_key or key, dated_on_arrival=arrived)


class EventsIn(Message):
    """Several events, stored together or not at all; a user's are kept in this order where their timestamps are equal."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"events": [{"user_id": "196", "item_id": "50", "action": "rating", "value": 5}]}]}
    )

    events: list[EventIn] = Field(min_length=1, max_length=LARGEST_BATCH, fail_fast=True)


def _kind(body: Any) -> str:
    return SEVERAL if isinstance(body, EventsIn) or (isinstance(body, dict) and "events" in body) else ONE


EventOrEvents = Annotated[Annotated[EventIn, Tag(ONE)] | Annotated[EventsIn, Tag(SEVERAL)], Discriminator(_kind)]


class StoredEventOut(Message):
    sequence: int = Field(description="the order in which events were stored")
    duplicate: bool = Field(description="its idempotency key was known: it had been stored before")


class EventsOut(Message):
    """The events are durable."""

    stored: int
    duplicates: int
    unknown_items: list[str] = Field(description="item ids that this model's catalogue does not hold; they are stored all the same")
    events: list[StoredEventOut]

    @classmethod
    def from_values(cls, stored: list[Stored], events: list[Event], catalogue: Catalogue) -> Self:
        duplicates = sum(one.duplicate for one in stored)
        return cls(
            stored=len(stored) - duplicates,
            duplicates=duplicates,
            unknown_items=list(dict.fromkeys(catalogue.unknown(event.behaviour.item_id for event in events))),
            events=[StoredEventOut(sequence=one.sequence, duplicate=one.duplicate) for one in stored],
        )


class PastEventOut(Message):
    item_id: str
    title: str | None = Field(description="null where the catalogue does not hold the item")
    timestamp: int
    action: Action
    value: float | None


class HistoryOut(Message):
    """What is stored of a user."""

    user_id: str
    tenant: str
    version: str = Field(description="changes with every event and with an erasure; empty where nothing was ever stored")
    total: int = Field(description="how many events are stored of the user")
    events: list[PastEventOut] = Field(
        description="oldest first; the latest ones where there are more than were asked for: ask for the older ones by `until`"
    )


class ErasedOut(Message):
    """What an erasure did."""

    user_id: str
    tenant: str
    events: int = Field(description="how many were deleted from the event store")
    cached_answers: int = Field(description="how many were deleted from the shared cache and from this gateway's")
    everywhere: bool = Field(
        description="every live replica and cache has deleted what it kept of the user; those that did not answer are told again"
    )


class InvalidateIn(Message):
    """Which cached answers to drop: those of a user, of a tenant, or of all tenants."""

    tenant: Tenant | None = None
    user_id: UserId | None = None


class InvalidatedOut(Message):
    dropped: int = Field(description="answers that this gateway and the shared cache held")
    everywhere: bool = Field(description="every live process has followed, and every cache has; those that did not answer are told again")


class TenantCacheOut(Message):
    hits: int
    misses: int
    entries: int
    used_bytes: int


class CacheTierOut(Message):
    tier: Literal["l1", "l2"] = Field(description="l1: this gateway replica's; l2: the cluster's")
    kind: str
    hits: int
    stale_hits: int = Field(description="of the hits, those past their time, given while they were computed anew")
    misses: int
    recent_hit_rate: float | None
    insertions: int
    evictions: int
    expirations: int
    rejections: int = Field(description="what was not worth keeping, while the hit rate was below the minimum")
    invalidations: int
    entries: int
    used_bytes: int
    capacity_bytes: int
    failures: int = Field(0, description="calls that failed or came too late, each of which counted as a miss")
    tenants: dict[str, TenantCacheOut]


class CacheShardOut(Message):
    """A shard of l2, as this gateway sees it."""

    name: str
    breaker: BreakerState = Field(description="closed: the shard is asked; open: not, as it has failed; half-open: tried again")
    calls: int
    failures: int = Field(description="of the calls, those that failed or came too late, each of which counted as a miss")
    timeouts: int = Field(description="of the failures, those that came too late")


class CacheOut(Message):
    """The caches: answers, and what the engines keep of users."""

    enabled: bool
    policy: str
    tiers: list[CacheTierOut]
    shards: list[CacheShardOut] = Field([], description="the actors of l2, or its Redis")
    computed: int = Field(description="answers that this gateway computed")
    joined: int = Field(description="requests that waited for another's computation of the same answer")
    refreshed: int = Field(description="answers computed in the background: stale, hot, or after an event")
    dropped: int = Field(description="computations in the background that were left out because there were too many")
    hot: list[float] = Field(description="how often a minute the ten hottest answers are asked for")
    user_states: dict[str, dict[str, dict[str, float]]] = Field(
        description="stage -> backend -> what its engines keep of users, over all replicas"
    )
