"""kill -9 of a process that writes events, again and again: every acknowledged one is there, once."""

import asyncio
import random
from collections import Counter

import pytest

from cluster.events.store import closing_store
from tests.chaos.rows import Row
from tests.integration.test_event_durability import held, write_and_kill
from tests.postgres import running_postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/events.db"
        return
    with running_postgres() as server:
        yield server.create("killed")


async def test_every_acknowledged_event_is_there_once(url, record, long: bool, run: int):
    rounds = 30 if long else 4
    store_name = url.partition(":")[0]
    with record(Row(f"event store ({store_name}): kill -9 during writes", "every acknowledged event is there, once", run)) as row:
        acknowledged = []
        for turn in range(rounds):
            lines = random.Random(100 * run + turn).randrange(5, 150)
            acknowledged += await asyncio.to_thread(write_and_kill, url, 1000 * turn, lines)
        async with closing_store(url) as store:
            present = Counter(f"key-{name}" for names in await held(store) for name in names)
        row.figures |= {"acknowledged": len(acknowledged), "stored": present.total(), "kills": rounds}
        row.claim("acknowledged events", len(acknowledged), least=rounds)
        row.claim("acknowledged and not there", sum(key not in present for key in acknowledged), most=0)
        row.claim("there more than once", sum(count > 1 for count in present.values()), most=0)
