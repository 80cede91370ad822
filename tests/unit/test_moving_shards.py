"""The shared cache while its shards become more and fewer: what is kept, what is erased, and what a shard that dies costs."""

import asyncio
import random
from collections import Counter

import pytest

from cluster.cache.elastic import NONE, ElasticCache
from cluster.cache.entry import Entry, Key
from cluster.cache.layout import Layout, ShardsSeen, shard_names
from cluster.cache.memory import MemoryCache
from cluster.cache.moving import BATCH, MovingShard
from cluster.cache.shard import Granted
from cluster.cache.shared import Erased, SharedSettings
from cluster.errors import BackendUnavailable
from tests.fakes.clock import Clock
from tests.repetitions import times
from tests.waiting import settled, until

pytestmark = pytest.mark.virtual_time

NAME = "cache"
KEYS = [Key("tenant", f"user {index % 50}", str(index)) for index in range(3 * BATCH)]
PATIENT = SharedSettings(deadline_s=60.0, operator_s=300.0)


class Place:
    """Shards in this process. Each call of one takes as many turns of the loop as `turns` says; the shards in `away` do not answer.
    While it `refuses`, none is to be had.
    """

    def __init__(self, turns=lambda: 0):
        self.shards, self.away, self.ended, self.clock, self.turns = {}, set(), [], Clock(1000.0), turns
        self.made, self.given, self.before_given, self.ends, self.refuses = Counter(), Counter(), None, [], False
        self.refused = 0

    async def make(self, names):
        self.refuse()
        self.made.update(names)
        for name in names:
            self.shards.setdefault(name, self.new(name))
        return {name: Far(self, name) for name in names}

    async def others(self, names):
        self.refuse()
        return {name: Far(self, name) for name in self.shards if name not in names}

    def refuse(self):
        if self.refuses:
            self.refused += 1
            raise BackendUnavailable("the head is away")

    async def end(self, name):
        self.ended.append(name)
        self.shards.pop(name, None)

    async def peer(self, name):
        return Far(self, name)

    async def way(self):
        for _ in range(self.turns()):
            await asyncio.sleep(0)

    def missed(self, name):
        """A call has found it away."""

    def new(self, name):
        self.clock.now += 1  # one that is made later begins with a later epoch
        return MovingShard(name, MemoryCache(clock=self.clock), self.peer, busy=lambda: 0.25, clock=self.clock)

    def kill(self, name):
        """It is restarted, empty."""
        self.ends.append(asyncio.create_task(self.shards[name].close()))
        self.shards[name] = self.new(name)

    def held(self, user=None):
        """Shard -> the keys that it holds, of a user or of all."""
        return {
            name: {key for key, _ in shard.memory.entries() if user in {None, key.group}} for name, shard in sorted(self.shards.items())
        }


class Far:
    """A shard of a place, a few turns away, by its name: another one may have that by then."""

    def __init__(self, place, name):
        self.place, self.name = place, name

    def __getattr__(self, method):
        async def called(*arguments, **named):
            await self.way()
            if method == "take_over":
                self.place.given[self.name] += len(arguments[0])
                if arguments[0] and self.place.before_given is not None:
                    await self.place.before_given(self.name)
            if self.name in self.place.away or self.name not in self.place.shards:
                self.place.missed(self.name)
                raise ConnectionResetError(f"{self.name} is away")
            answer = await getattr(self.place.shards[self.name], method)(*arguments, **named)
            await self.way()
            return answer

        return called

    async def way(self):
        await self.place.way()


def entry(payload=b"answer"):
    return Entry.lasting(payload, len(payload), now=1000.0, fresh_s=1e6)


def stored(keys=KEYS):
    return {key: entry(key.digest.encode()) for key in keys}


async def cache_of(place, least=1, most=8):
    cache = await ElasticCache.made(NAME, place, least=least, most=most, settings=PATIENT)
    await cache.settled()
    return cache


async def put(cache, entries):
    await cache.mput(entries, (await cache.mget(list(entries))).epochs)


async def change(cache, owners):
    cache.follow(Layout(cache.seen.layout.number + 1, owners))
    await cache.settled()


async def found(cache, keys=KEYS):
    return dict((await cache.mget(list(keys))).entries)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (1, 4), (4, 1), (3, 2)])
