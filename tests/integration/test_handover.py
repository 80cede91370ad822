"""An encoder stops, on a real cluster: its users' next home appends to what it had kept, unless they are erased."""

import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.bundle import Bundle
from tests.clusters import CPUS, Application, SharedCluster, fixed
from tests.integration.conftest import PATIENT, behaviours, everywhere
from tests.waiting import json_of, until_right

pytestmark = pytest.mark.cluster
USERS = [f"user-{number}" for number in range(24)]
LONG = list(range(20, 35))  # fewer events than the model's window
SETTINGS = {"order": ["onnxruntime"], "options": {"onnxruntime": {"keep_from": 2}}, "handover": {"max_bytes": 1 << 26, "within_s": 120}}


@pytest.fixture
def served(compiled_hstu: Bundle, default: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """Two replicas of the encoder."""
    model_dir = tmp_path_factory.mktemp("handover") / "tiny"
    shutil.copytree(compiled_hstu.path.parent, model_dir)
    document = fixed({"encoder": 2, "generator": 0}, {"encoder": {"graceful_shutdown_timeout_s": 300}})  # longer than a handover
    args = document["applications"][0]["args"]
    args["encoder"].update(SETTINGS)
    args["gateway"].update(PATIENT)
    with default.application(document, {"model_dir": str(model_dir)}) as application:
        yield application


def with_encoder(application: Application, **keys: object) -> set[int]:
    """Deploy the encoder so; the processes of its replicas once Serve runs no others."""
    entry, before = dict(application.entry), application.running("encoder")
    wanted = keys.get("num_replicas", 1)
    entry["deployments"] = [{**one, **keys} if one["name"] == "encoder" else one for one in entry["deployments"]]
    application.deploy(entry)
    restarted = "ray_actor_options" in keys
    return until_right(
        lambda: application.running("encoder"), lambda now: len(now) == wanted and (not restarted or not now & before), every_s=0.3
    )


def ask(application: Application, user: str, *more: int) -> None:
    request = {"user_id": user, "k": 5, "cache": "bypass", "strategy": "retrieval", "behaviours": behaviours(*LONG, *more)}
    response = httpx.post(f"{application.url}/v1/recommend", json=request, timeout=120)
    assert response.status_code == 200, response.text


def replicas_of(stages: list[dict[str, Any]]) -> dict[str, int]:
    return {stage["stage"]: stage["replicas"] for stage in stages}


def states(application: Application) -> dict[str, float]:
    """What the encoders say of the states that they keep, once one says anything: a replica that has just started has not reported yet."""
    told = until_right(lambda: json_of(f"{application.url}/v1/cache")["user_states"], lambda now: now.get("encoder", {}).get("onnxruntime"))
    kept: dict[str, float] = told["encoder"]["onnxruntime"]
    return kept


def test_a_returning_user_is_an_append_after_the_encoder_was_scaled_down_and_after_it_was_restarted(served):
    until_right(lambda: json_of(f"{served.url}/v1/backends")["stages"], lambda now: {"encoder": 2}.items() <= replicas_of(now).items())
    for user in USERS:
        ask(served, user)
    until_right(lambda: states(served), lambda now: now["users"] == len(USERS))

    with_encoder(served, num_replicas=1)
    until_right(lambda: states(served), lambda now: now["users"] == len(USERS) and now["adopted"] > 0)
    before = states(served)
    for user in USERS:
        ask(served, user, 7)
    now = until_right(lambda: states(served), lambda now: now["hits"] - before["hits"] == len(USERS))
    assert now["misses"] == before["misses"]

    everywhere(lambda: httpx.delete(f"{served.url}/v1/users/{USERS[0]}/history", timeout=120))
    with_encoder(served, num_replicas=1, ray_actor_options={"num_cpus": 2 * CPUS})
    left = len(USERS) - 1
    until_right(lambda: states(served), lambda now: (now["users"], now["rows"]) == (left, left * len(LONG)))
    for user in USERS:
        ask(served, user, 7, 8)
    now = until_right(lambda: states(served), lambda now: now["hits"] + now["misses"] == len(USERS))
    assert (now["hits"], now["misses"]) == (left, 1), "all but the erased one"
    assert now["hit_rows"] == left * len(LONG)
