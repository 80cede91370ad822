"""Both stores against a naive model: what is matched is what was committed for that beginning, within the budget, whatever else happens."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from integrations.hstu.state.paged import PagedStates
from integrations.hstu.state.pool import PagePool, Plane
from integrations.hstu.state.radix import RadixStates
from integrations.hstu.state.rows import identities, page_digests
from integrations.hstu.state.store import Owner
from tests.reached import reached
from tests.repetitions import times
from tests.waiting import eventually

PLANES = {"kt": Plane((2, 1, 3), axis=3), "v": Plane((2, 1, 2), axis=2), "states": Plane((4,), axis=0)}
PAGE_ROWS = 4
STORES = {
    "paged": PagedStates,
    "radix": lambda pool: RadixStates(pool, copies=True),
    "radix lfu": lambda pool: RadixStates(pool, policy="lfu", copies=True),
    "radix fifo": lambda pool: RadixStates(pool, policy="fifo", copies=True),
    "radix shared": lambda pool: RadixStates(pool, share_users=True, copies=True),
}


def pool_of(pages, planes=PLANES, page_rows=PAGE_ROWS, **options):
    page_bytes = page_rows * sum(plane.row_bytes for plane in planes.values())
    return PagePool(planes, budget_bytes=pages * page_bytes, page_rows=page_rows, **options)


def history(*events):
    """Identities of a history of these (item, time) events."""
    return identities([item for item, _ in events], [time for _, time in events])


def contents(rows, start=0):
    """What an encoder would make of the rows from `start` on: numbers that depend on all rows up to each, as HSTU's do."""
    sums = np.cumsum(rows.astype(np.float64) @ [1.0, 3.0, 7.0]) % 97
    fields = {name: np.arange(np.prod(plane.shape)).reshape(plane.shape) for name, plane in PLANES.items()}
    made = {name: np.stack([field + value for value in sums] or [field], axis=PLANES[name].axis) for name, field in fields.items()}
    return {name: array[PLANES[name].at(start, len(rows))].astype(np.float32) for name, array in made.items()}


def read(held, planes=PLANES, start=0, dtype=np.float32):
    out = {name: np.full(plane.stacked(held.rows - start), np.nan, dtype) for name, plane in planes.items()}
    held.read(out, start)
    return out


def assert_holds(held, rows):
    for name, array in contents(rows[: held.rows]).items():
        np.testing.assert_array_equal(read(held)[name], array)


def remember(store, owner, rows):
    """One request: match, encode what is missing, commit. How many rows were kept before."""
    with store.matched(owner, rows) as held:
        assert_holds(held, rows)
        store.commit(held, rows, held.rows, contents(rows, held.rows))
        return held.rows


def kept(store, owner, rows):
    with store.matched(owner, rows) as held:
        assert_holds(held, rows)
        return held.rows


EVENTS = [(item % 5 + 1, 10 * item) for item in range(40)]
ANN, BOB = Owner("model/shop", "ann"), Owner("model/shop", "bob")


@pytest.fixture(params=STORES)
def store_of(request):
    return lambda pages: STORES[request.param](pool_of(pages))


def test_a_history_that_grows_is_kept_but_for_its_new_rows(store_of):
    store = store_of(20)
    assert remember(store, ANN, history(*EVENTS[:11])) == 0
    assert [remember(store, ANN, history(*EVENTS[:n])) for n in (12, 13, 20, 21, 40)] == [10, 11, 12, 19, 20]
    assert kept(store, ANN, history(*EVENTS)) == 39
    assert store.statistics().pages == 10


def test_the_last_row_is_not_kept_for_another_next_time(store_of):
    store = store_of(20)
    remember(store, ANN, history(*EVENTS[:6]))
    changed = [*EVENTS[:5], (EVENTS[5][0], EVENTS[5][1] + 1), *EVENTS[6:8]]
    assert kept(store, ANN, history(*changed)) == 4


def test_no_owner_reads_what_is_anothers_unless_a_namespace_shares_it(store_of):
    store, rows = store_of(20), history(*EVENTS[:11])
    remember(store, ANN, rows)
    shared = isinstance(store, RadixStates) and store.share_users
    assert kept(store, BOB, rows) == (8 if shared else 0)
    assert kept(store, Owner("model/other", "ann"), rows) == 0
    assert kept(store, Owner("model2/shop", "ann"), rows) == 0


