"""Which answers are computed before they are asked for, when, and how many at a time; what computes them is played."""

import asyncio
import sys
from collections import Counter
from contextvars import Context
from itertools import count
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.context import attach, detach

from cluster.background import LANE
from cluster.errors import InvalidRequest
from cluster.values import RecommendRequest
from deployments.anticipation import AT_ONCE, Anticipation, Turn, Waiting
from pipelines.remembered import UsualRequests, usual_key
from tests.waiting import passed, until

pytestmark = pytest.mark.virtual_time


class Answers:
    """Notes for which users answers are computed; while it is held, those computations last."""

    def __init__(self):
        self.begun, self.traces, self.under_way, self.most, self.go = [], [], 0, 0, asyncio.Event()
        self.go.set()

    async def anticipate(self, tenant, user_id):
        if user_id == "refused":
            raise InvalidRequest("user_id", "no store holds it")
        self.begun.append(user_id)
        self.traces.append(trace.get_current_span().get_span_context().trace_id)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await self.go.wait()
        self.under_way -= 1


class Setting:
    def __init__(self, **options):
        self.answers, self.usual = Answers(), UsualRequests()
        versions = SimpleNamespace(model_for=lambda tenant, user_id: SimpleNamespace(answers=self.answers))
        self.anticipation = Anticipation(versions, self.usual, **{"anticipates": lambda *_: True, "after_s": 0.05} | options)

    def asked(self, users, tenant="default"):
        for user in users:
            self.usual.note(RecommendRequest(user, tenant=tenant))

    def events_of(self, users, tenant="default"):
        self.anticipation.expect([(tenant, user) for user in users])

    async def hold(self, users):
        """Have these users' answers computed until `answers.go` is set."""
        self.answers.go.clear()
        self.asked(users)
        self.events_of(users)
        await until(lambda: self.answers.under_way == len(users))


@pytest.fixture
async def setting():
    made = Setting()
    yield made
    await made.anticipation.close()


FILLS = [f"first {number}" for number in range(AT_ONCE)]


async def test_of_many_users_some_are_computed_at_a_time_and_the_others_follow_in_their_order(setting):
    users = [f"user {number}" for number in range(3 * AT_ONCE)]
    await setting.hold(FILLS)
    setting.asked(users)
    for user in users:
        setting.events_of([user])
    await passed(1)
    assert len(setting.answers.begun) == AT_ONCE
    setting.answers.go.set()
    await until(lambda: len(setting.answers.begun) == 4 * AT_ONCE)
    assert setting.answers.begun[AT_ONCE:] == users
    assert setting.answers.most == AT_ONCE


@pytest.mark.parametrize("lane", [None, "key ours"], ids=["a tenant", "a key for many tenants"])
async def test_many_users_of_one_caller_that_wait_for_their_next_answers_hold_up_no_other_callers(setting, lane):
    users = [f"user {number}" for number in range(3000)]
    await setting.hold(FILLS)
    for number, user in enumerate(users):
        tenant = "ours" if lane is None else f"ours {number}"
        setting.asked([user], tenant)
        LANE.set(lane)
        setting.events_of([user], tenant)
    await passed(1)
    LANE.set(lane and "theirs")
    setting.asked(["ada", "bob"], "theirs")
    setting.events_of(["ada"], "theirs")
    setting.events_of(["bob"], "theirs")
    await passed(0.1)
    setting.answers.go.set()
    await until(lambda: len(setting.answers.begun) == AT_ONCE + len(users) + 2)
    assert setting.answers.begun[AT_ONCE:][:5] == [users[0], "ada", users[1], "bob", users[2]]


