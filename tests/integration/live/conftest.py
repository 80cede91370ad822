"""An application that all tests of this folder ask, on the shared cluster with the fast profile."""

import shutil
from collections.abc import Iterator

import pytest

from cluster.bundle import Bundle
from tests.clusters import SharedCluster, fixed
from tests.collector import Collector
from tests.integration.conftest import PATIENT, PATIENT_READS, Live
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
def collector(fast: SharedCluster) -> Collector:
    """Where `live` sends its spans."""
    return fast.collector


@pytest.fixture(scope="package")
def live(compiled_hstu: Bundle, fast: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A small compiled HSTU behind a real Serve, whose engines tests can break; they leave it as they found it. It records the traces that
    a caller asks it to, and logs in JSON what takes long, as everything does here.
    """
    model_dir = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(compiled_hstu.path.parent, model_dir)
    logs, door = model_dir.parent / "logs", f"tcp://127.0.0.1:{free_port()}"
    document = fixed()
    application = document["applications"][0]
    application["logging_config"] = {**document["logging_config"], "encoding": "JSON", "logs_dir": str(logs)}
    application["args"]["gateway"].update(PATIENT, slow_ms=0.001)
    application["args"]["events"].update(PATIENT_READS)
    with fast.application(document, {"model_dir": str(model_dir), "zeromq": {"address": door}, **SETTINGS}) as serving:
        yield Live(serving.url, model_dir, serving, logs, door)
