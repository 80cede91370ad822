"""The Triton kernels without a GPU: against their reference in an interpreter, compiled for GPUs that are elsewhere, refused here."""

import os
import re
import subprocess
import sys
import weakref
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cluster.bundle import WEIGHTS, Bundle
from cluster.errors import BackendUnavailable
from integrations.hstu.config import HSTUConfig
from integrations.hstu.encoder import doublings
from integrations.hstu.kernels import encoder as encoder_module
from integrations.hstu.kernels.buckets import Bucketed
from integrations.hstu.kernels.encoder import TritonEncoder
from integrations.hstu.kernels.gpu import usable_gpu
from integrations.hstu.latest_states import latest_states
from integrations.hstu.user_behavior_schema import collate
from integrations.hstu.weights import load_model
from integrations.tensorrt.device import gpu_architecture
from tests.bundles import make_bundle, random_sequence

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {
    "attention_forward",
    "attention_backward",
    "norm_mul_dropout_forward",
    "norm_mul_dropout_backward",
    "append_forward",
}
TINY = HSTUConfig(items=10, heads=2, attention_dim=16, linear_dim=16)
ABSENT = "triton is not installed (pip install triton)"


@pytest.fixture
def bundle(tmp_path):
    return make_bundle(tmp_path / "tiny")


@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("triton") is None, reason=ABSENT)
def test_agree_with_the_reference_in_tritons_interpreter_and_on_a_gpu(device):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "tests/kernel_cases.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850, check=False)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-5_000:]


@pytest.fixture
def compile_ahead():
    pytest.importorskip("triton", reason=ABSENT)
    return import_module("tests.compile_ahead").compile_ahead


@pytest.mark.parametrize(
    ("target", "options"), [("sm_80", {}), ("sm_80", {"precision": "ieee"}), ("sm_90", {"dtype": "bf16", "windowed": True})]
)
def test_every_kernel_is_compiled_for_a_gpu_that_is_not_here(compile_ahead, target, options):
    cubins = compile_ahead(TINY, [target], **options)
    assert cubins.keys() == KERNELS
    for cubin in cubins.values():
        assert cubin[target].startswith(b"\x7fELF")


def test_the_encoder_is_unavailable_without_triton(bundle, monkeypatch):
    monkeypatch.setattr(encoder_module, "find_spec", lambda name: None)
    assert "triton is not installed" in TritonEncoder().get_availability(bundle).reason


@pytest.fixture
def _with_triton(monkeypatch):
    monkeypatch.setattr(encoder_module, "find_spec", lambda name: object())


@pytest.mark.usefixtures("_with_triton")
def test_the_encoder_is_unavailable_without_a_gpu_and_does_not_load(bundle, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no NVIDIA GPU with a driver is usable here" in TritonEncoder().get_availability(bundle).reason
    with pytest.raises(BackendUnavailable, match="no NVIDIA GPU"):
        TritonEncoder().load(bundle)


def test_a_driver_that_is_too_old_is_the_reason(monkeypatch):
    def refuse():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update it.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuse)
    said = r"usable here \(The NVIDIA driver on your system is too old \(found version 12020\).\); check nvidia-smi"
    assert re.search(said, usable_gpu("Triton").reason)
    with pytest.raises(BackendUnavailable, match=said):
        gpu_architecture()


@pytest.mark.usefixtures("_with_triton")
def test_the_encoder_is_unavailable_on_a_gpu_that_triton_does_not_compile_for(bundle, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert "needs compute capability 8.0 and Tesla T4 has 7.5" in TritonEncoder().get_availability(bundle).reason


@pytest.mark.usefixtures("_with_triton")
def test_the_encoder_refuses_a_sasrec_and_altered_weights(bundle, tmp_path):
    sasrec = make_bundle(tmp_path / "sasrec", family="sasrec")
    assert "holds a sasrec; serve it with torch" in TritonEncoder().get_availability(sasrec).reason
    with (bundle.path / WEIGHTS).open("ab") as file:
        file.write(b"!")
    altered = Bundle(bundle.path, bundle.manifest)
    assert WEIGHTS in TritonEncoder().get_availability(altered).reason


def test_any_batch_runs_in_the_buckets_that_were_recorded_and_answers_as_the_model(bundle):
    model = load_model(bundle)
    shapes, ran = [], []

    def encode(*inputs):
        return latest_states(model, *inputs, 2)

    def record(encode, inputs):
        shapes.append(tuple(inputs[0].shape))
        out = torch.empty(len(inputs[0]), 2, model.config.dim)

        def run():
            ran.append(tuple(inputs[0].shape))
            return out.copy_(encode(*inputs))

        return run

    with torch.inference_mode():
        bucketed = Bucketed(encode, (1, 8), doublings(5, model.config.max_history), torch.device("cpu"), record)
        assert set(shapes) == {(batch, length) for batch in (1, 8) for length in (5, 10, 20)}
        for sizes, used in [([1], {(1, 5)}), ([6], {(1, 10)}), ([3, 20], {(8, 20)}), ([2] * 9, {(8, 5), (1, 5)}), ([9] * 8, {(8, 10)})]:
            batch = collate([random_sequence(size, seed=seed) for seed, size in enumerate(sizes)], model.config.max_history).tensors()
            columns = [batch[name] for name in ("items", "times", "next_times", "lengths")]
            ran.clear()
            torch.testing.assert_close(bucketed(*columns), encode(*columns), atol=1e-5, rtol=1e-5)
            assert set(ran) == used


def test_what_was_recorded_holds_nothing_of_the_last_batches_once_it_is_cleared():
    ran, answers = [], []

    def record(encode, inputs):
        def run():
            ran.append((*inputs, encode(*inputs)))
            return ran[-1][-1]

        return run

    bucketed = Bucketed(lambda items, *_: items + 1, (1, 2), (3, 5), torch.device("cpu"), record)
    columns = [torch.full((3, 5), 7), *torch.full((2, 3, 5), -7, dtype=torch.int32), torch.full((3,), 5)]
    for _ in range(2):
        answers.append(bucketed(*columns))
        assert all(one.all() for one in ran[-1])
        bucketed.clear()
        assert not any(one.any() for used in ran for one in used)
    assert torch.equal(*answers)
    assert (len(ran), answers[0].unique().tolist()) == (4, [8])


def test_the_weights_stay_as_long_as_the_recorded_encodings_that_read_them():
    class Model:
        def __call__(self, items, times, next_times, lengths):
            return items

    def as_a_graph_is(encode, inputs):
        return partial(encode(*inputs).clone)

    model = Model()
    weights = weakref.ref(model)
    bucketed = Bucketed(model, (1,), (5,), torch.device("cpu"), as_a_graph_is)
    del model
    assert weights() is not None
    del bucketed
    assert weights() is None


def test_doublings_end_with_the_longest_and_start_at_it_where_it_is_short():
    assert doublings(64, 200) == [64, 128, 200]
    assert doublings(64, 64) == doublings(200, 64) == [64]