def test_an_edit_keeps_what_stands_before_it(store_of):
    store = store_of(20)
    remember(store, ANN, history(*EVENTS[:20]))
    edited = history(*EVENTS[:10], (9, 95), *EVENTS[10:20])
    before = kept(store, ANN, edited)
    assert before == (9 if isinstance(store, PagedStates) else 8)
    assert remember(store, ANN, edited) == before
    assert kept(store, ANN, edited) == 20


def test_a_paged_edit_frees_the_pages_behind_it():
    store = PagedStates(pool_of(20))
    remember(store, ANN, history(*EVENTS))
    remember(store, ANN, history(*EVENTS[:5], (9, 45)))
    assert (store.statistics().pages, store.statistics().rows) == (2, 5)


def test_a_late_request_for_a_shorter_history_takes_nothing_away(store_of):
    store = store_of(20)
    remember(store, ANN, history(*EVENTS[:20]))
    remember(store, ANN, history(*EVENTS[:7]))
    assert kept(store, ANN, history(*EVENTS[:20])) == 19


@pytest.mark.parametrize("at", [6, 9])
def test_a_reader_keeps_its_rows_while_another_edits_them(store_of, at):
    store, rows = store_of(20), history(*EVENTS[:12])
    edited = history(*EVENTS[:at], (9, 10 * at - 3), *EVENTS[at:12])
    remember(store, ANN, rows)
    with store.matched(ANN, rows) as held:
        remember(store, ANN, edited)
        assert held.rows == 11
        assert_holds(held, rows)
    assert kept(store, ANN, edited) == 12


def test_rows_behind_a_beginning_that_an_edit_replaced_are_kept_by_the_tree_alone(store_of):
    store, rows, longer = store_of(20), history(*EVENTS[:11]), history(*EVENTS[:14])
    edited = history(*EVENTS[:2], (9, 15), *EVENTS[2:14])
    remember(store, ANN, rows)
    with store.matched(ANN, rows) as held:
        remember(store, ANN, edited)
        store.commit(held, longer, 10, contents(longer, 10))
    paged = isinstance(store, PagedStates)
    assert [kept(store, ANN, edited), kept(store, ANN, longer)] == [14, 1 if paged else 13]
    assert store.statistics().rejected == (1 if paged else 0)


def test_keeps_what_fits_where_there_is_not_room_for_all(store_of):
    store, rows = store_of(1), history(*EVENTS[:11])
    remember(store, ANN, rows)
    assert kept(store, ANN, rows) == PAGE_ROWS
    assert store.statistics().rejected == 1


def test_gives_up_the_idle_for_the_new_but_never_the_held(store_of):
    store, rows = store_of(3), history(*EVENTS[:10])
    remember(store, ANN, rows)
    with store.matched(ANN, rows) as held:
        remember(store, BOB, history(*EVENTS[20:30]))
        assert_holds(held, rows)
        assert held.rows == 9
        assert kept(store, BOB, history(*EVENTS[20:30])) == 0
    remember(store, BOB, history(*EVENTS[20:30]))
    assert kept(store, BOB, history(*EVENTS[20:30])) == 9
    assert kept(store, ANN, rows) == 0
    assert store.statistics().evictions >= 1


def test_forgetting_a_held_user_frees_the_pages_at_the_last_release_and_keeps_it_from_coming_back(store_of):
    store, rows = store_of(20), history(*EVENTS[:10])
    remember(store, ANN, rows)
    with store.matched(ANN, rows) as held:
        assert store.forget(ANN) == 9
        assert_holds(held, rows)
        assert store.statistics().pages == 3
        longer = history(*EVENTS[:12])
        store.commit(held, longer, 9, contents(longer, 9))
        assert kept(store, ANN, rows) == 0
    assert store.statistics().pages == 0
    assert store.forget(ANN) == 0
    assert store.statistics().forgotten == 1


def some(value, rows):
    """Rows that are this number throughout, by which they are found in memory."""
    return {name: np.full(plane.stacked(len(rows)), value, np.float32) for name, plane in PLANES.items()}


def written(pool):
    """The numbers that stand anywhere in the pool's memory."""
    return set(np.concatenate([pool.view(name, page).ravel() for name in PLANES for page in range(pool.pages)]).tolist())


