"""The versions that a process holds: loaded beside those that serve, refused with the reason, given up when nobody needs them."""

import asyncio
import gc
import re
import shutil
from itertools import pairwise
from weakref import WeakSet

import pytest

from cluster.bundle import WEIGHTS
from cluster.bundle_store import BundleStore
from cluster.engines.heap import YOUNG_OBJECTS
from cluster.errors import BackendUnavailable, BundleError
from cluster.fleet.board import LOADING, READY
from deployments.fleet.model_cache import RETRY_AFTER_LOADS, RETRY_AFTER_S, ModelCache
from tests.fakes.clock import Clock
from tests.waiting import until

KEEP_S = 30.0


@pytest.fixture
def store(three_versions):
    return BundleStore(three_versions)


class Model:
    def __init__(self, bundle):
        self.bundle = bundle


class Workshop:
    """Makes models and discards them, and remembers which; `errors` are raised instead, by version; `busy` has it wait."""

    def __init__(self):
        self.made, self.discarded, self.errors, self.busy = [], [], {}, None

    async def make(self, bundle):
        version = bundle.manifest.version
        if self.busy:
            await self.busy.wait()
        if error := self.errors.get(version):
            raise error
        self.made.append(version)
        return Model(bundle)

    async def discard(self, model):
        self.discarded.append(model.bundle.manifest.version)


@pytest.fixture
def workshop():
    return Workshop()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def model_cache(store, workshop, clock):
    return ModelCache(store, workshop.make, workshop.discard, keep_s=KEEP_S, clock=clock)


def held(model_cache):
    return {model.bundle.manifest.version for model in model_cache.models}


async def want(model_cache, *versions):
    model_cache.want(versions)
    await model_cache.settled()


async def test_another_version_is_loaded_beside_the_one_that_serves(model_cache, store, workshop):
    await model_cache.fill([1])
    assert (model_cache.holds, model_cache.get(1).bundle.version) == ({1: READY}, "tiny/1")
    assert model_cache.named(model_cache.get(1).bundle.identity) is model_cache.get(1)
    workshop.busy = asyncio.Event()
    model_cache.want([1, 2])
    async with asyncio.timeout(120):
        while 2 not in model_cache.holds:  # noqa: ASYNC110 - nothing tells when it has begun
            await asyncio.sleep(0)
    assert (model_cache.holds, model_cache.get(2)) == ({1: READY, 2: LOADING}, None)
    assert model_cache.named(store.open(2).identity) is None
    workshop.busy.set()
    await model_cache.settled()
    assert (model_cache.holds, workshop.made) == ({1: READY, 2: READY}, [1, 2])


async def test_a_version_that_is_rolled_back_while_it_is_loaded_holds_no_other_up(model_cache, workshop, clock):
    await model_cache.fill([1])
    workshop.busy = asyncio.Event()  # for ever
    model_cache.want([1, 2])
    await until(lambda: 2 in model_cache.holds)
    clock.advance(1)
    model_cache.want([1])
    await until(lambda: model_cache.holds == {1: READY})
    workshop.busy = None
    clock.advance(1)
    model_cache.want([1, 3])
    await until(lambda: model_cache.holds == {1: READY, 3: READY})
    assert workshop.made == [1, 3]


async def test_what_is_held_is_not_loaded_again(model_cache, workshop):
    await model_cache.fill([1, 1])
    for _ in range(3):
        await want(model_cache, 1)
    await model_cache.fill([1, 2])
    assert workshop.made == [1, 2]


async def test_a_corrupt_version_is_refused_with_the_reason_and_the_others_go_on_serving(model_cache, store, workshop, clock):
    await model_cache.fill([1])
    whole = (store.root / "2" / WEIGHTS).read_bytes()
    (store.root / "2" / WEIGHTS).write_bytes(whole[:-1])
    await want(model_cache, 1, 2, 3)
    assert "it is cut off or was altered" in model_cache.holds[2]
    assert held(model_cache) == {1, 3}
    (store.root / "2" / WEIGHTS).write_bytes(whole)
    await want(model_cache, 1, 2, 3)
    assert held(model_cache) == {1, 3}, "it is not read all the time"
    clock.advance(RETRY_AFTER_S)
    workshop.busy = asyncio.Event()
    model_cache.want([1, 2, 3])
    await until(lambda: model_cache.loading == 2)
    assert re.search(f"it is cut off or was altered.*; {LOADING} again$", model_cache.holds[2])
    workshop.busy.set()
    await model_cache.settled()
    assert model_cache.holds == {1: READY, 2: READY, 3: READY}


async def test_a_version_whose_load_takes_long_and_fails_is_tried_a_fifth_of_the_time_at_most(store, workshop, clock):
    began = []

    async def make(bundle):
        if bundle.manifest.version == 2:
            began.append(clock.now)
            clock.advance(60)
            raise BackendUnavailable("no memory is left")
        return await workshop.make(bundle)

    cache = ModelCache(store, make, workshop.discard, keep_s=KEEP_S, clock=clock)
    await cache.fill([1])
    for _ in range(100):
        await want(cache, 1, 2)
        clock.advance(RETRY_AFTER_S)
    assert len(began) >= 3
    assert {later - earlier for earlier, later in pairwise(began)} == {60 + RETRY_AFTER_LOADS * 60}
    cache.try_again()
    tries = len(began)
    await want(cache, 1, 2)
    assert len(began) == tries + 1, "at once, as where settings have changed"


