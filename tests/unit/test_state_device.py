"""The tier of tensors over a store in host memory, on a GPU or with the CPU for a device: the same code, without streams."""

import logging
import weakref
from functools import partial

import numpy as np
import pytest

from cluster.errors import BackendUnavailable
from integrations.hstu.state.copies import get_availability, pinned
from integrations.hstu.state.device import DeviceTier
from integrations.hstu.state.paged import PagedStates
from integrations.hstu.state.radix import RadixStates
from integrations.hstu.state.store import Owner
from tests.unit.test_state_stores import (
    ANN,
    BOB,
    EVENTS,
    PAGE_ROWS,
    PLANES,
    Overwritten,
    contents,
    erased_beside,
    history,
    kept_of,
    pool_of,
    told_while,
)
from tests.waiting import eventually

torch = pytest.importorskip("torch")
ROW_BYTES = sum(plane.row_bytes for plane in PLANES.values())


def users(count, rows=12):
    """Bytes for so many users of so many rows."""
    return count * rows * ROW_BYTES


@pytest.fixture(params=[PagedStates, partial(RadixStates, copies=True)], ids=["paged", "radix"])
def tier_of(request, device):
    made, memory = [], {"allocate": pinned} if device == "cuda" else {}

    def make(budget_bytes=12 * 20 * ROW_BYTES, pages=40, **options):
        made.append(DeviceTier(request.param(pool_of(pages, **memory)), device, budget_bytes, **options))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def tensors(rows, start=0):
    return {name: torch.from_numpy(array) for name, array in contents(rows, start).items()}


def assert_holds(held, rows):
    for name, array in contents(rows[: held.rows]).items():
        np.testing.assert_array_equal(held.planes()[name].cpu().numpy(), array)


def remember(tier, owner, rows):
    with tier.matched(owner, rows) as held:
        assert_holds(held, rows)
        tier.commit(held, rows, held.rows, tensors(rows, held.rows))
        return held.rows


def kept(tier, owner, rows):
    with tier.matched(owner, rows) as held:
        assert_holds(held, rows)
        return held.rows


def test_what_one_device_has_committed_another_adopts(tier_of):
    tier, other = tier_of(), tier_of()
    for owner in (ANN, BOB):
        remember(tier, owner, history(*EVENTS[:20]))
    remember(tier, ANN, history(*EVENTS[:30]))
    assert tier.hottest() == [ANN, BOB]
    for owner in tier.hottest():
        assert other.adopt(owner, *tier.copy(owner)) > 0
    assert [remember(other, ANN, history(*EVENTS)), kept(other, BOB, history(*EVENTS))] == [29, 19]
    assert other.adopt(ANN, *tier.copy(ANN)) == 0
    assert other.statistics().adopted == 2


def test_a_growing_history_is_read_without_the_host(tier_of):
    tier = tier_of()
    assert [remember(tier, ANN, history(*EVENTS[:n])) for n in (7, 8, 20, 40)] == [0, 6, 7, 19]
    tier.flush()
    found = tier.statistics()
    assert (found.hits, found.misses, found.hit_rows, found.users, found.rows) == (3, 1, 32, 1, 39)


def test_what_is_committed_reaches_the_host_and_comes_back_from_there_after_eviction(tier_of):
    tier = tier_of(budget_bytes=users(1))
    rows, others = history(*EVENTS[:11]), history(*EVENTS[20:31])
    remember(tier, ANN, rows)
    tier.flush()
    remember(tier, BOB, others)
    assert tier.statistics().evictions == 1
    tier.flush()
    assert kept(tier, ANN, rows) == 10
    assert tier.statistics().users == tier.store.statistics().users == 2
    assert tier.users.owners() == [ANN]
    assert tier.statistics().device_bytes == users(1)


def test_the_figures_tell_of_users_and_rows_on_the_device_and_in_the_host_each_counted_once(tier_of):
    tier, rows, page_bytes = tier_of(budget_bytes=users(1), in_flight_bytes=10 * ROW_BYTES), history(*EVENTS[:11]), users(1, PAGE_ROWS)
    for owner in (ANN, BOB):
        remember(tier, owner, rows)
        tier.flush()
    found = tier.statistics()
    assert (found.users, found.rows, found.evictions, found.device_bytes) == (2, 20, 1, users(1)), "the device has BOB's alone"
    assert (found.used_bytes, found.budget_bytes) == (6 * page_bytes, 40 * page_bytes)
    tier.adopt(Owner("model/shop", "eve"), rows[:4], contents(rows[:4]))
    assert (tier.statistics().users, tier.statistics().used_bytes) == (3, 7 * page_bytes)
    tier.forget(BOB)
    remember(tier, BOB, history(*EVENTS[:12]))
    found = tier.statistics()
    assert (found.users, found.rows, found.rejected) == (3, 10 + 4 + 11, 1), "the host was not given so many rows of BOB's at once"
    assert (found.used_bytes, found.device_bytes) == (4 * page_bytes, users(1))


