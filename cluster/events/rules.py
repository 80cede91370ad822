"""What every event store does the same way: refuse events that no store takes, find repeated events, name versions."""

import sys
from collections.abc import AsyncIterable, AsyncIterator, Sequence

from msgspec import structs

from cluster.errors import InvalidRequest
from cluster.events.store import Batches, Event
from cluster.values import Action

LONGEST = {"user_id": 256, "item_id": 256, "tenant": 64, "idempotency_key": 256}  # characters; what an index row of PostgreSQL holds
LATEST_TIMESTAMP = 253_402_300_799  # the last second of the year 9999
LARGEST_VALUE = sys.float_info.max
LARGEST_BATCH = 10_000
LARGEST_LIMIT = 100_000


def check_events(events: Sequence[Event]) -> None:
    """Raises InvalidRequest for the first event that no store takes, and for a batch of more than LARGEST_BATCH.

    Names are 1 to LONGEST characters of Unicode without NUL, which PostgreSQL cannot hold. Timestamps are whole seconds from 1970 to 9999,
    values finite: SQLite would keep NaN as nothing.
    """
    if len(events) > LARGEST_BATCH:
        raise InvalidRequest("events", f"are {len(events)}, but at most {LARGEST_BATCH} go in one batch; send them in several")
    for number, event in enumerate(events):
        _check_event(event, f"events[{number}]")


def check_user(tenant: str, user_id: str) -> None:
    """Raises InvalidRequest where they cannot be the names of a user that is stored."""
    _check_name(tenant, "tenant", "tenant")
    _check_name(user_id, "user_id", "user_id")


def check_limit(limit: int) -> None:
    """Raises InvalidRequest for a limit outside 1..LARGEST_LIMIT."""
    if not 1 <= limit <= LARGEST_LIMIT:
        raise InvalidRequest("limit", f"must be from 1 to {LARGEST_LIMIT}, not {limit}")


def latest(until: int | None) -> int:
    """The last second of which events count: `until`, or the last one that an event can have."""
    return LATEST_TIMESTAMP if until is None else min(until, LATEST_TIMESTAMP)


def repeats(events: Sequence[Event]) -> dict[int, int]:
    """Position of an event -> position of the first of this batch with its key. Raises InvalidRequest where their content differs."""
    first: dict[tuple[str, str], int] = {}
    repeated: dict[int, int] = {}
    for number, event in enumerate(events):
        if event.idempotency_key is None:
            continue
        original = first.setdefault((event.tenant, event.idempotency_key), number)
        if original != number:
            refuse_other_content(number, event, events[original])
            repeated[number] = original
    return repeated


def refuse_other_content(number: int, event: Event, known: Event) -> None:
    """Raises InvalidRequest where an event differs from the stored one with its idempotency key."""
    sent = structs.replace(event.behaviour, timestamp=known.behaviour.timestamp) if event.dated_on_arrival else event.behaviour
    if (event.user_id, sent) != (known.user_id, known.behaviour):
        problem = f"{event.idempotency_key!r} is known for another event; send a new event with a new key, and an old one unchanged"
        raise InvalidRequest(f"events[{number}].idempotency_key", problem)


def version_of(identity: str, latest: int | None, erasure: int | None) -> str:
    """The version of a user whose latest event has this sequence, or that was erased under this number; `identity` is the store's own.

    A store made anew counts from 1 again; the identity keeps what was cached from the old one from being taken for the new.
    """
    if latest is not None:
        return f"{identity}-{latest}"
    return "" if erasure is None else f"{identity}-erased-{erasure}"


async def each_batch(batches: Batches) -> AsyncIterator[Sequence[Event]]:
    """The batches as an asynchronous iterator, whichever kind they are."""
    if isinstance(batches, AsyncIterable):
        async for batch in batches:
            yield batch
    else:
        for batch in batches:
            yield batch


def _check_event(event: Event, field: str) -> None:
    behaviour = event.behaviour
    _check_name(event.tenant, "tenant", f"{field}.tenant")
    _check_name(event.user_id, "user_id", f"{field}.user_id")
    _check_name(behaviour.item_id, "item_id", f"{field}.behaviour.item_id")
    if event.idempotency_key is not None:
        _check_name(event.idempotency_key, "idempotency_key", f"{field}.idempotency_key")
    if not isinstance(behaviour.timestamp, int) or not 0 <= behaviour.timestamp <= LATEST_TIMESTAMP:
        problem = f"must be whole seconds since 1970, at most {LATEST_TIMESTAMP}, not {behaviour.timestamp!r}"
        raise InvalidRequest(f"{field}.behaviour.timestamp", problem)
    if not isinstance(behaviour.action, Action):
        raise InvalidRequest(f"{field}.behaviour.action", f"must be one of {', '.join(Action)}, not {behaviour.action!r}")
    if behaviour.value is not None and not (isinstance(behaviour.value, int | float) and abs(behaviour.value) <= LARGEST_VALUE):
        raise InvalidRequest(f"{field}.behaviour.value", f"must be a finite number or none, not {behaviour.value!r}")


def _check_name(name: str, kind: str, field: str) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST[kind]:
        raise InvalidRequest(field, f"must be a text of 1 to {LONGEST[kind]} characters, not {_shown(name)}")
    if "\0" in name:
        raise InvalidRequest(field, f"holds the character NUL, which no store keeps: {_shown(name)}")
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
        raise InvalidRequest(field, f"holds half of a surrogate pair, which is no Unicode text: {_shown(name)}")


def _shown(name: object) -> str:
    text = ascii(name)
    return text if len(text) <= 60 else f"{text[:57]}..."
