"""A node of the prefix tree of users' rows."""

from collections.abc import Iterator
from itertools import takewhile

import numpy as np

from cluster.values import Int64Array
from integrations.hstu.state.rows import NO_ROWS
from integrations.hstu.state.store import Owner


class RadixNode:
    """The rows of users' histories between the parent's rows and the children's, in whole pages, each with a digest of all rows up to its
    end; the root has none.

    `tails`: leaves of one partly filled page without a digest, one for each owner, with the rows' `identities`. So a node never shares a
    page with its siblings, and owners never share a partly filled page.
    `whole`: the identities of the rows of whole pages, by which the history is known elsewhere.
    `owners`: those with a committed history that runs through here. `locks`: how many holders stand here or further down.
    `used`, `uses`, `made`: for eviction, the tick of the last use, the number of uses, and the tick when the node was made.
    """

    __slots__ = (
        "children", "digests", "identities", "locks", "made", "owners", "pages", "parent", "queued", "removed", "tails", "used", "uses",
        "whole",
    )  # fmt: skip

    def __init__(self, parent: "RadixNode | None", digests: list[bytes], pages: list[int], identities: Int64Array = NO_ROWS) -> None:
        self.parent, self.digests, self.pages, self.identities = parent, digests, pages, identities
        self.whole = NO_ROWS
        self.children: dict[bytes, RadixNode] = {}
        self.tails: dict[Owner, RadixNode] = {}
        self.owners: set[Owner] = set()
        self.locks = self.used = self.uses = self.made = 0
        self.queued = self.removed = False

    def path(self) -> "Iterator[RadixNode]":
        """From here up to the root."""
        node: RadixNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def history(self) -> Int64Array:
        """The identities of all rows from the root to the node's end."""
        parts = [rows for node in reversed(list(self.path())) for rows in (node.whole, node.identities) if len(rows)]
        return np.concatenate(parts) if parts else NO_ROWS

    def same(self, digests: list[bytes]) -> int:
        """With how many of this node's pages the digests begin."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.digests, digests, strict=False)))

    @property
    def evictable(self) -> bool:
        return not (self.locks or self.children or self.tails or self.removed or self.parent is None)

    def extendable_by(self, owner: Owner) -> bool:
        """Whether the owner's pages may become this node's: no other history runs through it, and nothing follows it."""
        return self.parent is not None and self.owners == {owner} and not self.children and not self.tails

    def split(self, at: int) -> "RadixNode":
        """Put the first `at` pages into a new node above this one, and return that. A lock on this node is one on the new node too."""
        assert self.parent is not None
        upper = RadixNode(self.parent, self.digests[:at], self.pages[:at])
        upper.owners, upper.locks = set(self.owners), self.locks
        upper.made, upper.used, upper.uses = self.made, self.used, self.uses
        self.parent.children[self.digests[0]] = upper
        cut = at * (len(self.whole) // len(self.digests))
        upper.whole, self.whole = self.whole[:cut], self.whole[cut:]
        self.digests, self.pages, self.parent = self.digests[at:], self.pages[at:], upper
        upper.children[self.digests[0]] = self
        return upper

    def attach(self, owner: Owner) -> None:
        """Put the node below its parent; one without a digest becomes the owner's tail."""
        assert self.parent is not None
        if self.digests:
            self.parent.children[self.digests[0]] = self
        else:
            self.parent.tails[owner] = self

    def detach(self) -> None:
        """Take the node out of the tree. It keeps its parent, so that its holders unlock the ancestors as well."""
        self.removed = True
        assert self.parent is not None
        if self.digests:
            del self.parent.children[self.digests[0]]
        else:
            (owner,) = self.owners
            del self.parent.tails[owner]
