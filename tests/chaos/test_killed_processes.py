"""kill -9, or SIGSTOP, of one process of a cluster with two replicas of each deployment, at 70 % of what it can do (`LOAD`)."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.load import Load, Phase
from benchmarks.load_bodies import bodies as requests
from tests.chaos.rows import Row
from tests.chaos.served import CACHE_ACTOR, CONTROLLER, DEPLOYMENTS, Served, before_and_after, seconds_until
from tests.waiting import eventually

pytestmark = pytest.mark.cluster
LOAD = 0.7
"""Of what the cluster can do."""
SHORT_RATE = 30.0
"""Requests/s where phases are cut short."""
IN_CI: dict[str, Any] = {"clients": 6, "timeout_s": 60.0}
"""There callers wait for each answer, so that a slow machine is asked for less."""
FULL = 48
"""Callers at once, so that a call to an encoder carries up to a dozen requests: each of two gateways has two encoders to ask."""
RETRIED_LOAD = 0.45
"""For the proxy: what was lost comes again within as many seconds, so that there is then twice as much."""
EVENT_S, SHORT_EVENT_S = 15.0, 8.0
"""How long after the fault the load is looked at by itself."""
RETRY_PAUSE_S = 5.0
"""What a client waits who is told nothing by a proxy that is gone."""


@pytest.fixture(autouse=True)
def _whole_again(two: Served) -> Iterator[None]:
    """Every test begins and ends with all replicas of each deployment, and each of them reports."""

    def until_whole() -> None:
        wanted = two.wanted()
        eventually(two.is_complete, "every replica runs")
        eventually(lambda: all(two.stages()[stage]["replicas"] == wanted[stage] for stage in ("encoder", "generator")), "each reports")
        eventually(lambda: two.ask(behaviours=[]).status_code == 200, "an answer")

    until_whole()
    yield
    until_whole()


def phases(*, long: bool, event_s: float = EVENT_S) -> tuple[list[Phase], float]:
    """The load's phases but for their rate, and when the fault is due."""
    before_s = 10.0 if long else 3.0
    return [Phase("before", 0, before_s), Phase("event", 0, event_s), Phase("after", 0, before_s)], before_s


def load_rate(two: Served, *, long: bool) -> float:
    """Requests/s."""
    return LOAD * two.capacity() if long else SHORT_RATE


def at(rate: float, shape: list[Phase]) -> list[Phase]:
    return [Phase(phase.name, rate, phase.seconds) for phase in shape]


def kill_one(two: Served, deployment: str, load: Load, row: Row) -> tuple[float, float]:
    """Kill a replica as the event begins: when, in seconds from the load's beginning, and how long it took until there were two again."""
    time.sleep(load.until("event"))
    row.mark(load.now, f"kill -9 {deployment}")
    victim, killed_s = two.replicas(deployment)[0], load.now
    victim.kill()
    back = seconds_until(lambda: len(two.running(deployment) - {victim.pid}) == 2, 60)
    row.mark(load.now, "replaced")
    return killed_s, back


# in short: one of them here, gateways in test_killed_caches.py
@pytest.mark.parametrize("deployment", ["encoder", *(pytest.param(one, marks=pytest.mark.chaos) for one in ("gateway", "generator"))])
def test_no_request_fails_when_a_replica_is_killed(two: Served, deployment: str, record, long: bool, run: int):
    event_s = EVENT_S if long else SHORT_EVENT_S
    shape, fault_s = phases(long=long, event_s=event_s)
    rate = load_rate(two, long=long)
    with record(Row(f"kill -9 a {deployment} replica", "0 failed requests; p99 <= 2x during the event; capacity back <= 15 s", run)) as row:
        with two.load(*at(rate, shape), **({} if long else IN_CI)) as load:
            _, back = kill_one(two, deployment, load, row)
            results = load.results()
        row.took(results, capacity_per_s=two.capacities.get(""), rate_per_s=rate)
        calm, event = before_and_after(results, fault_s, event_s)
        row.figures |= {"before": calm.summary(), "event": event.summary()}
        row.claim("failed requests", results.failed.sum() + results.rejected.sum(), most=0)
        row.claim("p99 during the event / p99 before", event.percentile(99) / calm.percentile(99), most=2, timing=True)
        row.claim("seconds until the replica was replaced", back, most=15, timing=True)


@pytest.mark.chaos
def test_requests_of_a_killed_encoder_s_full_calls_are_answered_by_the_other_one(two: Served, record, run: int):
    """Callers that ask again as soon as they are answered, so that the next call to an encoder carries all that came during the last one:
    what was under way as it was killed is answered, later.
    """
    shape, fault_s = phases(long=True)
    retrievals = requests(two.model_dir, strategy="retrieval", cache="bypass")
    with record(Row("kill -9 an encoder replica that has full calls", f"0 failed of {FULL} callers' requests; back <= 15 s", run)) as row:
        with two.load(*at(0, shape), bodies=retrievals, clients=FULL) as load:
            killed_s, back = kill_one(two, "encoder", load, row)
            results = load.results()
        calm, event = before_and_after(results, fault_s, EVENT_S)
        held = results.where((results.due <= killed_s) & (results.due + results.latency > killed_s))
        row.took(results, before=calm.summary(), event=event.summary(), under_way_when_killed=held.summary())
        row.claim("requests under way when it was killed", len(held), least=1)
        row.claim("failed requests", results.failed.sum() + results.rejected.sum(), most=0)
        row.claim("slowest of those under way, ms over the p99 before", held.percentile(100) - calm.percentile(99), most=1000, timing=True)
        row.claim("seconds until the replica was replaced", back, most=15, timing=True)