async def test_a_copy_of_a_version_under_another_number_is_refused_at_the_start_and_later(model_cache, store, workshop, clock):
    shutil.copytree(store.root / "3", store.root / "5")
    store.promote(5)
    await model_cache.fill([5])
    for _ in range(3):
        clock.advance(RETRY_AFTER_S)
        await want(model_cache, 5)
    assert (held(model_cache), workshop.made) == ({3}, [3])
    assert "5 holds version 3" in model_cache.holds[5]


async def test_a_version_whose_engines_do_not_load_is_refused_whatever_they_raise(model_cache, workshop, caplog):
    await model_cache.fill([1])
    workshop.errors = {2: BackendUnavailable("no engine for sm_90"), 3: ZeroDivisionError("a bug")}
    await want(model_cache, 1, 2, 3)
    assert model_cache.holds[2] == "no engine for sm_90"
    assert model_cache.holds[3].startswith("loading it failed in a way that is not known (ZeroDivisionError('a bug'))")
    assert "Traceback" in caplog.text
    assert held(model_cache) == {1}


async def test_a_version_is_given_up_some_time_after_it_was_last_wanted_and_not_before(model_cache, workshop, clock):
    await model_cache.fill([1, 2])
    await want(model_cache, 1, 2)
    clock.advance(KEEP_S - 1)
    await want(model_cache, 2)
    assert held(model_cache) == {1, 2}
    clock.advance(1)
    await want(model_cache, 2)
    assert (held(model_cache), workshop.discarded) == ({2}, [1])


async def test_a_version_that_refers_to_itself_is_gone_once_it_was_given_up(store, workshop, clock):
    made = WeakSet()

    async def in_a_circle(bundle):
        model = await workshop.make(bundle)
        model.itself = model
        made.add(model)
        return model

    cache = ModelCache(store, in_a_circle, workshop.discard, keep_s=0, clock=clock)
    await cache.fill([1, 2])
    clock.advance(1)
    await want(cache, 2)
    await until(lambda: len(made) == 1)
    await cache.close()


async def test_who_is_wanted_again_in_time_stays(model_cache, workshop, clock):
    await model_cache.fill([1, 2])
    for versions in ((1, 2), (2,), (1, 2), (2,)):
        await want(model_cache, *versions)
        clock.advance(KEEP_S - 1)
    assert workshop.discarded == []


async def test_the_last_one_is_never_given_up_whatever_is_wanted(model_cache, store, clock):
    await model_cache.fill([1])
    (store.root / "2" / WEIGHTS).unlink()
    for _ in range(5):
        clock.advance(KEEP_S)
        await want(model_cache, 2)
    assert held(model_cache) == {1}


async def test_at_the_start_the_garbage_collector_is_told_to_look_rarely(model_cache):
    before = gc.get_threshold()
    try:
        gc.set_threshold(700)
        await model_cache.fill([3])
        assert gc.get_threshold()[0] == YOUNG_OBJECTS
    finally:
        gc.set_threshold(*before)


async def test_at_the_start_the_last_good_version_takes_the_place_of_a_corrupt_one(model_cache, store, caplog):
    (store.root / "3" / WEIGHTS).unlink()
    await model_cache.fill([3])
    assert held(model_cache) == {2}
    assert "weights.safetensors is missing" in model_cache.holds[3]
    assert "serving tiny/2: " in caplog.text
    for version in (1, 2):
        (store.root / str(version) / WEIGHTS).unlink()
    with pytest.raises(BundleError, match=r"no version in .* can be served"):
        await ModelCache(store, None, None, keep_s=KEEP_S).fill([3])


async def test_at_the_start_an_older_version_takes_the_place_of_one_that_is_whole_and_cannot_be_made(model_cache, workshop, caplog):
    workshop.errors = {3: BackendUnavailable("it does not fit"), 2: BackendUnavailable("nor does this")}
    await model_cache.fill([3])
    assert (held(model_cache), model_cache.holds[3]) == ({1}, "it does not fit")
    assert "serving tiny/1: it does not fit" in caplog.text


async def test_at_the_start_a_version_in_use_is_enough_where_the_promoted_one_cannot_be_made(model_cache, workshop):
    workshop.errors = {3: BackendUnavailable("it does not fit")}
    await model_cache.fill([3, 1])
    assert held(model_cache) == {1}


async def test_where_no_version_can_be_made_the_error_says_why(model_cache, workshop):
    workshop.errors = dict.fromkeys((1, 2, 3), BackendUnavailable("it does not fit"))
    with pytest.raises(BackendUnavailable, match="it does not fit"):
        await model_cache.fill([3])


async def test_a_version_that_hangs_as_it_is_given_up_holds_no_other_up(store, workshop, clock):
    async def hang(_):
        await asyncio.Event().wait()

    cache = ModelCache(store, workshop.make, hang, keep_s=KEEP_S, clock=clock)
    await cache.fill([1])
    await want(cache, 2)
    clock.advance(KEEP_S)
    await want(cache, 2)
    await want(cache, 3)
    assert held(cache) == {2, 3}


async def test_closing_gives_everything_up(model_cache, workshop):
    await model_cache.fill([1, 2])
    workshop.busy = asyncio.Event()
    model_cache.want([1, 2, 3])
    await asyncio.sleep(0)
    await model_cache.close()
    assert (model_cache.models, sorted(workshop.discarded)) == ((), [1, 2])
