"""Requests that wait for a deployment go together, by their users' homes; each member of a call has an outcome of its own."""

import asyncio
import gc
from collections import Counter
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from cluster.errors import BackendFailed, BackendUnavailable, InvalidRequest
from cluster.traffic.batcher import Batcher, Raised
from cluster.traffic.hedging import ENOUGH, LEAST_S, LOOK_EVERY_S, Hedge
from cluster.traffic.retry_budget import RetryBudget
from cluster.traffic.user_router import home_of, user_key
from cluster.values import EncodeRequest, Outcomes
from deployments.calls.mailbox import HELD_S, MOST, PATIENCE_S, Mailbox
from deployments.calls.remote import StageCaller
from tests.bundles import random_sequence
from tests.fakes.handles import Streamed
from tests.waiting import passed, settled, until

pytestmark = pytest.mark.virtual_time

HISTORY = random_sequence(3)
REPLICAS = ("a", "b", "c")


def of(user, version="tiny/1"):
    return EncodeRequest(HISTORY, 5, user_id=user, model_version=version)


class Deployment:
    """Answers each request with its user once `gate` is open; `errors`: by user. Remembers every call, and which were cancelled."""

    deployment_name = "encoder"

    def __init__(self):
        self.calls, self.cancelled, self.errors, self.gate = [], [], {}, asyncio.Event()
        self.together = SimpleNamespace(remote=lambda together: asyncio.ensure_future(self._answers(together)))
        self.together_in_parts = SimpleNamespace(remote=lambda together: Streamed(self._parts(together)))
        self.dies, self.apart, self.spread_s = False, False, 0.0

    def options(self, *, method_name, **_):
        return getattr(self, method_name)

    async def _answers(self, together):
        users = [request.user_id for request, _ in together.requests]
        self.calls.append(together)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(users)
            raise
        if self.dies:
            raise ActorDiedError
        return self._outcomes(together, users)

    async def _parts(self, together):
        """All in one."""
        yield await self._answers(together)

    def _outcomes(self, together, users):
        asked = [(place, request.user_id) for place, (request, _) in enumerate(together.requests) if request.user_id in users]
        outcomes = [(place, Raised(self.errors[user]) if user in self.errors else user) for place, user in asked]
        return Outcomes(outcomes, self.spread_s, self.apart)

    @property
    def users(self):
        return [[request.user_id for request, _ in together.requests] for together in self.calls]


@pytest.fixture
def deployment():
    return Deployment()


@pytest.fixture
def mailbox(deployment):
    return Mailbox(deployment)


def sent(mailbox, *users):
    return [mailbox.send(of(user), 30.0) for user in users]


async def test_requests_of_one_turn_go_together_and_what_comes_meanwhile_in_the_next_calls(deployment, mailbox):
    first = sent(mailbox, "1", "2")
    await settled()
    second = sent(mailbox, "3")
    await settled()
    third = sent(mailbox, "4", "5", "6")
    await settled()
    assert deployment.users == [["1", "2"], ["3"]], "two calls are on the way"
    deployment.gate.set()
    assert await asyncio.gather(*first, *second, *third) == ["1", "2", "3", "4", "5", "6"]
    assert deployment.users[2:] == [["4", "5", "6"]]


async def test_a_call_goes_to_the_replica_that_is_home_to_all_of_its_users(deployment, mailbox):
    mailbox.learn(REPLICAS)
    deployment.gate.set()
    users = [str(number) for number in range(30)]
    assert await asyncio.gather(*sent(mailbox, *users)) == users
    assert len(deployment.calls) == len(REPLICAS)
    for together in deployment.calls:
        (home,) = {home_of(request, REPLICAS) for request, _ in together.requests}
        assert home == home_of(together, REPLICAS), "and a router takes it there"
    assert user_key(deployment.calls[0]) == user_key(deployment.calls[0].requests[0][0])


async def test_a_version_holds_up_no_request_of_another(deployment, mailbox):
    deployment.gate.set()
    requests = [of("1"), of("2", version="tiny/2"), of("3")]
    assert await asyncio.gather(*(mailbox.send(request, 30.0) for request in requests)) == ["1", "2", "3"]
    assert deployment.users == [["1", "3"], ["2"]]