@pytest.mark.chaos  # in short, with gateways, in test_killed_caches.py
def test_no_request_fails_when_the_cache_actor_is_killed(two: Served, record, long: bool, run: int):
    """Answers are asked for again and again, so that most come out of caches."""
    shape, fault_s = phases(long=long)
    rate = load_rate(two, long=long)
    cached = requests(two.model_dir, users=400, strategy="retrieval", cache="use", tenant=f"run-{run}")
    with record(Row("kill the cache actor", "0 failures; p99 <= miss p99 + 10 ms", run)) as row:
        with two.load(Phase("misses", rate, fault_s), bodies=requests(two.model_dir, strategy="retrieval", cache="bypass")) as load:
            misses = load.results().between(1, fault_s)
        with two.load(*at(rate, shape), bodies=cached) as load:
            time.sleep(load.until("event"))
            row.mark(load.now, "kill -9 the cache actor")
            killed = [process.pid for process in two.processes(CACHE_ACTOR) if process.kill() is None]
            results = load.results()
        row.took(results, tiers=results.named("tier"), misses=misses.summary(), killed=len(killed))
        _, event = before_and_after(results, fault_s, EVENT_S)
        row.claim("cache actors killed", len(killed), least=1)
        row.claim("failed requests", results.failed.sum() + results.rejected.sum(), most=0)
        row.claim("p99 during the event, ms over that of misses", event.percentile(99) - misses.percentile(99), most=10, timing=True)


@pytest.mark.chaos
def test_no_request_fails_when_the_controller_is_killed(two: Served, record, long: bool, run: int):
    """It has recovered once it knows of every replica; that it works is proven by a replica that is killed when the load is over."""
    shape, _ = phases(long=long)
    rate = load_rate(two, long=long)
    with record(Row("kill the Serve controller", "0 failures; recovers <= 30 s", run)) as row:
        (controller,) = two.processes(CONTROLLER)
        with two.load(*at(rate, shape)) as load:
            time.sleep(load.until("event"))
            row.mark(load.now, "kill -9 the controller")
            controller.kill()
            killed = load.now
            eventually(lambda: any(one.pid != controller.pid for one in two.processes(CONTROLLER)), "a new controller", 60)
            known = seconds_until(two.is_complete, 60)
            recovered = load.now - killed if np.isfinite(known) else known
            row.mark(load.now, "it knows every replica")
            results = load.results()
        victim = two.replicas("encoder")[0]
        victim.kill()
        replaced = seconds_until(lambda: len(two.running("encoder") - {victim.pid}) == 2, 60)
        row.took(results, then_replaced_an_encoder_in_s=replaced)
        row.claim("failed requests", results.failed.sum() + results.rejected.sum(), most=0)
        row.claim("seconds until it knew every replica", recovered, most=30, timing=True)
        row.claim("it replaced a replica afterwards", replaced < 60, least=1)


@pytest.mark.chaos
@pytest.mark.parametrize("retries", [0, 1])
def test_requests_go_on_within_seconds_when_the_proxy_is_killed(two: Served, retries: int, record, long: bool, run: int):
    """Errors end within 5 s; a client that tries once more, after as long, sees none."""
    shape, fault_s = phases(long=long)
    rate = RETRIED_LOAD * two.capacity()
    fault = "kill the proxy" + (", clients retry once" if retries else "")
    with record(Row(fault, "errors <= 5 s, 0 after one client retry", run)) as row:
        with two.load(*at(rate, shape), retries=retries, retry_pause_s=RETRY_PAUSE_S) as load:
            time.sleep(load.until("event"))
            row.mark(load.now, "kill -9 the proxy")
            victim = two.proxy()
            title = Path(victim.cmdline()[0]).name
            victim.kill()
            results = load.results()
        bad = results.where(results.failed | results.rejected)
        row.took(results, proxy=title, pause_s=RETRY_PAUSE_S)
        if retries:
            row.claim("failed requests after one retry", len(bad), most=0)
        else:
            last = float(bad.due.max()) - fault_s if len(bad) else 0.0
            row.claim("seconds from the kill to the last request that failed", last, most=5, timing=True)
            row.claim("requests that fail in the end", results.phase("after").failed.sum(), most=0)


@pytest.mark.chaos
@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_no_request_outlasts_its_deadline_while_a_replica_is_stopped(
    two: Served, deployment: str, record, long: bool, run: int, deadline_s: float
):
    stopped_s = 30.0 if long else 20.0
    shape, fault_s = phases(long=long, event_s=stopped_s)
    rate = load_rate(two, long=long)
    with record(Row(f"SIGSTOP a {deployment} replica for 30 s", "p99 <= the deadline; out of rotation <= 10 s", run)) as row:
        victim = two.replicas(deployment)[0]
        with two.load(*at(rate, shape), timeout_s=40) as load:
            time.sleep(load.until("event"))
            row.mark(load.now, f"SIGSTOP {deployment}")
            victim.suspend()
            try:
                time.sleep(load.until("after"))
            finally:
                row.mark(load.now, "SIGCONT")
                with suppress(psutil.NoSuchProcess):
                    victim.resume()
            results = load.results()
        calm, event = before_and_after(results, fault_s, stopped_s)
        row.took(results, before=calm.summary(), event=event.summary())
        slow = event.where(event.failed | event.degraded | (event.latency > max(1.0, 3 * calm.percentile(99) / 1e3)))
        row.claim("failed requests", results.failed.sum() + results.rejected.sum(), most=0)
        row.claim("p99 while it is stopped, s", event.percentile(99) / 1e3, most=deadline_s, timing=True)
        out_of_rotation = max(0.0, float(slow.due.max()) - fault_s) if len(slow) else 0.0
        row.claim("seconds until no request was held up, or degraded, any more", out_of_rotation, most=10, timing=True)
