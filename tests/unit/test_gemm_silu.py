"""CUTLASS's kernel of the projection without a GPU: compiled for GPUs elsewhere, its PTX interpreted, refused and replaced here."""

import logging
import re
import shutil
import struct
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from cluster.errors import CompileError, UnknownChoice
from integrations.hstu.config import HSTUConfig
from integrations.hstu.kernels import projection, reference
from integrations.hstu.kernels.encoder import PROJECTIONS, TritonEncoder
from integrations.hstu.kernels.gemm_silu_inputs import refuse
from integrations.hstu.kernels.projection import by_cutlass, by_torch, chosen
from integrations.hstu.model import HSTU
from tests import ptx

ABSENT = "nvidia-cutlass-dsl is not installed; install genrec with its extra cutlass"
CONFIG = HSTUConfig(items=10, dim=32, heads=2, attention_dim=8, linear_dim=16)
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
EM_CUDA = 190


@pytest.fixture
def kernel():
    pytest.importorskip("nvidia_cutlass_dsl", reason=ABSENT)
    return import_module("integrations.hstu.kernels.gemm_silu")


def matrices(rows, columns, depth, kind, scale=0.2):
    torch.manual_seed(rows)
    return torch.randn(rows, depth).to(kind), (torch.randn(depth, columns) * scale).to(kind)


def interpreted(kernel, x, w, out, target="sm_80", change=lambda text: text):
    """What the compiled kernel would write, by an interpreter of its PTX; NaN where it writes nothing."""
    (rows, depth), columns = x.shape, w.shape[1]
    y = torch.full((rows, columns), torch.nan, dtype=out)
    text = change(kernel.compiled(x.dtype, out, columns, depth, target).__ptx__)
    starts = [2**33 + 2**24 * index for index in range(3)]
    parameters = {(index, 0): start for index, start in enumerate(starts)} | {(0, 8): rows, (2, 8): rows}
    buffers = {start: tensor.view(torch.uint8).flatten().numpy() for start, tensor in zip(starts, (x, w, y), strict=True)}
    grid = -(-columns // kernel.BLOCK_N), -(-rows // kernel.BLOCK_M)
    ptx.run(text, grid, kernel.THREADS, buffers, parameters)
    return y


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "kind", "out", "target"),
    [
        (130, 200, 104, HALF, HALF, "sm_80"),
        (128, 128, 160, HALF, SINGLE, "sm_80"),
        (5, 136, 40, BRAIN, SINGLE, "sm_90"),
        (1, 8, 8, BRAIN, BRAIN, "sm_90"),
    ],
)
def test_the_compiled_kernel_computes_what_torch_does_at_any_number_of_rows(kernel, rows, columns, depth, kind, out, target):
    x, w = matrices(rows, columns, depth, kind)
    torch.testing.assert_close(interpreted(kernel, x, w, out, target), reference.gemm_silu(x, w, out))