def test_new_rows_of_a_known_user_go_to_the_host_once_they_begin_a_page(tier_of):
    tier, in_host = tier_of(), []
    for length in range(7, 15):
        assert remember(tier, ANN, history(*EVENTS[:length])) == (length - 2 if in_host else 0)
        tier.flush()
        in_host.append(tier.store.statistics().rows)
    assert in_host == [6, 6, 6, 9, 9, 9, 9, 13], f"{PAGE_ROWS} rows are a page"
    assert tier.store.statistics().held == 0


def test_a_copy_has_the_rows_that_the_host_has_not_been_given(tier_of):
    tier = tier_of()
    remember(tier, ANN, history(*EVENTS[:7]))
    remember(tier, ANN, history(*EVENTS[:8]))
    rows, copied = tier.copy(ANN)
    np.testing.assert_array_equal(rows, history(*EVENTS[:8])[:7])
    for name, array in contents(rows).items():
        np.testing.assert_array_equal(copied[name], array)
    assert (tier.store.statistics().held, len(tier.copy(BOB)[0])) == (0, 0)


def test_the_host_catches_up_with_rows_that_were_too_many_at_once(tier_of):
    tier = tier_of(in_flight_bytes=8 * ROW_BYTES)
    remember(tier, ANN, history(*EVENTS[:5]))
    tier.flush()
    remember(tier, BOB, history(*EVENTS[:11]))
    tier.flush()
    assert tier.store.statistics().rows == 4
    assert tier.statistics().rejected == 1
    remember(tier, ANN, history(*EVENTS[:11]))
    tier.flush()
    assert tier.store.statistics().rows == 10


def test_a_user_without_room_is_computed_with_and_left_to_the_host(tier_of):
    tier, rows = tier_of(budget_bytes=users(1, PAGE_ROWS)), history(*EVENTS[:11])
    remember(tier, ANN, rows)
    tier.flush()
    assert (tier.users.owners(), tier.statistics().device_bytes) == ([], 0)
    assert kept(tier, ANN, rows) == 10


def test_room_is_made_for_a_user_before_memory_is_taken(tier_of, monkeypatch):
    tier, rows, empty, taken = tier_of(budget_bytes=users(2)), history(*EVENTS[:11]), torch.empty, []
    for owner in (ANN, BOB):
        remember(tier, owner, rows)
    tier.flush()
    memory = weakref.ref(tier.users.get(ANN).tensors["kt"])

    def counted(*shape, **more):
        taken.append((tier.statistics().device_bytes, memory() is None))
        return empty(*shape, **more)

    monkeypatch.setattr(torch, "empty", counted)
    with tier.matched(Owner("model/shop", "eve"), rows):
        assert taken == [(users(1), True)] * len(PLANES), "the room of ANN's rows is free by then"


def test_a_user_of_more_rows_in_the_host_gives_its_memory_back_before_they_are_loaded(tier_of, monkeypatch):
    tier, rows, empty, freed = tier_of(), history(*EVENTS[:11]), torch.empty, []
    remember(tier, ANN, rows[:6])
    tier.flush()
    tier.adopt(ANN, rows[:10], contents(rows[:10]))
    memory = weakref.ref(tier.users.get(ANN).tensors["kt"])

    def counted(*shape, **more):
        freed.append(memory() is None)
        return empty(*shape, **more)

    monkeypatch.setattr(torch, "empty", counted)
    with tier.matched(ANN, rows) as held:
        assert held.rows == 10
        assert set(freed) == {True}


def test_held_users_are_not_evicted(tier_of):
    tier, rows = tier_of(budget_bytes=users(1)), history(*EVENTS[:11])
    remember(tier, ANN, rows)
    with tier.matched(ANN, rows) as held:
        remember(tier, BOB, history(*EVENTS[20:31]))
        assert tier.statistics().evictions == 0
        assert_holds(held, rows)


def test_an_edit_leaves_another_holder_its_rows(tier_of):
    tier, rows = tier_of(), history(*EVENTS[:11])
    edited = history(*EVENTS[:6], (9, 57), *EVENTS[6:10])
    remember(tier, ANN, rows)
    with tier.matched(ANN, rows) as held:
        assert remember(tier, ANN, edited) == 5
        assert_holds(held, rows)
    assert kept(tier, ANN, edited) == 10
    tier.flush()
    assert tier.statistics().device_bytes == users(1)


