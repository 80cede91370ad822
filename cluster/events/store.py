"""Events: what users did, kept so that an answer can be given to a user id alone. One interface for every database.

A store is used like this::

    async with closing_store("sqlite:///events.db") as store:
        await store.append([Event("196", Behaviour("50", 881250949), idempotency_key="order-17")])
        history = await store.history("default", "196", limit=200)

`open_event_store` chooses by the URL; what a store must do stands at `ServedEvents` and `EventStore`.
"""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from cluster.errors import ConfigError
from cluster.registry import EVENT_STORES, choose
from cluster.values import Availability, Behaviour

RECENT_USERS = 1000
"""How many rows `users` reads at most."""


@dataclass(frozen=True, slots=True)
class Event:
    """One behaviour of one user. Sent again with the same `idempotency_key` (unique within its tenant) it is stored once.

    `dated_on_arrival`: its sender gave no time; sent again it arrives later, and is the same event all the same.
    """

    user_id: str
    behaviour: Behaviour
    tenant: str = "default"
    idempotency_key: str | None = None
    dated_on_arrival: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """Where an event stands: later arrivals of a user have larger sequences. `duplicate`: it was stored before, under this sequence."""

    sequence: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class StoredHistory:
    """Behaviours by (timestamp, arrival), oldest first, the version of the user they were read at, and how many are stored in all."""

    behaviours: tuple[Behaviour, ...]
    version: str
    total: int = 0


@dataclass(frozen=True, slots=True)
class StoredUser:
    """A user with stored events, and how many."""

    user_id: str
    events: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a bulk import came to, in events."""

    stored: int = 0
    duplicates: int = 0

    def plus(self, batch: Sequence[Stored]) -> "Loaded":
        duplicates = sum(one.duplicate for one in batch)
        return Loaded(self.stored + len(batch) - duplicates, self.duplicates + duplicates)


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """How much a store holds, over all tenants; a user is one with events, counted once in each tenant."""

    events: int
    users: int


Batches: TypeAlias = Iterable[Sequence[Event]] | AsyncIterable[Sequence[Event]]


class Histories(Protocol):
    """What an answer reads of an event store. `name` is what provenance calls it."""

    name: str

    async def history(self, tenant: str, user_id: str, limit: int, until: int | None = None) -> StoredHistory:
        """The latest `limit` behaviours of a user, of those not after `until` (seconds since 1970); none of an unknown one."""
        ...

    async def version(self, tenant: str, user_id: str) -> str:
        """A text that changes whenever something of the user is stored or erased and never comes back; "" where nothing was ever stored."""
        ...


class ServedEvents(Histories, Protocol):
    """What a gateway asks of an event store. All methods may be called by many tasks of one event loop at once; `readers`: how many reads
    run then, while others wait for these; two at least. A cancelled read ends once the store has done with it.

    Each raises InvalidRequest, naming the field, for what no store takes (see `check_events`), and BackendUnavailable, with the cure, where
    the database cannot be reached, is broken or takes too long. A cancelled or failed write may still have been stored: only with
    idempotency keys is it safe to send again.
    """

    readers: int

    async def append(self, events: Sequence[Event]) -> list[Stored]:
        """Store all of them or none, and answer in their order; they are on the disk when this returns.

        The order of a batch is its users' order of arrival. An event with a key that is known is a duplicate where its user and
        behaviour are the same, and InvalidRequest for ``events[i].idempotency_key`` where they are not. One with the key of an erased
        user's event is a duplicate, whatever it says: a sender that tries again does not bring the user back.
        """
        ...

    async def erase(self, tenant: str, user_id: str) -> int:
        """Forget a user and say how many events that were.

        What remains are digests of the name, so that the version goes on, and of the idempotency keys, by the deployment's own key (see
        `Digests`). Where a ledger is kept, that is so of an unknown user too: another copy of the store may hold the user.
        """
        ...

    async def digest(self, tenant: str, user_id: str) -> str:
        """What remains of the user's name once it is erased, in hexadecimal."""
        ...

    async def users(self, tenant: str, limit: int) -> list[StoredUser]:
        """The tenant's users among the RECENT_USERS of all tenants that were first met last, the latest first."""
        ...

    async def close(self) -> None:
        """Finish what was begun and give everything back; later calls raise BackendUnavailable."""
        ...


class EventStore(ServedEvents, Protocol):
    """Where events are kept: what a gateway asks of it, and what commands do."""

    async def load(self, batches: Batches) -> Loaded:
        """Store many batches, each all or nothing and kept even where later ones fail; keys make a load restartable."""
        ...

    async def pass_over(self, events: Sequence[Event]) -> None:
        """Store nothing under their keys from now on: they repeat events that are stored under other keys, and stay erased with these."""
        ...

    async def statistics(self) -> StoreStatistics: ...


class EventStoreDriver(Protocol):
    """What a table names: says whether its database can be used here, and opens it, bringing its schema up to date, and erasing from it
    what its ledger says was erased since it was backed up.
    """

    def get_availability(self) -> Availability: ...
    async def open(self, url: str) -> EventStore: ...

    async def require_there(self, url: str) -> None:
        """Raises ConfigError where `open` would make a new store, but BackendUnavailable where one may be there that is away now."""
        ...

    async def statistics(self, url: str) -> StoreStatistics:
        """Of the store as it is, which may be a backup: nothing is written, not even what its ledger says. Raises as `require_there`."""
        ...

    async def back_up(self, url: str, to: Path) -> None:
        """Copy the store, while it serves, into a file that is not there yet. Raises ConfigError where its database has a tool for that."""
        ...

    async def restore(self, url: str, backup: Path | None) -> None:
        """Make the store of a backup, or finish what the database's own tool has restored, and erase what its ledger says.

        Raises ConfigError where there is no ledger.
        """
        ...


async def open_event_store(url: str) -> EventStore:
    """The store at ``sqlite:///file.db`` (a fourth slash makes it absolute) or ``postgresql://user@host/database``.

    Raises ConfigError or UnknownChoice for another kind of URL, BackendUnavailable where the store cannot be opened.
    """
    return await driver_of(url).open(url)


def driver_of(url: str) -> EventStoreDriver:
    """The driver of the database that a URL names. Raises as `open_event_store`."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ConfigError(f"event store {url!r} is not a URL; write sqlite:///events.db or postgresql://user@host/database")
    driver: EventStoreDriver = choose("event store", EVENT_STORES, scheme)()
    driver.get_availability().require()
    return driver


@asynccontextmanager
async def closing_store(url: str) -> AsyncIterator[EventStore]:
    """The store that `open_event_store` opens, closed at the end of an `async with` block."""
    store = await open_event_store(url)
    try:
        yield store
    finally:
        await store.close()
