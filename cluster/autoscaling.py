"""How many replicas a deployment needs: Serve's view of it -> (replicas, what to remember). In ray_config.yaml:

    policy: {policy_function: "cluster.autoscaling:QueuePolicy", policy_kwargs: {down_after_s: 60, forecast_s: 10}}

    load   the figure that is furthest above its target: requests queued and running, and what the replicas tell of themselves
    up     at once, as far as the load says
    down   once `down_after_s` have passed in which fewer replicas, with `band` to spare, would have done
    zero   where min_replicas is 0, and nothing was asked for `idle_s`

Serve pickles this file's classes into its controller, so nothing of genrec may be imported here. Beside the policy, give Serve
upscale_delay_s: 0 and downscale_delay_s: 0: it would apply its own delays, 30 and 600 s, to what the policy has decided already.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, exp, isfinite
from typing import Any

GROWTH = 2.0
"""How many times as many replicas a latency, or a forecast, may ask for at once. Both grow without bound where the load does not."""
RECOVERY = 10.0
"""A replica's limit that was lowered because of latency doubles in so many times `down_after_s`."""
MOST_DOUBLINGS = 1000.0
"""More of them are beyond every number that a float holds, as after a week without a replica."""
BUSY = 0.5
"""A latency counts where a replica has at least so many requests on average: one that is idle most of the time is slow by itself."""
QUIET = 1e-3
"""A utilisation below it is that of an idle engine; a latency, in milliseconds, that of no call."""
ROUNDING = 1e-6
LEAP_S = 10.0
"""Serve passes the system's time, many times a second. Where that is set back or forward by more, or Serve's controller stalls for longer,
the policy starts anew: what it remembers lies in the future, or is of a time of which it has seen nothing. What latency allows stays.
"""
OUTLIER = 2.0
"""A sample may be so many mean deviations away from what was foreseen; the rest of it is cut off."""
MEMORY = "memory"
"""The key of Serve's policy state under which the policy's own stands."""

Figures = Mapping[str, Mapping[Any, float]]
"""What replicas record: figure -> replica -> mean over look_back_period_s."""