async def test_what_was_kept_is_still_a_hit_when_shards_are_added_or_taken_away(before, after):
    place = Place()
    cache = await cache_of(place, before)
    await put(cache, stored())
    held = place.held()
    await change(cache, after)
    assert await found(cache) == stored()
    assert list(place.shards) == shard_names(after, NAME)
    assert sum(map(len, place.held().values())) == len(KEYS), "each key is in one shard"
    stayed = sum(len(held[name] & now) for name, now in place.held().items() if name in held)
    assert sum(place.given.values()) == len(KEYS) - stayed, "what keeps its owner stays where it is"
    assert cache.seen.layout.owners == after


async def test_a_cache_tells_its_first_layout_before_it_has_looked_at_its_shards():
    cache = await ElasticCache.made(NAME, Place(), least=2, most=8, settings=PATIENT)
    assert cache.seen == ShardsSeen(Layout(0, 2))
    await cache.settled()


async def test_a_shard_that_is_slow_to_start_owns_nothing_until_it_answers(caplog):
    place = Place()
    cache = await cache_of(place)
    await put(cache, stored())
    place.away.add(f"{NAME}-1")
    cache.follow(Layout(1, 2))
    await until(lambda: place.made[f"{NAME}-1"] > 3)
    assert (cache.seen.layout.owners, await found(cache)) == (1, stored())
    assert caplog.text.count("cache-1 does not answer yet") == 1, "it may take hours"
    place.away.clear()
    await cache.settled()
    assert (cache.seen.layout.owners, await found(cache)) == (2, stored())
    assert not cache.seen.moving


class LateStart(Place):
    """As Place; all but the first shard take `start_s` to start. What they are asked before waits and is done then, one call after the
    other, though its callers have given up.
    """

    def __init__(self, start_s):
        super().__init__()
        self.start_s, self.turn = start_s, {}

    async def make(self, names):
        for name in names[1:]:
            if name not in self.shards:
                self.turn[name] = asyncio.Lock()
                await self.turn[name].acquire()
                asyncio.get_running_loop().call_later(self.start_s, self.turn[name].release)
        return self.queued(await super().make(names))

    async def others(self, names):
        return self.queued(await super().others(names))

    def queued(self, shards):
        return {name: Queued(shard, self.turn[name]) if name in self.turn else shard for name, shard in shards.items()}


class Queued:
    """A shard that answers one call at a time, each when it is its `turn`."""

    def __init__(self, shard, turn):
        self.shard, self.turn = shard, turn

    def __getattr__(self, method):
        async def done(*arguments, **named):
            async with self.turn:
                return await getattr(self.shard, method)(*arguments, **named)

        return lambda *arguments, **named: asyncio.shield(asyncio.create_task(done(*arguments, **named)))


async def test_a_shard_that_starts_more_slowly_than_gateways_wait_is_made_once_and_not_ended_by_them():
    place = LateStart(1.5 * PATIENT.operator_s)
    gateways = [await cache_of(place), await cache_of(place)]
    for gateway in gateways:
        gateway.follow(Layout(1, 2))
    async with asyncio.timeout(10 * PATIENT.operator_s):
        for gateway in gateways:
            await gateway.settled()
    assert [gateway.seen for gateway in gateways] == [ShardsSeen(Layout(1, 2), 0.5, moving=False)] * 2
    assert (place.ended, list(place.shards)) == ([], shard_names(2, NAME))


async def test_shards_that_cannot_be_had_at_the_start_are_had_later_and_until_then_no_erasure_is_confirmed(caplog):
    place = Place()
    others = await cache_of(place, 2)
    await put(others, stored())
    place.refuses = True
    cache = await ElasticCache.made(NAME, place, least=2, most=8, settings=PATIENT)
    assert (await found(cache), await cache.lease(KEYS[0], "me", 30.0), cache.seen) == ({}, None, None)
    assert await cache.invalidate("tenant") == Erased(0, (NAME,))
    assert [health.name for health in cache.health()] == [NAME]
    await until(lambda: place.refused > 10)
    assert caplog.text.count("the cache stays with 0 shards: the head is away") == 1
    place.refuses = False
    await cache.settled()
    assert (await found(cache), cache.seen.layout.owners) == (stored(), 2)
    assert await cache.invalidate("tenant") == Erased(len(KEYS))


