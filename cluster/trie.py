"""The trie of all semantic IDs: which codes may follow which, so that a decoder can only name existing items.

Level 0 is the root, level `levels` the items. A level's nodes are numbered in the order of their paths, so that a node's children are
consecutive, and three small arrays a level hold everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.errors import DataError
from cluster.semantic_ids import SemanticIds
from cluster.values import BoolArray, Int32Array

NO_NODE = -1


@dataclass(frozen=True, eq=False)
class Trie:
    """`tokens[l]`, `parents[l]`: each node's token and parent at level l + 1; `first[l]`: where the children of each node of level l begin.

    `items`: the catalogue index of each leaf; `leaves`: the leaf of each catalogue index, NO_NODE where it has none (index 0).
    `version` is that of the semantic IDs.
    """

    version: str
    tokens: tuple[Int32Array, ...]
    parents: tuple[Int32Array, ...]
    first: tuple[Int32Array, ...]
    items: Int32Array
    leaves: Int32Array

    @classmethod
    def of(cls, ids: SemanticIds) -> "Trie":
        """The trie of every item. Raises DataError where two items have the same path."""
        order = np.lexsort(ids.codes[1:].T[::-1]).astype(np.int32) + 1
        paths = ids.tokens[order]
        tokens, parents, first, nodes = [], [], [], np.zeros(len(order), np.int32)
        new = np.zeros(len(order), bool)
        new[:1] = True
        for level in range(ids.levels):
            new = new | np.append(True, paths[1:, level] != paths[:-1, level])[: len(order)]
            starts = np.flatnonzero(new)
            parents.append(nodes[starts])
            count = int(nodes[-1]) + 1 if len(nodes) else 1
            first.append(np.searchsorted(parents[-1], np.arange(count + 1)).astype(np.int32))
            tokens.append(paths[starts, level].astype(np.int32))
            nodes = (np.cumsum(new) - 1).astype(np.int32)
        if len(tokens[-1]) < len(order):
            twice = order[np.flatnonzero(np.diff(nodes) == 0)[0]]
            raise DataError(f"the semantic ID {ids.codes[twice].tolist()} of catalogue index {twice} is that of another item too")
        leaves = np.full(ids.items + 1, NO_NODE, np.int32)
        leaves[order] = nodes
        return cls(ids.version, tuple(tokens), tuple(parents), tuple(first), order, leaves)

    @property
    def levels(self) -> int:
        return len(self.tokens)

    def children(self, level: int, nodes: Int32Array) -> Int32Array:
        """The children of several nodes of `level`, (nodes, most children of any node), filled up with NO_NODE."""
        starts, stops = self.first[level][nodes], self.first[level][nodes + 1]
        below = starts[:, None] + np.arange(int((stops - starts).max(initial=0)), dtype=np.int32)
        return np.where(below >= stops[:, None], np.int32(NO_NODE), below)

    def view(self, among: Int32Array | None = None, blocked: Int32Array | None = None) -> "TrieView":
        """The trie with only the items of `among` (default: all), less `blocked`: catalogue indices, of which unknown ones are ignored."""
        if among is not None:
            return TrieView(self, self._listed(np.setdiff1d(among, [] if blocked is None else blocked), barred=False))
        if blocked is None or not len(blocked):
            return TrieView(self, None)
        return TrieView(self, self._listed(blocked, barred=True), barred=True)

    def _listed(self, items: Int32Array, *, barred: bool) -> tuple[Int32Array, ...]:
        """The nodes above these items, or, `barred`, those with nothing but them below, in order; level 1 to the leaves.

        Only nodes on the items' paths are looked at: a request names few items, and the catalogue may have very many.
        """
        given = np.asarray(items, np.int64)
        nodes = np.unique(self.leaves[given[(given >= 1) & (given < len(self.leaves))]])
        listed = [nodes]
        for level in reversed(range(1, self.levels)):
            nodes = self._parents(level, nodes, whole=barred) if len(nodes) else nodes
            listed.append(nodes)
        return tuple(reversed(listed))

    def _parents(self, level: int, nodes: Int32Array, *, whole: bool) -> Int32Array:
        """The parents of some nodes of level `level` + 1, both in order; `whole`: only those of which all children are given."""
        parents: Int32Array = self.parents[level][nodes]
        changes = np.ones(len(parents) + 1, np.bool_)
        np.not_equal(parents[1:], parents[:-1], out=changes[1:-1])
        begins = changes.nonzero()[0]
        parents = parents[begins[:-1]]
        if whole:
            children = self.first[level][parents + 1] - self.first[level][parents]
            parents = parents[np.diff(begins) == children]
        return parents


@dataclass(frozen=True, eq=False)
class TrieView:
    """The part of a trie that may be named. `listed[l]`: the nodes of level l + 1 that may, or, `barred`, those that may not, in order;
    None: all may.
    """

    trie: Trie
    listed: tuple[Int32Array, ...] | None
    barred: bool = False

    @property
    def items(self) -> int:
        """How many items may be named."""
        listed = 0 if self.listed is None else len(self.listed[-1])
        return len(self.trie.items) - listed if self.barred or self.listed is None else listed

    def children(self, level: int, node: int) -> Int32Array:
        """The nodes of level `level` + 1 below a node of `level` that may be named."""
        start, stop = self.trie.first[level][node : node + 2]
        nodes = np.arange(start, stop, dtype=np.int32)
        return nodes if self.listed is None else nodes[_may(self.listed[level], nodes, barred=self.barred)]

    def permitted(self, level: int, children: Int32Array) -> Int32Array:
        """These nodes of level `level` + 1, with NO_NODE for those that may not be named."""
        if self.listed is None or (self.barred and not len(self.listed[level])):
            return children
        return np.where(_may(self.listed[level], children, barred=self.barred), children, np.int32(NO_NODE))

    def tokens(self, level: int, nodes: Int32Array) -> Int32Array:
        """The tokens that lead to these nodes of level `level` + 1."""
        return self.trie.tokens[level][nodes]

    def paths(self, items: Sequence[int] | Int32Array) -> Int32Array:
        """Node numbers of each item at level 1 to the leaves, (items, levels)."""
        nodes = [self.trie.leaves[np.asarray(items, np.int32)]]
        for level in reversed(range(1, self.trie.levels)):
            nodes.append(self.trie.parents[level][nodes[-1]])
        return np.stack(nodes[::-1], axis=1)


def _may(listed: Int32Array, nodes: Int32Array, *, barred: bool) -> BoolArray:
    """Which of these nodes are listed, or, `barred`, are not. NO_NODE is not listed."""
    if not len(listed):
        return np.full(nodes.shape, barred)
    found: BoolArray = listed[listed[1:].searchsorted(nodes, side="right")] == nodes
    return ~found if barred else found