def test_where_too_many_wait_the_lane_with_the_most_loses_the_one_that_has_waited_longest():
    waiting, turn = Waiting(limit=3), Turn(0.0, Context())
    for lane, user in (("few", "ada"), ("many", "bob"), ("many", "cyd"), ("many", "dan"), ("new", "eve")):
        waiting.put(lane, usual_key("t", user), turn)
    left = []
    while (lane := waiting.due(1.0)) is not None:
        left.append((lane, waiting.take(lane)[0].group))
    assert left == [("few", "ada"), ("many", "dan"), ("new", "eve")]


def test_what_a_user_that_waits_costs_does_not_depend_on_how_many_lanes_callers_have_named():
    def calls(work):
        """How many functions the work calls."""
        called, before = [], sys.getprofile()
        sys.setprofile(lambda _frame, event, what: called.append(what) if event in {"call", "c_call"} else None)
        try:
            work()
        finally:
            sys.setprofile(before)
        return len(called)

    def costs(lanes):
        """Of a user too many, of looking for one that is due, where none is and where one is, and of one that is forgotten."""
        waiting, dues = Waiting(limit=lanes), count()
        for number in range(lanes):
            waiting.put(f"lane {number}", usual_key("t", f"user {number}"), Turn(next(dues), Context()))
        return [
            calls(lambda: waiting.put("one more", usual_key("t", "one more"), Turn(next(dues), Context()))),
            calls(lambda: waiting.due(0.0)),
            calls(lambda: waiting.take(waiting.due(1.0))),
            calls(lambda: waiting.forget("t", f"user {lanes - 1}")),
        ]

    assert costs(1000) == costs(10)


def test_a_user_of_whom_more_events_come_waits_anew_in_that_lane_alone_and_holds_up_no_other_of_it():
    waiting = Waiting()
    for lane, user, due in (("a", "ada", 1.0), ("b", "ada", 1.0), ("a", "bob", 1.0), ("a", "cyd", 2.0)):
        waiting.put(lane, usual_key("t", user), Turn(due, Context()))
    taken = [waiting.due(1.0)]
    waiting.put("a", usual_key("t", "ada"), Turn(3.0, Context()))
    for now in (1.0, 1.0, 2.0, 3.0):
        lane = waiting.due(now)
        taken.append((lane, waiting.take(lane)[0].group, waiting.due(now)))
    assert taken == ["a", ("a", "bob", "b"), ("b", "ada", None), ("a", "cyd", None), ("a", "ada", None)]


async def test_no_more_are_computed_than_requests_would_have_a_place():
    free = [2]
    setting = Setting(free=lambda: free[0])
    setting.answers.go.clear()
    users = [f"user {number}" for number in range(5)]
    setting.asked(users)
    setting.events_of(users)
    await passed(1)
    assert len(setting.answers.begun) == 2
    free[0] = 0
    setting.answers.go.set()
    await passed(1)
    assert len(setting.answers.begun) == 2, "requests wait"
    free[0] = 1
    await until(lambda: sorted(setting.answers.begun) == users)
    assert setting.answers.most == 2
    await setting.anticipation.close()


async def test_beyond_a_tenants_rate_its_users_are_left_out_and_others_have_their_turns():
    left = Counter(ours=2, theirs=9)

    def within_rate(tenant):
        left[tenant] -= 1
        return left[tenant] >= 0

    setting = Setting(within_rate=within_rate)
    for tenant, users in (("ours", ["ada", "bob", "cyd"]), ("theirs", ["dan", "eve"])):
        setting.asked(users, tenant)
        setting.events_of(users, tenant)
    await passed(1)
    assert sorted(setting.answers.begun) == ["ada", "bob", "dan", "eve"]
    await setting.anticipation.close()


async def test_a_user_is_computed_once_the_events_have_paused_and_where_a_usual_request_is_known():
    setting = Setting(after_s=1.0)
    setting.asked(["ada", "bob"])
    setting.events_of(["ada", "bob", "unknown"])
    await passed(0.6)
    setting.events_of(["ada"])
    await passed(0.6)
    assert setting.answers.begun == ["bob"]
    await passed(0.6)
    assert setting.answers.begun == ["bob", "ada"]
    await setting.anticipation.close()