@pytest.mark.parametrize("erase", [
    lambda store, owner: store.forget(owner), lambda store, owner: store.forget_namespace(owner.namespace), lambda store, _: store.clear()
], ids=["forget", "forget_namespace", "clear"])  # fmt: skip
@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_nothing_of_a_forgotten_user_stays_in_memory_evicted_held_or_behind_the_rows_of_another(erase, make):
    store = make(pool_of(5, allocate=np.zeros))
    evicted, held_one, other = Owner("model/shop", "eve"), ANN, Owner("model/other", "bob")
    with store.matched(evicted, history(*EVENTS[:10])) as held:
        store.commit(held, history(*EVENTS[:10]), 0, some(111, range(9)))
    with store.matched(held_one, history(*EVENTS[10:17])) as held:
        store.commit(held, history(*EVENTS[10:17]), 0, some(222, range(6)))
    reader = store.match(held_one, history(*EVENTS[10:17]))
    assert reader.rows >= 4
    with store.matched(other, history(*EVENTS[20:26])) as held:  # one row in a page that held four of the evicted user's
        store.commit(held, history(*EVENTS[20:26]), 0, some(333, range(5)))
    assert store.statistics().evictions
    assert written(store.pool) >= {111, 222, 333}
    for owner in (evicted, held_one):
        erase(store, owner)
    assert 111 not in written(store.pool)
    assert read(reader)["states"].min() == 222, "a reader goes on"
    store.release(reader)
    assert 222 not in written(store.pool)
    with store.matched(other, history(*EVENTS[20:26])) as held:
        assert held.rows == (5 if 333 in written(store.pool) else 0)


def kept_of(store, owner, rows):
    """What the store leads to of the owner and of these rows: Owners, identities that have some of the rows, digests of pages."""
    events, digests = {tuple(row) for row in rows.tolist()}, set(page_digests(rows, PAGE_ROWS))
    objects = reached(store)
    arrays = [one for one in objects if isinstance(one, np.ndarray) and one.dtype == np.int64]
    return (
        [one for one in objects if isinstance(one, Owner) and one == owner],
        [one for one in arrays if events.intersection(map(tuple, one.tolist()))],
        [one for one in objects if isinstance(one, bytes) and one in digests],
    )


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_no_name_event_or_digest_of_a_forgotten_user_is_kept_beside_the_pages(make):
    store, rows = make(pool_of(20)), history(*EVENTS[:20])
    edited = history(*EVENTS[:10], (9, 95), *EVENTS[10:14])
    remember(store, BOB, history(*EVENTS[20:31]))
    for grown in (history(*EVENTS[:6]), history(*EVENTS[:11]), rows[:12], edited, rows):
        remember(store, ANN, grown)
    assert all(kept_of(store, ANN, rows)[:2])
    store.forget(ANN)
    assert kept_of(store, ANN, rows) == kept_of(store, ANN, edited) == ([], [], [])
    assert kept(store, BOB, history(*EVENTS[20:31])) == 10


class Overwritten(np.ndarray):
    """Memory that calls the function in `told`, once, before zeros are put into it."""

    told: ClassVar[list[Callable[[], None]]] = []

    @classmethod
    def allocate(cls, shape, dtype):
        return np.zeros(shape, dtype).view(cls)

    def __setitem__(self, at, value):
        if np.isscalar(value) and self.told:
            self.told.pop()()
        super().__setitem__(at, value)


def erased_beside(step, erase, until=None):
    """(what `erase()`, what `step()` returns): another thread does the step while the first page is being overwritten, which goes on once
    the step is done, or `until()` holds.
    """
    with ThreadPoolExecutor(1) as thread:
        begun = []

        def told():
            begun.append(thread.submit(step))
            eventually(until or begun[0].done, "the step does not wait for the erasure", within_s=30, every_s=0.001)

        Overwritten.told[:] = [told]
        return erase(), begun[0].result()


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_requests_are_answered_while_pages_are_overwritten(make):
    store = make(pool_of(20, allocate=Overwritten.allocate))
    remember(store, ANN, history(*EVENTS[:11]))
    remember(store, BOB, history(*EVENTS[20:31]))

    def step():  # it takes no new page
        return remember(store, BOB, history(*EVENTS[20:32])), store.statistics().users

    assert erased_beside(step, lambda: store.forget(ANN)) == (10, (10, 1))


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_rows_that_are_put_into_a_page_while_it_is_overwritten_stay(make):
    store, rows = make(pool_of(1, allocate=Overwritten.allocate)), history(*EVENTS[20:24])
    remember(store, ANN, history(*EVENTS[:4]))
    erased_beside(lambda: remember(store, BOB, rows), lambda: store.forget(ANN), until=lambda: not store.pool.free)
    assert kept(store, BOB, rows) == 3


