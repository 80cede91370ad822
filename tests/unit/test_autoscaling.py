"""How many replicas of the generator are wanted."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingPolicy

from cluster import autoscaling
from cluster.autoscaling import TARGETS, by_queues, wanted_replicas


@pytest.mark.parametrize(
    ("ongoing", "queues", "wanted"),
    [
        (0, {}, 0),
        (32, {}, 2),
        (8, {"waiting": {"a": 0.0}, "kv_cache_usage": {"a": 0.1}}, 0.5),
        (8, {"waiting": {"a": 192.0, "b": 0.0}}, 3),
        (8, {"waiting": {"a": 64.0, "b": 64.0}, "kv_cache_usage": {"a": 0.8, "b": 1.6}}, 3),
        (16, {"a figure it does not know": {"a": 1e9}}, 1),
    ],
)
def test_the_figure_that_is_furthest_above_its_target_counts(ongoing, queues, wanted):
    assert wanted_replicas(ongoing, 16, queues) == pytest.approx(wanted)


def context(**changes):
    given = {"current_num_replicas": 2, "target_num_replicas": 2, "total_num_requests": 16.0, "aggregated_metrics": None}
    return SimpleNamespace(**{**given, "config": SimpleNamespace(get_target_ongoing_requests=lambda: 16), **changes})


def test_the_policy_reads_what_serve_has_gathered():
    assert by_queues(context()) == (1, {})
    assert by_queues(context(aggregated_metrics={"waiting": {"a": 3 * TARGETS["waiting"]}})) == (3, {})
    assert by_queues(context(current_num_replicas=0, target_num_replicas=1)) == (1, {})


def test_serves_controller_can_run_it_without_genrec(tmp_path: Path):
    policy = AutoscalingPolicy(policy_function="cluster.autoscaling:by_queues")
    (tmp_path / "policy.pickle").write_bytes(policy.get_serialized_policy_def())
    code = "import pickle, sys; print(pickle.load(open('policy.pickle', 'rb')).__name__, 'cluster' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.split(), done.returncode) == ([autoscaling.by_queues.__name__, "False"], 0), done.stderr