async def test_calls_to_a_replica_that_keeps_silent_hold_up_no_other_for_long(deployment, mailbox):
    """The router finds out that it is stopped, and takes the next call to another one."""
    stuck = []
    for user in ("1", "2", "3"):
        stuck += sent(mailbox, user)
        await settled()
    assert deployment.users == [["1"], ["2"]]
    await until(lambda: len(deployment.calls) > 2, f"a third call {PATIENCE_S:g} s later")
    assert deployment.users == [["1"], ["2"], ["3"]]
    stuck += sent(mailbox, "4")
    await settled()
    assert deployment.users[3:] == [["4"]]
    deployment.gate.set()
    assert await asyncio.gather(*stuck) == ["1", "2", "3", "4"]


async def test_a_call_is_made_in_the_context_of_none_of_its_requests(deployment, mailbox):
    """Serve cancels the calls that were made in the context of a request whose client leaves."""
    request_id, seen = ContextVar("request_id", default="none"), []
    answers = deployment.together_in_parts.remote
    deployment.together_in_parts.remote = lambda *call: seen.append(request_id.get()) or answers(*call)
    request_id.set("the first member's")
    deployment.gate.set()
    await asyncio.gather(*sent(mailbox, "1", "2"))
    assert seen == ["none"]


async def test_a_call_carries_no_more_than_it_may(deployment, mailbox):
    deployment.gate.set()
    users = [str(number) for number in range(2 * MOST + 1)]
    assert await asyncio.gather(*sent(mailbox, *users)) == users
    assert Counter(map(len, deployment.users)) == {MOST: 2, 1: 1}


async def test_one_member_s_error_is_no_other_s(deployment, mailbox):
    deployment.errors = {"2": InvalidRequest("k", "is wrong"), "3": BackendFailed("it broke")}
    deployment.gate.set()
    outcomes = await asyncio.gather(*sent(mailbox, "1", "2", "3", "4"), return_exceptions=True)
    assert outcomes == ["1", deployment.errors["2"], deployment.errors["3"], "4"]


async def test_where_the_call_fails_every_member_fails_and_the_next_call_is_made(deployment, mailbox):
    deployment.dies = True
    deployment.gate.set()
    outcomes = await asyncio.gather(*sent(mailbox, "1", "2"), return_exceptions=True)
    assert [type(one) for one in outcomes] == [ActorDiedError] * 2
    deployment.dies = False
    assert await asyncio.gather(*sent(mailbox, "3")) == ["3"]


@pytest.mark.parametrize(("replicas", "hedges"), [(("a",), 0), (("a", "b"), 1)])
async def test_a_slow_call_is_hedged_where_another_replica_would_get_the_copy(deployment, mailbox, replicas, hedges):
    caller = StageCaller(deployment, hedge=Hedge(), mailbox=mailbox, repeatable=True)
    mailbox.learn(replicas)
    deployment.gate.set()
    await asyncio.gather(*(caller.ask(of(str(number)), within_s=30.0) for number in range(ENOUGH)))
    await passed(LOOK_EVERY_S)
    deployment.gate.clear()
    slow = asyncio.create_task(caller.ask(of("slow"), within_s=30.0))
    await passed(2 * LEAST_S)
    deployment.gate.set()
    assert await slow == "slow"
    assert caller.figures["hedges"] == hedges


async def test_members_of_a_call_whose_replica_dies_are_sent_again_one_by_one_as_far_as_the_retry_budget_goes(deployment, mailbox):
    caller, budget = StageCaller(deployment, mailbox=mailbox), int(RetryBudget().share * MOST)
    assert budget > 10, "more than are granted to a gateway that has few requests"
    deployment.dies = True
    asked = [asyncio.create_task(caller.ask(of(str(number)), within_s=30.0)) for number in range(MOST)]
    await settled()
    deployment.gate.set()
    await settled()
    deployment.dies = False
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert Counter(map(type, outcomes)) == {str: budget, BackendUnavailable: MOST - budget}
    assert len(deployment.users[0]) == MOST
    assert caller.figures == {"requests": MOST, "copies": budget, "hedges": 0, "refused": MOST - budget}
    copies = [request for together in deployment.calls[1:] for request, _ in together.requests]
    assert [copy.attempt for copy in copies] == [1] * budget, "no home is asked for again"


async def test_a_member_that_leaves_takes_no_other_along_and_the_last_one_ends_the_call(deployment, mailbox):
    leaving, staying = sent(mailbox, "leaving", "staying")
    await settled()
    leaving.cancel()
    await settled()
    assert deployment.cancelled == []
    staying.cancel()
    await settled()
    assert deployment.cancelled == [["leaving", "staying"]]
    deployment.gate.set()
    assert await asyncio.gather(*sent(mailbox, "next")) == ["next"]