async def test_entries_move_in_batches_and_requests_go_on_in_between():
    place = Place()
    cache = await cache_of(place)
    await put(cache, stored())
    sizes, answered = [], []

    async def asked(name):
        sizes.append(place.given[name] - sum(sizes))
        answered.append(len(await found(cache)))

    place.before_given = asked
    await change(cache, 2)
    assert len(sizes) == len(KEYS) / BATCH
    assert max(sizes) <= BATCH
    assert min(answered) > 0


async def test_an_entry_that_the_new_owner_has_computed_meanwhile_is_not_replaced_by_the_old_one():
    place = Place()
    cache = await cache_of(place)
    await put(cache, stored())
    newer = dict.fromkeys(KEYS, entry(b"newer"))

    async def computed(_):
        place.before_given = None
        await put(cache, newer)

    place.before_given = computed
    await change(cache, 2)
    moved = place.held()["cache-1"]
    assert {one.payload for key, one in (await found(cache)).items() if key in moved} == {b"newer"}


async def test_a_gateway_that_has_not_heard_of_the_change_has_misses_and_no_errors_until_a_shard_tells_it():
    place = Place()
    cache, late = await cache_of(place), await cache_of(place)
    await put(cache, stored())
    await change(cache, 2)
    stays = place.held()["cache-0"]
    assert (await found(late)).keys() == stays
    assert await late.mput(dict.fromkeys(KEYS, entry(b"late")), (await late.mget(KEYS)).epochs) == frozenset()
    assert place.held()["cache-0"] == stays, "it takes in nothing that another one owns"
    assert {health.failures for health in late.health()} == {0}
    await late.statistics()
    await late.settled()
    assert late.seen.layout == cache.seen.layout
    assert (await found(late)).keys() == set(KEYS)


async def test_a_shard_that_is_emptied_takes_in_nothing_more_and_is_ended_once_it_is_empty():
    place = Place()
    cache, late = await cache_of(place, 2), await cache_of(place, 2)
    taken = []

    async def written(_):
        taken.append(await late.mput(dict.fromkeys(KEYS, entry(b"late")), (await late.mget(KEYS)).epochs))
        taken.append(len(place.held()["cache-1"]))

    await put(cache, stored())
    leaving = len(place.held()["cache-1"])
    place.before_given = written
    await change(cache, 1)
    assert taken[:2] == [frozenset(), leaving]
    assert place.ended == ["cache-1"]
    place.before_given = None
    await late.statistics()
    await late.settled()
    assert list(place.shards) == ["cache-0"]


async def test_what_began_at_the_old_owner_is_not_put_at_the_new_one():
    """Epochs of two shards have nothing in common: one of a younger shard would pass for a later one."""
    place = Place()
    cache = await cache_of(place, 2)
    leased = {key: await cache.lease(key, "me", 30) for key in KEYS[:50]}
    looked_up = (await cache.mget(KEYS[50:])).epochs
    await change(cache, 1)
    await cache.invalidate("tenant")
    began = {key: granted.epoch for key, granted in leased.items()} | looked_up
    assert await cache.mput(stored(), began) < set(KEYS)  # what the old owner granted is a miss, the rest is refused
    assert await found(cache) == {}


async def test_callers_that_wait_at_the_old_owner_are_told_at_once():
    place = Place()
    cache = await cache_of(place, 2)
    granted = {key: await cache.lease(key, "me", 3600) for key in KEYS[:40]}
    assert all(isinstance(one, Granted) for one in granted.values())
    waiting = {key: asyncio.create_task(cache.wait(key, 3600)) for key in granted}
    await settled()
    await change(cache, 1)
    told = {key for key, task in waiting.items() if task.done()}
    assert 0 < len(told) < 40
    assert {isinstance(await cache.lease(key, "you", 30), Granted) for key in told} == {True}
    for task in waiting.values():
        task.cancel()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 1)])