async def test_an_answer_is_computed_in_the_trace_of_its_users_events_though_an_ended_one_made_room(setting):
    await setting.hold(FILLS)
    setting.asked(["ada"])
    token = attach(trace.set_span_in_context(trace.NonRecordingSpan(trace.SpanContext(7, 7, is_remote=False))))
    setting.events_of(["ada"])
    detach(token)
    setting.answers.go.set()
    await until(lambda: len(setting.answers.begun) > AT_ONCE)
    assert setting.answers.traces == [0] * AT_ONCE + [7]


async def test_a_user_that_cannot_be_answered_keeps_no_other_from_being_prepared_for_another_version(setting):
    setting.asked(["refused", "refused", "ada"])
    setting.anticipation.make_ready()
    await until(lambda: setting.answers.begun == ["ada"])


async def test_for_another_version_none_is_prepared_while_requests_have_all_places():
    free = [0]
    setting = Setting(free=lambda: free[0])
    setting.asked(["ada"])
    setting.anticipation.make_ready()
    await passed(1)
    assert setting.answers.begun == []
    free[0] = 1
    await until(lambda: setting.answers.begun == ["ada"])
    await setting.anticipation.close()


@pytest.mark.parametrize("late", [False, True])
async def test_a_user_that_has_no_turn_in_time_is_left_out(setting, monkeypatch, late):
    monkeypatch.setattr("deployments.anticipation.LATE_S", 1.0)
    await setting.hold(FILLS)
    setting.asked(["ada"])
    setting.events_of(["ada"])
    await passed(1.5 if late else 0.5)
    setting.answers.go.set()
    await passed(0.5)
    assert setting.answers.begun[AT_ONCE:] == ([] if late else ["ada"])


async def test_what_waits_as_anticipation_is_switched_off_is_not_computed():
    on = [True]
    setting = Setting(anticipates=lambda *_: on[0])
    await setting.hold(FILLS)
    setting.asked(["ada"])
    setting.events_of(["ada"])
    on[0] = False
    setting.answers.go.set()
    await passed(0.5)
    assert len(setting.answers.begun) == AT_ONCE
    await setting.anticipation.close()


@pytest.mark.parametrize(
    ("scope", "left"), [(("default", "bob"), ["cyd"]), (("default", None), []), ((None, None), []), (("other", "bob"), ["bob", "cyd"])]
)
async def test_users_that_are_erased_while_they_wait_for_their_turns_have_none(setting, scope, left):
    await setting.hold(FILLS)
    setting.asked(["bob", "cyd"])
    for user in ("bob", "cyd"):
        setting.events_of([user])
    await passed(0.1)
    setting.anticipation.forget(*scope)
    setting.answers.go.set()
    await passed(0.1)
    assert setting.answers.begun[AT_ONCE:] == left


async def test_nothing_is_begun_after_the_end(setting):
    await setting.hold(FILLS)
    setting.asked(["ada"])
    setting.events_of(["ada"])
    await setting.anticipation.close()
    setting.events_of(["ada"])
    await passed(0.1)
    assert len(setting.answers.begun) == AT_ONCE


@pytest.mark.parametrize(
    ("scope", "left"), [(("default", "bob"), ["cyd"]), (("default", None), []), ((None, None), []), (("other", "bob"), ["bob", "cyd"])]
)
async def test_users_that_are_erased_while_they_wait_to_be_prepared_for_another_version_are_not(setting, scope, left):
    setting.asked(["ada", "ada", "ada", "bob", "bob", "cyd"])
    setting.answers.go.clear()
    setting.anticipation.make_ready()
    await until(lambda: setting.answers.begun)
    setting.anticipation.forget(*scope)
    setting.answers.go.set()
    await until(lambda: len(setting.answers.begun) == 1 + len(left))
    await passed(1)
    assert setting.answers.begun == ["ada", *left]
