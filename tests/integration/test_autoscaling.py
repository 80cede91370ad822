"""The autoscaling policy in a real Serve controller: replicas come with the load, go when it is over, and come again from none."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import httpx
import pytest

from tests.clusters import Application, SharedCluster
from tests.waiting import until_right

pytestmark = pytest.mark.cluster
SLEEPER = {
    "name": "sleeper",
    "max_ongoing_requests": 3,  # so that calls reach a new replica, and the others wait in the handle
    "ray_actor_options": {"num_cpus": 0.1},
    "autoscaling_config": {
        "min_replicas": 0,
        "max_replicas": 3,
        "target_ongoing_requests": 2,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "look_back_period_s": 1,
        "metrics_interval_s": 0.2,
        "policy": {"policy_function": "cluster.autoscaling:QueuePolicy", "policy_kwargs": {"down_after_s": 2, "idle_s": 30}},
    },
}
APPLICATION = {"name": "sleeping", "import_path": "tests.integration.autoscaling_app:build", "deployments": [SLEEPER]}


@pytest.fixture
def sleeping(default: SharedCluster) -> Iterator[Application]:
    with default.application({"applications": [APPLICATION]}) as served:
        yield served


def replicas(url: str, calls: int, seconds: float) -> set[str]:
    """Those that served so many calls at once."""
    with ThreadPoolExecutor(calls) as threads:
        return set(threads.map(lambda _: served_by(url, seconds), range(calls)))


def served_by(url: str, seconds: float) -> str:
    answer = httpx.get(url, params={"seconds": seconds}, timeout=120)
    assert answer.status_code == 200, "no call fails, whatever comes and goes"
    return answer.text


def eventually(url: str, calls: int, seconds: float, serving: int) -> set[str]:
    return until_right(lambda: replicas(url, calls, seconds), lambda found: len(found) == serving, within_s=300)


def under_load(url: str, calls: int, seconds: float, serving: int, within_s: float = 300) -> set[str]:
    """As many as `serving`, which have answered while so many calls were on the way all the time."""
    seen, deadline = set[str](), monotonic() + within_s

    def ask(_: int) -> None:
        while len(seen) < serving and monotonic() < deadline:
            seen.add(served_by(url, seconds))

    with ThreadPoolExecutor(calls) as callers:
        list(callers.map(ask, range(calls)))
    assert len(seen) >= serving, f"after {within_s:g} s {seen} have answered"
    return seen


def test_replicas_come_with_the_load_go_when_it_is_over_and_come_again_from_none(sleeping: Application):
    url = sleeping.url
    first = eventually(url, calls=1, seconds=0, serving=1)
    three = under_load(url, calls=9, seconds=1, serving=3)
    (last,) = eventually(url, calls=2, seconds=0.2, serving=1)
    assert last in first | three
    until_right(lambda: sleeping.running("sleeper"), lambda running: not running, within_s=300)
    (other,) = replicas(url, calls=1, seconds=0)
    assert other not in {*first, *three}, "the last one is gone, and the first request has started another"