async def test_an_erased_user_does_not_come_back_whatever_is_on_its_way_at_that_moment(before, after):
    for seed in range(40):
        draw = random.Random(seed)
        place = Place(lambda draw=draw: draw.randrange(12))
        cache, late = await cache_of(place, before), await cache_of(place, before)
        await put(cache, stored())
        cache.follow(Layout(1, after))
        for _ in range(draw.randrange(120)):
            await asyncio.sleep(0)
        erased = await draw.choice((cache, late)).invalidate("tenant", "user 7")
        if not erased.unconfirmed:
            assert set().union(*place.held("user 7").values()) == set(), f"seed {seed}: it is confirmed, and not erased"
        else:
            await until(lambda late=late: confirms(late))
        await cache.settled()
        assert set().union(*place.held("user 7").values()) == set(), f"seed {seed}: it came back"
        others = {key: one for key, one in stored().items() if key.group != "user 7"}
        assert await found(cache) == others, f"seed {seed}"


async def confirms(cache):
    return not (await cache.invalidate("tenant", "user 7")).unconfirmed


class Slow(Place):
    """As Place, with calls that take their time, each its own. One that was ended while another gateway still asks it is made anew."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    async def way(self):
        await asyncio.sleep(self.draw.choice((0.0, 0.001, 0.01, 0.1, 0.5)))

    def missed(self, name):
        self.shards.setdefault(name, self.new(name))


class Unrest:
    """Gateways that follow one layout after another and write what they know of users, while a user is erased and shards are killed.

    An entry says how many erasures had begun when it was computed. `confirmed`: the latest one that every shard has confirmed.
    """

    def __init__(self, draw):
        self.draw, self.place = draw, Slow(draw)
        self.erasures, self.confirmed, self.number = 0, 0, 0

    async def last(self, seconds, *, killed):
        self.gateways = [await cache_of(self.place) for _ in range(3)]
        pauses = {self.changes: 3.0, self.writes: 0.2, self.erases: 2.0, **({self.kills: 5.0} if killed else {})}
        tasks = [asyncio.create_task(self.again_and_again(work, pause_s)) for work, pause_s in pauses.items()]
        for _ in range(100 * seconds):
            await asyncio.sleep(0.01)
            self.check()
        for task in tasks:
            task.cancel()
        assert not [error for error in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(error, Exception)]
        for gateway in self.gateways:
            await gateway.settled()
        self.check()

    async def again_and_again(self, work, pause_s):
        while True:
            await asyncio.sleep(2 * pause_s * self.draw.random())
            await work(self.draw.choice(self.gateways))

    async def changes(self, gateway):
        self.number += self.draw.randrange(2)
        gateway.follow(Layout(self.number, self.draw.randrange(1, 5)))

    async def writes(self, gateway):
        keys = [key for key in KEYS if key.group == "user 7"]
        epochs = (await gateway.mget(keys)).epochs
        known = entry(str(self.erasures).encode())
        await asyncio.sleep(self.draw.random())
        await gateway.mput(dict.fromkeys(keys, known), epochs)

    async def erases(self, gateway):
        self.erasures += 1
        begun = self.erasures
        if not (await gateway.invalidate("tenant", "user 7")).unconfirmed:
            self.confirmed = max(self.confirmed, begun)

    async def kills(self, _):
        self.place.kill(self.draw.choice(list(self.place.shards)))

    def check(self):
        held = [int(one.payload) for shard in self.place.shards.values() for _, one in shard.memory.entries()]
        assert min(held, default=self.confirmed) >= self.confirmed, "what was computed before a confirmed erasure came back"


@pytest.mark.parametrize("killed", [False, True])
async def test_nothing_from_before_a_confirmed_erasure_is_held_whatever_moves_is_written_and_is_killed(killed):
    confirmed = moved = 0
    for seed in range(times(200, 10)):
        unrest = Unrest(random.Random(seed))
        await unrest.last(60, killed=killed)
        confirmed, moved = confirmed + unrest.confirmed, moved + sum(unrest.place.given.values())
    assert min(confirmed, moved) > 0


async def test_an_erasure_is_not_confirmed_while_a_shard_that_may_hold_the_user_does_not_answer():
    place = Place()
    cache, late = await cache_of(place), await cache_of(place)
    await put(cache, stored())
    await change(cache, 2)
    place.away = {"cache-1"}
    assert (await late.invalidate("tenant", "user 7")).unconfirmed == ("cache-1",), "also by a gateway that does not know of it yet"
    place.away = set()
    assert (await late.invalidate("tenant", "user 7")).unconfirmed == ()
    assert set().union(*place.held("user 7").values()) == set()


async def test_a_shard_without_a_layout_serves_on_after_an_erasure_by_a_gateway_that_knows_none_either():
    place = Place()
    shard = place.new("cache-0")
    ada, bob = Key("tenant", "ada", "1"), Key("tenant", "bob", "1")
    granted = [await shard.lease(key, "me", 30.0) for key in (ada, bob)]
    assert await shard.mput({ada: entry()}, {ada: granted[0].epoch}) == frozenset()
    assert await shard.erase("tenant", "ada", NONE) == (1, NONE)
    assert await shard.mput({bob: entry()}, {bob: granted[1].epoch}) == frozenset()
    assert (await shard.mget([ada, bob])).entries.keys() == {bob}
    assert (await shard.follow(Layout(0, 1))).layout == Layout(0, 1)


async def test_an_erasure_is_not_confirmed_where_it_is_not_known_which_shards_there_are(monkeypatch):
    place = Place()
    cache = await cache_of(place)

    async def unknown(_):
        raise BackendUnavailable("the head is away")

    monkeypatch.setattr(place, "others", unknown)
    await put(cache, stored())
    assert await cache.invalidate("tenant", "user 7") == Erased(8, (NAME,))
    assert place.held("user 7") == {"cache-0": set()}, "those that are known are asked all the same"
    place.away.add("cache-0")
    assert await cache.invalidate("tenant", "user 7") == Erased(0, (NAME, "cache-0"))


@pytest.mark.parametrize("killed", ["cache-0", "cache-1"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
async def test_a_shard_that_is_killed_in_the_middle_of_a_move_costs_misses_and_no_wrong_answer(before, after, killed):
    place = Place()
    cache = await cache_of(place, before)
    await put(cache, stored())
    batches = []

    async def kill(name):
        batches.append(name)
        if len(batches) == 1:
            place.kill(killed)

    place.before_given = kill
    await change(cache, after)
    kept = await found(cache)
    assert kept.items() <= stored().items()
    assert len(kept) < len(KEYS)
    assert list(place.shards) == shard_names(after, NAME)
    await put(cache, stored())
    assert await found(cache) == stored()


async def test_what_an_owner_does_not_take_over_is_given_up():
    place = Place()
    cache = await cache_of(place)
    await put(cache, stored())
    await place.make(shard_names(2, NAME))

    async def silent(_):
        raise ConnectionResetError("it ended in the middle of a call")

    place.before_given = silent
    await change(cache, 2)
    assert place.held() == {"cache-0": (await found(cache)).keys(), "cache-1": set()}
    assert 0 < len(await found(cache)) < len(KEYS)


async def test_a_newer_change_overtakes_one_that_is_under_way():
    place = Place()
    cache = await cache_of(place)
    await put(cache, stored())

    async def overtaken(_):
        place.before_given = None
        cache.follow(Layout(2, 3))

    place.before_given = overtaken
    await change(cache, 2)
    assert (cache.seen.layout, cache.seen.moving) == (Layout(2, 3), False)
    assert await found(cache) == stored()


async def test_an_earlier_layout_changes_nothing():
    place = Place()
    cache = await cache_of(place)
    await change(cache, 2)
    cache.follow(Layout(0, 5))
    await cache.settled()
    assert list(place.shards) == shard_names(2, NAME)


@pytest.mark.parametrize(("least", "most", "owners"), [(1, 8, 3), (1, 2, 2), (4, 6, 4), (1, 1, 1)])
async def test_a_gateway_that_starts_finds_what_is_kept_and_has_as_many_shards_as_it_may(least, most, owners):
    place = Place()
    cache = await cache_of(place)
    await put(cache, stored())
    await change(cache, 3)
    again = await cache_of(place, least, most)
    assert again.seen.layout.owners == owners
    assert await found(again) == stored()
    assert list(place.shards) == shard_names(owners, NAME)


async def test_tells_how_busy_the_shards_are():
    cache = await cache_of(Place(), 3)
    assert cache.seen.busy == 0.75
