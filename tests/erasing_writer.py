"""A process that appends events of several users to an event store, erases some of the users, and prints what was acknowledged.

Called as ``python -m tests.erasing_writer URL ROUNDS``. It prints `began USER` before the first event of a user, `stored KEY ...` and
`erasing USER`, `erased USER`.
"""

import asyncio
import sys

from cluster.events.store import Event, closing_store
from cluster.values import Behaviour

BATCH, BATCHES = 3, 2


async def main(url: str, rounds: int) -> None:
    """In each round a new user has events, and every second one is erased a round later."""
    async with closing_store(url) as store:
        for turn in range(rounds):
            user = f"user-{turn:04}"
            print("began", user, flush=True)
            for batch in range(BATCHES):
                names = [f"{turn}.{batch}.{part}" for part in range(BATCH)]
                await store.append([Event(user, Behaviour(name, 1), idempotency_key=f"key-{name}") for name in names])
                print("stored", *names, flush=True)
            if turn % 2:
                gone = f"user-{turn - 1:04}"
                print("erasing", gone, flush=True)
                await store.erase("default", gone)
                print("erased", gone, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
