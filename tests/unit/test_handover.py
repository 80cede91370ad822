"""Users' states from a replica that stops to their new homes, by a real switchboard and real engines in this process."""

import asyncio
import threading
import weakref
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import ClassVar

import pytest
from ray.exceptions import ActorDiedError

from cluster.bundle_store import BundleStore
from cluster.config import HandoverSettings, parse
from cluster.engines.kept_users import CHUNK_BYTES, KeptUser, StateCapacity, capacity_for, chunk_of, kind_of_engine, take_over
from cluster.errors import ConfigError
from cluster.fleet.erasures import NO_PLACE, Erasure, News, Place
from cluster.fleet.heartbeat import Orders
from cluster.fleet.held_states import LOOK_AT, HeldStates, Taken
from cluster.fleet.rollout import RolloutStore
from cluster.traffic.user_router import in_order_of
from cluster.values import EncodeRequest, UserSequence
from deployments.fleet.handover import Handover
from deployments.fleet.heartbeat import Heartbeat
from deployments.fleet.switchboard import SwitchboardDeployment
from deployments.replicas.encoder import Encoder
from integrations.hstu.encoder import TorchEncoder
from integrations.hstu.torch_append import device_states
from tests.bundles import random_sequence
from tests.fakes.clock import Clock
from tests.fakes.handles import NEVER, Handle, ScriptedHandle
from tests.waiting import settled, until

KEEP_S = 600.0
NOTHING_MISSED = News(Place("epoch", 1))
USERS = [f"user {number}" for number in range(12)]
HOMES = ("a", "b", "c")


def state(user, size=100, kind="k", tenant="shop"):
    return KeptUser.sealed(kind, tenant, user, bytes(size))


def names(states):
    return [one.user for one in states]


def all_taken(held, process, homes, kinds=("k",)):
    """The states that a process takes, as a replica does: until there are no more."""
    states, after = [], 0
    while (taken := held.take(process, kinds, homes, after)).after != after:
        states += taken.states
        after = taken.after
    return states


def homes_of(users, homes=HOMES, tenant="shop"):
    return {user: in_order_of(f"{tenant}/{user}", homes)[0] for user in users}


