"""A Serve deployment with a fake clock: arrivals -> router -> replicas, and the control loop that decides how many there are.

A replica computes `LANES` requests at a time, and the router gives each to the replica with the fewest. Requests are counted at Serve's
intervals, reported at metrics_interval_s and averaged over look_back_period_s, and Serve's own functions apply its factors and delays
ten times a second to what the policy returns. A replica serves `START_S` after it was wanted.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
from ray.serve.autoscaling_policy import _apply_delay_logic, _apply_scaling_factors
from ray.serve.config import AutoscalingConfig

TICK_S = 0.1
START_S = 30.0
LANES, SERVICE_S, MOST_ONGOING = 4, 0.3, 32
LATENCY_WINDOW_S = 10.0
Policy: TypeAlias = Callable[[Any], tuple[float, dict[str, Any]]]


@dataclass(eq=False)
class Replica:
    """`queue`: arrival times; `busy`: requests that are computed; `worked_s`: lane-seconds so far."""

    ready_at: float
    queue: deque[float] = field(default_factory=deque)
    busy: int = 0
    worked_s: float = 0.0
    leaving: bool = False

    @property
    def ongoing(self) -> int:
        return self.busy + len(self.queue)


@dataclass
class Outcome:
    """Rows each `TICK_S`: requests waiting (not computed), and replicas wanted and serving. `waits_s`: of each request.

    `left`: how many gave up.
    """

    waits_s: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    serving: list[int] = field(default_factory=list)
    replica_s: float = 0.0
    left: int = 0

    @property
    def turns(self) -> int:
        """How often the direction of scaling changed."""
        steps = [after > before for before, after in pairwise(self.wanted) if before != after]
        return sum(before != after for before, after in pairwise(steps))


class Simulation:
    """A deployment of which the replicas run that its first minute needs. `arrivals`: seconds, ascending.

    `patience_s`: how long a request waits at most.
    """

    def __init__(
        self, arrivals: np.ndarray[Any, Any], policy: Policy, config: AutoscalingConfig, patience_s: float = float("inf"), seed: int = 0
    ) -> None:
        at_once = np.count_nonzero(arrivals < 60.0) / 60.0 * SERVICE_S
        self.target = max(1, ceil(1.25 * at_once / config.get_target_ongoing_requests()))
        self.replicas = [Replica(0.0) for _ in range(self.target)]
        self.arrivals, self.policy, self.config, self.patience_s = arrivals, policy, config, patience_s
        self.services = iter(np.random.default_rng(seed).gamma(4.0, SERVICE_S / 4.0, len(arrivals)).tolist())
        self.held: deque[float] = deque()  # in the router, while all replicas are full
        self.done: list[tuple[float, int, Replica, float]] = []
        self.latencies: deque[tuple[float, float]] = deque()
        self.state: dict[str, Any] = {}
        self.delays: dict[str, Any] = {}
        self.samples: deque[tuple[float, float, dict[int, float]]] = deque()
        self.reported: list[tuple[float, float, dict[int, float]]] = []
        self.worked: dict[int, float] = {}
        self.figures: Mapping[str, Mapping[int, float]] = {}
        self.outcome, self.count = Outcome(), 0

    def run(self, until_s: float) -> Outcome:
        waiting, interval = deque(self.arrivals.tolist()), self.config.metrics_interval_s
        sample_s = min(0.2 * self.config.look_back_period_s, interval)
        next_sample, next_report = sample_s, interval
        for tick in range(int(until_s / TICK_S)):
            now = tick * TICK_S
            self._serve_until(now, waiting)
            self._leave(now)
            if now >= next_sample:
                next_sample += sample_s
                self._sample(now, sample_s)
            if now >= next_report:
                next_report += interval
                self.samples = deque(one for one in self.samples if one[0] > now - self.config.look_back_period_s)
                self.reported, self.figures = list(self.samples), self._figures(now)
            self._scale(now)
            self._note(now)
        return self.outcome

    def _serve_until(self, now: float, waiting: deque[float]) -> None:
        while (waiting and waiting[0] <= now) or (self.done and self.done[0][0] <= now):
            if self.done and (not waiting or self.done[0][0] <= waiting[0]):
                at, _, replica, arrived = heapq.heappop(self.done)
                replica.busy -= 1
                self.latencies.append((at, at - arrived))
                self._start(replica, at)
                self._route(at)
            else:
                self.held.append(at := waiting.popleft())
                self._route(at)
        self._route(now)

    def _route(self, at: float) -> None:
        ready = [one for one in self.replicas if one.ready_at <= at and not one.leaving]
        while self.held and ready and (least := min(ready, key=lambda one: one.ongoing)).ongoing < MOST_ONGOING:
            least.queue.append(self.held.popleft())
            self._start(least, at)

    def _start(self, replica: Replica, at: float) -> None:
        while replica.queue and replica.busy < LANES:
            arrived, service = replica.queue.popleft(), next(self.services)
            replica.busy, replica.worked_s, self.count = replica.busy + 1, replica.worked_s + service, self.count + 1
            self.outcome.waits_s.append(at - arrived)
            heapq.heappush(self.done, (at + service, self.count, replica, arrived))

    def _leave(self, now: float) -> None:
        for queue in (self.held, *(one.queue for one in self.replicas)):
            while queue and now - queue[0] > self.patience_s:
                self.outcome.waits_s.append(now - queue.popleft())
                self.outcome.left += 1

    def _ready(self, now: float) -> list[Replica]:
        return [one for one in self.replicas if one.ready_at <= now and not one.leaving]

    def _sample(self, now: float, every_s: float) -> None:
        used = {id(one): min((one.worked_s - self.worked.get(id(one), 0.0)) / (LANES * every_s), 1.0) for one in self._ready(now)}
        self.worked = {id(one): one.worked_s for one in self.replicas}
        self.samples.append((now, float(len(self.held) + sum(one.ongoing for one in self.replicas)), used))

    def _scale(self, now: float) -> None:
        ready = self._ready(now)
        requests = _mean(self.reported, now)
        if not ready and requests + len(self.held) > 0:  # Serve's way out of zero: the handle reports at once, no delay, no policy
            self._follow(max(self.target, 1), now)
            return
        ctx = SimpleNamespace(
            current_time=now,
            policy_state=self.state,
            current_num_replicas=len(ready),
            target_num_replicas=self.target,
            total_num_requests=requests,
            aggregated_metrics=self.figures,
            capacity_adjusted_min_replicas=self.config.min_replicas,
            capacity_adjusted_max_replicas=self.config.max_replicas,
            config=self.config,
        )
        desired, self.state = self.policy(ctx)
        scaled = _apply_scaling_factors(desired, len(ready), self.config)
        decided, self.delays = _apply_delay_logic(max(0, scaled), self.target, self.config, self.delays, _now=now)
        self._follow(max(self.config.min_replicas, min(decided, self.config.max_replicas)), now)

    def _figures(self, now: float) -> Mapping[str, Mapping[int, float]]:
        ready = self._ready(now)
        while self.latencies and self.latencies[0][0] < now - LATENCY_WINDOW_S:
            self.latencies.popleft()
        tail = float(np.percentile([one for _, one in self.latencies], 95)) * 1e3 if len(self.latencies) > 1 else 0.0
        used = {id(one): [share for _, _, of in self.reported if (share := of.get(id(one))) is not None] for one in ready}
        return {
            "utilisation": {name: sum(shares) / len(shares) for name, shares in used.items() if shares},
            "latency_ms": dict.fromkeys(map(id, ready), tail),
        }

    def _follow(self, target: int, now: float) -> None:
        self.target, staying = target, [one for one in self.replicas if not one.leaving]
        self.replicas += [Replica(now + START_S) for _ in range(target - len(staying))]
        for replica in sorted(staying, key=lambda one: (one.ready_at <= now, one.ongoing))[: max(0, len(staying) - target)]:
            replica.leaving = True

    def _note(self, now: float) -> None:
        self.replicas = [one for one in self.replicas if not one.leaving or one.ongoing]
        self.outcome.replica_s += TICK_S * len(self.replicas)
        self.outcome.waiting.append(len(self.held) + sum(len(one.queue) for one in self.replicas))
        self.outcome.wanted.append(self.target)
        self.outcome.serving.append(len(self._ready(now)))


def _mean(samples: list[tuple[float, float, Any]], now: float) -> float:
    """Over time: each value holds until the next one."""
    if not samples:
        return 0.0
    ends = [at for at, *_ in samples[1:]] + [now]
    lasted = [max(end - at, 1e-3) for (at, *_), end in zip(samples, ends, strict=True)]
    return sum(value * seconds for (_, value, _), seconds in zip(samples, lasted, strict=True)) / sum(lasted)
