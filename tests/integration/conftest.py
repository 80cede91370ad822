"""A real Ray cluster with Serve, started once for all tests that ask it over HTTP."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.bundle import Bundle
from deployments.cli.local_serve import LocalServe
from tests.integration.collector import Collector
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "encoder": {
        "order": ["tensorrt", "onnxruntime", "torch", "mean"],
        "disabled": ["mean"],
        "backends": {
            "onnxruntime": "tests.integration.breakable:BreakableOnnxRuntime",
            "torch": "tests.integration.breakable:BreakableTorch",
            "mean": "own_backend:MeanEncoder",
        },
        "options": {"onnxruntime": {"keep_from": 2}, "torch": {"keep_from": 2}},
        "breaker": {"failures_to_open": 1, "pause_s": 0.2, "growth": 1.0, "longest_pause_s": 0.2},
        "probe_interval_s": 0.3,
    }
}


@dataclass(frozen=True)
class Live:
    """A served model: where it answers, the directory it was published in, what serves it, where its replicas log, and where it answers
    over ZeroMQ.
    """

    url: str
    model_dir: Path
    serving: LocalServe
    logs: Path = Path()
    door: str = ""

    def recommend(self, **request: Any) -> httpx.Response:
        """Computed, not taken from the cache, unless `cache` says otherwise."""
        return httpx.post(f"{self.url}/v1/recommend", json={"user_id": "ada", "cache": "bypass", **request}, timeout=30)

    def switch(self, name: str, to: str, stage: str = "encoder") -> None:
        response = httpx.post(f"{self.url}/v1/backends/{stage}/{name}:{to}", timeout=30)
        assert (response.status_code, response.json()["applied"]) == (200, True), response.text

    def stages(self) -> dict[str, dict[str, Any]]:
        return {stage["stage"]: stage for stage in httpx.get(f"{self.url}/v1/backends", timeout=30).json()["stages"]}

    def backends(self, stage: str = "encoder") -> dict[str, dict[str, Any]]:
        return {backend["name"]: backend for backend in self.stages()[stage]["backends"]}

    def eventually(self, holds: Callable[[Mapping[str, Any]], bool], *, within_s: float = 20, **request: Any) -> Mapping[str, Any]:
        """Ask until the answer is as expected; every answer on the way has status 200."""
        deadline = time.monotonic() + within_s
        while True:
            response = self.recommend(**request)
            assert response.status_code == 200, response.text
            if holds(response.json()):
                return response.json()
            assert time.monotonic() < deadline, f"still so after {within_s} s: {response.text}"
            time.sleep(0.1)


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    """Where `live` sends its spans."""
    with Collector() as one:
        yield one


@pytest.fixture(scope="package")
def live(compiled_hstu: Bundle, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A small compiled HSTU behind a real Serve, whose engines tests can break; they leave it as they found it. It records the traces that
    a caller asks it to, and logs in JSON what takes long, as everything does here.
    """
    model_dir = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(compiled_hstu.path.parent, model_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "examples")]))
        patch.syspath_prepend(ROOT / "examples")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "500")
        config, log = model_dir.parent / "watched.yaml", model_dir.parent / "serve.log"
        config.write_text(yaml.safe_dump(watched(model_dir.parent / "logs")))
        door = f"tcp://127.0.0.1:{free_port()}"
        changes = {"model_dir": str(model_dir), "zeromq": {"address": door}, **SETTINGS}
        serving = LocalServe(config, changes, port=free_port(), log=log)
        with serving as url:
            yield Live(url, model_dir, serving, model_dir.parent / "logs", door)


def watched(logs: Path) -> dict[str, Any]:
    """ray_config.yaml with all that tells what happens, and time for bursts however busy this machine is."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "ray_config.yaml").read_text())
    document["logging_config"].update(encoding="JSON", logs_dir=str(logs))
    document["tracing_config"] = {"enabled": True, "exporter_import_path": "deployments.tracing:otlp", "sampling_ratio": 0.0}
    gateway = document["applications"][0]["args"]["gateway"]
    gateway.update(slow_ms=0.001, deadline_s=30.0)
    gateway["admission"]["max_wait_ms"] = 30_000
    return document


def behaviours(*items: int, start: int = 1_700_000_000) -> list[dict[str, Any]]:
    """Views of these items of the small catalogue, an hour apart."""
    return [{"item_id": str(item), "timestamp": start + 3600 * step} for step, item in enumerate(items)]