class InParts(Deployment):
    """Has parts: `parts` has for each the users with an outcome in it, an error, or the end. `streams`: calls that were answered so."""

    END = "end"

    def __init__(self):
        super().__init__()
        self.parts, self.streams = asyncio.Queue(), 0

    async def _parts(self, together):
        users = [request.user_id for request, _ in together.requests]
        self.calls.append(together)
        self.streams += 1
        try:
            while (part := await self.parts.get()) != self.END:
                if isinstance(part, Exception):
                    raise part
                yield self._outcomes(together, part)
        except asyncio.CancelledError:
            self.cancelled.append(users)
            raise


@pytest.fixture
def in_parts():
    return InParts()


@pytest.fixture
def split_mailbox(in_parts):
    return Mailbox(in_parts)


async def test_of_several_batches_each_member_has_its_outcome_as_soon_as_its_batch_has_ended(in_parts, split_mailbox):
    in_parts.errors = {"2": BackendFailed("it broke")}
    first, second, third = sent(split_mailbox, "1", "2", "3")
    in_parts.parts.put_nowait(["2", "3"])
    await settled()
    assert (first.done(), second.exception(), third.result()) == (False, in_parts.errors["2"], "3")
    in_parts.parts.put_nowait(["1"])
    in_parts.parts.put_nowait(in_parts.END)
    assert await first == "1"
    assert in_parts.cancelled == []


async def comes_in_parts(in_parts, mailbox, requests, spread_s=HELD_S / 4, version="tiny/1"):
    """Whether a call of so many requests, of which the last is answered so long after the first, is answered in parts."""
    users, in_parts.spread_s = [str(number) for number in range(requests)], spread_s
    asked, before = [mailbox.send(of(user, version), 60.0) for user in users], in_parts.streams
    await passed(5 * HELD_S)  # how long it takes as a whole does not matter
    if streams := in_parts.streams > before:
        in_parts.parts.put_nowait(users)
        in_parts.parts.put_nowait(in_parts.END)
    in_parts.gate.set()
    assert await asyncio.gather(*asked) == users
    in_parts.gate.clear()
    await settled()
    return streams


async def test_what_is_known_of_calls_begins_anew_with_other_replicas_and_stays_with_the_same_ones(in_parts, split_mailbox):
    split_mailbox.learn(["a"])
    assert await comes_in_parts(in_parts, split_mailbox, 16)
    split_mailbox.learn(["a"])
    assert not await comes_in_parts(in_parts, split_mailbox, 16)
    split_mailbox.learn(["b"])
    assert await comes_in_parts(in_parts, split_mailbox, 16)


async def test_outcomes_of_calls_that_are_quick_come_together_until_one_takes_long(in_parts, split_mailbox):
    slow_s = 4 * HELD_S
    assert await comes_in_parts(in_parts, split_mailbox, 16), "it is not known how far apart batches end"
    assert not await comes_in_parts(in_parts, split_mailbox, 16)
    assert await comes_in_parts(in_parts, split_mailbox, MOST), "four times as many may be more batches"
    assert await comes_in_parts(in_parts, split_mailbox, 2), "nor is it known of few"
    for requests in (3, 31, MOST, 2):
        assert not await comes_in_parts(in_parts, split_mailbox, requests)
    assert not await comes_in_parts(in_parts, split_mailbox, 16, slow_s), "that was not to be foreseen"
    assert await comes_in_parts(in_parts, split_mailbox, 16, slow_s)
    assert not await comes_in_parts(in_parts, split_mailbox, 2), "few are quick as before"


async def test_what_calls_for_one_version_are_like_is_not_known_of_another_one(in_parts, split_mailbox):
    for version in ("tiny/1", "tiny/2"):
        assert await comes_in_parts(in_parts, split_mailbox, 16, version=version)
    assert not await comes_in_parts(in_parts, split_mailbox, 16, 4 * HELD_S, version="tiny/1")
    assert not await comes_in_parts(in_parts, split_mailbox, 16, version="tiny/2")
    assert await comes_in_parts(in_parts, split_mailbox, 16, version="tiny/1")