class TestHeldStates:
    @pytest.fixture
    def held(self):
        return HeldStates(max_bytes=1200, keep_s=KEEP_S)

    def test_each_home_takes_its_own_users_once(self, held):
        assert held.give(map(state, USERS), NOTHING_MISSED, now=0).held == 12
        for home in HOMES:
            assert names(all_taken(held, home, HOMES)) == [user for user, at in homes_of(USERS).items() if at == home]
            assert all_taken(held, home, HOMES) == []

    def test_states_whose_answer_was_lost_on_its_way_are_given_again(self, held):
        held.give([*map(state, USERS[:6]), state("large", 600)], NOTHING_MISSED, now=0)
        lost = held.take("a", {"k"}, ["a"])
        assert held.give([state("late")], NOTHING_MISSED, now=0).held == 0, "no state that has not arrived makes room"
        assert held.take("a", {"k"}, ["a"]).states == lost.states
        assert held.take("a", {"k"}, ["a"], lost.after).states == ()
        assert held.take("a", {"k"}, ["a"]).states == ()
        assert held.give([state("late")], NOTHING_MISSED, now=0).held == 1

    def test_a_state_that_is_not_asked_for_again_does_not_count_as_arrived(self, held):
        held.give([state("ann"), state("bob", kind="l")], NOTHING_MISSED, now=0)
        held.take("a", {"k", "l"}, ["a"])
        assert names(all_taken(held, "a", ["a"])) == ["ann"]
        assert names(all_taken(held, "a", ["a"], kinds=("k", "l"))) == ["bob"]

    def test_a_replica_that_starts_later_finds_those_that_another_took_meanwhile(self, held):
        held.give(map(state, USERS), NOTHING_MISSED, now=0)
        assert names(all_taken(held, "b", ["b"])) == USERS
        assert names(held.take("d", {"k"}, ["b", "d"]).states) == [u for u, at in homes_of(USERS, ["b", "d"]).items() if at == "d"]

    def test_states_of_another_kind_are_not_given(self, held):
        held.give([state("ann"), state("bob", kind="another version")], NOTHING_MISSED, now=0)
        assert names(held.take("a", {"k", "l"}, ["a"]).states) == ["ann"]

    def test_a_later_state_of_a_user_takes_the_place_of_the_earlier_one(self, held):
        held.give([state("ann"), state("bob")], NOTHING_MISSED, now=0)
        all_taken(held, "a", ["a"])
        held.give([state("ann", 200)], NOTHING_MISSED, now=1)
        assert (len(held), held.used_bytes) == (2, 300)
        assert [len(one.data) for one in held.take("a", {"k"}, ["a"]).states] == [200]

    @pytest.mark.parametrize("taken", [False, True])
    def test_an_earlier_state_of_a_user_makes_room_for_the_later_one_and_stays_where_that_is_not_enough(self, held, taken):
        held.give([state("ann", 400), state("bob", 600)], NOTHING_MISSED, now=0)
        if taken:
            all_taken(held, "a", ["a"])
        room = 1200 if taken else 600
        assert held.give([state("ann", room + 1)], NOTHING_MISSED, now=1).held == 0
        assert {one.user: len(one.data) for one in held.take("c", {"k"}, ["c"]).states} == {"ann": 400, "bob": 600}
        assert held.give([state("ann", room)], NOTHING_MISSED, now=1).held == 1
        left = {one.user: len(one.data) for one in held.take("d", {"k"}, ["d"]).states}
        assert left == ({"ann": 1200} if taken else {"bob": 600, "ann": 600})

    def test_what_finds_no_room_is_left_out_unless_others_were_taken(self, held):
        assert held.give((state(f"hot {number}") for number in range(15)), NOTHING_MISSED, now=0).held == 12
        assert held.give([state("late")], NOTHING_MISSED, now=0).held == 0
        first = all_taken(held, "a", ["a", "b"])
        assert held.give([state("late")], NOTHING_MISSED, now=0).held == 1
        assert len(held) == 12
        assert first[0].user not in names(held.take("d", {"k"}, ["d"]).states)

    def test_a_state_larger_than_all_there_is_room_for_is_left_out(self, held):
        assert held.give([state("ann", 1201), state("bob", 1200)], NOTHING_MISSED, now=0).held == 1

    def test_what_was_taken_makes_no_room_for_a_state_that_finds_none_all_the_same(self, held):
        held.give([state("ann", 600), state("bob", 600)], NOTHING_MISSED, now=0)
        all_taken(held, "a", ["a"])
        assert held.give([state("large", 1201), state("eve", 600)], NOTHING_MISSED, now=0).held == 1
        assert names(held.take("b", {"k"}, ["b"]).states) == ["bob", "eve"]

    def test_none_is_held_beyond_its_time(self, held):
        held.give([state("ann")], NOTHING_MISSED, now=0)
        held.give([state("bob")], NOTHING_MISSED, now=10)
        held.expire(KEEP_S)
        assert names(held.take("a", {"k"}, ["a"]).states) == ["bob"]
        held.expire(KEEP_S + 10)
        assert (len(held), held.used_bytes) == (0, 0)

    @pytest.mark.parametrize(
        ("tenant", "user", "left"),
        [("shop", "ann", ["bob", "ann"]), ("shop", None, ["ann"]), (None, None, []), ("mall", "bob", ["ann", "bob", "ann"])],
    )
    def test_an_erasure_reaches_what_is_held_and_what_was_read_before_it(self, held, tenant, user, left):
        given = [state("ann"), state("bob"), state("ann", tenant="mall")]
        held.give(given, NOTHING_MISSED, now=0)
        held.forget(tenant, user)
        assert names(held.take("a", {"k"}, ["a"]).states) == left
        late = HeldStates(1200, KEEP_S)
        late.give(given, News(Place("epoch", 2), (Erasure(2, tenant, user),)), now=0)
        assert names(late.take("a", {"k"}, ["a"]).states) == left

    def test_nothing_is_held_of_a_giver_of_which_it_is_not_known_what_it_missed(self, held):
        assert held.give([state("ann")], News(Place("epoch", 1), lost_track=True), now=0).held == 0

    def test_a_call_gives_a_few_mebibytes_and_the_next_one_goes_on(self):
        held = HeldStates(1 << 40, KEEP_S)
        held.give((state(user, CHUNK_BYTES // 2) for user in USERS[:5]), NOTHING_MISSED, now=0)
        found, after = [], 0
        while (taken := held.take("a", {"k"}, ["a"], after)).after != after:
            found.append(names(taken.states))
            after = taken.after
        assert found == [USERS[:2], USERS[2:4], USERS[4:5]]

    def test_a_call_looks_at_some_of_many_states_and_the_next_one_goes_on(self):
        held = HeldStates(1 << 40, KEEP_S)
        held.give((state(f"{number}", 1, kind="other") for number in range(LOOK_AT)), NOTHING_MISSED, now=0)
        held.give([state("last")], NOTHING_MISSED, now=0)
        first = held.take("a", {"k"}, ["a"])
        assert (first.states, names(held.take("a", {"k"}, ["a"], first.after).states)) == ((), ["last"])


class Engine:
    """Keeps bytes by user; those of `spoilt` it raises at."""

    def __init__(self, spoilt=()):
        self.users, self.spoilt = {}, spoilt

    def hand_over(self):
        for (tenant, user), data in self.users.items():
            yield tenant, user, data

    def take_over(self, tenant, user, data):
        if user in self.spoilt:
            raise ValueError("rows of another layout")
        self.users[tenant, user] = data
        return len(data)


class TestStatesOnTheirWay:
    @pytest.mark.parametrize(
        "damage",
        [
            {"data": bytes(99)},
            {"data": b"\1" + bytes(99)},
            {"user": "bob"},
            {"tenant": "mall"},
            {"digest": b""},
        ],
        ids=["shorter", "altered", "of another user", "of another tenant", "without its digest"],
    )
    def test_a_damaged_one_is_refused_and_the_log_says_so(self, damage, caplog):
        engine = Engine()
        assert take_over(engine, "k", [replace(state("ann"), **damage), state("eve")]) == 1
        assert list(engine.users) == [("shop", "eve")]
        assert "1 states that were handed over are not used: it is damaged" in caplog.text

    def test_what_the_engine_raises_at_or_is_of_another_kind_is_refused(self, caplog):
        engine = Engine(spoilt={"ann"})
        assert take_over(engine, "k", [state("ann"), state("bob", kind="l"), state("eve")]) == 1
        assert "2 states that were handed over are not used: rows of another layout" in caplog.text

    def test_there_is_room_for_what_is_free_or_for_half_of_the_memory(self):
        assert capacity_for({"budget_bytes": 100.0, "used_bytes": 20.0, "users": 2.0}) == StateCapacity(80, each=10)
        assert capacity_for({"budget_bytes": 100.0, "used_bytes": 99.0, "users": 3.0}) == StateCapacity(50, each=33)
        assert capacity_for({"budget_bytes": 100.0}) == StateCapacity(100)

    def test_versions_classes_and_options_are_told_apart(self):
        told = [("m/1", "a:B", {}), ("m/2", "a:B", {}), ("m/1", "a:C", {}), ("m/1", "a:B", {"precision": "bf16"})]
        assert len({kind_of_engine(*one) for one in told}) == 4
        assert kind_of_engine("m/1", "a:B", {"x": 1, "y": 2}) == kind_of_engine("m/1", "a:B", {"y": 2, "x": 1})

    def test_chunks_are_of_a_few_mebibytes(self):
        states = iter([state("ann", CHUNK_BYTES), state("bob", 1), state("eve", CHUNK_BYTES), state("zoe", 1)])
        assert [names(chunk_of(states)) for _ in range(4)] == [["ann"], ["bob", "eve"], ["zoe"], []]


LENGTH = 9


def history_of(user, length=LENGTH):
    whole = random_sequence(20, items=20, seed=int(user.split()[1]))
    columns = {name: getattr(whole, name)[:length] for name in ("items", "timestamps", "actions", "values")}
    return UserSequence(**columns, request_time=int(columns["timestamps"][-1]) + 60)


class Fleet:
    """Replicas of the encoder and their switchboard. While `gate` is closed no states arrive anywhere; `sent` is set once some would."""

    def __init__(self, model_dir, **encoder):
        handover = {"max_bytes": 1 << 20, **encoder.pop("handover", {})}
        engine = {"order": ["torch"], "options": {"torch": {"keep_from": 2}}, **encoder}
        self.settings = {"model_dir": str(model_dir), "encoder": {**engine, "handover": handover}}
        self.replicas, self.starting, self.clock = {}, set(), Clock(1_760_000_000.0)
        self.gate, self.sent = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.board = self.switchboard()
        self.handle = Gated(self.board, self)

    def switchboard(self):
        return SwitchboardDeployment(self.settings, self.clock, self.live)

    async def live(self):
        return {name: name not in self.starting for name in self.replicas}

    async def start(self, name):
        self.starting.add(name)
        tree = parse(self.settings)
        heartbeat = Heartbeat(tree, self.handle, name)
        handover = Handover(tree.encoder.handover, self.handle, name, heartbeat)
        self.replicas[name] = replica = Encoder(tree, heartbeat, handover)
        await replica.start()
        self.starting.discard(name)

    async def stop(self, name):
        """As Serve stops a replica."""
        await self.replicas.pop(name).__del__()

    async def ask(self, name, *users, length=LENGTH):
        """What each user is answered, one after the other."""
        requests = [EncodeRequest(history_of(user, length), 5, user_id=user, tenant="shop") for user in users]
        return [(await self.replicas[name].answer(request, 300.0)).result for request in requests]

    def kept(self, name, figure="users"):
        """What the replica's engine says of what it keeps."""
        (backend,) = (one for one in self.replicas[name].snapshot().backends if one.name == "torch")
        return backend.kept[figure]

    async def erase(self, user):
        """Until it is so everywhere."""
        number = await self.board.erase("shop", user)
        await until(lambda: self.board.erased(number))


class Gated(Handle):
    def __init__(self, replica, fleet):
        super().__init__(replica)
        self.fleet = fleet

    async def _call(self, method, args):
        answer = await super()._call(method, args)
        if method == "take_over" and answer.states:
            self.fleet.sent.set()
            await self.fleet.gate.wait()
        return answer


@pytest.fixture
async def fleet(three_versions, monkeypatch):
    monkeypatch.setattr("deployments.fleet.heartbeat.LOOK_INTERVAL_S", 0.01)
    made = Fleet(three_versions)
    yield made
    made.gate.set()
    for replica in made.replicas.values():
        await replica.close()


async def test_a_replica_that_is_started_again_appends_to_what_its_predecessor_kept(fleet):
    await fleet.start("a")
    await fleet.ask("a", *USERS)
    await fleet.stop("a")
    await fleet.start("b")
    assert (fleet.kept("b", "adopted"), fleet.kept("b")) == (12, 12)
    answers = await fleet.ask("b", *USERS, length=LENGTH + 1)
    assert [fleet.kept("b", figure) for figure in ("hits", "misses", "hit_rows")] == [12, 0, 12 * (LENGTH - 1)]
    plain = TorchEncoder(state_bytes=0)
    plain.load(fleet.replicas["b"].model_cache.models[0].bundle)
    for user, answer in zip(USERS, answers, strict=True):
        whole = plain.infer(EncodeRequest(history_of(user, LENGTH + 1), 5))
        assert answer.state == pytest.approx(whole.state, abs=1e-5)
        assert answer.items.tolist() == whole.items.tolist()
    plain.close()


async def test_each_replica_that_goes_on_takes_the_users_whose_home_it_is_now(fleet):
    for name in HOMES:
        await fleet.start(name)
    await fleet.ask("a", *USERS)
    await fleet.stop("a")
    homes = homes_of(USERS, ("b", "c"))
    await until(lambda: fleet.kept("b") + fleet.kept("c") == 12)
    for name in ("b", "c"):
        await fleet.ask(name, *(user for user, home in homes.items() if home == name))
    assert [fleet.kept(name, "misses") for name in ("b", "c")] == [0, 0]


async def test_replicas_that_are_replaced_one_after_the_other_each_find_their_users(fleet):
    for name in ("a", "b"):
        await fleet.start(name)
        await fleet.ask(name, *(user for user, home in homes_of(USERS, ("a", "b")).items() if home == name))
    for old, new in (("a", "c"), ("b", "d")):
        await fleet.stop(old)
        await fleet.start(new)
    for name in ("c", "d"):
        await fleet.ask(name, *(user for user, home in homes_of(USERS, ("c", "d")).items() if home == name))
        assert fleet.kept(name, "misses") == 0


async def test_what_a_replica_keeps_of_a_user_already_stays(fleet):
    await fleet.start("a")
    await fleet.start("b")
    await fleet.ask("b", "user 1", length=12)
    await fleet.ask("a", "user 1", "user 2")
    await fleet.stop("a")
    await until(lambda: fleet.kept("b") == 2)
    await fleet.ask("b", "user 1", length=13)
    assert fleet.kept("b", "hit_rows") == 11


async def test_a_replica_that_is_full_takes_users_in_place_of_half_of_its_own_however_short_their_histories_are(fleet):
    await fleet.start("probe")
    await fleet.ask("probe", "user 1")
    page = int(fleet.kept("probe", "used_bytes"))  # of which one user's nine events fill a part
    fleet.settings["encoder"]["options"]["torch"]["state_bytes"] = 8 * page
    await fleet.stop("probe")
    own = [f"user {number}" for number in range(20, 28)]
    await fleet.start("a")
    await fleet.start("b")
    await fleet.ask("a", *USERS[:8])
    await fleet.ask("b", *own)
    await fleet.stop("a")
    await until(lambda: fleet.kept("b", "adopted"))
    await fleet.ask("b", *own[4:])  # the ones that were asked for last, after all that has arrived
    assert (fleet.kept("b", "adopted"), fleet.kept("b", "hits")) == (4, 4)


class OnDevice(TorchEncoder):
    """Has its users' rows on a device over host memory, as where there is a GPU."""

    def _keep(self, bundle, model):
        kept = super()._keep(bundle, model)
        kept.store = device_states(model.config, self._state_options, bundle, self._device)
        return kept


async def test_users_taken_over_into_host_memory_leave_as_much_less_room_for_those_of_the_next_handover(fleet):
    await fleet.start("probe")
    await fleet.ask("probe", "user 1")
    page = int(fleet.kept("probe", "used_bytes"))
    fleet.settings["encoder"] |= {"backends": {"torch": f"{__name__}:OnDevice"}}
    fleet.settings["encoder"]["options"]["torch"]["state_bytes"] = 8 * page
    await fleet.stop("probe")
    await fleet.start("a")
    await fleet.start("b")
    await fleet.ask("a", *USERS[:6])
    await fleet.stop("a")
    await until(lambda: fleet.kept("b", "adopted") == 6)
    assert (fleet.kept("b", "used_bytes"), fleet.kept("b", "device_bytes")) == (6 * page, 0)
    await fleet.start("c")
    await fleet.ask("c", *(f"user {number}" for number in range(20, 26)))
    await fleet.stop("c")
    await until(lambda: fleet.kept("b", "adopted") > 6)
    await fleet.ask("b", *USERS[2:6])
    assert (fleet.kept("b", "adopted"), fleet.kept("b", "hits")) == (6 + 4, 4), "half of its memory is for others' users"


async def test_of_more_than_there_is_room_for_the_hottest_are_handed_over(three_versions):
    fleet = Fleet(three_versions, handover={"max_bytes": 10_000})
    await fleet.start("a")
    await fleet.ask("a", *USERS)
    await fleet.stop("a")
    await fleet.start("b")
    found = int(fleet.kept("b"))
    assert 0 < found < 12
    await fleet.ask("b", *USERS[-found:])
    assert fleet.kept("b", "misses") == 0
    await fleet.replicas["b"].close()


async def test_an_erasure_that_the_replica_that_stops_has_not_heard_of_is_carried_out_on_the_way(fleet):
    await fleet.start("a")
    await fleet.ask("a", *USERS)
    await fleet.board.erase("shop", "user 3")
    assert fleet.kept("a") == 12
    await fleet.stop("a")
    await fleet.start("b")
    assert fleet.kept("b") == 11
    await fleet.ask("b", "user 3")
    assert fleet.kept("b", "misses") == 1


async def test_an_erased_user_is_gone_from_what_waits_for_a_home(fleet):
    await fleet.start("a")
    await fleet.ask("a", *USERS)
    await fleet.stop("a")
    await fleet.erase("user 3")
    await fleet.start("b")
    assert fleet.kept("b") == 11


async def test_answers_that_are_dropped_take_no_states_along(fleet):
    await fleet.start("a")
    await fleet.ask("a", *USERS)
    number = await fleet.board.drop_answers("shop", None)
    await until(lambda: fleet.board.erased(number))
    assert fleet.kept("a") == 12
    await fleet.board.drop_answers("shop", None)  # it may not have heard of these as it stops
    await fleet.stop("a")
    await fleet.board.drop_answers("shop", None)
    await fleet.start("b")
    assert fleet.kept("b") == 12


async def test_a_user_erased_while_states_are_on_their_way_does_not_arrive(fleet):
    await fleet.start("a")
    await fleet.start("b")
    await fleet.ask("a", *USERS)
    fleet.gate.clear()
    await fleet.stop("a")
    await fleet.sent.wait()
    await fleet.erase("user 3")
    fleet.gate.set()
    await until(lambda: fleet.kept("b"))
    await fleet.ask("b", "user 3")  # after all that has arrived: engines do one thing at a time
    assert (fleet.kept("b", "adopted"), fleet.kept("b", "misses")) == (11, 1)


async def test_an_erasure_waits_for_a_replica_that_takes_over_while_it_starts(fleet):
    await fleet.start("a")
    await fleet.ask("a", *USERS)
    await fleet.stop("a")
    fleet.gate.clear()
    starting = asyncio.create_task(fleet.start("b"))
    await fleet.sent.wait()
    number = await fleet.board.erase("shop", "user 3")
    assert not await fleet.board.erased(number), "it may keep the user"
    fleet.gate.set()
    await starting
    fleet.clock.advance(1)
    await until(lambda: fleet.board.erased(number))
    assert fleet.kept("b") == 11


async def test_what_a_request_under_way_kept_of_an_erased_user_is_not_handed_over(fleet):
    await fleet.start("a")
    await fleet.ask("a", *USERS)
    await fleet.erase("user 3")
    await fleet.ask("a", "user 3")  # it knew the history from before
    await fleet.stop("a")
    await fleet.start("b")
    assert fleet.kept("b") == 11


async def test_a_switchboard_that_was_restarted_holds_nothing_since_it_may_have_missed_erasures(fleet):
    await fleet.start("a")
    await fleet.ask("a", *USERS)
    fleet.handle.replica = fleet.switchboard()
    await fleet.stop("a")
    await fleet.start("b")
    assert fleet.kept("b") == 0


async def test_which_kind_of_states_an_engine_takes_is_not_worked_out_for_each_of_them(fleet, monkeypatch):
    """That is done on the event loop, on which requests go on: a few MiB may be thousands of states."""
    await fleet.start("a")
    (controller,) = (model.controller for model in fleet.replicas["a"].model_cache.models)
    (kind,), worked_out = controller.openings(), []
    monkeypatch.setattr("cluster.engines.managed_backend.kind_of_engine", lambda *_: worked_out.append(1) or kind)
    assert await controller.take_over([state(user, kind=kind) for user in USERS], wanted=lambda _: False) == 0
    assert 0 < len(worked_out) < len(USERS)


class SlowToLoad(TorchEncoder):
    """Is loaded once it `may_end`."""

    may_end: ClassVar[threading.Event]

    def load(self, bundle):
        self.may_end.wait(300)
        super().load(bundle)


async def test_a_replica_that_stops_while_its_first_choice_is_loaded_hands_over_what_the_second_keeps(fleet, monkeypatch):
    monkeypatch.setattr(SlowToLoad, "may_end", threading.Event(), raising=False)
    monkeypatch.setattr("cluster.engines.controller.LOADS_ALONE_S", 0.01)
    fleet.settings["encoder"] |= {"backends": {"slow": f"{__name__}:SlowToLoad"}, "order": ["slow", "torch"]}
    await fleet.start("a")
    await fleet.ask("a", *USERS)
    await fleet.stop("a")
    await fleet.start("b")
    SlowToLoad.may_end.set()
    assert fleet.kept("b") == 12


async def test_states_of_another_version_are_not_used(fleet, three_versions):
    await fleet.start("a")
    await fleet.ask("a", *USERS)
    await fleet.stop("a")
    RolloutStore(BundleStore(three_versions)).promote(2)
    await fleet.start("b")
    assert fleet.kept("b") == 0
    await fleet.ask("b", "user 3")


async def test_states_of_an_engine_with_other_options_are_not_used(fleet):
    await fleet.start("a")
    await fleet.ask("a", *USERS)
    await fleet.stop("a")
    fleet.settings["encoder"]["options"] = {"torch": {"keep_from": 2, "state_dtype": "fp16"}}
    await fleet.start("b")
    assert fleet.kept("b") == 0


async def test_a_replica_stops_and_another_starts_while_the_switchboard_is_away(fleet, caplog):
    await fleet.start("a")
    await fleet.ask("a", *USERS)
    fleet.handle.replica = None
    await fleet.stop("a")
    await fleet.start("b")
    await fleet.ask("b", "user 3")
    assert "states could not be handed over" in caplog.text


async def test_without_the_setting_nothing_is_handed_over_and_serve_has_nothing_to_await(three_versions):
    tree = parse({"model_dir": str(three_versions), "encoder": {"order": ["torch"]}})
    replica = Encoder(tree, Heartbeat(tree, Handle(SwitchboardDeployment({"model_dir": str(three_versions)})), "a"))
    await replica.start()
    assert replica.__del__() is None
    await replica.close()


class Keeper:
    """Has room for 250 bytes; `taken` in the order in which they are."""

    def __init__(self):
        self.taken = []

    def openings(self):
        return {"k": StateCapacity(250)}

    async def hand_over(self):
        yield [state("ann")]

    async def take_over(self, states, wanted):
        self.taken += names(filter(wanted, states))
        return len(states)


async def leave():
    return Place("epoch", 1)


def handover_by(*outcomes, heartbeat=None):
    """Beside a switchboard that answers so."""
    heartbeat = heartbeat or SimpleNamespace(place=Place("epoch", 1), leave=leave)
    return Handover(HandoverSettings(max_bytes=1000, within_s=5), ScriptedHandle(*outcomes), "a", heartbeat)


async def test_the_hottest_states_are_taken_over_last_and_no_more_than_there_is_room_for():
    hot, warm, cold, icy = map(state, ("hot", "warm", "cold", "icy"))
    await handover_by(Taken((hot, warm), 2), Taken((cold,), 3), Taken((icy,), 4)).start([keeper := Keeper()])
    assert keeper.taken == ["cold", "warm", "hot"]


async def test_what_arrived_before_the_switchboard_went_away_is_taken_over(caplog):
    await handover_by(Taken((state("ann"),), 1), ActorDiedError()).start([keeper := Keeper()])
    assert keeper.taken == ["ann"]
    assert "cannot be taken" in caplog.text


async def test_states_whose_answer_was_lost_on_its_way_are_taken_over_by_the_next_attempt():
    states, keeper, calls = HeldStates(1000, KEEP_S), Keeper(), []
    states.give([state("ann"), state("bob")], NOTHING_MISSED, now=0)

    class Board:
        def take_over(self, process, place, kinds, after):
            calls.append(after)
            taken = states.take(process, kinds, [process], after)
            if len(calls) == 1:
                raise ActorDiedError
            return taken

    handover = Handover(HandoverSettings(max_bytes=1000, within_s=5), Handle(Board()), "a", SimpleNamespace(place=Place("epoch", 1)))
    for _ in range(2):
        handover.look(Orders(handed_over=2), [keeper])
        await settled()
    assert sorted(keeper.taken) == ["ann", "bob"]
    assert states.take("a", {"k"}, ["a"]).states == (), "they have arrived"


async def test_a_takeover_that_failed_is_tried_again_though_nothing_changes():
    handover, keeper = handover_by(ActorDiedError(), Taken((state("ann"),), 1), Taken((), 1)), Keeper()
    for _ in range(3):
        handover.look(Orders(handed_over=1), [keeper])
        await settled()
    assert keeper.taken == ["ann"]


async def test_a_replica_takes_over_as_soon_as_it_knows_which_erasures_it_has_carried_out():
    heartbeat, keeper = SimpleNamespace(place=NO_PLACE, leave=leave), Keeper()
    handover = handover_by(Taken((state("ann"),), 1), Taken((), 1), heartbeat=heartbeat)
    await handover.start([keeper])
    for place in (NO_PLACE, Place("epoch", 1)):
        heartbeat.place = place
        handover.look(Orders(handed_over=1), [keeper])
        await settled()
    assert keeper.taken == ["ann"]


class Name(str):
    """Of a user; unlike other strings it can be seen to be let go of."""


async def test_erasures_are_noted_only_while_states_are_on_their_way():
    handover = handover_by(Taken((state("ann"),), 1), Taken((), 1))
    for before in (True, False):
        erased = Name("ann")
        handover.erase([("shop", erased)])
        noted, erased = weakref.ref(erased), None
        assert noted() is None, "a replica that lives for a year hears of many"
        if before:
            await handover.start([Keeper()])


class Giver(Keeper):
    """Gives these chunks; `given`: how many of them were asked for."""

    def __init__(self, *chunks):
        self.chunks, self.given = chunks, 0

    async def hand_over(self):
        for chunk in self.chunks:
            self.given += 1
            yield chunk


async def given_to_a_switchboard(*chunks, missed=NOTHING_MISSED):
    """What it holds, of a thousand bytes at most, what was sent to it, and the giver."""
    states, sent, giver = HeldStates(1000, KEEP_S), [], Giver(*chunks)

    class Board:
        def hand_over(self, process, place, chunk):
            sent.append(names(chunk))
            return states.give(chunk, missed, now=0)

    heartbeat = SimpleNamespace(leave=leave)
    await Handover(HandoverSettings(max_bytes=1000), Handle(Board()), "a", heartbeat).give([giver])
    return names(states.take("b", {"k"}, ["b"]).states), sent, giver


async def test_what_finds_no_room_is_not_sent_and_what_is_smaller_is():
    chunks = [state("large", 800)], [state("larger", 900)], [state("huge", 4000), state("small")], [state("smaller", 50)]
    held, sent, _ = await given_to_a_switchboard(*chunks)
    assert (held, sent) == (["large", "small", "smaller"], [["large"], ["small"], ["smaller"]])


async def test_a_chunk_of_erased_users_alone_does_not_end_the_handover():
    erased = News(Place("epoch", 2), (Erasure(2, "shop", "ann"),))
    held, _, _ = await given_to_a_switchboard([state("ann")], [state("bob")], missed=erased)
    assert held == ["bob"]


@pytest.mark.parametrize(("lost_track", "held"), [(False, ["ann"]), (True, [])])
async def test_nothing_more_is_read_of_an_engine_once_nothing_more_is_taken(lost_track, held):
    chunks = [state("ann", 1000)], [state("bob")], [state("eve")]
    found, _, giver = await given_to_a_switchboard(*chunks, missed=News(Place("epoch", 1), lost_track=lost_track))
    assert (found, giver.given) == (held, 1)


@pytest.mark.virtual_time
async def test_a_replica_takes_no_longer_to_stop_or_to_start_than_it_may(caplog):
    handover, began = handover_by(NEVER, NEVER), monotonic()
    await handover.start([Keeper()])
    assert monotonic() - began == pytest.approx(5)
    await handover.give([Keeper()])
    assert monotonic() - began == pytest.approx(10)
    assert "not enough for all" in caplog.text or "could not be handed over" in caplog.text


def test_a_colocated_encoder_has_no_homes_to_hand_over_to():
    with pytest.raises(ConfigError, match="users have homes among replicas of the encoder alone"):
        parse({"placement": "colocated", "encoder": {"handover": {"max_bytes": 1}}})
