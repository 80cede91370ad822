"""Who may start, who waits, who is turned away, with a clock of the test's own."""

import heapq
import itertools
import random
from collections import Counter, deque
from math import ceil, inf

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cluster.config import AdmissionSettings
from cluster.traffic.adaptive_limit import AdaptiveLimit
from cluster.traffic.admission import Admission, Standing
from tests.repetitions import times

WAITING, RUNNING, REFUSED, LEFT = Standing


def places(max_concurrent=2, max_queued=2, max_wait_ms=1000, share=1.0):
    return AdmissionSettings(max_concurrent=max_concurrent, max_queued=max_queued, max_wait_ms=max_wait_ms, max_concurrent_share=share)


def admission(**wanted):
    return Admission(places(**wanted), target_s=10.0)


def arrive(held, *urgencies, now=0.0, tenant=None):
    return [held.arrive(now, urgency, tenant)[0] for urgency in urgencies]


def standings(tickets):
    return [ticket.standing for ticket in tickets]


def test_as_many_run_as_there_are_places_as_many_wait_as_may_and_the_rest_is_refused():
    assert standings(arrive(admission(), 3, 3, 3, 3, 3)) == [RUNNING, RUNNING, WAITING, WAITING, REFUSED]


@pytest.mark.parametrize("took_s", [0.0, 0.01, 0.05, 0.4, 3.0])
def test_as_many_are_taken_as_was_said_before(took_s):
    held = admission(max_concurrent=4, max_queued=50)
    for ticket in arrive(held, 3, 3, 3):
        held.leave(ticket, took_s)
    said = held.most(took_s)
    assert standings(arrive(held, *[7] * 60, now=took_s)) == [RUNNING] * 4 + [WAITING] * (said - 4) + [REFUSED] * (60 - said)


@pytest.mark.parametrize("callers", [1, 2, 5, 20])
def test_each_caller_has_its_part_beside_one_that_fills_all(callers):
    """Where places are taken, and the queue stands, for a second and more."""
    held = admission(max_concurrent=16, max_queued=100)
    running, now = deque(held.arrive(0.0, 3, "floods")[0] for _ in range(60)), 0.0
    while now < 2:
        now += 0.01
        held.leave(running.popleft(), now)
        running.append(held.arrive(now, 3, "floods")[0])
    others = [f"calm{number}" for number in range(callers)]
    taken = dict.fromkeys(others, 0)
    for other in others * 16:
        if taken[other] < held.part():
            taken[other] += 1
            assert held.arrive(now, 3, other)[0].standing is WAITING
    assert set(taken.values()) == {ceil(16 / (callers + 1))}


def test_fewer_are_taken_while_the_queue_stands():
    held = admission(max_concurrent=2, max_queued=50)
    running, now = deque(arrive(held, 3, 3, 3)), 0.0
    while now < 2:
        now += 0.01
        held.leave(running.popleft(), now)
        running += arrive(held, 3, now=now)
    assert held.most(now) < 10 < 40 < admission(max_concurrent=2, max_queued=50).most(now)


def test_the_most_urgent_starts_first_and_of_equals_the_oldest():
    held = admission(max_concurrent=1, max_queued=9)
    running, *waiting = arrive(held, 3, 6, 3, 3, 0)
    order = []
    while running is not None:
        running = next(iter(held.leave(running, 0.0)), None)
        order.append(running)
    assert order == [waiting[3], waiting[1], waiting[2], waiting[0], None]


def test_a_caller_with_long_requests_takes_no_place_back_while_one_with_short_ones_waits():
    held = admission(max_concurrent=4, max_queued=9)
    long = arrive(held, *[3] * 8, tenant="long")
    short = arrive(held, *[3] * 3, tenant="short")
    held.leave(long[0], 2.0)
    for ended, next_ in itertools.pairwise(short):
        assert standings(short).count(RUNNING) == 1
        assert held.leave(ended, 2.0) == [next_]
    assert held.leave(short[2], 2.0) == [long[4]]


