"""A real Ray cluster with Serve, started once for all tests of this folder, which come first, and ended with them: it is busy even when
nobody asks.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.bundle import Bundle
from deployments.cli.local_serve import LocalServe
from tests.integration.conftest import PATIENT, ROOT, Live
from tests.integration.live.collector import Collector
from tests.ports import free_port

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
    """ray_config.yaml with all that tells what happens."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "ray_config.yaml").read_text())
    document["logging_config"].update(encoding="JSON", logs_dir=str(logs))
    document["tracing_config"] = {"enabled": True, "exporter_import_path": "deployments.tracing:otlp", "sampling_ratio": 0.0}
    document["applications"][0]["args"]["gateway"].update(PATIENT, slow_ms=0.001)
    return document