@dataclass(frozen=True)
class QueuePolicy:
    """The policy. A `target_` that is None, and a figure that no replica records, do not count. Raises ValueError.

    Figures, by the names under which `record_autoscaling_stats` gives them: `requests`, what waits and runs in a replica (the greater of
    this and Serve's count is used: Serve counts a call of many requests as one); `waiting`, paths or requests in the engine's own queue;
    `kv_cache_usage`, 0 to 1; `utilisation`, the share of the last seconds in which the engine computed, 0 to 1; `latency_ms`, the 95th
    percentile of the last seconds' calls, 0 where there were none. `forecast_s` is how long a replica takes to start (0: no forecast), and
    `trend_s` the time over which a trend shows. `settle_s`: how long after a change of replicas a latency counts again; give more than the
    time over which the replicas take it.
    """

    down_after_s: float = 60.0
    band: float = 0.25
    idle_s: float = 300.0
    target_waiting: float | None = 64.0
    target_kv_cache_usage: float | None = 0.8
    target_utilisation: float | None = None
    target_latency_ms: float | None = None
    settle_s: float = 20.0
    forecast_s: float = 0.0
    trend_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("down_after_s", "band", "idle_s", "settle_s", "forecast_s"):
            if not (isfinite(value := getattr(self, name)) and value >= 0):
                raise ValueError(f"{name} is {value}; give a finite number of 0 or more")
        if not (isfinite(self.trend_s) and self.trend_s > 0):
            raise ValueError(f"trend_s is {self.trend_s}; give a number greater than 0")
        for name in ("target_waiting", "target_kv_cache_usage", "target_utilisation", "target_latency_ms"):
            if (value := getattr(self, name)) is not None and not (isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; give a number greater than 0, or null for none")

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """`ctx` is Serve's AutoscalingContext. The replicas are within its bounds."""
        now, figures = ctx.current_time, ctx.aggregated_metrics or {}
        requests = max(ctx.total_num_requests, sum(figures.get("requests", {}).values()))
        memory = _with_what_is_seen(ctx, requests, figures)
        if not ctx.current_num_replicas:  # the first ones start
            return ctx.target_num_replicas, {MEMORY: memory}
        trend = (memory.trend or Trend(now, requests)).after(requests, now, self.trend_s)
        limit = self._limit(ctx, memory, requests, figures.get("latency_ms", {}))
        load = self.load(trend.ahead(requests, self.forecast_s) / limit.requests, figures)
        peaks = _peaks(memory.peaks or ((now, float(ctx.target_num_replicas)),), load, now, self.down_after_s)
        highest = peaks[0][1]
        wanted = self.replicas(load, highest, ctx, now - memory.busy_at)
        return wanted, {MEMORY: replace(memory, trend=trend, limit=limit, peaks=peaks)}

    def load(self, requests: float, figures: Figures) -> float:
        """How many replicas are needed: `requests`, which is in replicas already, or by the figure that says more."""
        targets = {"waiting": self.target_waiting, "kv_cache_usage": self.target_kv_cache_usage, "utilisation": self.target_utilisation}
        return max(requests, *(sum(figures.get(name, {}).values()) / target for name, target in targets.items() if target is not None), 0.0)

    def replicas(self, load: float, peak: float, ctx: Any, idle_for_s: float) -> int:
        """How many replicas to have. `load`: now; `peak`: the highest of the last `down_after_s`; both in replicas."""
        needed, with_band = ceil(load - ROUNDING), ceil(peak * (1 + self.band) - ROUNDING)
        wanted = max(needed, min(with_band, ctx.target_num_replicas))  # up at once, down as far as the peak allows
        if idle_for_s < self.idle_s:
            wanted = max(wanted, 1)
        return int(min(max(wanted, ctx.capacity_adjusted_min_replicas), ctx.capacity_adjusted_max_replicas))

    def _limit(self, ctx: Any, memory: "Memory", requests: float, latency_ms: Mapping[Any, float]) -> "Limit":
        """Requests a replica may have: the target, or fewer where the latency was too high though there were no more than that."""
        now, most = ctx.current_time, ctx.config.get_target_ongoing_requests()
        limit = memory.limit or Limit(most, now, now)
        settled = ctx.current_num_replicas == ctx.target_num_replicas and now - max(memory.running_since, limit.lowered_at) >= self.settle_s
        each = requests / ctx.current_num_replicas
        called = [value for value in latency_ms.values() if value > 0]
        if self.target_latency_ms is not None and called and settled and BUSY <= each <= limit.requests:
            over = sum(called) / len(called) / self.target_latency_ms
            if over > 1:
                return limit.lowered(each / over, now)
        return limit.recovered(most, now, RECOVERY * max(self.down_after_s, self.settle_s))


@dataclass(frozen=True)
class Limit:
    """What latency allows: `requests` a replica may have at the time `at`; last lowered at `lowered_at`."""

    requests: float
    at: float
    lowered_at: float

    def lowered(self, to: float, now: float) -> "Limit":
        return Limit(max(to, self.requests / GROWTH), now, now)

    def recovered(self, most: float, now: float, doubling_s: float) -> "Limit":
        """The limit raised slowly towards `most`, so that what was learned holds for as long as a load does."""
        doublings = min(MOST_DOUBLINGS, max(0.0, now - self.at) / doubling_s) if doubling_s else MOST_DOUBLINGS
        return Limit(min(most, self.requests * 2**doublings), now, self.lowered_at)


@dataclass(frozen=True)
class Trend:
    """Holt's linear trend (1957), with Brown's weights: that of a sample falls to 1/e each `trend_s`. Made robust as by Gelper, Fried and
    Croux (2010): outliers are cut off.

    `level` requests at the time `at`, `slope` more each second, and `spread`: the mean deviation of a sample from what was foreseen.
    """

    at: float
    level: float
    slope: float = 0.0
    spread: float = 1.0

    def after(self, load: float, now: float, trend_s: float) -> "Trend":
        """The trend with one more sample. What was seen `trend_s` ago counts 1/e of what is seen now."""
        if (elapsed := now - self.at) <= 0:
            return self
        gain = 1 - exp(-elapsed / trend_s)
        foreseen = self.level + self.slope * elapsed
        miss = max(-OUTLIER * self.spread, min(OUTLIER * self.spread, load - foreseen))
        spread = max(1.0, self.spread + gain * (abs(miss) - self.spread))  # one request more or less is no surprise
        return Trend(now, foreseen + gain * (2 - gain) * miss, self.slope + gain**2 * miss / elapsed, spread)

    def ahead(self, load: float, horizon_s: float) -> float:
        """The load in so many seconds, at least what it is now: a fall is believed when it is seen, a rise if it is more than noise."""
        rise = self.slope * horizon_s
        return load if rise <= self.spread else max(load, min(self.level + rise, GROWTH * load))


@dataclass(frozen=True)
class Memory:
    """What the policy remembers from call to call: when the last was (`seen_at`); how many replicas were `running`, and since when; when
    there was work last (`busy_at`); the `peaks` of the load that count against going down.
    """

    seen_at: float
    running: int
    running_since: float
    busy_at: float
    trend: Trend | None = None
    limit: Limit | None = None
    peaks: tuple[tuple[float, float], ...] = ()


def _with_what_is_seen(ctx: Any, requests: float, figures: Figures) -> Memory:
    """What is remembered, with the replicas that run now and whether there is work."""
    now, running = ctx.current_time, ctx.current_num_replicas
    memory: Memory | None = (ctx.policy_state or {}).get(MEMORY)
    if memory is None or abs(now - memory.seen_at) > LEAP_S:
        limit = replace(memory.limit, at=now, lowered_at=now) if memory and memory.limit else None
        return Memory(seen_at=now, running=running, running_since=now, busy_at=now, limit=limit)
    running_since = memory.running_since if running == memory.running else now
    busy_at = now if not memory.running or _is_busy(requests, figures) else memory.busy_at
    return replace(memory, seen_at=now, running=running, running_since=running_since, busy_at=busy_at)


def _is_busy(requests: float, figures: Figures) -> bool:
    """Requests are counted at intervals, which miss the short ones; the engines' own figures, and how long calls took, do not."""
    recorded = [value for name in ("waiting", "utilisation", "latency_ms") for value in figures.get(name, {}).values()]
    return requests > 0 or any(value > QUIET for value in recorded)


def _peaks(earlier: tuple[tuple[float, float], ...], load: float, now: float, within_s: float) -> tuple[tuple[float, float], ...]:
    """(time, load): the highest load of the last `within_s`, then the highest after that, and so on: the next ones once it is too old."""
    higher = tuple((at, peak) for at, peak in earlier if peak > load and now - at < within_s)
    return (*higher, (now, load))
