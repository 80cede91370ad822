"""A process that appends to an event store as fast as it can and prints the keys of each batch that is acknowledged, until it is killed.

Called as ``python -m tests.durable_writer URL USERS START``; START is the number of the first batch.
"""

import asyncio
import sys
from collections.abc import Iterator

from cluster.events.store import Event, EventStore, closing_store
from cluster.values import Behaviour

BATCH = 3


def batches(user: int, start: int) -> Iterator[list[Event]]:
    """A user's events from batch number `start` on, without end. All have one timestamp, so that their order is that of arrival."""
    while True:
        names = [f"{user}.{start}.{part}" for part in range(BATCH)]
        yield [Event(f"u{user}", Behaviour(name, 1), idempotency_key=f"key-{name}") for name in names]
        start += 1


async def _write(store: EventStore, user: int, start: int) -> None:
    for batch in batches(user, start):
        await store.append(batch)
        print(*(event.idempotency_key for event in batch), flush=True)


async def _main(url: str, users: int, start: int) -> None:
    async with closing_store(url) as store:
        await asyncio.gather(*(_write(store, user, start) for user in range(users)))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
