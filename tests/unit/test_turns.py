"""Work that runs in turns of lanes."""

import asyncio

from cluster.traffic.turns import InTurns
from tests.waiting import settled


async def test_a_caller_that_leaves_as_its_turn_comes_gives_it_to_the_next():
    turns = InTurns(lambda: 1)
    await turns.begin("any")
    leaves, follows = (asyncio.create_task(turns.begin("any")) for _ in range(2))
    await settled()
    turns.end()
    leaves.cancel()
    await follows
    assert (leaves.cancelled(), turns.running) == (True, 1)