def test_an_urgent_newcomer_takes_the_place_of_the_least_urgent_and_latest_in_a_full_queue():
    held = admission(max_concurrent=1, max_queued=3)
    _, first, second, third = arrive(held, 3, 6, 6, 3)
    newcomer, displaced = held.arrive(0.0, 1)
    assert (displaced, displaced.standing, newcomer.standing) == (second, REFUSED, WAITING)
    assert standings([first, third]) == [WAITING, WAITING]


def test_a_newcomer_who_is_not_more_urgent_displaces_nobody():
    held = admission(max_concurrent=1, max_queued=1)
    _, waiting = arrive(held, 3, 3)
    assert held.arrive(0.0, 3)[1] is None
    assert waiting.standing is WAITING


def test_who_has_waited_long_enough_is_refused_and_nobody_sooner():
    held = admission(max_concurrent=1, max_queued=9, max_wait_ms=1000)
    arrive(held, 3, now=1.0)
    [early], [late] = arrive(held, 3, now=1.0), arrive(held, 0, now=1.5)
    assert held.expire(1.999) == []
    assert held.expire(early.until) == [early]
    assert standings([early, late]) == [REFUSED, WAITING]


def test_a_wait_is_foretold_by_how_soon_others_finish_and_not_only_by_how_long_they_took():
    held = admission(max_concurrent=16, max_queued=99, max_wait_ms=1000)
    quick = arrive(held, *[3] * 16)
    for ticket in quick[:10]:
        held.leave(ticket, 0.1)  # a mean of 0.1 s: by it alone, 80 would wait half a second
    assert standings(arrive(held, *[3] * 11, now=0.1)) == [RUNNING] * 10 + [WAITING]
    held.leave(quick[10], 2.1)  # but since all places were taken, one has finished in two seconds
    assert standings(arrive(held, 3, now=2.1)) == [REFUSED]


def test_who_leaves_the_queue_takes_nobodys_place():
    held = admission(max_concurrent=1)
    running, waiting, other = arrive(held, 3, 3, 3)
    assert held.leave(waiting, 0.0) == []
    assert held.leave(running, 0.0) == [other]
    assert waiting.standing is LEFT


def test_leaving_twice_frees_one_place():
    held = admission(max_concurrent=1)
    running, first, second = arrive(held, 3, 3, 3)
    assert held.leave(running, 0.0) == [first]
    assert held.leave(running, 0.0) == []
    assert second.standing is WAITING


def test_who_could_not_start_in_half_the_time_is_refused_on_arrival():
    held = admission(max_concurrent=1, max_queued=100, max_wait_ms=1000)
    [first] = arrive(held, 3)
    held.leave(first, 0.2)  # a request takes 200 ms: two may be ahead within 500 ms
    assert standings(arrive(held, 3, 3, 3, 3, now=0.2)) == [RUNNING, WAITING, WAITING, REFUSED]
    assert standings(arrive(held, 0, now=0.2)) == [WAITING], "the less urgent are not ahead of it"


def test_a_tenant_takes_no_more_than_its_share_of_the_places_and_leaves_the_rest_to_others():
    held = admission(max_concurrent=4, max_queued=4, share=0.5)
    ours = arrive(held, 3, 3, 3, 3, 3, tenant="ours")
    assert standings(ours) == [RUNNING, RUNNING, WAITING, WAITING, REFUSED]
    theirs = arrive(held, 3, 3, tenant="theirs")
    assert standings(theirs) == [RUNNING, RUNNING]
    assert held.leave(theirs[0], 0.0) == []
    assert held.leave(ours[0], 0.0) == [ours[2]]


def test_tenants_take_turns_and_of_one_tenants_requests_the_oldest_is_next():
    held = admission(max_concurrent=1, max_queued=9)
    [running], ours = arrive(held, 3, tenant="ours"), arrive(held, 3, 3, 3, tenant="ours")
    theirs = arrive(held, 3, 3, tenant="theirs")
    order = []
    while running is not None:
        running = next(iter(held.leave(running, 0.0)), None)
        order.append(running)
    assert order == [ours[0], theirs[0], ours[1], theirs[1], ours[2], None]


