"""What is shown of GPUs: those this process may use, for as long as their driver answers and again once it does."""
# ruff: noqa: N802 - the names are the library's

from types import SimpleNamespace

import pytest

from cluster import metrics as m
from cluster.config import parse
from cluster.metrics import SILENT
from deployments.fleet.heartbeat import Heartbeat
from deployments.replicas import replica
from deployments.replicas.encoder import Encoder
from deployments.replicas.ranker import Ranker
from deployments.telemetry import gpus, metrics
from deployments.telemetry.gpus import VISIBLE, Gpus, any_gpu
from deployments.telemetry.metrics import StageRecorder
from tests.fakes.handles import Handle
from tests.noted import Noted

UUIDS = ("GPU-a", "GPU-b", "GPU-c")


class Library:
    """pynvml, with three GPUs of which each has as many bytes in use as its number says."""

    class NVMLError(Exception):
        pass

    broken = False

    def nvmlDeviceGetCount(self):
        if self.broken:
            raise self.NVMLError("GPU is lost")
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return UUIDS.index(uuid)

    def nvmlDeviceGetIndex(self, device):
        return device

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(used=device, total=80)

    def nvmlDeviceGetUtilizationRates(self, device):
        return SimpleNamespace(gpu=50)


def used(noted):
    return {dict(labels)["gpu"]: value for (name, labels), value in noted.values.items() if name == m.GPU_USED.name}


@pytest.mark.parametrize(
    ("named", "shown"),
    [
        (None, {"0": 0, "1": 1, "2": 2}),
        ("2", {"2": 2}),
        ("2, 0", {"2": 2, "0": 0}),
        ("GPU-b", {"1": 1}),
        ("", {}),
        ("-1", {}),
        ("1,-1,2", {"1": 1}),
        ("7", {}),
    ],
)
def test_a_replica_shows_the_gpus_that_it_may_use(monkeypatch, named, shown):
    monkeypatch.delenv(VISIBLE, raising=False) if named is None else monkeypatch.setenv(VISIBLE, named)
    noted = Noted()
    Gpus(Library()).show(noted)
    assert used(noted) == shown
    assert noted.values.get(("genrec_gpu_busy_ratio", (("gpu", "1"),)), 0.5) == 0.5


def test_an_error_is_said_once_while_it_lasts_and_does_not_end_the_watching(monkeypatch, caplog):
    monkeypatch.delenv(VISIBLE, raising=False)
    library, noted = Library(), Noted()
    watched = Gpus(library)
    for broken in (True, True, False, True):
        library.broken = broken
        watched.show(noted)
    assert len(used(noted)) == len(UUIDS)
    assert [record.getMessage() for record in caplog.records] == [
        "the GPUs cannot be watched; they are asked again at each report: GPU is lost"
    ] * 2


def test_a_stage_shows_gpus_where_it_records_anything_and_the_library_is_there(monkeypatch):
    for meter, library, shown in ((Noted(), Library(), True), (Noted(), None, False), (SILENT, Library(), False)):
        monkeypatch.setattr(metrics, "nvml", lambda library=library: library)
        recorder = StageRecorder("encoder", meter)
        recorder.show(SimpleNamespace(backends=()), {})
        assert bool(meter is not SILENT and used(meter)) is shown


def test_without_the_package_or_its_driver_no_gpu_is_watched(monkeypatch):
    def no_driver():
        raise Library.NVMLError("driver not loaded")

    gpus.nvml.cache_clear()
    monkeypatch.setattr(gpus, "import_module", lambda name: SimpleNamespace(NVMLError=Library.NVMLError, nvmlInit=no_driver))
    assert gpus.nvml() is None
    gpus.nvml.cache_clear()


@pytest.mark.parametrize(("named", "there"), [(None, True), ("1", True), ("", False), ("-1", False)])
def test_a_process_has_a_gpu_where_it_may_use_one_and_the_driver_answers(monkeypatch, named, there):
    library = Library()
    monkeypatch.setattr(gpus, "nvml", lambda: library)
    monkeypatch.delenv(VISIBLE, raising=False) if named is None else monkeypatch.setenv(VISIBLE, named)
    assert any_gpu() is there
    library.broken = True
    assert not any_gpu()
    monkeypatch.setattr(gpus, "nvml", lambda: None)
    assert not any_gpu()


@pytest.mark.parametrize(("assigned", "named", "warned"), [([], None, True), (["1"], None, False), ([], "1", False), ([], "", False)])
def test_a_replica_to_which_ray_assigns_none_of_several_gpus_says_once_what_it_lacks(
    monkeypatch, caplog, tmp_path, assigned, named, warned
):
    monkeypatch.delenv(VISIBLE, raising=False) if named is None else monkeypatch.setenv(VISIBLE, named)
    monkeypatch.setattr(gpus, "nvml", Library)
    monkeypatch.setattr(replica, "in_a_replica", lambda: True)
    monkeypatch.setattr(replica, "get_runtime_context", lambda: SimpleNamespace(get_accelerator_ids=lambda: {"GPU": assigned, "TPU": []}))
    gpus.warn_of_the_first_gpu.cache_clear()
    settings = parse({"model_dir": str(tmp_path)})
    for stage in (Encoder, Ranker):  # as in a colocated gateway
        stage(settings, Heartbeat(settings, Handle(None), "a"))
    gpus.warn_of_the_first_gpu.cache_clear()
    told = "(num_gpus in its ray_actor_options) and hides none: it computes on the first of 3, as does every replica like it"
    assert [record.getMessage() for record in caplog.records] == [f"Ray assigns this replica no GPU {told}"] * warned
