"""Tasks that no request waits for."""

import asyncio
from contextvars import ContextVar

from cluster.background import Background
from tests.waiting import until


async def test_work_is_done_in_the_context_of_none_of_the_requests():
    """Serve cancels the calls that were made in the context of a request whose client leaves."""
    caller, seen, background = ContextVar("caller", default="none"), [], Background()

    async def work():
        seen.append(caller.get())

    caller.set("the first one's")
    await background.start(work())
    assert (seen, len(background)) == (["none"], 0)


async def test_there_is_no_room_beyond_the_limit_and_what_still_runs_ends_with_it():
    background = Background(1)
    running = background.start(asyncio.Event().wait())
    assert not background.has_room()
    await background.close()
    assert running.cancelled()
    assert not background.has_room()


async def test_what_begins_for_a_key_ends_what_began_for_it_before_and_nothing_else():
    background, ended = Background(), []

    async def work(name):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    background.replace("ada", work("first"))
    background.replace("bob", work("another's"))
    await asyncio.sleep(0)
    background.replace("ada", work("second"))
    await until(lambda: len(background) == 2)
    assert ended == ["first"]
    await background.close()
    assert sorted(ended) == ["another's", "first", "second"]