def test_a_key_without_tenant_takes_turns_by_its_own_name_and_has_no_share():
    held = admission(max_concurrent=2, max_queued=4, share=0.5)
    first, second, *waiting = (held.arrive(0.0, 3, lane="key ours")[0] for _ in range(6))
    assert standings([first, second, *waiting]) == [RUNNING, RUNNING, *[WAITING] * 4], "it may act for many tenants"
    theirs, displaced = held.arrive(0.0, 3, lane="key theirs")
    assert displaced is waiting[-1]
    assert held.belong(first, "ours")
    assert [held.leave(first, 0.0), held.leave(second, 0.0)] == [[theirs], [waiting[0]]]


@pytest.mark.parametrize("ours", [{"tenant": "ours"}, {"lane": "key ours"}], ids=["tenant", "key"])
def test_where_the_queue_stands_its_flood_may_not_wait_longer_though_what_a_key_has_running_is_of_many_tenants(ours):
    held, now = admission(max_concurrent=8, max_queued=50), 0.0
    running = deque(held.arrive(now, 3, **ours)[0] for _ in range(9))
    while now < 2:
        now += 0.02
        for started in held.leave(running.popleft(), now):
            held.belong(started, f"tenant {now}")
        running.append(held.arrive(now, 3, **ours)[0])
    assert running[-1].standing is WAITING
    assert standings(held.arrive(now, 3, **ours)[0] for _ in range(3)) == [WAITING, REFUSED, REFUSED]
    assert standings(held.arrive(now, 3, lane="key theirs")[0] for _ in range(2)) == [WAITING, WAITING]


def test_in_a_full_queue_a_tenant_with_fewer_waiting_takes_the_place_of_the_last_of_the_one_with_the_most():
    held = admission(max_concurrent=1, max_queued=4)
    _, *ours = arrive(held, 3, 3, 3, 3, 3, tenant="ours")
    first, second, third = (held.arrive(0.0, 3, "theirs") for _ in range(3))
    assert [first[1], second[1], third[1]] == [ours[3], ours[2], None]
    assert standings([first[0], second[0], third[0]]) == [WAITING, WAITING, REFUSED]
    assert standings(arrive(held, 3, tenant="ours")) == [REFUSED]
    assert standings(arrive(held, 4, tenant="others")) == [REFUSED], "what is less urgent displaces nothing"


def test_a_tenant_that_is_known_only_later_is_held_to_its_share_as_well():
    held = admission(max_concurrent=2, share=0.5)
    first, second = arrive(held, 3, 3)
    assert held.belong(first, "ours")
    assert not held.belong(second, "ours")
    held.leave(first, 0.0)
    assert held.belong(second, "ours")


def test_new_settings_let_more_start_or_refuse_who_waits_beyond_them():
    held = admission(max_concurrent=1, max_queued=9)
    _, *waiting = arrive(held, 3, 3, 6, 0)
    assert held.reconfigure(places(max_concurrent=2, max_queued=1), 10.0, 0.0) == [waiting[2], waiting[1]]
    assert standings(waiting) == [WAITING, REFUSED, RUNNING]
    held.reconfigure(places(max_concurrent=2, max_wait_ms=10), 10.0, 0.5)
    assert held.expire(0.51) == [waiting[0]]


def test_there_may_be_all_places_until_late_answers_have_lowered_them():
    held = admission(max_concurrent=128)
    first, second = arrive(held, 3, 3)
    held.leave(first, 1.0, 1.0)
    assert (held.places, held.places_yet()) == (16, 128)
    held.leave(second, 200.0, 200.0)
    assert held.places == held.places_yet() < 16