def told_while(monkeypatch, working, method, step, tell):
    """What another thread is told by `tell()` each time that `step()` is at this method of `working`, which goes on then."""
    told, work = [], getattr(working, method)
    with ThreadPoolExecutor(1) as thread:

        def at_work(*arguments):
            told.append(thread.submit(tell).result(timeout=30))
            return work(*arguments)

        monkeypatch.setattr(working, method, at_work)
        step()
    return told


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_how_many_rows_are_kept_is_said_without_a_wait_for_rows_that_are_written(make, monkeypatch):
    store = make(pool_of(20))
    remember(store, ANN, history(*EVENTS[:9]))
    told = told_while(
        monkeypatch, store.pool, "scatter", lambda: remember(store, BOB, history(*EVENTS[20:31])), lambda: store.kept_rows(ANN)
    )
    assert (told, store.kept_rows(ANN)) == ([0], 8)


def test_a_user_that_is_forgotten_while_it_is_copied_leaves_nothing_in_memory(monkeypatch):
    store, rows = PagedStates(pool_of(20, allocate=np.zeros)), history(*EVENTS[:9])
    with store.matched(ANN, rows) as held:
        store.commit(held, rows, 0, some(111, rows))
    gather = store.pool.gather

    def forgotten(*arguments):
        store.forget(ANN)
        gather(*arguments)

    monkeypatch.setattr(store.pool, "gather", forgotten)
    assert store.copy(ANN)[1]["states"].min() == 111
    assert 111 not in written(store.pool)


def test_the_release_of_an_erased_users_rows_overwrites_no_others():
    store, rows = PagedStates(pool_of(20, allocate=np.zeros)), history(*EVENTS[:9])
    for value, owner in ((111, ANN), (222, BOB)):
        with store.matched(owner, rows) as held:
            store.commit(held, rows, 0, some(value, rows))
    with store.matched(ANN, rows):
        store.forget(ANN)
        store.drop(BOB)
    assert 222 in written(store.pool)
    assert 111 not in written(store.pool)


def test_a_user_forgotten_while_first_encoded_is_not_kept(store_of):
    store, rows = store_of(20), history(*EVENTS[:10])
    with store.matched(ANN, rows) as held:
        store.forget(ANN)
        store.commit(held, rows, 0, contents(rows))
    assert kept(store, ANN, rows) == 0


def test_forgetting_a_namespace_leaves_the_others(store_of):
    store, rows, other = store_of(20), history(*EVENTS[:10]), Owner("model/other", "ann")
    for owner in (ANN, BOB, other):
        remember(store, owner, rows)
    before = store.statistics().rows
    assert store.forget_namespace("model/shop") == before - 9
    assert [kept(store, owner, rows) for owner in (ANN, BOB, other)] == [0, 0, 9]
    assert store.clear() == 9
    assert store.statistics().pages == store.statistics().users == store.statistics().rows == 0


def test_misuse_is_refused(store_of):
    store, rows = store_of(20), history(*EVENTS[:10])
    held = store.match(ANN, rows)
    with pytest.raises(ValueError, match=r"8 rows were given as rows 0\.\.8, behind 0 that are held"):
        store.commit(held, rows, 0, contents(rows[1:]))
    with pytest.raises(ValueError, match="of the planes"):
        store.commit(held, rows, 0, {"kt": contents(rows)["kt"]})
    store.release(held)
    with pytest.raises(ValueError, match="is not held here"):
        store.release(held)
    with pytest.raises(ValueError, match="is not held here"):
        store.commit(held, rows, 0, contents(rows))


