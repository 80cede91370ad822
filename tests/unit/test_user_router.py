"""The user router: whose home is where, and who is passed on."""

import asyncio
from collections import Counter
from math import ceil
from time import monotonic

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from ray.serve._private.common import ReplicaID, RequestMetadata
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest
from ray.serve.schema import DeploymentSchema

from cluster.errors import ConfigError
from cluster.traffic.paces import AVOIDING, ENOUGH, LATEST, LATEST_S
from cluster.traffic.user_router import asked_before, capacity, choose, home_of, in_order_of, note_asked, user_key
from cluster.values import EncodeRequest, GenerateRequest, Together, UserState
from deployments.routers import SILENT_S
from deployments.user_router import UserAffinityRouter
from tests.bundles import random_sequence
from tests.fakes.routers import ENCODER, Replica, replicas_of, routed, router_of, sent_over_grpc
from tests.waiting import passed, settled, until

pytestmark = pytest.mark.virtual_time

REPLICAS = st.lists(st.text(min_size=1), min_size=1, max_size=12, unique=True)
LOADS = st.dictionaries(st.text(min_size=1), st.integers(0, 200), min_size=1, max_size=12)
BOUNDS = st.floats(1.0, 4.0)


@given(st.text(), REPLICAS, st.randoms())
def test_a_users_order_has_every_replica_once_and_does_not_depend_on_how_they_are_listed(user, replicas, random):
    shuffled = random.sample(replicas, len(replicas))
    assert in_order_of(user, replicas) == in_order_of(user, shuffled)
    assert sorted(in_order_of(user, replicas)) == sorted(replicas)


@given(st.text(), LOADS, BOUNDS, st.integers(0, 9))
def test_a_user_keeps_the_home_as_long_as_it_is_not_busy(user, loads, bound, slack):
    home, *_ = in_order_of(user, loads)
    first, *_ = choose(user, loads, bound, slack)
    assert (first == home) == (loads[home] < capacity(loads.values(), bound, slack))


@given(st.text(), LOADS, BOUNDS, st.integers(0, 9))
def test_the_first_choice_is_never_busy_and_the_busy_ones_are_the_last_resort(user, loads, bound, slack):
    order, most = choose(user, loads, bound, slack), capacity(loads.values(), bound, slack)
    busy = [loads[replica] >= most for replica in order]
    assert not busy[0]
    assert busy == sorted(busy)
    assert sorted(order) == sorted(loads)


@given(st.lists(st.text(), min_size=1, max_size=50), REPLICAS.filter(lambda replicas: len(replicas) > 1))
def test_the_removal_of_a_replica_moves_only_its_users_and_each_to_the_next_of_its_order(users, replicas):
    gone, *left = replicas
    for user in users:
        home, following, *_ = in_order_of(user, replicas)
        assert in_order_of(user, left)[0] == (following if home == gone else home)


@given(st.lists(st.integers(0, 20), max_size=300), st.integers(1, 9), BOUNDS)
def test_no_replica_gets_more_than_the_bound_however_busy_single_users_are(users, replicas, bound):
    loads = {f"replica-{number}": 0 for number in range(replicas)}
    for requests, user in enumerate(users, start=1):
        loads[choose(f"user-{user}", loads, bound, slack=0)[0]] += 1
        assert max(loads.values()) <= ceil(bound * requests / replicas)


def test_users_are_spread_evenly_and_so_are_those_of_a_replica_that_went():
    replicas = [f"replica-{number}" for number in range(5)]
    users = [f"default/user-{number}" for number in range(10_000)]
    homes = {user: in_order_of(user, replicas)[0] for user in users}
    assert all(1800 < count < 2200 for count in Counter(homes.values()).values())
    moved = Counter(in_order_of(user, replicas[1:])[0] for user in users if homes[user] == replicas[0])
    assert all(400 < count < 600 for count in moved.values())


def test_the_order_is_the_same_in_every_process():
    assert in_order_of("default/ada", ["one", "two", "three"]) == ["two", "three", "one"]


