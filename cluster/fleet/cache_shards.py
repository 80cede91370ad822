"""How many shards the shared cache has: as many as its load needs; their number stays until the last change is over.

    gateway -> report(the layout it follows, how busy its shards are) -> the layout that all gateways should follow

Nothing is kept on disk: after a restart the latest layout that a gateway follows is adopted, and nothing decided before all have reported.
Times are passed in, in seconds.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from cluster.cache.layout import Layout, ShardsSeen

ROUNDING = 1e-6
LOOK_EVERY_S = 1.0
"""How often a report's load is looked at. Gateways report far more often while their orders change, as at each erasure, and all see the
same load.
"""


@dataclass(frozen=True, slots=True)
class ShardPolicy:
    """`target_busy`: the share of a core that a shard may use. There are more shards once the load has needed them for `up_after_s`, and
    fewer once fewer, with `band` to spare, would have done for `down_after_s`. A change costs moves, so neither comes quickly.
    """

    target_busy: float = 0.6
    up_after_s: float = 15.0
    down_after_s: float = 300.0
    band: float = 0.25

    def owners(self, loads: Sequence[tuple[float, float]], owners: int, bounds: tuple[int, int], *, now: float) -> int:
        """How many shards there should be, where there are `owners` now. `loads`: (when, cores used by all), from the last change on."""
        needed, enough = _within(loads, now - self.up_after_s), _within(loads, now - self.down_after_s)
        more = self._shards(min(needed, default=0.0))
        fewer = self._shards(max(enough) * (1 + self.band)) if enough else owners
        return min(max(more, min(fewer, owners), bounds[0]), bounds[1])

    def _shards(self, busy: float) -> int:
        return ceil(busy / self.target_busy - ROUNDING)


def _within(loads: Sequence[tuple[float, float]], since: float) -> list[float]:
    """The loads from `since` on, with the one that held at that time; none where the loads do not go back so far."""
    before = [load for at, load in loads if at <= since]
    return [*before[-1:], *(load for at, load in loads if at > since)] if before else []


class CacheShards:
    """Plain Python, for one thread at a time. A gateway that is silent for `ttl_s` is not waited for. `now`: when the object is made."""

    def __init__(self, least: int, most: int, ttl_s: float, policy: ShardPolicy | None = None, *, now: float) -> None:
        self._bounds, self._ttl_s, self._made_at = (least, most), ttl_s, now
        self._policy = policy or ShardPolicy()
        self._seen: dict[str, tuple[float, ShardsSeen]] = {}
        self._loads: deque[tuple[float, float]] = deque()
        self.layout: Layout | None = None

    def report(self, gateway: str, seen: ShardsSeen, *, now: float) -> None:
        """Take a gateway's view of the shards; changes `layout` where that is called for."""
        self._seen[gateway] = now, seen
        self._seen = {name: told for name, told in self._seen.items() if now - told[0] <= self._ttl_s}
        if self.layout is None or seen.layout > self.layout:
            self.layout = seen.layout
            self._loads.clear()
        if any(one.moving or one.layout != self.layout for _, one in self._seen.values()):
            self._loads.clear()  # what a move costs says nothing of the load
            return
        if self._loads and now - self._loads[-1][0] < LOOK_EVERY_S:
            return
        self._loads.append((now, seen.busy))
        while len(self._loads) > 1 and self._loads[1][0] <= now - self._policy.down_after_s:
            self._loads.popleft()
        self._decide(self.layout, now)

    def _decide(self, layout: Layout, now: float) -> None:
        least, most = self._bounds
        if least == most or now - self._made_at <= self._ttl_s:
            return
        owners = self._policy.owners(self._loads, layout.owners, self._bounds, now=now)
        if owners != layout.owners:
            self.layout = Layout(layout.number + 1, owners)
            self._loads.clear()