def test_sums_far_from_zero_are_gated_without_overflow(kernel):
    x, w = matrices(16, 16, 32, HALF, scale=100)
    expected = reference.gemm_silu(x, w, SINGLE)
    assert expected.max() > 500
    torch.testing.assert_close(interpreted(kernel, x, w, SINGLE), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("left_out", ["cp.async.wait_group", "bar.sync"])
def test_the_interpreter_notices_a_missing_wait(kernel, left_out):
    x, w = matrices(128, 128, 256, HALF)
    wrong = interpreted(kernel, x, w, HALF, change=lambda text: re.sub(rf"{re.escape(left_out)}[^;]*;", "", text))
    assert not torch.allclose(wrong, reference.gemm_silu(x, w, HALF), atol=1e-2)


@pytest.mark.parametrize(("target", "architecture"), [("sm_80", 80), ("sm_90", 90), ("sm_90a", 90), ("sm_120", 120)])
def test_cubins_hold_tensor_core_instructions_for_a_gpu_that_is_not_here(kernel, tmp_path, target, architecture):
    cubin = kernel.cubin(HALF, HALF, 64, 32, target)
    assert cubin.startswith(b"\x7fELF")
    assert struct.unpack_from("<H", cubin, 18) == (EM_CUDA,)
    text = kernel.compiled(HALF, HALF, 64, 32, target).__ptx__
    assert re.search(r"\.target (\w+)", text)[1] == target
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in text
    if disassembler := _nvdisasm():
        (tmp_path / "cubin").write_bytes(cubin)
        code = subprocess.run([disassembler, tmp_path / "cubin"], capture_output=True, text=True, check=True).stdout
        assert re.search(rf"(?i)sm_?{architecture}\b", code)
        assert "HMMA.16816.F32" in code


def _nvdisasm():
    if found := shutil.which("nvdisasm"):
        return found
    spec = find_spec("triton")
    bundled = spec and Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return bundled if bundled and bundled.exists() else None


def test_a_kernel_is_compiled_once_for_its_types_sizes_and_architecture(kernel):
    first = kernel.compiled(HALF, HALF, 64, 32, "sm_80")
    assert kernel.compiled(HALF, HALF, 64, 32, "sm_80") is first
    for other in [
        (BRAIN, BRAIN, 64, 32, "sm_80"),
        (HALF, SINGLE, 64, 32, "sm_80"),
        (HALF, HALF, 32, 64, "sm_80"),
        (HALF, HALF, 64, 32, "sm_90"),
    ]:
        assert kernel.compiled(*other).__cubin__ != first.__cubin__


def test_an_architecture_that_cute_dsl_does_not_know_is_refused(kernel):
    with pytest.raises(CompileError, match=r"does not compile for 'sm_99'; choose from .*sm_80, "):
        kernel.cubin(HALF, HALF, 64, 32, "sm_99")


@pytest.mark.parametrize(("dtype", "multiplied", "out"), [("fp32", HALF, SINGLE), ("fp16", HALF, HALF), ("bf16", BRAIN, BRAIN)])
def test_the_kernel_is_compiled_ahead_with_tritons(kernel, monkeypatch, dtype, multiplied, out):
    pytest.importorskip("triton", reason="triton is not installed (pip install triton)")
    ahead = import_module("tests.compile_ahead")
    monkeypatch.setattr(ahead, "_kernels", lambda *sizes, **options: [])
    cubins = ahead.compile_ahead(CONFIG, ["sm_80", "sm_90"], dtype=dtype)
    assert cubins == {"gemm_silu": {target: kernel.cubin(multiplied, out, 96, 32, target) for target in ("sm_80", "sm_90")}}
    assert ahead.compile_ahead(CONFIG.model_copy(update={"dim": 50}), ["sm_80"]) == {}


def ones(*shape, dtype=HALF, **options):
    return torch.ones(shape, dtype=dtype, **options)


@pytest.mark.parametrize(
    ("x", "w", "dtype", "reason"),
    [
        (ones(2, 3, 8), ones(8, 8), HALF, r"x \(M, K\) and W \(K, N\), and these are x \(2, 3, 8\)"),
        (ones(2, 8), ones(16, 8), HALF, r"x \(2, 8\) and W \(16, 8\)"),
        (ones(2, 50), ones(50, 8), HALF, r"multiples of 8, and these are x \(2, 50\)"),
        (ones(2, 8), ones(8, 12), HALF, r"multiples of 8, .* W \(8, 12\); pad them"),
        (
            ones(2**21, 8, device="meta"),
            ones(8, 1024, device="meta"),
            HALF,
            r"2\*\*31 elements in x and in the result, .* x \(2097152, 8\)",
        ),
        (ones(2**22, 8, device="meta"), ones(8, 8, device="meta"), HALF, r"fewer than 2\*\*22 rows"),
        (ones(2, 8, dtype=SINGLE), ones(8, 8, dtype=SINGLE), SINGLE, "these are torch.float32, torch.float32 and torch.float32"),
        (ones(2, 8), ones(8, 8, dtype=BRAIN), HALF, "torch.float16, torch.bfloat16 and torch.float16"),
        (ones(2, 8), ones(8, 8), BRAIN, "and torch.bfloat16; convert them"),
        (ones(2, 8), ones(8, 8, requires_grad=True), HALF, "no part in gradients"),
        (ones(8, 2).T, ones(8, 8), HALF, r"row-major .* x has strides \(1, 2\)"),
        (ones(17)[1:].reshape(2, 8), ones(8, 8), HALF, "aligned to 16 bytes"),
        (ones(2, 8), ones(8, 8), HALF, "x and W on one GPU, and these are on cpu and cpu"),
    ],
)
def test_what_the_kernel_would_compute_wrongly_is_refused_with_its_values(x, w, dtype, reason):
    with pytest.raises(ValueError, match=f"gemm_silu takes .*{reason}"):
        refuse(x, w, dtype)


def test_the_projection_is_torchs_unless_asked_otherwise():
    assert chosen("torch", CONFIG) is by_torch
    with pytest.raises(UnknownChoice, match="unknown projection 'cublas'; choose from cutlass, torch"):
        TritonEncoder(projection="cublas")
    assert [TritonEncoder(projection=name)._projection for name in PROJECTIONS] == ["torch", "cutlass"]  # noqa: SLF001 - it cannot load here, and shows its choice nowhere else


@pytest.mark.parametrize(
    ("package", "changes", "reason"),
    [
        (None, {}, "nvidia-cutlass-dsl is not installed; install genrec with its extra cutlass"),
        ("", {"dim": 50}, "dim is 50; train a model where that is a multiple of 8"),
        ("", {"attention_dim": 5}, "attention_dim + linear_dim) is 84"),
        ("", {}, "no NVIDIA GPU with a driver is usable here"),
    ],
)
def test_torch_projects_where_the_kernel_cannot_and_the_log_says_why(monkeypatch, caplog, package, changes, reason):
    monkeypatch.setattr(projection, "find_spec", lambda name: package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert chosen("cutlass", CONFIG.model_copy(update=changes)) is by_torch
    assert f"projection=torch (cutlass: {reason}" in caplog.text.replace("gemm_silu copies 8 numbers at once and ", "").replace(
        "2 * heads * (", ""
    )


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))