def test_a_user_who_is_passed_on_always_goes_to_the_same_other_replica():
    first, second, third = in_order_of("default/ada", ["one", "two", "three"])
    busy = {first: 30, second: 4, third: 0}
    assert choose("default/ada", busy, bound=1.25, slack=0) == [second, third, first]


def test_a_few_requests_more_than_its_share_drive_nobody_from_home():
    first, second, third = in_order_of("default/ada", ["one", "two", "three"])
    assert choose("default/ada", {first: 8, second: 0, third: 0}, bound=1.25, slack=8)[0] == first
    assert choose("default/ada", {first: 30, second: 0, third: 0}, bound=1.25, slack=8)[0] == second


def test_the_home_of_a_copy_is_the_next_replica_of_the_users_order():
    first, second, third = in_order_of("default/ada", ["one", "two", "three"])
    requests = [replace(encode_request("ada"), attempt=attempt) for attempt in range(4)]
    assert [home_of(request, ["one", "two", "three"]) for request in requests] == [first, second, third, first]


@pytest.mark.parametrize(
    ("loads", "asked", "order"),
    [
        ((0, 3, 3), (0,), (1, 2, 0)),
        ((0, 3, 3), (1, 0), (2, 0, 1)),
        ((0, 3, 3), (0, 1, 2), (0, 1, 2)),
        ((30, 0, 0), (1, 2), (0, 1, 2)),
        ((30, 0, 0), (1,), (2, 0, 1)),
    ],
)
async def test_replicas_that_were_asked_before_are_the_last_ones_however_idle_they_are(router, loads, asked, order):
    """A replica without a sound engine answers at once, and is idle."""
    router.initialize_state(bound=1.25, slack=8)
    names = in_order_of("default/ada", ["one", "two", "three"])
    for name, load in zip(names, loads, strict=True):
        router.replica_queue_len_cache.update(ReplicaID(name, ENCODER), load)
    copy = pending("ada")
    copy.args[0] = replace(copy.args[0], attempt=len(asked), asked=[names[place] for place in asked])
    assert await chosen(router, copy) == [names[place] for place in order]


def test_no_replicas_are_no_choice():
    assert choose("default/ada", {}) == []


def encode_request(user: str, tenant: str = "default") -> EncodeRequest:
    return EncodeRequest(random_sequence(3), top_n=5, user_id=user, tenant=tenant)


def test_a_request_says_whose_it_is():
    state = UserState(np.zeros((1, 4), np.float32), random_sequence(1))
    generate = GenerateRequest(state, 5, 5, blocked=np.zeros(0, np.int32), tenant="shop", user_id="ada")
    assert user_key(generate) == user_key(encode_request("ada", "shop")) == "shop/ada"
    assert user_key(encode_request("ada", "shop")) != user_key(encode_request("ada", "other"))
    assert [user_key(one) for one in (encode_request(""), 5.0, None, "ada")] == [""] * 4


@pytest.fixture
async def router():
    """Three replicas whose queues are known to be empty."""
    return await router_of(UserAffinityRouter, *map(Replica, ("one", "two", "three")), bound=1.25, slack=0)


def pending(user: str = "", session: str = "", request_id: str = "of-all") -> PendingRequest:
    metadata = RequestMetadata(request_id=request_id, internal_request_id=request_id, session_id=session)
    return PendingRequest(args=[encode_request(user)], kwargs={}, metadata=metadata)


def together(*users: str) -> PendingRequest:
    """A call of several requests."""
    call = Together(tuple((encode_request(user), 30.0) for user in users))
    return PendingRequest(args=[call], kwargs={}, metadata=RequestMetadata(request_id="of-all", internal_request_id="of-all"))


async def chosen(router: UserAffinityRouter, request: PendingRequest) -> list[str]:
    """In one list, also where several stand side by side."""
    ranks = await router.choose_replicas(replicas_of(router), request)
    return [one.replica_id.unique_id for rank in ranks for one in rank]