class Places(RuleBasedStateMachine):
    """Any traffic: the queue is modelled as a list, and every decision is compared with it."""

    @initialize(
        concurrent=st.integers(1, 4), queued=st.integers(0, 5), wait_ms=st.integers(0, 3000), share=st.sampled_from([0.3, 0.5, 1.0])
    )
    def start(self, concurrent, queued, wait_ms, share):
        self.settings = places(concurrent, queued, wait_ms, share)
        self.held, self.now, self.tickets, self.decided = Admission(self.settings, 0.5), 0.0, [], []

    @rule(urgency=st.integers(0, 7), tenant=st.sampled_from([None, "a", "b"]), key=st.sampled_from([None, "key"]))
    def arrives(self, urgency, tenant, key):
        ticket, displaced = self.held.arrive(self.now, urgency, tenant, key)
        self.tickets.append(ticket)
        if ticket.standing is not WAITING:
            self.decided.append(ticket)
        if displaced is not None:
            waiting = Counter(other.lane for other in self.in_standing(WAITING) if other.urgency == urgency)
            assert displaced.urgency > urgency or waiting[displaced.lane] >= waiting[ticket.lane]
            assert all(displaced.urgency >= other.urgency for other in self.in_standing(WAITING))
            self.note([displaced], REFUSED)

    @rule(seconds=st.floats(0, 2))
    def time_passes(self, seconds):
        self.now += seconds
        self.note(self.held.expire(self.now), REFUSED)

    @rule(data=st.data(), tenant=st.sampled_from(["a", "b"]))
    def ones_tenant_is_known(self, data, tenant):
        if running := self.in_standing(RUNNING):
            self.held.belong(data.draw(st.sampled_from(running)), tenant)

    @rule(data=st.data(), first_byte=st.none() | st.floats(0, 2))
    def one_leaves(self, data, first_byte):
        if there := self.in_standing(WAITING) + self.in_standing(RUNNING):
            leaving = data.draw(st.sampled_from(there))
            waited = leaving.standing is WAITING
            self.note(self.held.leave(leaving, self.now, None if waited else first_byte), RUNNING)
            assert leaving.standing is LEFT
            if waited:
                self.decided.append(leaving)

    @rule(concurrent=st.integers(1, 4), queued=st.integers(0, 5), wait_ms=st.integers(0, 3000))
    def is_reconfigured(self, concurrent, queued, wait_ms):
        self.settings = places(concurrent, queued, wait_ms, self.settings.max_concurrent_share)
        for ticket in self.held.reconfigure(self.settings, 0.5, self.now):
            self.note([ticket], ticket.standing)
        self.note(self.held.expire(self.now), REFUSED)
        self.allowed = len(self.in_standing(RUNNING))

    def note(self, tickets, standing):
        for ticket in tickets:
            assert ticket.standing is standing
            assert ticket not in self.decided, "decided on twice"
            self.decided.append(ticket)

    def in_standing(self, standing):
        return [ticket for ticket in self.tickets if ticket.standing is standing]

    allowed = 0
    """Requests that ran already when the settings allowed fewer."""

    @invariant()
    def nobody_is_lost(self):
        if hasattr(self, "held"):
            assert len(self.decided) + len(self.in_standing(WAITING)) == len(self.tickets)
            assert self.held.running == len(self.in_standing(RUNNING))
            assert self.held.waiting == len(self.in_standing(WAITING))
            under_way = self.in_standing(WAITING) + self.in_standing(RUNNING)
            assert self.held._under_way == Counter(ticket.lane for ticket in under_way)  # noqa: SLF001 - no name stays in it

    @invariant()
    def never_more_than_allowed(self):
        if hasattr(self, "held"):
            self.allowed = min(self.allowed, self.held.running)
            assert self.held.running <= max(self.settings.max_concurrent, self.allowed)
            assert self.held.waiting <= self.settings.max_queued
            assert all(ticket.until > self.now for ticket in self.in_standing(WAITING) if self.settings.max_wait_ms > 0)

    @invariant()
    def nobody_waits_beside_a_free_place_of_theirs(self):
        if hasattr(self, "held") and self.held.running < self.held.places:
            full = max(1, int(self.settings.max_concurrent_share * self.held.places))
            running = [ticket.tenant for ticket in self.in_standing(RUNNING)]
            assert all(t.tenant is not None and running.count(t.tenant) >= full for t in self.in_standing(WAITING))