def test_the_kernel_projects_on_a_gpu_from_compute_capability_8_on(kernel, gpu):
    assert chosen("cutlass", CONFIG) is by_cutlass


def test_torch_projects_where_cutlass_is_installed_and_breaks_as_it_is_imported(gpu, monkeypatch, caplog, tmp_path):
    (tmp_path / "cutlass.py").write_text("import os\n\nos.cudaLibrary_t\n")  # as where packages have overwritten files of each other
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("cutlass", "integrations.hstu.kernels.gemm_silu"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(projection, "find_spec", lambda name: "")
    assert chosen("cutlass", CONFIG) is by_torch
    reason = "nvidia-cutlass-dsl is installed but cannot be imported: AttributeError: module 'os' has no attribute 'cudaLibrary_t'"
    assert f"projection=torch (cutlass: {reason})" in caplog.text


def test_any_projection_takes_the_place_of_the_layers_own(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed (pip install triton)")
    fused = import_module("integrations.hstu.kernels.fused").FusedHSTU(CONFIG, lambda x, w: F.silu(x @ w))
    layer, x = fused._layers()[0], torch.randn(2, 3, CONFIG.dim)  # noqa: SLF001 - one step of the fused layer, which needs a GPU as a whole
    u, v, q, k = fused._uvqk(layer, x)  # noqa: SLF001 - as above
    for actual, expected in zip((u, v.transpose(1, 2), q.transpose(1, 2), k.permute(0, 2, 3, 1)), layer.project(x), strict=True):
        torch.testing.assert_close(actual, expected)
    assert isinstance(fused, HSTU)


def test_fp32_is_multiplied_as_fp16_and_stays_fp32(kernel, monkeypatch):
    monkeypatch.setattr(kernel, "gemm_silu", lambda x, w, dtype: reference.gemm_silu(x, w, dtype) if x.dtype == w.dtype == HALF else None)
    x, w = torch.randn(7, 32), torch.randn(32, 16) * 0.2
    y = by_cutlass(x, w)
    assert y.dtype == SINGLE
    torch.testing.assert_close(y, by_torch(x, w), atol=5e-3, rtol=5e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU with a driver is usable here")
@pytest.mark.parametrize("kind", [HALF, BRAIN])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 8, 8), (130, 200, 104), (6752, 1024, 256)])
def test_agrees_with_the_reference_on_a_gpu(kernel, kind, rows, columns, depth):
    x, w = (matrix.cuda() for matrix in matrices(rows, columns, depth, kind, scale=depth**-0.5))
    for out in (kind, SINGLE):
        torch.testing.assert_close(kernel.gemm_silu(x, w, out), reference.gemm_silu(x, w, out), atol=1e-2, rtol=1e-2)