async def test_the_user_in_the_request_or_in_the_session_decides_and_the_session_first(router):
    assert await chosen(router, pending("ada")) == in_order_of("default/ada", ["one", "two", "three"])
    assert await chosen(router, pending("ada", session="shop/bob")) == in_order_of("shop/bob", ["one", "two", "three"])


async def test_a_busy_home_passes_its_user_on(router):
    first, second, _ = in_order_of("default/ada", ["one", "two", "three"])
    for _ in range(10):
        router.on_send_request(ReplicaID(first, ENCODER))
    assert (await chosen(router, pending("ada")))[0] == second


async def test_a_call_counts_with_all_requests_in_it_until_it_has_ended(router):
    first, second, _ = in_order_of("default/ada", ["one", "two", "three"])
    router.initialize_state(slack=8)
    call = together(*["ada"] * 20)
    assert (await routed(router, call)).replica_id.unique_id == first
    router.on_send_request(home := ReplicaID(first, ENCODER))
    router.on_new_queue_len_info(home, 1)  # the replica counts calls
    assert (await chosen(router, pending("ada")))[0] == second
    router.on_request_completed(home, call.metadata.internal_request_id)
    router.decrement_queue_len_cache(home)
    assert (await chosen(router, pending("ada")))[0] == first


async def test_of_calls_with_one_id_each_that_ends_counts_no_longer(router):
    """All calls made for one HTTP request carry its id."""
    first, second, _ = in_order_of("default/ada", ["one", "two", "three"])
    router.initialize_state(slack=8)
    for size in (20, 1):
        assert (await routed(router, together(*["ada"] * size))).replica_id.unique_id in (first, second)
    for replica in (first, second):
        router.on_request_completed(ReplicaID(replica, ENCODER), "of-all")
    assert (await chosen(router, pending("ada")))[0] == first


async def test_a_burst_of_calls_is_spread_by_the_requests_in_them(router):
    async with asyncio.timeout(120):
        found = await asyncio.gather(*(routed(router, together(*["ada"] * size)) for size in (20, 5, 5, 5, 5)))
    first, second, third = in_order_of("default/ada", ["one", "two", "three"])
    assert [one.replica_id.unique_id for one in found] == [first, second, second, second, third]


async def test_what_is_nobodys_goes_to_the_less_busy_of_two(router):
    assert {len(await router.choose_replicas(replicas_of(router), pending(request_id=f"{number}"))) for number in range(5)} == {1}
    pairs = [tuple(await chosen(router, pending(request_id=f"{number}"))) for number in range(50)]
    assert {len(set(pair)) for pair in pairs} == {2}
    assert {one for pair in pairs for one in pair} == {"one", "two", "three"}


async def test_many_users_of_one_http_request_all_reach_their_homes(router):
    """All calls made for one HTTP request carry its id, and the parents' ways of matching mix them up or lose them. One replica is slow to
    say how busy it is, so that requests that came later are done sooner.
    """
    router.initialize_state(slack=100)
    slow = replicas_of(router)[0]
    router.on_replica_actor_unavailable(slow.replica_id)
    slow.get_queue_len = lambda *, deadline_s: asyncio.sleep(0.02, 0)
    users = [f"user-{number}" for number in range(40)]
    async with asyncio.timeout(120):
        found = await asyncio.gather(*(routed(router, pending(user)) for user in users))
    assert [one.replica_id.unique_id for one in found] == [in_order_of(f"default/{user}", ["one", "two", "three"])[0] for user in users]


async def test_a_burst_is_spread_though_nothing_of_it_has_been_sent_when_the_last_is_routed(router):
    async with asyncio.timeout(120):
        found = await asyncio.gather(*(routed(router, pending("ada")) for _ in range(30)))
    served = Counter(one.replica_id.unique_id for one in found)
    first, second, third = in_order_of("default/ada", ["one", "two", "three"])
    assert served[first] >= served[second] > served[third] > 0
    assert max(served.values()) <= ceil(1.25 * 30 / 3)
    assert await chosen(router, pending("ada")) == [first, second, third], "from here on the cache counts them"