def test_each_request_is_admitted_refused_or_gone_exactly_once_whatever_comes():
    run_state_machine_as_test(Places, settings=settings(max_examples=times(150, 30), stateful_step_count=40))


@given(st.lists(st.floats(0, 20), max_size=200), st.integers(1, 300))
def test_the_adaptive_limit_stays_within_its_bounds(durations, most):
    limit, now = AdaptiveLimit(most, target_s=1.0), 0.0
    for took in durations:
        now += took
        limit = limit.after(took, now, full=True)
        assert max(1, most // 16) <= limit.places <= most


@pytest.mark.parametrize("capacity", [8, 40, 100])
def test_the_adaptive_limit_finds_how_many_fit_into_the_target(capacity):
    """A server of `capacity` requests a second, whatever is under way: n at a time take n / capacity seconds. Target 0.5 s."""
    limit, now, seen = AdaptiveLimit(128, target_s=0.5), 0.0, []
    for _ in range(4000):
        took = limit.places / capacity
        now += 1 / capacity
        limit = limit.after(took, now, full=True)
        seen.append(took)
    assert sum(seen[2000:]) / 2000 <= 0.55 or limit.places == 8
    assert limit.places >= min(capacity / 4, 8)


def test_the_adaptive_limit_comes_back_once_answers_are_fast_again():
    limit = AdaptiveLimit(128, target_s=0.5, exact=8.0, mean_s=0.5)
    for answer in range(2000):
        limit = limit.after(0.05, 10 + answer / 500, full=True)
    assert limit.places == 128


def test_the_adaptive_limit_is_lowered_by_the_late_answers_of_a_stall_and_not_by_the_quick_ones_after_it():
    limit = AdaptiveLimit(64, target_s=1.0, exact=64.0, mean_s=0.5, lowered_at=0.0)
    for began in range(64):
        limit = limit.after(15.0 - (10 + began / 128), 15.0, full=True)
    lowered = limit.places
    assert 32 < lowered < 64
    for answer in range(50):
        limit = limit.after(0.5, 15.5 + answer / 100, full=False)
        assert limit.places == lowered


def test_the_adaptive_limit_does_not_grow_while_places_are_free():
    assert AdaptiveLimit(128, 0.5, exact=20.0, mean_s=0.1).after(0.1, 1.0, full=False).places == 20


class Sharing:
    """A server in virtual time that finishes `capacity` requests a second, all that run at equal speed, and clients that come at random.
    `others`: tenants beside the one that all others are of, each of which asks for a tenth of the capacity; `of_others`: their requests.
    """

    def __init__(self, held, capacity, offered, seed=0, others=0):
        self.held, self.capacity, self.random = held, capacity, random.Random(seed)
        self.offered, self.now, self.served = offered, 0.0, 0.0
        self.ends, self.refused, self.answered = [], [], []  # ends: (served when it ends, number, ticket)
        self.waiting = deque()  # each may wait as long as the others, so that the first to come is the first to expire
        self.number = itertools.count()
        self.others, self.of_others = others, []

    def run(self, seconds):
        arrival = 0.0
        while self.now < seconds:
            running = self.held.running
            end = self.now + (self.ends[0][0] - self.served) * running / self.capacity if self.ends else inf
            while self.waiting and self.waiting[0].standing is not WAITING:
                self.waiting.popleft()
            until = self.waiting[0].until if self.waiting else inf
            now = min(arrival, end, until)
            self.served += (now - self.now) * self.capacity / max(1, running)
            self.now = now
            if now == end:
                ticket = heapq.heappop(self.ends)[2]
                self.answered.append((now, now - ticket.arrived))
                self.start(self.held.leave(ticket, now, now - ticket.started))
            elif now == until:
                self.refused += [(now, now - ticket.arrived) for ticket in self.held.expire(now)]
            else:
                ticket, displaced = self.arrive(now)
                self.start([ticket] if ticket.standing is RUNNING else [])
                self.waiting += [ticket] if ticket.standing is WAITING else []
                self.refused += [(now, now - one.arrived) for one in (ticket, displaced) if one and one.standing is REFUSED]
                arrival = now + self.random.expovariate(self.offered)

    def arrive(self, now):
        if not self.others:
            return self.held.arrive(now, 3 if self.random.random() < 0.9 else 6)
        other = int(self.random.uniform(0, self.offered / (self.capacity / 10)))
        ticket, displaced = self.held.arrive(now, 3, other if other < self.others else "flood")
        self.of_others += [ticket] if other < self.others else []
        return ticket, displaced

    def start(self, tickets):
        for ticket in tickets:
            heapq.heappush(self.ends, (self.served + self.random.uniform(0.5, 1.5), next(self.number), ticket))


@pytest.mark.parametrize("capacity", [20, 100])
def test_at_ten_times_the_load_the_places_stay_useful_and_who_is_refused_learns_it_at_once(capacity):
    """Nothing is tuned to the capacity: 128 places would take 6.4 s an answer at 20 a second, and the deadline is 2 s."""
    server = Sharing(Admission(places(128, 512, max_wait_ms=500), target_s=1.0), capacity, offered=10 * capacity)
    server.run(60)
    in_time = [took for at, took in server.answered if at >= 10 and took <= 2.0]
    waited = sorted(waited for at, waited in server.refused if at >= 10)
    assert len(in_time) >= 0.95 * capacity * 50
    assert waited[int(0.99 * len(waited))] <= 0.05


@pytest.mark.parametrize("times", [1.5, 10])
def test_a_queue_that_stands_makes_no_answer_late_and_one_that_ends_may_be_as_long_as_before(times):
    """32 places of a server of 1,000 requests a second take 32 ms; half of the second that one may wait would make that half a second."""
    held = Admission(places(32, 512, max_wait_ms=1000), target_s=1.0)
    server = Sharing(held, 1000, offered=times * 1000)
    server.run(15)
    late = sorted(took for at, took in server.answered if at >= 5)
    assert late[int(0.99 * len(late))] <= 0.15
    assert len(late) >= 0.95 * 1000 * 10
    longest_queue = held.waiting
    server.offered = 500
    server.run(30)
    assert held.waiting == 0
    for _ in range(600):
        held.arrive(30.0, 3)
    assert held.waiting >= 4 * longest_queue


def test_a_queue_stands_also_while_the_adaptive_limit_grows():
    """The limit finds the 40 places that take the target of 200 ms, and goes on growing: a new place is free only until it is filled."""
    server = Sharing(held := Admission(places(128, 512, max_wait_ms=1000), target_s=0.2), 200, offered=400)
    server.run(20)
    took = sorted(took for at, took in server.answered if at >= 10)
    assert 20 < held.places < 128
    assert took[len(took) // 2] <= 0.2 + 0.05 + 0.05, "the target, and a twentieth of the allowed wait"


@pytest.mark.parametrize("capacity", [20, 100, 1000])
@pytest.mark.parametrize("others", [1, 2])
def test_a_tenants_flood_is_not_noticed_by_those_that_ask_for_less_than_their_part(capacity, others):
    """Each of the others asks for a tenth of what the server can do."""
    server = Sharing(Admission(places(128, 512), target_s=1.0), capacity, offered=10 * capacity, others=others)
    server.run(30)
    assert len(server.of_others) >= 0.08 * others * capacity * 30
    refused = [ticket for ticket in server.of_others if ticket.standing is REFUSED]
    assert len(refused) <= 0.06 * len(server.of_others), "those of a burst that is more than their part"
    waited = sorted(ticket.started - ticket.arrived for ticket in server.of_others if ticket.standing in (RUNNING, LEFT))
    assert waited[int(0.99 * len(waited))] <= 16 / capacity, "so many answers later it is its turn"
    assert len(server.answered) >= 0.95 * capacity * 30