def test_reads_a_part_of_the_rows(store_of):
    store, rows = store_of(20), history(*EVENTS[:20])
    remember(store, ANN, rows)
    with store.matched(ANN, rows) as held:
        out = np.zeros((6, 4), np.float32)
        held.read({"states": out}, 5, 11)
        np.testing.assert_array_equal(out, contents(rows)["states"][5:11])
        with pytest.raises(ValueError, match="of 19 rows"):
            held.read({"states": out}, 0, 20)


def test_statistics_count_what_was_asked_and_found(store_of):
    store = store_of(20)
    remember(store, ANN, history(*EVENTS[:10]))
    remember(store, ANN, history(*EVENTS[:12]))
    found = store.statistics()
    assert (found.hits, found.misses, found.hit_rows, found.asked_rows, found.commits) == (1, 1, 9, 20, 2)
    assert (found.users, found.rows, found.held, found.pages) == (1, 11, 0, 3)


def assert_copied(store, owner, other):
    """What is copied is what was committed, and found in another store that adopts it; how many rows that is."""
    rows, planes = store.copy(owner)
    for name, array in contents(rows).items() if len(rows) else ():
        np.testing.assert_array_equal(planes[name], array)
    assert (other.adopt(owner, rows, planes) > 0) == (len(rows) > 0)
    assert kept(other, owner, rows) == len(rows)
    return len(rows)


def test_a_history_goes_on_in_another_store_that_adopts_it(store_of):
    store, other = store_of(20), store_of(20)
    for length in (11, 12, 13, 30):
        remember(store, ANN, history(*EVENTS[:length]))
    assert assert_copied(store, ANN, other) == 29
    assert remember(other, ANN, history(*EVENTS)) == 29
    assert kept(other, ANN, history(*EVENTS)) == 39
    found = other.statistics()
    assert (found.adopted, found.users, found.rows, found.hits, found.misses) == (1, 1, 39, 3, 0)


def test_of_several_histories_the_latest_is_copied(store_of):
    store, edited = store_of(40), history(*EVENTS[:10], (9, 95), *EVENTS[10:20])
    for rows in (history(*EVENTS), edited):
        remember(store, ANN, rows)
    np.testing.assert_array_equal(store.copy(ANN)[0], edited)
    assert assert_copied(store, ANN, store_of(20)) == len(edited)


def test_an_older_history_of_the_user_goes_on_with_a_newer_one_and_not_the_other_way_round(store_of):
    older, newer = store_of(20), store_of(20)
    remember(older, ANN, history(*EVENTS[:7]))
    remember(newer, ANN, history(*EVENTS[:20]))
    assert newer.adopt(ANN, *older.copy(ANN)) == 0
    assert older.adopt(ANN, *newer.copy(ANN)) == 3 * older.pool.page_bytes
    assert [kept(store, ANN, history(*EVENTS)) for store in (older, newer)] == [19, 19]
    assert older.adopt(ANN, *newer.copy(ANN)) == 0
    assert [store.statistics().adopted for store in (older, newer)] == [1, 0]


def test_what_is_kept_of_a_user_already_stays_where_it_is_of_another_history(store_of):
    store, other, rows = store_of(20), store_of(20), history(*EVENTS[:9])
    remember(store, ANN, history(*EVENTS[20:30]))
    remember(other, ANN, rows)
    assert other.adopt(ANN, *store.copy(ANN)) == 0
    assert (kept(other, ANN, rows), other.statistics().adopted) == (8, 0)


def test_the_users_that_were_asked_about_last_come_first_and_forgotten_ones_not_at_all(store_of):
    store, users = store_of(20), [Owner("model/shop", user) for user in "abcd"]
    for step, user in enumerate(users):
        remember(store, user, history(*EVENTS[5 * step : 5 * step + 10]))
    kept(store, users[1], history(*EVENTS[5:15]))
    store.forget(users[2])
    with store.matched(users[0], history(*EVENTS[:10])):
        assert store.hottest() == [users[0], users[1], users[3]]
        assert not len(store.copy(users[2])[0])


def test_adopting_gives_up_the_idle_but_never_the_held(store_of):
    store, other, rows = store_of(3), store_of(20), history(*EVENTS[:10])
    remember(other, BOB, history(*EVENTS[20:30]))
    remember(store, ANN, rows)
    with store.matched(ANN, rows):
        store.adopt(BOB, *other.copy(BOB))
        assert not kept(store, BOB, history(*EVENTS[20:30]))
    store.adopt(BOB, *other.copy(BOB))
    assert kept(store, BOB, history(*EVENTS[20:30])) == 9
    assert not kept(store, ANN, rows)


