"""Many that ask at once share one answer."""

import asyncio

from deployments.calls.shared_answer import SharedAnswer
from tests.waiting import settled


async def test_all_that_ask_within_a_moment_share_one_question_and_the_next_moment_asks_anew():
    asked, now, gate = [], [0.0], asyncio.Event()

    async def ask():
        asked.append(now[0])
        await gate.wait()
        return len(asked)

    shared = SharedAnswer(ask, 0.5, clock=lambda: now[0])
    callers = [asyncio.create_task(shared.get()) for _ in range(100)]
    await settled()
    callers[0].cancel()  # one that leaves
    gate.set()
    assert await asyncio.gather(*callers[1:]) == [1] * 99
    now[0] = 0.4
    assert await shared.get() == 1
    now[0] = 0.5
    assert await shared.get() == 2
    assert asked == [0.0, 0.5]
