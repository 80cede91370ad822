"""Work that runs in turns of lanes."""

import asyncio
from dataclasses import dataclass

from cluster.traffic.turns import InTurns, Turns
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


async def test_work_that_does_not_wait_overtakes_none_that_waits():
    room = 1
    turns = InTurns(lambda: room)
    assert [turns.begin_at_once(), turns.begin_at_once(), turns.running] == [True, False, 1]
    waits = asyncio.create_task(turns.begin("any"))
    await settled()
    room = 2
    assert not turns.begin_at_once(), "one waits, though there is room now"
    turns.end()
    await waits
    assert turns.running == 1
    assert turns.begin_at_once()


@dataclass
class Compared:
    """A request that counts how often any is compared with another."""

    number: int
    times = 0

    def __lt__(self, other: "Compared") -> bool:
        Compared.times += 1
        return self.number < other.number


def test_a_request_that_leaves_a_long_lane_is_found_without_a_look_at_all_others():
    turns, requests = Turns[Compared](), [Compared(number) for number in range(1000)]
    for request in reversed(requests):
        turns.put("lane", request)
    Compared.times = 0
    for request in requests[500:]:
        turns.remove("lane", request)
    assert Compared.times < 20 * 500
    assert [turns.take().number for _ in range(len(turns))] == list(range(500))