def test_adopting_rows_that_are_not_those_of_the_history_is_refused(store_of):
    rows = history(*EVENTS[:10])
    with pytest.raises(ValueError, match="8 rows were given for a history of 9"):
        store_of(20).adopt(ANN, rows, contents(rows, 1))
    with pytest.raises(ValueError, match="of the planes"):
        store_of(20).adopt(ANN, rows, {"kt": contents(rows)["kt"]})


def test_a_tree_that_keeps_digests_alone_has_no_history_to_copy():
    store = RadixStates(pool_of(20))
    remember(store, ANN, history(*EVENTS[:10]))
    assert (store.hottest(), len(store.copy(ANN)[0])) == ([], 0)


class Requests(RuleBasedStateMachine):
    """Users with histories that grow, shrink and are edited; some are held across other requests."""

    make = PagedStates

    @initialize(pages=st.integers(1, 12))
    def start(self, pages):
        self.store = type(self).make(pool_of(pages))
        self.histories = {user: [] for user in "abc"}
        self.clock, self.held = 0, []

    @rule(user=st.sampled_from("abc"), items=st.lists(st.integers(1, 2), min_size=1, max_size=9))
    def grows(self, user, items):
        for item in items:
            self.clock += 1
            self.histories[user] = [*self.histories[user], (item, self.clock)][-40:]

    @rule(user=st.sampled_from("abc"), other=st.sampled_from("abc"))
    def begins_like_another(self, user, other):
        self.histories[user] = list(self.histories[other])

    @rule(user=st.sampled_from("abc"), at=st.integers(0, 40))
    def is_cut(self, user, at):
        self.histories[user] = self.histories[user][:at]

    @rule(user=st.sampled_from("abc"), at=st.integers(0, 40))
    def is_edited(self, user, at):
        self.histories[user] = [(item + (place == at), time) for place, (item, time) in enumerate(self.histories[user])]

    def rows(self, user):
        return history(*self.histories[user])

    @rule(user=st.sampled_from("abc"))
    def asks(self, user):
        remember(self.store, Owner("m", user), self.rows(user))

    @rule(user=st.sampled_from("abc"))
    def starts_to_ask(self, user):
        rows = self.rows(user)
        self.held.append((self.store.match(Owner("m", user), rows), rows))

    @rule(commits=st.booleans(), at=st.integers(0, 9))
    def is_answered(self, commits, at):
        if self.held:
            held, rows = self.held.pop(at % len(self.held))
            if commits:
                self.store.commit(held, rows, held.rows, contents(rows, held.rows))
            self.store.release(held)

    @rule(user=st.sampled_from("abc"))
    def is_forgotten(self, user):
        self.store.forget(Owner("m", user))
        if not (isinstance(self.store, RadixStates) and self.store.share_users):
            assert kept(self.store, Owner("m", user), self.rows(user)) == 0

    @rule()
    def all_are_copied(self):
        for owner in self.store.hottest():
            assert assert_copied(self.store, owner, type(self).make(pool_of(20)))

    @invariant()
    def held_rows_are_as_committed(self):
        for held, rows in getattr(self, "held", []):
            assert_holds(held, rows)

    @invariant()
    def the_budget_is_kept(self):
        if hasattr(self, "store"):
            found = self.store.statistics()
            assert found.used_bytes <= found.budget_bytes
            assert found.rows <= found.pages * PAGE_ROWS
            assert found.held == len(self.held)

    def teardown(self):
        if hasattr(self, "store"):
            for held, rows in self.held:
                assert_holds(held, rows)
                self.store.release(held)
            self.store.clear()
            assert self.store.pool.free == self.store.pool.pages
            assert self.store.statistics().users == self.store.statistics().rows == 0
            assert not getattr(self.store, "_roots", None)
            assert not getattr(self.store, "_tables", None)


@pytest.mark.parametrize("name", STORES)
def test_whatever_is_matched_is_what_was_committed_for_that_beginning(name):
    machine = type("Requests", (Requests,), {"make": staticmethod(STORES[name])})
    case = machine.TestCase
    case.settings = settings(max_examples=times(60, 15), stateful_step_count=40, deadline=None)
    case("runTest").runTest()