async def test_who_leaves_just_as_a_replica_is_found_does_not_count_for_ever(router):
    home, *_ = in_order_of("default/ada", ["one", "two", "three"])
    caller = asyncio.create_task(routed(router, request := pending("ada")))
    while not request.future.done():  # noqa: ASYNC110 - nothing tells when a replica is found
        await asyncio.sleep(0)
    assert (await chosen(router, pending("ada")))[0] != home, "it has its one request, which is not sent yet"
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert (await chosen(router, pending("ada")))[0] == home


async def test_a_replica_that_is_gone_is_not_remembered(router):
    for number in range(5):
        (replica,) = only = [Replica(f"number-{number}")]
        router.update_replicas(only)
        router.on_new_queue_len_info(replica.replica_id, 0)
        async with asyncio.timeout(120):
            await routed(router, pending("ada"))
    assert [one.unique_id for one in router._unsent] == ["number-4"]  # noqa: SLF001 - what it has in memory


async def test_a_caller_who_leaves_while_all_are_full_is_not_waited_for(router):
    for one in replicas_of(router):
        one.max_ongoing_requests = 1
        one.queue = 1
        router.on_new_queue_len_info(one.replica_id, 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(routed(router, pending("ada")), 0.05)
    for one in replicas_of(router):
        one.max_ongoing_requests = 100
    async with asyncio.timeout(120):
        found = await routed(router, pending("bob"))
    assert found.replica_id.unique_id == in_order_of("default/bob", ["one", "two", "three"])[0]


async def answered(router: UserAffinityRouter, name: str, seconds: float, *, clock_set_s: float = 0.0) -> None:
    """A request is sent to this replica, which answers it after so long. `clock_set_s`: how far the system's clock is set on meanwhile."""
    replica, result = ReplicaID(name, ENCODER), asyncio.get_running_loop().create_future()
    request = pending()
    request.created_at -= clock_set_s
    router.on_send_request(replica)
    router.on_new_queue_len_info(replica, 0)
    router.on_request_routed(request, replica, result)
    await asyncio.sleep(seconds)
    result.set_result(None)
    await settled()


async def used_to_replicas(router: UserAffinityRouter, names: list[str]) -> None:
    """They have answered long enough to be judged, and what they answer from now on is judged by itself."""
    for name in names:
        for seconds_each in (0.05, *[0.005] * 2 * ENOUGH):
            await answered(router, name, seconds_each)
    due = monotonic() + LATEST_S
    await until(lambda: monotonic() >= due)


async def test_the_users_of_a_slow_replica_go_to_the_next_of_their_orders_until_a_trial_is_quick(router):
    home, second, third = in_order_of("default/ada", ["one", "two", "three"])
    await used_to_replicas(router, [home, second, third])
    for _ in range(LATEST // 2 + 1):
        assert await chosen(router, pending("ada")) == [home, second, third]
        await answered(router, home, 0.05)
    assert await chosen(router, pending("ada")) == [second, third, home], "it is there for what the others have no room for"
    assert home not in await first_choices_without_a_user(router)
    await asyncio.sleep(AVOIDING.pause_s)
    assert (await chosen(router, pending("ada")))[0] == home
    await answered(router, home, 0.005)
    assert await chosen(router, pending("ada")) == [home, second, third]


async def left_out(router: UserAffinityRouter, name: str, others: list[str]) -> None:
    """The replica is slow."""
    await used_to_replicas(router, [name, *others])
    for _ in range(LATEST // 2 + 1):
        await answered(router, name, 0.05)


async def test_a_copy_goes_to_a_slow_replica_before_one_that_was_asked(router):
    """A replica with broken engines is quick to say so."""
    first, second, slow = in_order_of("default/ada", ["one", "two", "three"])
    await left_out(router, slow, [first, second])
    original, asked = encode_request("ada"), []
    for attempt in range(4):
        (copy := pending("ada")).args[0] = replace(original, attempt=attempt)
        asked.append((await routed(router, copy)).replica_id.unique_id)
    assert asked == [first, second, slow, first]


async def test_a_copy_takes_no_first_attempt_that_goes_with_it_to_a_slow_replica(router):
    quick, slow = in_order_of("default/ada", ["one", "two"])
    await left_out(router, slow, [quick])
    router.update_replicas([one for one in replicas_of(router) if one.replica_id.unique_id in (quick, slow)])
    original = encode_request("ada")
    copy, sent = replace(original, attempt=1), []
    for asked in (original, Together(((copy, 1.0), (encode_request("bob"), 1.0))), Together(((copy, 1.0),))):
        (call := pending()).args[0] = asked
        sent.append((await routed(router, call)).replica_id.unique_id)
    assert sent == [quick, quick, slow]


@pytest.mark.parametrize("user", ["ada", ""], ids=["of a user", "of none"])
async def test_a_slow_replica_is_asked_before_those_that_say_nothing(router, user):
    slow, *silent = in_order_of("default/ada", ["one", "two", "three"])
    await left_out(router, slow, silent)
    for name in silent:
        router.on_send_request(ReplicaID(name, ENCODER))
    for one in replicas_of(router):
        one.get_queue_len = lambda *, deadline_s: asyncio.sleep(deadline_s)
    await passed(1.1 * SILENT_S)
    assert (await routed(router, pending(user))).replica_id.unique_id == slow


async def test_a_clock_that_is_set_on_while_a_replica_answers_makes_it_no_slow_one(router):
    home, second, third = in_order_of("default/ada", ["one", "two", "three"])
    await used_to_replicas(router, [home, second, third])
    for _ in range(LATEST):
        await answered(router, home, 0.005, clock_set_s=3600.0)
    assert await chosen(router, pending("ada")) == [home, second, third]


async def test_the_time_for_which_a_request_waits_for_room_after_a_replica_refused_it_is_not_that_replicas(router):
    home, second, third = in_order_of("default/ada", ["one", "two", "three"])
    await used_to_replicas(router, [home, second, third])
    for one in replicas_of(router):
        one.max_ongoing_requests, one.queue = 1, 1

    async def refused() -> None:
        router.on_send_request(replica := ReplicaID(home, ENCODER))
        router.on_new_queue_len_info(replica, 1)
        await routed(router, pending("ada"))

    for _ in range(LATEST // 2 + 1):
        for one in replicas_of(router):
            router.on_new_queue_len_info(one.replica_id, 1)
        call = asyncio.create_task(refused())
        await passed(0.05)
        call.cancel()
        await settled()
        assert call.cancelled()
    assert await chosen(router, pending("ada")) == [home, second, third]


@pytest.mark.parametrize(("seconds", "slow"), [(0.05, True), (0.001, False)], ids=["late", "soon"])
async def test_calls_over_grpc_that_were_cancelled_count_where_they_were_late(seconds, slow, router):
    home, second, third = in_order_of("default/ada", ["one", "two", "three"])
    await used_to_replicas(router, [home, second, third])
    for _ in range(LATEST // 2 + 1):
        assert await chosen(router, pending("ada")) == [home, second, third]
        call = asyncio.create_task(sent_over_grpc(router, pending("ada")))
        await asyncio.sleep(seconds)
        call.cancel()
        await settled()
        assert call.cancelled()
        router.on_new_queue_len_info(ReplicaID(home, ENCODER), 0)
    assert await chosen(router, pending("ada")) == ([second, third, home] if slow else [home, second, third])


async def test_a_request_without_a_user_goes_to_no_replica_that_says_nothing(router):
    router.on_send_request(ReplicaID("one", ENCODER))
    for one in replicas_of(router):
        one.get_queue_len = lambda *, deadline_s: asyncio.sleep(deadline_s, 0)
    await asyncio.sleep(1.1 * SILENT_S)
    assert await first_choices_without_a_user(router) == {"two", "three"}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("before", "after"), [((0, 3, 3), (0, 3, 3)), ((0, 0, 0), (40, 0, 0)), ((40, 0, 0), (0, 0, 0)), ((40, 0, 0), (40, 0, 0))]
)
async def test_a_copy_goes_where_no_earlier_attempt_went_whatever_the_loads_were_and_are(router, before, after, together):
    """A replica with broken engines answers at once and is idle; one that stalls is soon busy."""
    order = in_order_of("default/ada", ["one", "two", "three"])
    router.initialize_state(bound=1.25, slack=8)
    original = encode_request("ada")
    asked = []
    for attempt, loads in enumerate((before, after, after)):
        for name, load in zip(order, loads, strict=True):
            router.replica_queue_len_cache.update(ReplicaID(name, ENCODER), load)
        request = replace(original, attempt=attempt)
        call = Together(((request, 1.0), (encode_request("bob"), 1.0))) if together else request
        sent = await routed(
            router, PendingRequest(args=[call], kwargs={}, metadata=RequestMetadata(request_id="r", internal_request_id="r"))
        )
        asked.append(sent.replica_id.unique_id)
    assert sorted(asked) == sorted(order)
    assert asked[0] == (order[0] if before[0] < 30 else order[1])


def test_a_copy_of_a_request_that_still_waits_to_be_sent_goes_to_another_replica_than_the_home():
    replicas = ["one", "two", "three"]
    first, second, third = in_order_of("default/ada", replicas)
    original = encode_request("ada")
    copies = [replace(original, attempt=attempt) for attempt in (1, 2)]
    assert [asked_before(copy, replicas) for copy in (original, *copies)] == [set(), {first}, {first, second}]
    note_asked(copies[0], third)
    assert asked_before(copies[1], replicas) == {first, second, third}
    note_asked(original, second)
    assert asked_before(copies[1], replicas) == {second, third}
    assert asked_before(Together(((encode_request("bob"), 1.0), (copies[1], 1.0))), replicas) == {second, third}
    assert asked_before(encode_request("ada"), replicas) == set()


async def first_choices_without_a_user(router: UserAffinityRouter) -> set[str]:
    """Where requests without a user may go first."""
    ranks = [(await router.choose_replicas(replicas_of(router), pending(request_id=f"{number}")))[0] for number in range(50)]
    return {one.replica_id.unique_id for rank in ranks for one in rank}


async def test_where_it_is_not_wanted_no_replica_is_left_out_for_being_slow(router):
    router.initialize_state(slow_times=0)
    router.update_replicas(replicas_of(router))
    home, *_ = in_order_of("default/ada", ["one", "two", "three"])
    for name in ("one", "two", "three"):
        for _ in range(ENOUGH):
            await answered(router, name, 5.0 if name == home else 0.005)
    assert (await chosen(router, pending("ada")))[0] == home


@pytest.mark.parametrize(
    "wrong",
    [{"bound": 0.9}, {"bound": float("nan")}, {"bound": float("inf")}, {"slack": -1}, {"slack": 1.5}, {"bounds": 2}, {"slow_times": 1}],
)
async def test_wrong_settings_are_refused(router, wrong):
    with pytest.raises(ConfigError, match="|".join(wrong)):
        router.initialize_state(**wrong)


def test_serve_accepts_the_router_in_its_configuration_and_finds_the_class():
    given = {"request_router_class": "deployments.user_router:UserAffinityRouter", "request_router_kwargs": {"bound": 1.25, "slack": 8}}
    schema = DeploymentSchema(name="encoder", request_router_config=given)
    config = RequestRouterConfig(**schema.request_router_config)
    assert config.get_request_router_class().__name__ == "UserAffinityRouter"
    assert config.request_router_kwargs == {"bound": 1.25, "slack": 8}
