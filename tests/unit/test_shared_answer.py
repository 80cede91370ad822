"""Many that ask at once share one answer."""

import asyncio
from contextvars import ContextVar

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


async def test_the_question_is_asked_in_the_context_of_none_of_those_that_ask():
    """Serve cancels the calls that were made in the context of a request whose client leaves."""
    caller, seen = ContextVar("caller", default="none"), []

    async def ask():
        seen.append(caller.get())

    shared = SharedAnswer(ask, 0.5)
    caller.set("the first one's")
    await shared.get()
    assert seen == ["none"]
