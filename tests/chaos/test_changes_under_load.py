"""A rolling update, a model swap, a change of configuration, each under load: no request fails, and each answer is one version's."""

import copy
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.load import Phase, Plan, Results
from benchmarks.load import run as carry_out
from cluster.bundle_store import BundleStore
from tests.bundles import make_generative_bundle
from tests.chaos.rows import Row
from tests.chaos.served import Served, served
from tests.clusters import SharedCluster
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]  # in short: test_rollout.py and test_deploy.py in tests/integration
ENGINES = dict.fromkeys(("first", "second"), "tests.chaos.engines:CountedTorch")
ARGS = {"encoder": {"order": ["first", "second"], "backends": ENGINES}, "generator": {"order": ["torch_beam"]}}
MUST = "0 failures, every answer from one consistent model version"
LOAD = 0.3
UPDATE_LOAD = 0.1
"""Of the capacity, while all replicas are replaced: seven processes that start take the processor from those that serve."""
SWAPPED_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("versions") / "swapped"


@pytest.fixture(scope="module")
def two_versions(root) -> tuple[int, int]:
    """A model with two versions of different weights, the first of which is current."""
    old = make_generative_bundle(root, seed=0).manifest.version
    new = make_generative_bundle(root, seed=1).manifest.version
    BundleStore(root).promote(old)
    return old, new


@pytest.fixture(scope="module")
def two(root, two_versions, cluster: SharedCluster, tmp_path_factory) -> Iterator[Served]:
    """Tests begin with whichever version the one before them left."""
    body = {"strategy": "unified"}
    with served(cluster, tmp_path_factory.mktemp("two"), root, ARGS, replicas=2, body=body) as serving:
        yield serving


def answers_of(cluster: Served) -> set[tuple[str, int, int]]:
    """What the version that serves answers to each request in peace: (version, request, checksum of its items)."""
    plan = Plan(cluster.url, (Phase("calm", 2 * len(cluster.bodies) / 5, 5.0),), cluster.bodies, examine=True)
    return set(triples(carry_out(plan)))


def triples(results: Results) -> list[tuple[str, int, int]]:
    whole = results.where(results.ok & ~results.degraded)
    rows = zip(whole.version.tolist(), whole.body.tolist(), whole.items.tolist(), strict=True)
    return [(whole.words[version], body, items) for version, body, items in rows]


def claim_consistent(row: Row, results: Results, known: set[tuple[str, int, int]], *, crowded: bool = False) -> None:
    """Every whole answer is, to the item, what its version answers in peace. `crowded`: how many are refused is a matter of the cores."""
    strange = sum(answer not in known for answer in triples(results))
    row.claim("failed requests", results.failed.sum(), most=0)
    row.claim("refused requests", results.rejected.sum(), most=0, timing=crowded)
    row.claim("degraded answers", results.degraded.sum(), most=0)
    row.claim("answers that are no one version's", strange, most=0)


@pytest.mark.parametrize("back", [False, True], ids=["promote", "rollback"])
def test_a_model_is_swapped_under_load(two: Served, two_versions, back: bool, record, long: bool, run: int):
    """By the pointer alone: whoever serves follows it."""
    old, new = two_versions
    store = BundleStore(two.model_dir)
    first, second = (new, old) if back else (old, new)
    with record(Row(f"model swap under load ({'rollback' if back else 'promote'})", MUST, run)) as row:
        store.promote(first)
        eventually(lambda: serves(two, first), f"version {first} serves", SWAPPED_WITHIN_S)
        known = answers_of(two)
        rate = LOAD * two.capacity()
        with two.load(Phase("before", rate, 5), Phase("swap", rate, 20 if long else 12), Phase("after", rate, 5 if long else 3)) as load:
            time.sleep(load.until("swap"))
            row.mark(load.now, f"version {first} -> {second}")
            store.promote(second)
            results = load.results()
        known |= answers_of(two)
        versions = results.named("version")
        row.took(results, versions=versions)
        claim_consistent(row, results, known)
        after = results.phase("after").named("version")
        row.claim("share answered by the new version in the end", after.get(f"swapped/{second}", 0) / max(1, sum(after.values())), least=1)


def serves(cluster: Served, version: int) -> bool:
    answers = [cluster.ask(behaviours=[{"item_id": "1", "timestamp": 5}]).json()["model_version"] for _ in range(8)]
    return set(answers) == {f"swapped/{version}"}


def test_a_configuration_is_changed_without_a_restart_under_load(two: Served, record, run: int):
    """`serve deploy` with another order of the encoders, back and forth."""
    with record(Row("config change under load", MUST, run)) as row:
        known = answers_of(two)
        before = two.running("encoder")
        rate = LOAD * two.capacity()
        with two.load(Phase("before", rate, 5), Phase("changes", rate, 25)) as load:
            for order in (["second"], ["first", "second"]):
                time.sleep(max(load.until("changes"), 0.0) or 8.0)
                entry = copy.deepcopy(two.serving.entry)
                encoder = next(one for one in entry["deployments"] if one["name"] == "encoder")
                encoder["user_config"] = {"order": order, "selection": "ordered", "disabled": []}
                row.mark(load.now, f"order: {', '.join(order)}")
                two.serving.deploy(entry)
            results = load.results()
        row.took(results, stages=results.named("stages"))
        claim_consistent(row, results, known)
        for engine in ENGINES:
            count = sum(count for stages, count in results.named("stages").items() if f"encode={engine} " in stages)
            row.claim(f"answers by the {engine} engine", count, least=1)
        row.claim("replicas restarted", len(before - two.running("encoder")), most=0)


def test_replicas_are_replaced_one_after_the_other_under_load(two: Served, record, run: int):
    """`serve deploy` with a setting that makes new replicas of every deployment."""
    with record(Row("rolling update under load", MUST, run)) as row:
        known = answers_of(two)
        entry = copy.deepcopy(two.serving.entry)
        entry["args"]["gateway"] = {**entry["args"]["gateway"], "max_k": 999 - run}
        before = {name: two.running(name) for name in ("gateway", "encoder", "generator")}
        rate = UPDATE_LOAD * two.capacity()
        with two.load(Phase("before", rate, 5), Phase("update", rate, 60)) as load:
            time.sleep(load.until("update"))
            row.mark(load.now, "serve deploy")
            two.serving.deploy(entry)
            took = eventually(lambda: all(len(two.running(name) - before[name]) == 2 for name in before), "all are new", 120, 0.5)
            row.mark(load.now, "all replicas are new")
            results = load.results()
        row.took(results, seconds_to_replace=took)
        claim_consistent(row, results, known, crowded=True)
