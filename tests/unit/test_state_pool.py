"""Pages of rows: what is written is read, in either precision and along any axis; no page is lost, and none is free twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from benchmarks.state_reads import read_seconds
from integrations.hstu.state.half import widen
from integrations.hstu.state.lru_list import Link, LruList
from integrations.hstu.state.pool import PagePool, Plane
from integrations.hstu.state.rows import common_rows, identities, page_digests
from tests.repetitions import times

PLANES = {"kt": Plane((2, 1, 3), axis=3), "v": Plane((2, 1, 2), axis=2), "states": Plane((4,), axis=0)}


def pool_of(pages, page_rows=4, dtype=np.float32, **options):
    planes = {name: Plane(plane.shape, plane.axis, dtype) for name, plane in PLANES.items()}
    page_bytes = page_rows * sum(plane.row_bytes for plane in planes.values())
    return PagePool(planes, budget_bytes=pages * page_bytes, page_rows=page_rows, **options)


def random_rows(count, seed=0):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(plane.stacked(count)).astype(np.float32) for name, plane in PLANES.items()}


def empty_rows(count, dtype=np.float32):
    return {name: np.full(plane.stacked(count), 7, dtype) for name, plane in PLANES.items()}


def assert_rows_equal(found, wanted, start=0, stop=None, **tolerance):
    for name, plane in PLANES.items():
        at = plane.at(start, stop if stop is not None else wanted[name].shape[plane.axis])
        count = wanted[name][at].shape[plane.axis]
        np.testing.assert_allclose(found[name][plane.at(0, count)], wanted[name][at], **(tolerance or {"rtol": 0}))


@given(rows=st.integers(0, 23), start=st.integers(0, 23), page_rows=st.sampled_from([1, 3, 4, 8]), half=st.booleans())
@settings(max_examples=times(80, 20), deadline=None)
def test_reads_any_part_of_what_was_written_across_scattered_pages(rows, start, page_rows, half):
    start = min(start, rows)
    pool = pool_of(30, page_rows, np.float16 if half else np.float32)
    pages = pool.alloc(30)[::-3][: pool.pages_for(rows)] if rows <= 8 * page_rows else pool.alloc(pool.pages_for(rows))[::-1]
    written, out = random_rows(rows), empty_rows(rows - start + 2)
    pool.scatter(pages, 0, written)
    pool.gather(pages, rows, out, start)
    assert_rows_equal(out, written, start, **({"atol": 1e-3, "rtol": 1e-3} if half else {"rtol": 0}))
    assert all((out[name][plane.at(rows - start, rows - start + 2)] == 7).all() for name, plane in PLANES.items())


def test_rows_are_added_behind_others_and_copied():
    pool, rows = pool_of(3), random_rows(6)
    first, second, third = pool.alloc(3)
    pool.write(first, 0, {name: rows[name][plane.at(0, 3)] for name, plane in PLANES.items()})
    pool.scatter([first, second], 3, rows, offset=3)
    pool.copy(second, third, 2)
    out = empty_rows(6)
    pool.gather([first, third], 6, out)
    assert_rows_equal(out, rows)


def test_reads_into_rows_of_a_larger_batch():
    pool, rows = pool_of(2), random_rows(5)
    pages = pool.alloc(2)
    pool.scatter(pages, 0, rows)
    past_kt = np.zeros((2, 3, 1, 3, 9), np.float32)  # layers, users, heads, dim, rows
    pool.gather(pages, 5, {"kt": past_kt[:, 1]})
    np.testing.assert_array_equal(past_kt[:, 1, ..., :5], rows["kt"])
    assert not past_kt[:, [0, 2]].any()


def test_memory_is_what_the_caller_allocates_once():
    asked = []

    def allocate(shape, dtype):
        asked.append(shape)
        return np.zeros(shape, dtype)

    pool_of(5, allocate=allocate)
    assert asked == [(5, 2, 1, 3, 4), (5, 2, 1, 4, 2), (5, 4, 4)]


def test_as_many_pages_as_the_budget_holds():
    pool = pool_of(5)
    assert (pool.pages, pool.free, pool.used_bytes) == (5, 5, 0)
    assert pool.alloc(6) is None
    assert len(set(pool.alloc(5))) == 5
    assert (pool.free, pool.used_bytes, pool.alloc(1), pool.alloc(0)) == (0, pool.budget_bytes, None, [])


def test_a_page_is_free_once_all_who_retained_it_released_it():
    pool = pool_of(2)
    (page,) = pool.alloc(1)
    pool.retain([page])
    assert pool.release([page]) == 0
    assert pool.release([page]) == 1
    assert pool.free == 2


@pytest.mark.parametrize("misuse", ["release", "retain"])
def test_a_free_page_is_neither_released_nor_retained_and_nothing_else_changes(misuse):
    pool = pool_of(3)
    mine, other = pool.alloc(2)
    pool.release([other])
    with pytest.raises(ValueError, match=f"page {other} was {misuse}e?d 1 times and has 0 references"):
        getattr(pool, misuse)([mine, other])
    assert pool.references(mine) == 1
    with pytest.raises(ValueError, match="2 times and has 1 references"):
        pool.release([mine, mine])
    assert pool.free == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"kt": np.zeros((2, 1, 3, 2))}, "of the planes"),
        (random_rows(2) | {"v": np.zeros((2, 1, 3, 2), np.float32)}, "different numbers of rows"),
        (random_rows(2) | {"v": np.zeros((2, 2, 2), np.float32)}, r"make \(2, 1, -1, 2\)"),
        (random_rows(3), "rows 2..4 of a page of 4"),
    ],
)
def test_rows_that_are_not_the_planes_are_refused(rows, message):
    pool = pool_of(1)
    with pytest.raises(ValueError, match=message):
        pool.write(pool.alloc(1)[0], 2, rows)


def test_reads_beyond_the_pages_or_the_array_are_refused():
    pool = pool_of(1)
    pages = pool.alloc(1)
    with pytest.raises(ValueError, match=r"rows 0\.\.4 of 1 pages of 4"):
        pool.gather(pages, 5, empty_rows(5))
    with pytest.raises(ValueError, match="4 rows into an array for 3"):
        pool.gather(pages, 4, empty_rows(3))
    with pytest.raises(KeyError, match="keys"):
        pool.gather(pages, 4, {"keys": np.zeros((4, 4))})


def test_a_pool_that_holds_no_page_is_refused():
    with pytest.raises(ValueError, match=r"100 bytes hold no page of 64 rows \(1024 bytes\); raise budget_bytes"):
        PagePool({"states": Plane((4,), axis=0)}, budget_bytes=100)
    with pytest.raises(ValueError, match="page_rows must be at least 1, not 0"):
        pool_of(1, page_rows=0)
    with pytest.raises(ValueError, match=r"axis must be within 0\.\.1"):
        Plane((4,), axis=2)


@pytest.mark.parametrize("number", [65_505 * 2, -np.inf, np.nan])
def test_what_half_precision_does_not_hold_is_refused(number):
    rows = random_rows(2) | {"states": np.full((2, 4), number, np.float32)}
    with pytest.raises(ValueError, match="states has numbers beyond 65504"):
        pool_of(1, dtype=np.float16).rows_of(rows)
    assert pool_of(1).rows_of(rows) == 2


def test_every_finite_half_becomes_the_same_number_in_single_precision():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = halves[np.isfinite(halves)]
    out = np.empty(finite.shape, np.float32)
    widen(finite, out)
    np.testing.assert_array_equal(out.view(np.uint32), finite.astype(np.float32).view(np.uint32))


class Pages(RuleBasedStateMachine):
    """Against a dictionary of how often each page was taken."""

    def __init__(self):
        super().__init__()
        self.pool, self.counts = pool_of(6), {}

    @rule(count=st.integers(0, 4))
    def alloc(self, count):
        pages = self.pool.alloc(count)
        if pages is None:
            assert count > 6 - len(self.counts)
        else:
            assert len(set(pages)) == count
            assert not self.counts.keys() & set(pages)
            self.counts.update(dict.fromkeys(pages, 1))

    @rule(pages=st.lists(st.integers(0, 5), max_size=4))
    def retain(self, pages):
        if all(page in self.counts for page in pages):
            self.pool.retain(pages)
            for page in pages:
                self.counts[page] += 1
        else:
            with pytest.raises(ValueError, match="has 0 references"):
                self.pool.retain(pages)

    @rule(pages=st.lists(st.integers(0, 5), max_size=4))
    def release(self, pages):
        if all(pages.count(page) <= self.counts.get(page, 0) for page in pages):
            for page in pages:
                self.counts[page] -= 1
            gone = {page for page in pages if not self.counts[page]}
            assert self.pool.release(pages) == len(gone)
            self.counts = {page: count for page, count in self.counts.items() if count}
        else:
            with pytest.raises(ValueError, match="times and has"):
                self.pool.release(pages)

    @invariant()
    def counts_agree(self):
        assert self.pool.free == 6 - len(self.counts)
        assert all(self.pool.references(page) == self.counts.get(page, 0) for page in range(6))


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=times(60, 15), deadline=None)


class Name(Link):
    __slots__ = ("name",)

    def __init__(self, name):
        super().__init__()
        self.name = name

    def __repr__(self):
        return self.name


def test_the_list_gives_up_what_was_used_longest_ago():
    names, links = LruList(), {name: Name(name) for name in "abcd"}
    for link in links.values():
        names.push(link)
    names.touch(links["a"])
    names.remove(links["c"])
    assert [link.name for link in names] == ["b", "d", "a"]
    assert [names.pop().name, names.pop().name, names.pop().name, names.pop()] == ["b", "d", "a", None]
    assert len(names) == 0


def test_a_link_stands_in_one_list_once():
    names, link = LruList(), Name("a")
    names.push(link)
    with pytest.raises(ValueError, match="a stands in a list already"):
        names.push(link)
    names.remove(link)
    with pytest.raises(ValueError, match="a stands in no list"):
        names.remove(link)


def test_a_row_is_known_by_its_item_its_time_and_the_next_ones():
    assert identities([5, 6, 7], [10, 20, 35]).tolist() == [[5, 10, 20], [6, 20, 35]]
    assert identities([5], [10]).shape == identities([], []).shape == (0, 3)
    with pytest.raises(ValueError, match="one item and one time an event"):
        identities([5, 6], [10])


@given(
    a=st.lists(st.integers(0, 1), max_size=12),
    b=st.lists(st.integers(0, 1), max_size=12),
)
def test_common_rows_and_digests_agree_with_comparing_one_by_one(a, b):
    first, second = (np.stack([row, row, row], axis=1) for row in (np.array(a, np.int64), np.array(b, np.int64)))
    common = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_rows(first, second) == common
    digests = list(zip(page_digests(first, 3), page_digests(second, 3), strict=False))
    assert [x == y for x, y in digests] == [3 * (page + 1) <= common for page in range(len(digests))]
    assert len(list(page_digests(first, 3))) == len(a) // 3


def test_a_page_has_another_digest_behind_another_beginning():
    rows = np.array([[1, 1, 1], [2, 2, 2], [2, 2, 2]])
    assert len(set(page_digests(rows, 1))) == 3


def test_measures_how_long_a_read_takes():
    seconds, size = read_seconds((2, 1, 5, 20), 16, np.float32)
    assert seconds > 0
    assert size == 2 * 2 * 5 * 20 * 4