def test_a_late_request_for_a_shorter_history_takes_nothing_away(tier_of):
    tier = tier_of()
    remember(tier, ANN, history(*EVENTS[:20]))
    remember(tier, ANN, history(*EVENTS[:7]))
    assert kept(tier, ANN, history(*EVENTS[:20])) == 19


def test_forgetting_reaches_the_device_the_host_and_what_is_under_way(tier_of):
    tier, rows = tier_of(), history(*EVENTS[:11])
    remember(tier, ANN, rows)
    tier.flush()
    with tier.matched(ANN, rows) as held:
        assert tier.forget(ANN) == 10
        assert_holds(held, rows)
        longer = history(*EVENTS[:14])
        tier.commit(held, longer, 10, tensors(longer, 10))
    assert kept(tier, ANN, rows) == 0
    tier.flush()
    assert tier.statistics().used_bytes == tier.statistics().device_bytes == 0


def test_forgets_a_namespace_and_everything(tier_of):
    tier, rows, other = tier_of(), history(*EVENTS[:11]), Owner("model/other", "ann")
    for owner in (ANN, BOB, other):
        remember(tier, owner, rows)
    tier.flush()
    assert tier.forget_namespace("model/shop") == 20
    assert [kept(tier, owner, rows) for owner in (ANN, BOB, other)] == [0, 0, 10]
    assert tier.clear() == 10
    tier.flush()
    assert tier.statistics().used_bytes == tier.statistics().device_bytes == 0


def test_nothing_of_a_forgotten_user_is_kept_on_the_list_of_copies_that_are_done(tier_of):
    tier, rows = tier_of(), history(*EVENTS[:20])
    remember(tier, ANN, rows)
    assert any(kept_of(tier, ANN, rows))

    def is_forgotten():  # again, as every erasure is carried out once more when no request is under way
        tier.forget(ANN)
        return not any(kept_of(tier, ANN, rows))

    eventually(is_forgotten, "the tier keeps nothing of the user", within_s=30)


ERASURES = {"user": lambda tier: tier.forget(ANN), "namespace": lambda tier: tier.forget_namespace(ANN.namespace), "all": DeviceTier.clear}


@pytest.mark.parametrize("erase", ERASURES.values(), ids=ERASURES)
def test_an_erasure_counts_a_users_rows_wherever_they_are(tier_of, erase):
    tier, other = tier_of(budget_bytes=users(1)), Owner("model/other", "eve")
    remember(tier, ANN, history(*EVENTS[:11]))
    tier.flush()
    remember(tier, other, history(*EVENTS[20:31]))
    assert tier.forget(other) == 10
    assert erase(tier) == 10, "the device gave them up for the other's, and the host has them"
    remember(tier, ANN, history(*EVENTS[:11]))
    tier.flush()
    remember(tier, ANN, history(*EVENTS[:12]))
    assert erase(tier) == 11, "the host has ten of them until they begin another page"
    assert erase(tier) == 0


@pytest.mark.parametrize("erase", ERASURES.values(), ids=ERASURES)
@pytest.mark.parametrize("make", [PagedStates, RadixStates])
def test_requests_and_figures_do_not_wait_while_pages_of_the_host_are_overwritten(make, erase):
    tier, rows = DeviceTier(make(pool_of(40, allocate=Overwritten.allocate)), "cpu", users(4)), history(*EVENTS[:11])
    remember(tier, ANN, rows)
    tier.flush()

    def step():
        return kept(tier, Owner("model/other", "eve"), rows), tier.statistics().users

    assert erased_beside(step, lambda: erase(tier)) == (10, (0, 0))
    tier.close()


def test_how_many_rows_are_kept_is_said_without_a_wait_for_rows_that_go_to_the_device(tier_of, monkeypatch):
    tier, rows, others = tier_of(budget_bytes=users(1)), history(*EVENTS[:11]), history(*EVENTS[20:28])
    for owner, their in ((ANN, rows), (BOB, others)):
        remember(tier, owner, their)
        tier.flush()
    told = told_while(monkeypatch, tier.users, "load", lambda: kept(tier, ANN, rows), lambda: (tier.kept_rows(ANN), tier.kept_rows(BOB)))
    assert told == [(10, 7)] * len(PLANES)


def test_reads_parts_into_tensors_and_arrays(tier_of):
    tier, rows = tier_of(), history(*EVENTS[:20])
    remember(tier, ANN, rows)
    with tier.matched(ANN, rows) as held:
        states, kt = np.zeros((9, 4), np.float32), torch.zeros(PLANES["kt"].stacked(7))
        held.read({"states": states, "kt": kt}, 5, 11)
        np.testing.assert_array_equal(states[:6], contents(rows)["states"][5:11])
        np.testing.assert_array_equal(kt[..., :6].numpy(), contents(rows)["kt"][..., 5:11])
        with pytest.raises(ValueError, match="of 19 rows"):
            held.planes(0, 20)


