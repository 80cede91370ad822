"""Which leaf of the prefix tree to give up next."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Literal, TypeAlias

from integrations.hstu.state.radix_node import RadixNode

Priority: TypeAlias = tuple[int, ...]
PolicyName = Literal["lru", "lfu", "fifo"]

PRIORITIES: dict[PolicyName, Callable[[RadixNode], Priority]] = {
    "lru": lambda node: (node.used,),
    "lfu": lambda node: (node.uses, node.used),
    "fifo": lambda node: (node.made,),
}


class EvictionHeap:
    """The leaves that no request holds, the one with the lowest priority first, in logarithmic time.

    A priority only grows, so each node is queued once, with its priority at that time; a node used since is queued anew when it comes up.
    """

    def __init__(self, policy: PolicyName) -> None:
        if policy not in PRIORITIES:
            raise ValueError(f"unknown eviction policy '{policy}'; choose from {', '.join(PRIORITIES)}")
        self._priority = PRIORITIES[policy]
        self._heap: list[tuple[Priority, int, RadixNode]] = []
        self._serial = count()

    def offer(self, node: RadixNode) -> None:
        """Queue the node if it may be evicted. To be called whenever a node may have become evictable."""
        if node.evictable and not node.queued:
            node.queued = True
            heappush(self._heap, (self._priority(node), next(self._serial), node))

    def pop(self) -> RadixNode | None:
        """The evictable node of the lowest priority, taken out of the queue; None where there is none."""
        while self._heap:
            priority, _, node = heappop(self._heap)
            node.queued = False
            if node.evictable and self._priority(node) == priority:
                return node
            self.offer(node)
        return None

    def shrink(self, nodes: int) -> None:
        """Drop queued nodes that have left the tree, once they outnumber its `nodes`."""
        if len(self._heap) > 2 * nodes + 64:
            self._heap = [entry for entry in self._heap if not entry[2].removed]
            heapify(self._heap)
