"""Engines that raise at every call, one stage's, then all: everybody is answered, and told how."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.load import Phase
from benchmarks.load_bodies import bodies as requests
from tests.chaos.engines import ENCODERS, GENERATORS, counted
from tests.chaos.rows import Row
from tests.chaos.served import Served, seconds_until, served
from tests.clusters import SharedCluster
from tests.integration.breakable import switch
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]  # in short: tests/integration/live/test_integration.py
ARGS = {
    "encoder": {"order": ["onnxruntime", "torch"], "backends": ENCODERS},
    "generator": {"order": ["torch_beam"], "backends": GENERATORS},
    "cache": {"negative_ttl_s": 0.1},
}
LOAD = 0.3
"""Of what the first choice can do: the fallback is slower, on a processor by half."""
UNTRIED_S = 0.8
"""After its first failure a backend fails dozens of calls in so many seconds, but for the breaker, which makes a trial after a second."""
NO_MODEL = ("onnxruntime", "torch", "torch_beam")
STAGE_OF = {"onnxruntime": "encoder", "torch": "encoder", "torch_beam": "generator"}


@pytest.fixture(scope="module")
def one(model, cluster: SharedCluster, tmp_path_factory) -> Iterator[Served]:
    with served(cluster, tmp_path_factory.mktemp("stages"), model.path.parent, ARGS) as serving:
        yield serving


@contextmanager
def broken(cluster: Served, *names: str) -> Iterator[None]:
    """All calls of these backends fail inside the block."""
    with ExitStack() as stack:
        for name in names:
            file = switch(cluster.model_dir, name)
            file.touch()
            stack.callback(file.unlink)
        yield


def opened(cluster: Served, name: str) -> bool:
    return bool(cluster.backend(STAGE_OF[name], name)["breakers"].get("open"))


def closed(cluster: Served, name: str) -> bool:
    shown = cluster.backend(STAGE_OF[name], name)
    return shown["breakers"] == {"closed": cluster.stages()[STAGE_OF[name]]["replicas"]}


@pytest.mark.parametrize(("name", "fallback"), [("onnxruntime", "encode=torch"), ("torch_beam", "generate=none")])
def test_everybody_is_answered_by_the_fallback_while_a_stage_fails(one: Served, name: str, fallback: str, record, long: bool, run: int):
    broken_s = 20.0 if long else 8.0
    rate = LOAD * one.capacity()
    must = "100 % answered by its fallback, flagged degraded; breaker opens in <= 5 failures, closes <= 30 s after repair"
    with record(Row(f"{name} fails 100 % of its calls", must, run)) as row:
        failures = counted(one.model_dir, f"failed-{name}")
        phases = [Phase("before", rate, 5), Phase("broken", rate, broken_s), Phase("after", rate, 5)]
        with one.load(*phases) as load:
            time.sleep(load.until("broken"))
            with broken(one, name):
                row.mark(broke_at := load.now, f"{name} breaks")
                seconds_until(lambda: counted(one.model_dir, f"failed-{name}") > failures, broken_s)
                time.sleep(UNTRIED_S)
                until_open = counted(one.model_dir, f"failed-{name}") - failures
                opens = load.now - broke_at + seconds_until(lambda: opened(one, name), broken_s)
                time.sleep(load.until("after"))
            row.mark(load.now, "repaired")
            closes = seconds_until(lambda: closed(one, name), 60)
            results = load.results()
        # the first requests after the switch was thrown, and the last before, may have been under way
        during = results.between(5 + 0.5, 5 + broken_s - 0.5)
        before = results.where(results.due + results.latency < 5)
        row.took(results, breaker_open_after_s=opens, breaker_closed_after_s=closes, stages=during.named("stages"))
        row.figures["degraded_before"] = before.where(before.degraded).named("stages")
        by_fallback = sum(count for stages, count in during.named("stages").items() if fallback in stages)
        row.claim("failed requests", results.failed.sum() + results.rejected.sum(), most=0)
        row.claim("share answered by the fallback", by_fallback / len(during), least=1)
        row.claim("share flagged degraded", during.degraded.mean(), least=1)
        row.claim("failed calls before the breaker's first trial", until_open, least=1, most=5)
        row.claim("seconds from the repair until the breaker closed", closes, most=30, timing=True)
        row.claim("degraded answers before", before.degraded.sum(), most=0)
    eventually(lambda: not one.ask(behaviours=[{"item_id": "1", "timestamp": 5}]).json()["degraded"], "whole again", 60)


def test_everybody_is_answered_from_the_cache_or_by_popularity_when_every_model_stage_fails(one: Served, record, long: bool, run: int):
    """Half of the requests were asked before, so that their answers are kept; the other half was not."""
    broken_s = 20.0 if long else 8.0
    rate = LOAD * one.capacity()
    seen = requests(one.model_dir, 32, cache="use", tenant=f"seen-{run}")
    unseen = requests(one.model_dir, 32, cache="use", tenant=f"unseen-{run}")
    mixed = tuple(body for pair in zip(seen, unseen, strict=True) for body in pair)
    with record(Row("every model stage fails", "100 % answered from cache or popularity, flagged", run)) as row:
        with one.load(Phase("before", rate, 5), bodies=seen) as load:
            load.results()
        with one.load(Phase("broken", rate, broken_s), bodies=mixed) as load, broken(one, *NO_MODEL):
            row.mark(0, "encoder and generator break")
            results = load.results()
        kept = results.where((results.body % 2 == 0) & results.ok)
        computed = results.where((results.body % 2 == 1) & results.ok)
        popular = sum(count for stages, count in computed.named("stages").items() if "popularity=" in stages)
        row.took(results, stages=results.named("stages"), tiers=kept.named("tier"))
        row.claim("failed requests", results.failed.sum() + results.rejected.sum(), most=0)
        row.claim("share of kept answers that are given, whole", (~kept.degraded).mean(), least=1)
        row.claim("share of the others answered by popularity", popular / len(computed), least=1)
        row.claim("share of the others flagged degraded", computed.degraded.mean(), least=1)
    eventually(lambda: not one.ask(behaviours=[{"item_id": "1", "timestamp": 5}]).json()["degraded"], "whole again", 90)