def test_misuse_is_refused(tier_of):
    tier, rows = tier_of(), history(*EVENTS[:11])
    held = tier.match(ANN, rows)
    with pytest.raises(ValueError, match="9 rows were given"):
        tier.commit(held, rows, 0, tensors(rows[1:]))
    with pytest.raises(ValueError, match="is not held here"):
        tier_of().release(held)
    tier.release(held)
    with pytest.raises(ValueError, match="is not held here"):
        tier.release(held)


def refuse(*_):
    raise OSError("no host memory today")


def test_what_goes_wrong_on_the_way_to_the_host_costs_no_user_but_the_one_whose_rows_they_are(tier_of, monkeypatch, caplog):
    tier, rows = tier_of(), history(*EVENTS[:11])
    remember(tier, BOB, rows)
    tier.flush()
    for _ in range(2):
        with monkeypatch.context() as broken:
            broken.setattr(tier.store, "commit", refuse)
            remember(tier, ANN, rows)
            eventually(lambda: not tier.store.statistics().held, "the host's pages are let go of, behind the rows")
        assert kept(tier, BOB, rows) == 10
        assert kept(tier, ANN, rows) == 0
    tier.flush()
    (record,) = caplog.records
    assert (record.levelno, str(record.exc_info[1])) == (logging.ERROR, "no host memory today")
    assert remember(tier, ANN, rows) == 0
    tier.flush()
    assert tier.store.statistics().rows == 20


def test_what_goes_wrong_on_the_way_to_the_host_ends_no_handover(tier_of, monkeypatch):
    tier, rows = tier_of(), history(*EVENTS[:11])
    remember(tier, BOB, rows)
    tier.flush()
    with monkeypatch.context() as broken:
        broken.setattr(tier.store, "commit", refuse)
        remember(tier, ANN, rows)
        assert tier.hottest() == [BOB]
    assert tier.statistics().rejected == 1
    given, _ = tier.copy(BOB)
    assert len(given) == 10


def test_what_goes_wrong_on_the_way_to_the_host_is_raised_by_flush(tier_of, monkeypatch):
    tier, rows = tier_of(), history(*EVENTS[:11])
    with monkeypatch.context() as broken:
        broken.setattr(tier.store, "commit", refuse)
        remember(tier, ANN, rows)
        with pytest.raises(OSError, match="no host memory today"):
            tier.flush()
    tier.flush()
    assert tier.store.statistics().held == 0


def test_random_requests_read_what_was_committed_and_leave_nothing_behind(tier_of):
    random = np.random.default_rng(0)
    tier = tier_of(budget_bytes=users(2, 24), pages=12)
    histories = {user: [] for user in "abcd"}
    for step in range(400):
        user = random.choice(list(histories))
        events = histories[user]
        if random.random() < 0.15:
            events[random.integers(len(events) + 1) :] = []
        events.extend((int(random.integers(1, 3)), 10 * step + more) for more in range(random.integers(1, 4)))
        histories[user] = events = events[-30:]
        remember(tier, Owner("m", user), history(*events))
        if step % 50 == 7:
            tier.forget(Owner("m", user))
        assert tier.statistics().device_bytes <= users(2, 24)
    assert tier.statistics().hit_rows > 0
    tier.clear()
    tier.flush()
    assert tier.statistics().used_bytes == tier.statistics().device_bytes == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_says_why_there_is_no_tier_without_a_cuda_device():
    assert get_availability("cpu").ok
    assert get_availability("cuda").reason.startswith("no CUDA device here; ")
    with pytest.raises(BackendUnavailable, match="no CUDA device here; "):
        DeviceTier(PagedStates(pool_of(4)), "cuda:0", users(1))
    with pytest.raises(BackendUnavailable, match="no CUDA device here; "):
        pinned((4, 4), np.float32)


@pytest.mark.parametrize("broken", ["make", "load"])
def test_a_device_that_is_full_costs_the_store_nothing(tier_of, monkeypatch, broken):
    tier, rows = tier_of(), history(*EVENTS[:11])
    remember(tier, ANN, rows)
    tier.flush()
    tier.users.drop(ANN)

    def full(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(tier.users, broken, full)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="out of memory"):
                tier.match(ANN, rows)
    tier.forget(ANN)
    assert tier.store.statistics().used_bytes == 0, "nobody holds its pages any more"
    assert tier.statistics().users == 0
