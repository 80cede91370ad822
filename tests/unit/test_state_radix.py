"""What only the prefix tree does: it splits, shares, locks ancestors and evicts leaves in the order of its policy."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from integrations.hstu.state.eviction import PolicyName
from integrations.hstu.state.radix import RadixStates
from integrations.hstu.state.store import Owner
from tests.repetitions import times
from tests.unit.test_state_stores import ANN, BOB, EVENTS, PAGE_ROWS, Requests, contents, history, kept, pool_of, remember


def nodes_of(store):
    """Every node of the trees but the roots."""
    found, todo = [], list(store._roots.values())
    while todo:
        below = [*todo[0].children.values(), *todo[0].tails.values()]
        found += below
        todo = todo[1:] + below
    return found


def shapes(store):
    """(whole pages, rows in a tail, owners, locks) of each node, from the root down."""
    return [(len(node.digests), len(node.identities), len(node.owners), node.locks) for node in nodes_of(store)]


def shared(pages=40, **options):
    return RadixStates(pool_of(pages), share_users=True, **options)


def test_a_history_is_one_node_of_whole_pages_and_a_tail():
    store = RadixStates(pool_of(20))
    remember(store, ANN, history(*EVENTS[:20]))
    assert shapes(store) == [(4, 0, 1, 0), (0, 3, 1, 0)]


def test_whole_pages_that_follow_extend_the_node_instead_of_hanging_below_it():
    store = RadixStates(pool_of(20))
    for length in range(2, 32):
        remember(store, ANN, history(*EVENTS[:length]))
    assert shapes(store) == [(7, 0, 1, 0), (0, 2, 1, 0)]
    assert store.statistics().pages == 8


def test_a_node_is_split_at_the_page_in_which_histories_part():
    store, edited = RadixStates(pool_of(20)), history(*EVENTS[:10], (9, 95), *EVENTS[10:19])
    remember(store, ANN, history(*EVENTS[:21]))
    remember(store, ANN, edited)
    assert shapes(store) == [(2, 0, 1, 0), (3, 0, 1, 0), (2, 0, 1, 0), (0, 3, 1, 0)]
    assert [kept(store, ANN, rows) for rows in (history(*EVENTS[:21]), edited)] == [20, 19]
    assert store.statistics().pages == 8


def test_equal_beginnings_of_users_of_a_namespace_are_stored_once():
    store = shared()
    remember(store, ANN, history(*EVENTS[:21]))
    assert remember(store, BOB, history(*EVENTS[:12], (9, 115), *EVENTS[12:19])) == 8
    assert store.statistics().pages == 5 + 3
    assert store.statistics().users == 2


def test_a_namespace_does_not_read_anothers_beginning():
    store = shared()
    remember(store, ANN, history(*EVENTS[:21]))
    assert remember(store, Owner("model/other", "bob"), history(*EVENTS[:21])) == 0
    assert store.statistics().pages == 10


def test_forgetting_a_user_leaves_the_pages_that_anothers_history_runs_through():
    store, mine, others = shared(), history(*EVENTS[:21]), history(*EVENTS[:12], (9, 115), *EVENTS[12:19])
    remember(store, ANN, mine)
    remember(store, BOB, others)
    assert store.forget(ANN) == 20 - 8
    assert kept(store, BOB, others) == 19
    assert kept(store, BOB, mine) == 8
    assert store.forget(BOB) == 19


def test_a_shorter_history_of_another_user_does_not_keep_what_only_the_first_one_did():
    store = shared()
    remember(store, ANN, history(*EVENTS[:21]))
    remember(store, BOB, history(*EVENTS[: 2 * PAGE_ROWS + 1]))
    store.forget(ANN)
    assert store.statistics().pages == 2
    assert kept(store, BOB, history(*EVENTS[:21])) == 8


def test_a_node_that_another_user_has_too_is_not_extended():
    store = shared()
    for owner, length in ((ANN, 2), (BOB, 2), (BOB, 4)):
        remember(store, owner, history(*EVENTS[: length * PAGE_ROWS + 1]))
    assert shapes(store) == [(2, 0, 2, 0), (2, 0, 1, 0)]
    assert store.forget(BOB) == 2 * PAGE_ROWS


def test_a_held_node_locks_its_ancestors_and_one_made_above_it():
    store, rows = RadixStates(pool_of(20)), history(*EVENTS[:20])
    remember(store, ANN, rows)
    with store.matched(ANN, rows):
        assert shapes(store) == [(4, 0, 1, 1), (0, 3, 1, 1)]
        remember(store, ANN, history(*EVENTS[:10], (9, 95), *EVENTS[10:17]))
        assert [(whole, locks) for whole, _, _, locks in shapes(store)] == [(2, 1), (2, 1), (2, 0), (0, 1), (0, 0)]
    assert {locks for *_, locks in shapes(store)} == {0}


def test_ancestors_of_a_held_leaf_stay_when_everything_else_goes():
    store, rows = RadixStates(pool_of(6)), history(*EVENTS[:20])
    remember(store, ANN, rows)
    with store.matched(ANN, rows):
        remember(store, BOB, history(*EVENTS[20:40]))
        assert kept(store, ANN, rows) == 19
        assert store.statistics().pages == 6
    remember(store, BOB, history(*EVENTS[20:40]))
    assert kept(store, BOB, history(*EVENTS[20:40])) == 19


def test_users_whose_own_rows_were_given_up_are_not_noted_in_the_pages_that_all_share():
    store = shared(pages=8)
    for number in range(200):
        remember(store, Owner("model/shop", f"user {number}"), history(*EVENTS[:9], (9, 100 + number), (9, 400 + number)))
    assert store.statistics().pages == 8
    assert store.statistics().users == 8 - 2
    assert kept(store, ANN, history(*EVENTS[:9])) == 8


OWNERS = [Owner("m", name) for name in "abc"]


@pytest.mark.parametrize(("policy", "goes"), [("lru", "c"), ("lfu", "b"), ("fifo", "a")])
def test_the_policy_says_which_leaf_goes(policy, goes):
    store = RadixStates(pool_of(3), policy=policy)
    for owner in OWNERS:  # one page each; used 4, 1 and 2 times more, c longest ago
        remember(store, owner, history(*EVENTS[:5]))
    for name in "ccabaa":
        kept(store, Owner("m", name), history(*EVENTS[:5]))
    kept(store, Owner("m", "a"), history(*EVENTS[:5]))
    remember(store, Owner("m", "d"), history(*EVENTS[:5]))
    left = {owner.user for owner in store._owners()}
    assert left == {*"abcd"} - {goes}


def test_an_unknown_policy_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="unknown eviction policy 'random'; choose from lru, lfu, fifo"):
        RadixStates(pool_of(3), policy="random")


def test_rows_may_be_prompts_of_tokens():
    store, tokens = shared(), np.arange(30, dtype=np.int64)[:, None]
    rows = contents(np.repeat(tokens, 3, axis=1))
    with store.matched(ANN, tokens) as held:
        store.commit(held, tokens, 0, rows)
    with store.matched(BOB, tokens) as held:
        out = np.zeros((30, 4), np.float32)
        held.read({"states": out})
        assert held.rows == 28
        np.testing.assert_array_equal(out[:28], rows["states"][:28])


def test_the_queue_of_leaves_does_not_grow_with_nodes_that_left_the_tree():
    store = RadixStates(pool_of(20))
    for length in range(1000):
        remember(store, Owner("m", str(length)), history(*EVENTS[:10]))
        store.forget(Owner("m", str(length)))
    assert len(store._leaves._heap) <= 64 + 3


class Trees(Requests):
    """The same requests, and what must hold of the tree after each."""

    @rule(user=st.sampled_from("abc"))
    def is_encoded_and_committed_while_held(self, user):
        if self.held:
            held, rows = self.held[-1]
            self.store.commit(held, rows, held.rows, contents(rows, held.rows))

    @invariant()
    def the_tree_is_sound(self):
        if not hasattr(self, "store"):
            return
        nodes = nodes_of(self.store)
        pages = [page for node in nodes for page in node.pages]
        held = [page for found, _ in self.held for page in found.pages]
        assert len(pages) == len(set(pages)), "a page stands in one node"
        assert all(self.store.pool.references(page) == pages.count(page) + held.count(page) for page in range(self.store.pool.pages))
        assert self.store._nodes == len(nodes)
        assert self.store.statistics().rows == sum(self.store._rows_in(node) for node in nodes)
        queued = {id(node) for _, _, node in self.store._leaves._heap}
        for node in nodes:
            below = [*node.children.values(), *node.tails.values()]
            assert node.owners, "somebody's history runs through every node"
            assert all(child.parent is node and child.owners <= node.owners and child.locks <= node.locks for child in below)
            assert len(node.pages) == len(node.digests) or (len(node.pages) == 1 and 0 < len(node.identities) < PAGE_ROWS and not below)
            assert all(node in self.store._nodes_of[owner] for owner in node.owners)
            assert node.queued == (id(node) in queued)
            assert node.queued or not node.evictable, "what may be evicted is queued"
        held_at = [part for found, _ in self.held for part in found.anchor.path()]
        assert all(node.locks == held_at.count(node) for node in nodes)
        assert sum(map(len, self.store._nodes_of.values())) == sum(len(node.owners) for node in nodes)


@pytest.mark.parametrize("share_users", [False, True])
@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_the_tree_is_sound_after_whatever_was_asked(policy, share_users):
    machine = type("Trees", (Trees,), {"make": staticmethod(lambda pool: RadixStates(pool, policy=policy, share_users=share_users))})
    machine.TestCase.settings = settings(max_examples=times(40, 10), stateful_step_count=40, deadline=None)
    machine.TestCase("runTest").runTest()
