"""Erasures on their way: who has yet to forget whom, and who has lost track and forgets everything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.fleet.erasures import ErasureLog, Erasures, News, Place
from tests.reached import reached

NOW = 1_760_000_000.0


class Holder:
    """Keeps users, and forgets as the news say."""

    def __init__(self, name: str = "holder") -> None:
        self.name, self.place, self.users = name, Place(), set()

    def take(self, news: News) -> None:
        if news.lost_track:
            self.users.clear()
        for erasure in news.erasures:
            self.users = {
                (tenant, user) for tenant, user in self.users if not (erasure.tenant in (None, tenant) and erasure.user in (None, user))
            }
        self.place = news.place

    def exchange(self, erasures: Erasures) -> None:
        erasures.report(self.name, self.place)
        self.take(erasures.since(self.place))


def erased(erasures: Erasures, number: int, *live: Holder, starting: tuple[Holder, ...] = ()) -> bool:
    """Whether the erasure is done, where these live, and others are being started."""
    erasures.answered(erasures.question(), {**{one.name: True for one in live}, **{one.name: False for one in starting}})
    return erasures.erased(number)


def strings(erasures: Erasures) -> list[str]:
    """All strings that are kept."""
    return [one for one in reached(erasures) if isinstance(one, str)]


def started(*names: str, now: float = NOW) -> tuple[Erasures, list[Holder]]:
    """Erasures, and followers that have found their place in their log."""
    erasures, holders = Erasures(now=now - 60), [Holder(name) for name in names]
    for holder in holders:
        holder.exchange(erasures)
    return erasures, holders


def test_an_erasure_reaches_everybody_and_is_done_only_then():
    erasures, holders = started("a", "b")
    for holder in holders:
        holder.users = {("default", "ada"), ("default", "bob")}
    number = erasures.erase("default", "ada", now=NOW)
    for holder in holders:
        assert not erased(erasures, number, *holders)
        holder.exchange(erasures)
        assert holder.users == {("default", "bob")}
    assert not erased(erasures, number, *holders), "it is done once they say so"
    for holder in holders:
        holder.exchange(erasures)
    assert erased(erasures, number, *holders)


def test_a_user_of_another_tenant_stays_and_a_tenant_or_everybody_can_be_erased():
    erasures, (holder,) = started("a")
    everybody = {("shop", "ada"), ("shop", "bob"), ("news", "ada")}
    for erased, left in (
        (("shop", "ada"), {("shop", "bob"), ("news", "ada")}),
        (("shop", None), {("news", "ada")}),
        ((None, None), set()),
    ):
        holder.users = set(everybody)
        erasures.erase(*erased, now=NOW)
        holder.exchange(erasures)
        assert holder.users == left


def test_nobody_is_erased_by_a_user_of_no_tenant():
    with pytest.raises(ValueError, match="the tenant of user 'ada' is missing"):
        ErasureLog().add(None, "ada", now=NOW)


def test_a_holder_that_says_nothing_is_waited_for_until_it_has_ended_however_long_that_takes():
    erasures, (stopped, alive) = started("stopped", "alive")
    number = erasures.erase("default", "ada", now=NOW + 1)
    for _ in range(2):
        alive.exchange(erasures)
    assert not erased(erasures, number, stopped, alive)
    assert not erasures.erased(erasures.erase("default", "bob", now=NOW + 2)), "which live is asked after each erasure"
    assert erased(erasures, number, alive)
    stopped.users = {("default", "ada")}
    stopped.exchange(erasures)
    assert stopped.users == set(), "it catches up when it comes back"


def test_nothing_is_erased_everywhere_before_it_is_known_which_processes_live():
    erasures = Erasures(now=NOW)
    number = erasures.erase("default", "ada", now=NOW + 1)
    assert not erasures.erased(number)
    assert erased(erasures, number), "there is none"


def test_a_holder_that_a_restarted_switchboard_has_not_heard_of_is_waited_for():
    erasures, unheard = Erasures(now=NOW), Holder("stopped before the restart")
    number = erasures.erase("default", "ada", now=NOW + 1)
    assert not erased(erasures, number, unheard)
    unheard.exchange(erasures)
    assert not erasures.erased(number)
    unheard.exchange(erasures)
    assert erasures.erased(number)


def test_a_holder_that_is_being_started_is_not_waited_for_and_one_that_joins_while_the_question_is_asked_is():
    erasures, (holder,) = started("a")
    number, loading, joining = erasures.erase("default", "ada", now=NOW + 1), Holder("loading"), Holder("joining")
    loading.exchange(erasures)
    question = erasures.question()
    joining.exchange(erasures)
    for _ in range(2):
        holder.exchange(erasures)
    erasures.answered(question, {"a": True, "loading": False})
    assert not erasures.erased(number)
    joining.exchange(erasures)
    assert erasures.erased(number)


def test_a_process_that_comes_from_an_earlier_switchboard_forgets_everything_and_what_that_one_erased_counts_as_done_then():
    old, holders = started("a", "b")
    number = old.erase("default", "ada", now=NOW + 1)
    restarted = Erasures(now=NOW + 2)
    for holder in holders:
        holder.users = {("default", "ada"), ("default", "bob")}
        holder.exchange(restarted)
        assert holder.users == set()
        assert not erased(restarted, number, *holders)
    for holder in holders:
        holder.users = {("default", "bob")}
        holder.exchange(restarted)
        assert holder.users == {("default", "bob")}, "once is enough"
    assert erased(restarted, number, *holders)


def test_a_restarted_switchboard_whose_clock_is_slow_does_not_claim_what_it_cannot_know():
    old, (holder,) = started("a")
    number = old.erase("default", "ada", now=NOW + 1)
    restarted = Erasures(now=NOW - 100)
    for _ in range(2):
        holder.exchange(restarted)
    assert not erased(restarted, number, holder)


def test_who_is_further_behind_than_the_log_goes_back_forgets_everything():
    log = ErasureLog(NOW, longest=3)
    here = log.since(Place()).place
    numbers = [log.add("default", f"user-{number}", now=NOW) for number in range(4)]
    assert log.since(here).lost_track
    assert [one.number for one in log.since(Place(here.epoch, numbers[0])).erasures] == numbers[1:]
    assert log.since(Place(here.epoch, numbers[-1])) == News(Place(here.epoch, numbers[-1]))


def test_what_has_expired_is_kept_no_more_and_who_has_missed_it_forgets_everything():
    erasures, (behind, after, there) = started("behind", "after", "there")
    users = {("default", name) for name in ("ada", "bob", "eve")}
    for holder in (behind, after, there):
        holder.users = set(users)
    erasures.erase("default", "ada", now=NOW)
    after.exchange(erasures)
    last = erasures.erase("default", "bob", now=NOW + 10)
    there.exchange(erasures)
    erasures.expire(before=NOW + 10)
    assert {"ada", "bob"}.intersection(strings(erasures)) == {"bob"}
    for holder, left in ((behind, set()), (after, {("default", "eve")}), (there, {("default", "eve")})):
        holder.exchange(erasures)
        assert holder.users == left
    erasures.expire(before=NOW + 11)
    assert "bob" not in strings(erasures)
    for holder in (behind, after, there):
        holder.users = set(users)
        holder.exchange(erasures)
        assert holder.users == users, "there are no news for a holder that has come to the end"
    assert erased(erasures, last, behind, after, there)


def test_a_holder_without_a_place_is_told_what_a_request_under_way_may_have_begun_before():
    log = ErasureLog(NOW - 60)
    numbers = [log.add("default", f"user-{second}", now=NOW + second) for second in range(4)]
    news = log.since(Place(), under_way_since=NOW + 1.5)
    assert news.lost_track
    assert [one.number for one in news.erasures] == numbers[2:]
    assert log.since(Place()).erasures == ()
    assert [one.number for one in log.since(Place(news.place.epoch, numbers[0]), under_way_since=NOW + 1.5).erasures] == numbers[1:]


def test_every_erasure_has_a_number_of_its_own_also_within_a_millisecond_or_when_the_clock_goes_back():
    log = ErasureLog(NOW)
    numbers = [log.add("default", "ada", now=NOW - second) for second in range(5)]
    assert sorted(set(numbers)) == numbers


STEPS = ["erase", "exchange", "restart", "keep", "expire"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(STEPS), st.sampled_from("xyz"))))
def test_whatever_happens_a_holder_that_is_up_to_date_keeps_nobody_erased_since_it_kept_them(steps):
    erasures, holders = Erasures(now=NOW), {name: Holder(name) for name in "ab"}
    to_go: dict[str, set[tuple[str, str]]] = {name: set() for name in "ab"}
    for second, (name, step, user) in enumerate(steps):
        holder, one, now = holders[name], ("default", user), NOW + second
        if step == "erase":
            erasures.erase(*one, now=now)
            for other in "ab":
                to_go[other].add(one)
        elif step == "keep":
            holder.users.add(one)
            to_go[name].discard(one)
        elif step == "restart":
            erasures = Erasures(now=now)
        elif step == "expire":
            erasures.expire(before=now - 2)
        else:
            holder.exchange(erasures)
            assert not holder.users & to_go[name]
            to_go[name].clear()