async def test_after_a_call_that_all_of_its_members_left_outcomes_come_in_parts(in_parts, split_mailbox):
    assert await comes_in_parts(in_parts, split_mailbox, 2)
    members = sent(split_mailbox, "1", "2")
    await passed(2 * HELD_S)
    for member in members:
        member.cancel()
    await settled()
    assert in_parts.cancelled == [["1", "2"]]
    assert await comes_in_parts(in_parts, split_mailbox, 2)


async def test_where_the_engine_takes_requests_one_by_one_outcomes_come_in_parts_however_quick_they_are(in_parts, split_mailbox):
    assert await comes_in_parts(in_parts, split_mailbox, 2)
    in_parts.apart = True
    assert not await comes_in_parts(in_parts, split_mailbox, 2), "it says so with its answer"
    for requests in (2, 16, 2, 16):
        assert await comes_in_parts(in_parts, split_mailbox, requests)
    assert not await comes_in_parts(in_parts, split_mailbox, 1)
    in_parts.apart = False
    assert await comes_in_parts(in_parts, split_mailbox, 2)
    assert not await comes_in_parts(in_parts, split_mailbox, 2)


async def test_a_request_that_is_alone_has_its_outcome_at_once(in_parts, split_mailbox):
    assert not await comes_in_parts(in_parts, split_mailbox, 1, spread_s=4 * HELD_S)
    assert not await comes_in_parts(in_parts, split_mailbox, 1, spread_s=4 * HELD_S)


@pytest.mark.parametrize(("end", "error"), [(ActorDiedError(), ActorDiedError), (InParts.END, BackendFailed)], ids=["dies", "ends"])
async def test_where_the_replica_ends_midway_only_members_without_an_outcome_fail(in_parts, split_mailbox, end, error):
    members = sent(split_mailbox, "1", "2", "3")
    in_parts.parts.put_nowait(["2"])
    in_parts.parts.put_nowait(end)
    outcomes = await asyncio.gather(*members, return_exceptions=True)
    assert (outcomes[1], type(outcomes[0]), type(outcomes[2])) == ("2", error, error)


async def test_a_call_ends_when_all_members_that_still_wait_have_left(in_parts, split_mailbox):
    answered, *leaving = sent(split_mailbox, "answered", "leaving", "leaves too")
    in_parts.parts.put_nowait(["answered"])
    assert await answered == "answered"
    leaving[0].cancel()
    await settled()
    assert in_parts.cancelled == []
    leaving[1].cancel()
    await settled()
    assert in_parts.cancelled == [["answered", "leaving", "leaves too"]]


async def test_a_call_ends_when_the_last_member_that_still_waits_has_its_outcome_and_others_have_left(in_parts, split_mailbox):
    leaving, answered = sent(split_mailbox, "leaving", "answered")
    await settled()
    leaving.cancel()
    await settled()
    assert in_parts.cancelled == []
    in_parts.parts.put_nowait(["answered"])
    assert await answered == "answered"
    await settled()
    assert in_parts.cancelled == [["leaving", "answered"]]


async def test_a_request_whose_caller_left_while_it_waited_is_not_sent(deployment, mailbox):
    on_the_way = [*sent(mailbox, "1")]
    await settled()
    on_the_way += sent(mailbox, "2")
    await settled()
    gone, stays = sent(mailbox, "gone", "stays")
    await settled()
    gone.cancel()
    deployment.gate.set()
    assert await asyncio.gather(*on_the_way, stays) == ["1", "2", "stays"]
    assert deployment.users[-1] == ["stays"]


async def test_each_member_is_told_what_is_left_of_its_time(deployment, mailbox):
    members = [mailbox.send(of("1"), 30.0), mailbox.send(of("2"), 0.05)]
    deployment.gate.set()
    assert await asyncio.gather(*members) == ["1", "2"]
    patient, hurried = (left_s for _, left_s in deployment.calls[0].requests)
    assert 29 < patient <= 30
    assert hurried <= 0.05 + 1e-9  # a sum of times is rounded


async def test_an_address_that_is_idle_is_not_kept(deployment, mailbox):
    """Versions, replicas and traced requests come and go for as long as a gateway lives."""
    others = batchers()  # what earlier tests left, held so that no new one takes the place of one of them
    deployment.gate.set()
    for number in range(100):
        await asyncio.gather(*(mailbox.send(of(str(number), version=f"tiny/{number}"), 30.0) for _ in range(2)))
    await settled()
    assert [one for one in batchers() if not any(one is other for other in others)] == []


def batchers():
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Batcher]
