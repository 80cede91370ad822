import ctypes
import shutil
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import onnx
import pytest
import torch

from cluster.bundle import Bundle, FailedStep, ModelRecord
from cluster.compilation import CompileOptions
from cluster.errors import BackendFailed, BackendUnavailable, CompileError, ConfigError, UnknownChoice
from cluster.values import EncodeRequest
from integrations.hstu.append_inputs import GROUP_BYTES_ON_GPU
from integrations.hstu.encoder import TorchEncoder
from integrations.hstu.weights import load_model
from integrations.onnx.files import graph_file
from integrations.onnx.graphs import graphs
from integrations.onnx.layers import by_layer
from integrations.tensorrt import build, device, engine_files, library
from integrations.tensorrt.build import build_engine, builder_config, profile_ranges
from integrations.tensorrt.encoder import TensorRTEncoder
from integrations.tensorrt.engine import Engine
from integrations.tensorrt.engine_files import engine_of
from integrations.tensorrt.library import FULL, RTX, load_library, make_logger
from integrations.tensorrt.options import MOST_CANDIDATES
from integrations.tensorrt.ranker import TensorRTRanker
from tests.bundles import random_sequence
from tests.unit.test_kept_states import assert_agree, growing

rtx = pytest.importorskip(RTX, reason="TensorRT-RTX is not installed; install genrec with its extra cpu")


def has_gpu():
    try:
        return bool(device.gpu_architecture())
    except BackendUnavailable:
        return False


without_gpu = pytest.mark.skipif(has_gpu(), reason="a GPU is here, so its absence cannot be shown")


@pytest.fixture(autouse=True)
def _nothing_refused(monkeypatch):
    monkeypatch.setattr(engine_files, "REFUSED", {})


@pytest.fixture
def compiled_hstu(compiled_hstu):
    if not any(artifact.target == "sm_89" for artifact in compiled_hstu.manifest.artifacts):
        pytest.skip("the full TensorRT is here and built for its own GPU only")
    return compiled_hstu


@pytest.fixture
def altered(compiled_hstu, tmp_path):
    shutil.copytree(compiled_hstu.path, tmp_path / "2")
    return Bundle(tmp_path / "2", compiled_hstu.manifest)


def with_artifacts(bundle, artifacts, failed=()):
    return replace(bundle, manifest=bundle.manifest.model_copy(update={"artifacts": list(artifacts), "failed_steps": list(failed)}))


def built(bundle, graph="encode", precision="fp32", target="sm_89", ranges=None):
    ranges = profile_ranges(graph, bundle.manifest) if ranges is None else ranges
    return build_engine(rtx, bundle.path / graph_file(graph, precision), ranges, target)


@without_gpu
def test_builds_every_graph_in_both_precisions_for_every_target_without_a_gpu(compiled_hstu):
    engines = {(a.graph, a.precision, a.target) for a in compiled_hstu.manifest.artifacts if a.kind == "tensorrt"}
    assert engines == {(g, p, t) for g in build.GRAPHS for p in ("fp32", "fp16") for t in ("sm_80", "sm_89")}
    assert not compiled_hstu.manifest.failed_steps


def test_a_compile_of_int8_alone_builds_no_engine_and_fails_at_none(compiled_hstu):
    draft = SimpleNamespace(artifacts=[], path=compiled_hstu.path)
    assert build.TensorRTCompiler().steps(compiled_hstu, draft, CompileOptions(precisions=("int8",), targets=("sm_89",))) == []


def test_refuses_an_architecture_that_the_library_cannot_build_for(compiled_hstu):
    with pytest.raises(CompileError, match=r"does not build for 'sm_90', only for sm_75, sm_80"):
        built(compiled_hstu, target="sm_90")


def test_passes_on_the_librarys_reason_where_an_architecture_lacks_an_operation(compiled_hstu):
    with pytest.raises(CompileError, match="FP32 GEMM is not supported"):
        built(compiled_hstu, target="sm_75")


def test_refuses_a_graph_with_a_dimension_nobody_gave_a_range(compiled_hstu):
    with pytest.raises(CompileError, match=r"input 'items' has dimensions \['length'\] without a range"):
        built(compiled_hstu, ranges={"batch": (1, 2, 4)})


def test_passes_on_the_librarys_reason_where_the_ranges_contradict_themselves(compiled_hstu):
    with pytest.raises(CompileError, match=r"(?i)profile"):
        built(compiled_hstu, ranges={"batch": (8, 2, 1), "length": (1, 2, 3)})


def test_refuses_a_graph_with_an_operator_it_does_not_know(tmp_path):
    make = onnx.helper
    values = [make.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in ("x", "y")]
    graph = make.make_graph([make.make_node("Telepathy", ["x"], ["y"], domain="nowhere")], "odd", values[:1], values[1:])
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 20), make.make_opsetid("nowhere", 1)]), tmp_path / "odd.onnx")
    with pytest.raises(CompileError, match=r"cannot parse odd\.onnx: .*Telepathy"):
        build_engine(rtx, tmp_path / "odd.onnx", {}, "sm_89")


def test_refuses_a_file_that_is_no_graph(tmp_path):
    (tmp_path / "noise.onnx").write_bytes(b"\x00noise" * 50)
    with pytest.raises(CompileError, match=r"cannot (parse|build) noise\.onnx"):
        build_engine(rtx, tmp_path / "noise.onnx", {}, "sm_89")


@without_gpu
def test_an_engine_does_not_load_without_a_driver_and_says_so(compiled_hstu):
    with pytest.raises(BackendUnavailable, match=r"cannot load encode\.fp32\.sm_89\.engine here: .*CUDA driver"):
        Engine(load_library(RTX), compiled_hstu.path / "tensorrt/encode.fp32.sm_89.engine")


def test_is_unavailable_where_no_library_is_installed(compiled_hstu, monkeypatch):
    monkeypatch.setattr(engine_files, "installed", list)
    assert (
        TensorRTEncoder().get_availability(compiled_hstu).reason.startswith("TensorRT is not installed; install genrec with its extra gpu")
    )


def test_is_unavailable_where_the_bundle_has_no_engine_and_says_which_step_failed(compiled_hstu):
    graphs_only = [a for a in compiled_hstu.manifest.artifacts if a.kind == "onnx"]
    reason = TensorRTEncoder().get_availability(with_artifacts(compiled_hstu, graphs_only)).reason
    assert reason == f"tiny-hstu/2 has no tensorrt artifact 'encode'; run: genrec compile --model-dir {compiled_hstu.path.parent}"
    failed = [FailedStep(step="tensorrt encode fp32 sm_75", reason="FP32 GEMM is not supported")]
    reason = TensorRTEncoder().get_availability(with_artifacts(compiled_hstu, graphs_only, failed)).reason
    assert "the step 'tensorrt encode fp32 sm_75' failed: FP32 GEMM is not supported" in reason


def test_is_unavailable_where_the_engine_files_were_deleted_whether_or_not_there_is_a_gpu(altered):
    for engine in (altered.path / "tensorrt").iterdir():
        engine.unlink()
    encoder = TensorRTEncoder()
    found = encoder.get_availability(altered)
    assert found.told == "tensorrt/encode.fp32.sm_80.engine is missing; run: genrec compile"
    assert found.reason == f"{altered.path}/{found.told} --model-dir {altered.path.parent}"
    with pytest.raises(BackendUnavailable, match="missing") as refused:
        encoder.load(altered)
    assert refused.value.told == found.told


@without_gpu
def test_is_unavailable_without_a_gpu_and_driver(compiled_hstu):
    assert TensorRTEncoder().get_availability(compiled_hstu).reason.startswith("no NVIDIA GPU with a driver is usable here")


def on_gpu(monkeypatch, architecture, name="NVIDIA L4"):
    monkeypatch.setattr(engine_files, "gpu_architecture", lambda: architecture)
    monkeypatch.setattr(engine_files, "gpu_name", lambda: name)


def test_is_unavailable_on_a_gpu_nobody_built_for_and_says_what_there_is(compiled_hstu, monkeypatch):
    on_gpu(monkeypatch, "sm_90")
    found = TensorRTEncoder().get_availability(with_artifacts(compiled_hstu, compiled_hstu.manifest.artifacts))
    assert "has engines for sm_80 fp32, sm_89 fp32, sm_80 fp16, sm_89 fp16, none for this GPU, sm_90" in found.reason
    assert f"genrec compile --model-dir {compiled_hstu.path.parent} --only tensorrt" in found.reason
    assert found.told.endswith("none for this GPU, sm_90 fp32/fp16; run on this machine: genrec compile --only tensorrt")


def test_quotes_the_step_that_failed_for_the_gpu_that_is_here(compiled_hstu, monkeypatch):
    on_gpu(monkeypatch, "sm_90")
    failed = [FailedStep(step=f"tensorrt encode fp32 {target}", reason=f"not for {target}") for target in ("sm_75", "sm_90")]
    reason = TensorRTEncoder().get_availability(with_artifacts(compiled_hstu, compiled_hstu.manifest.artifacts, failed)).reason
    assert reason.endswith("none for this GPU, sm_90 fp32/fp16; the step 'tensorrt encode fp32 sm_90' failed: not for sm_90")


def test_is_available_on_a_gpu_it_was_built_for_until_that_engine_is_altered(altered, monkeypatch):
    on_gpu(monkeypatch, "sm_89")
    encoder = TensorRTEncoder()
    assert encoder.get_availability(altered).ok
    (altered.path / "tensorrt/encode.fp32.sm_89.engine").write_bytes(b"short")
    assert "encode.fp32.sm_89.engine" in encoder.get_availability(altered).reason


def built_by(bundle, builder):
    """The bundle, as if this library had built its engines."""
    altered = [a.model_copy(update={"builder": builder}) if a.kind == "tensorrt" else a for a in bundle.manifest.artifacts]
    return with_artifacts(bundle, altered)


@pytest.mark.parametrize(
    ("here", "builder", "packages"),
    [
        (RTX, "tensorrt 10.9", "tensorrt==10.9"),
        (FULL, "tensorrt_rtx_bindings 1.7.1.116", "tensorrt-rtx-cu13-bindings==1.7.1.116 tensorrt-rtx-cu13-libs==1.7.1.116"),
    ],
)
def test_where_the_library_that_built_the_engine_is_missing_it_says_what_to_install_or_run(
    compiled_hstu, monkeypatch, here, builder, packages
):
    on_gpu(monkeypatch, "sm_89")
    monkeypatch.setattr(engine_files, "installed", lambda: [here])
    reason = TensorRTEncoder().get_availability(built_by(compiled_hstu, builder)).reason
    missing = f"tensorrt/encode.fp32.sm_89.engine was built by {builder}, which is not installed; run: pip install {packages}, "
    command = f"genrec compile --model-dir {compiled_hstu.path.parent} --only tensorrt"
    assert reason == f"{missing}or build engines on this machine: {command}"


def test_an_engine_of_another_version_of_its_library_is_refused_with_the_command_that_builds_it_anew(compiled_hstu, monkeypatch):
    on_gpu(monkeypatch, "sm_89")
    reason = TensorRTEncoder().get_availability(built_by(compiled_hstu, f"{RTX} 1.5.0.1")).reason
    versions = f"was built by {RTX} 1.5.0.1, and {rtx.__version__} is installed, which does not load it"
    command = f"genrec compile --model-dir {compiled_hstu.path.parent} --only tensorrt"
    assert reason == f"tensorrt/encode.fp32.sm_89.engine {versions}; run on this machine: {command}"


def test_a_library_of_which_no_package_tells_the_version_is_tried(compiled_hstu, monkeypatch):
    on_gpu(monkeypatch, "sm_89")
    monkeypatch.setattr(library, "PACKAGES", {RTX: ()})
    assert TensorRTEncoder().get_availability(built_by(compiled_hstu, f"{RTX} 1.5.0.1")).ok


def test_prefers_the_precisions_in_the_order_given(compiled_hstu, monkeypatch):
    on_gpu(monkeypatch, "sm_89")
    assert engine_of(compiled_hstu, "encode", ("fp32", "fp16")).precision == "fp32"
    assert engine_of(compiled_hstu, "encode", ("fp16", "fp32")).precision == "fp16"


@pytest.mark.parametrize("backend", [TensorRTEncoder, TensorRTRanker])
@pytest.mark.parametrize(
    ("precisions", "error", "said"),
    [
        ("fp16", ConfigError, r"precisions \('fp16'\) must be a list"),
        ([], ConfigError, r"precisions \(\[\]\) must be a list of one or more"),
        (["fp32", "bf16"], UnknownChoice, "unknown precision 'bf16'; choose from fp16, fp32, int8"),
    ],
)
def test_refuses_precisions_that_are_no_list_of_what_engines_are_built_in(backend, precisions, error, said):
    with pytest.raises(error, match=said):
        backend(precisions)


def test_refuses_more_candidates_at_a_time_than_a_rankers_engine_takes():
    assert TensorRTRanker(micro_batch=MOST_CANDIDATES)
    with pytest.raises(ConfigError, match=r"micro_batch \(2049\) must be at most 2048"):
        TensorRTRanker(micro_batch=MOST_CANDIDATES + 1)


def test_the_full_library_is_not_used_to_build_without_a_gpu(monkeypatch):
    monkeypatch.setattr(build, "installed", lambda: [FULL])
    with pytest.raises(CompileError, match="no TensorRT builder can work here"):
        build.builder_library(None)
    monkeypatch.setattr(build, "installed", lambda: [FULL, RTX])
    assert build.builder_library(None).__name__ == RTX


def test_builds_with_rtx_where_the_full_library_does_not_load(monkeypatch):
    def load(name):
        if name == FULL:
            raise ImportError("libnvinfer.so.10: cannot open shared object file")
        return rtx

    monkeypatch.setattr(build, "installed", lambda: [FULL, RTX])
    monkeypatch.setattr(build, "load_library", load)
    assert build.builder_library("sm_89") is rtx
    monkeypatch.setattr(build, "installed", lambda: [FULL])
    with pytest.raises(CompileError, match=r"libnvinfer\.so\.10"):
        build.builder_library("sm_89")


def test_builds_with_rtx_for_the_gpu_that_is_here_as_well(compiled_hstu, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "gpu_architecture", lambda: "sm_90")
    monkeypatch.setattr(build, "installed", lambda: [RTX])
    graphs = [a for a in compiled_hstu.manifest.artifacts if (a.kind, a.graph, a.precision) == ("onnx", "encode", "fp32")]
    draft = SimpleNamespace(path=tmp_path, artifacts=graphs)
    steps = build.TensorRTCompiler().steps(compiled_hstu, draft, CompileOptions(targets=("sm_89",)))
    assert [step.name for step in steps] == ["tensorrt encode fp32 sm_89", "tensorrt encode fp32 sm_90"]


def test_engines_compute_without_tf32_which_the_fp32_gate_would_refuse():
    builder = rtx.Builder(make_logger(rtx))
    assert builder.create_builder_config().get_flag(rtx.BuilderFlag.TF32), "the library's default"
    assert not builder_config(rtx, builder, "sm_89").get_flag(rtx.BuilderFlag.TF32)


class Faked:
    """The library, but for the names that are given."""

    def __init__(self, **names):
        self.__dict__.update(names)

    def __getattr__(self, name):
        return getattr(rtx, name)


def null_pointer(*_):
    raise TypeError("pybind11::init(): factory function returned nullptr")


def test_a_builder_that_cannot_start_fails_its_step_only(compiled_hstu):
    graph = compiled_hstu.path / graph_file("encode", "fp32")
    with pytest.raises(CompileError, match=r"building encode\.fp32\.onnx for sm_89, broke: TypeError: .*returned nullptr"):
        build_engine(Faked(Builder=null_pointer), graph, profile_ranges("encode", compiled_hstu.manifest), "sm_89")


class Deserialized:
    """An engine with one output, of a type, whose context may not start."""

    num_io_tensors = 1

    def __init__(self, context, dtype):
        self._context, self._dtype = context, dtype

    def create_execution_context(self):
        return self._context

    def get_tensor_name(self, index):
        return "state"

    def get_tensor_mode(self, name):
        return rtx.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name):
        return self._dtype


@pytest.mark.parametrize(
    ("runtime", "reason"),
    [
        (null_pointer, "broke: TypeError: .*returned nullptr"),
        (lambda _: SimpleNamespace(deserialize_cuda_engine=lambda data: Deserialized(None, rtx.DataType.FLOAT)), "lack of GPU memory"),
        (
            lambda _: SimpleNamespace(deserialize_cuda_engine=lambda data: Deserialized(object(), rtx.DataType.FP8)),
            "broke: KeyError: .*FP8",
        ),
    ],
)
def test_an_engine_that_cannot_start_makes_the_backend_unavailable(compiled_hstu, runtime, reason):
    with pytest.raises(BackendUnavailable, match=reason):
        Engine(Faked(Runtime=runtime), compiled_hstu.path / "tensorrt/encode.fp32.sm_89.engine")


def test_an_engine_that_cannot_start_where_it_was_built_fails_its_step(compiled_hstu, monkeypatch):
    graph = next(a for a in compiled_hstu.manifest.artifacts if (a.kind, a.graph, a.precision) == ("onnx", "encode", "fp32"))
    with pytest.raises(CompileError, match="returned nullptr"):
        build.measured(Faked(Runtime=null_pointer), compiled_hstu, compiled_hstu.path / "tensorrt/encode.fp32.sm_89.engine", graph)


class Context:
    """The context of an engine in host memory, which takes any address but that of the tensor named `refused`; `read`: what an execution
    finds at its inputs' addresses.
    """

    num_io_tensors = property(lambda self: len(self.shapes) + 1)

    def __init__(self, inputs, refused=""):
        self.shapes = {name: tuple(one.shape) for name, one in inputs.items()}
        self.sizes = {name: one.nbytes for name, one in inputs.items()}
        self.refused, self.addresses, self.read = refused, {}, {}

    def create_execution_context(self):
        return self

    def get_tensor_name(self, index):
        return [*self.shapes, "made"][index]

    def get_tensor_mode(self, name):
        return rtx.TensorIOMode.INPUT if name in self.shapes else rtx.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name):
        return rtx.DataType.FLOAT

    def get_tensor_shape(self, name):
        return (1, 50)

    def set_input_shape(self, name, shape):
        return shape == self.shapes[name]

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return name != self.refused

    def execute_async_v3(self, stream):
        self.read = {name: ctypes.string_at(self.addresses[name], size) for name, size in self.sizes.items()}
        return True


def aligned(tensor):
    """A copy that begins at a multiple of 256 bytes, as what torch's allocator gives on a GPU."""
    room = torch.empty(tensor.nbytes + 256, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    return room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


@pytest.fixture
def layers(monkeypatch):
    """Keys and values of 1,023 kept rows in two layers with one head of 50, of which the second layer begins in the middle of 256 bytes."""
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None, cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.Tensor, "clone", aligned)
    pool = aligned(torch.arange(2 * 50 * 1023, dtype=torch.float32))
    found = by_layer(pool.view(2, 1, 1, 50, 1023), pool.view(2, 1, 1, 1023, 50))
    assert [one.data_ptr() % 256 for one in found.values()] == [0, 56, 0, 56]
    return found


def opened(context, tmp_path):
    (tmp_path / "append.engine").touch()
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda data: context)
    return Engine(Faked(Runtime=lambda logger: runtime), tmp_path / "append.engine", device="cpu")


def test_each_layers_rows_begin_where_tensorrt_lets_an_input_begin(layers, tmp_path):
    context = Context(layers)
    opened(context, tmp_path).run(layers)
    assert [context.addresses[name] % 256 for name in layers] == [0, 0, 0, 0]
    assert context.read == {name: one.numpy().tobytes() for name, one in layers.items()}


@pytest.mark.parametrize("refused", ["past_v_1", "made"])
def test_an_address_that_is_refused_fails_the_call_which_would_read_or_write_at_the_one_before(layers, tmp_path, refused):
    with pytest.raises(BackendFailed, match=rf"does not take the address \d+ for '{refused}'"):
        opened(Context(layers, refused), tmp_path).run(layers)


class TorchEngine:
    """An engine whose answers are the model's, times `factor`; it counts its calls."""

    largest_batch, most_new = 32, 4

    def __init__(self, graph, factor):
        self._graph, self._factor, self.calls = graph, factor, 0
        self.inputs, self.outputs = list(graph.inputs), list(graph.outputs)

    def largest(self, name, axis):
        assert (name, axis) == ("items", 1)
        return self.most_new

    def run(self, inputs):
        assert self._graph.name != "append" or inputs["items"].shape[1] <= 8
        self.calls += 1
        with torch.no_grad():
            made = self._graph.module(*(inputs[name] for name in self.inputs))
        return {name: output * self._factor for name, output in zip(self.outputs, made, strict=True)}


def served_with(monkeypatch, bundle, factor, append_factor=1.0):
    """The `encode` engine by which TensorRTEncoder will then serve; `append` has its own factor."""
    on_gpu(monkeypatch, "sm_89")
    factors = {"encode": factor, "retrieve": factor, "append": append_factor}
    engines = {graph.name: TorchEngine(graph, factors[graph.name]) for graph in graphs(load_model(bundle), bundle.prompt_length)}
    monkeypatch.setattr("integrations.tensorrt.engine.Engine", lambda library, file: engines[file.name.split(".")[0]])
    return engines["encode"]


@pytest.mark.parametrize("factor", [0.9, float("nan")])
def test_an_engine_built_without_its_gpu_is_checked_before_it_serves_and_refused_where_it_is_wrong(compiled_hstu, monkeypatch, factor):
    served_with(monkeypatch, compiled_hstu, factor)
    with pytest.raises(BackendUnavailable, match=r"encode\.fp32\.sm_89\.engine, built without this GPU .* refused: its outputs are"):
        TensorRTEncoder().load(compiled_hstu)


def test_an_engine_that_was_wrong_here_is_not_tried_again_on_this_gpu(compiled_hstu, monkeypatch):
    served_with(monkeypatch, compiled_hstu, 0.9)
    encoder = TensorRTEncoder()
    assert encoder.get_availability(compiled_hstu).ok
    with pytest.raises(BackendUnavailable, match="refused: its outputs are") as refused:
        encoder.load(compiled_hstu)
    engine = served_with(monkeypatch, compiled_hstu, 0.9)
    with pytest.raises(BackendUnavailable, match="refused: its outputs are") as again:
        encoder.load(compiled_hstu)
    assert (engine.calls, f"{again.value}") == (0, f"{refused.value}")
    assert encoder.get_availability(compiled_hstu).reason == f"{refused.value}"
    on_gpu(monkeypatch, "sm_89", "NVIDIA L40S")
    assert encoder.get_availability(compiled_hstu).ok


def test_an_engine_that_broke_here_is_tried_again_as_there_may_be_memory_then(compiled_hstu, monkeypatch):
    def out_of_memory(inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    served_with(monkeypatch, compiled_hstu, 1.0).run = out_of_memory
    with pytest.raises(BackendUnavailable, match="broke when it ran: CUDA out of memory"):
        TensorRTEncoder().load(compiled_hstu)
    served_with(monkeypatch, compiled_hstu, 1.0)
    TensorRTEncoder().load(compiled_hstu)


def measured_on(bundle, gpu):
    """The bundle, as if its engines had been built and measured on this GPU."""
    measured = {"parity": {"max_abs_error": 0.0, "state_error": 0.0, "top10_agreement": 1.0}, "measured_on": gpu}
    return with_artifacts(bundle, [a.model_copy(update=measured) for a in bundle.manifest.artifacts])


def test_an_engine_that_answers_as_the_model_does_serves(compiled_hstu, monkeypatch):
    served_with(monkeypatch, compiled_hstu, 1.0)
    encoder = TensorRTEncoder()
    encoder.load(compiled_hstu)
    assert len(encoder.infer(EncodeRequest(random_sequence(3), 4)).items) == 4


def test_an_engine_measured_on_this_gpu_when_it_was_built_is_not_measured_again(compiled_hstu, monkeypatch):
    engine = served_with(monkeypatch, compiled_hstu, 1.0)
    TensorRTEncoder().load(measured_on(compiled_hstu, "NVIDIA L4"))
    assert engine.calls == 1


def test_an_engine_measured_on_another_gpu_of_this_architecture_is_measured_here(compiled_hstu, monkeypatch):
    served_with(monkeypatch, compiled_hstu, 0.9)
    with pytest.raises(BackendUnavailable, match=r"encode\.fp32\.sm_89\.engine, built without this GPU .* refused: its outputs are"):
        TensorRTEncoder().load(measured_on(compiled_hstu, "NVIDIA L40S"))


@pytest.fixture
def keeping(compiled_hstu, monkeypatch):
    served_with(monkeypatch, compiled_hstu, 1.0)
    encoder = TensorRTEncoder(keep_from=1)
    encoder.load(compiled_hstu)
    yield encoder
    encoder.close()


@pytest.fixture
def plain(compiled_hstu):
    encoder = TorchEncoder(state_bytes=0)
    encoder.load(compiled_hstu)
    return encoder


def test_appends_to_kept_states_by_the_append_engine_in_steps_that_it_takes(keeping, plain):
    for requests in growing([random_sequence(length, seed=length) for length in range(1, 31)], seed=3):
        assert_agree(plain, keeping, requests)
    assert keeping.kept()["hit_rows"] > 0.5 * keeping.kept()["asked_rows"]
    assert keeping.forget("default", "user 29") > 0


def test_shorter_histories_are_kept_in_host_memory_than_on_a_gpu(compiled_hstu, monkeypatch):
    monkeypatch.setattr("integrations.hstu.state_options.KEEP_FROM", 5)
    served_with(monkeypatch, compiled_hstu, 1.0)
    for encoder, keeps in (
        (TensorRTEncoder(), False),
        (TorchEncoder(), not torch.cuda.is_available()),
        (TensorRTEncoder(keep_from=5), True),
    ):
        encoder.load(compiled_hstu)
        assert bool(encoder.kept()) == keeps
        encoder.close()


def test_users_in_one_call_of_the_append_engine_are_as_many_as_fit_on_a_gpu(keeping):
    assert keeping._kept.inputs.shapes.most_bytes == GROUP_BYTES_ON_GPU  # noqa: SLF001 - gigabytes of states would show it


def test_a_user_of_whom_everything_but_the_last_event_is_kept_costs_one_call_of_the_append_engine_and_none_of_the_other(keeping, plain):
    request = EncodeRequest(random_sequence(20), 10, user_id="ann")
    keeping.infer(request)
    encode, append = keeping._engine, keeping._kept  # noqa: SLF001 - the engines count their calls
    run, sizes = append.run, []
    append.run = lambda inputs: sizes.append(inputs["items"].shape) or run(inputs)
    before = encode.calls
    assert keeping.infer(request).state == pytest.approx(plain.infer(request).state, abs=1e-5)
    assert (sizes, encode.calls) == ([(1, 1)], before)


@pytest.mark.parametrize("factor", [0.9, float("nan")])
def test_an_append_engine_that_is_wrong_keeps_no_state_and_every_history_is_encoded_whole(
    compiled_hstu, monkeypatch, plain, caplog, factor
):
    served_with(monkeypatch, compiled_hstu, 1.0, append_factor=factor)
    encoder, request = TensorRTEncoder(keep_from=1), EncodeRequest(random_sequence(20), 10, user_id="ann")
    encoder.load(compiled_hstu)
    assert encoder.infer(request).state == pytest.approx(plain.infer(request).state, abs=1e-5)
    assert encoder.kept() == {}
    assert "tensorrt keeps no user's state: tensorrt/append.fp32.sm_89.engine, built without this GPU" in caplog.text


def test_keeps_no_state_where_there_is_no_append_engine_and_says_how_to_build_it(compiled_hstu, monkeypatch, caplog):
    bare = with_artifacts(compiled_hstu, [a for a in compiled_hstu.manifest.artifacts if (a.kind, a.graph) != ("tensorrt", "append")])
    served_with(monkeypatch, bare, 1.0)
    encoder = TensorRTEncoder(keep_from=1)
    encoder.load(bare)
    assert len(encoder.infer(EncodeRequest(random_sequence(20), 10, user_id="ann")).items) == 10
    assert encoder.kept() == {}
    assert "tensorrt keeps no user's state: tiny-hstu/2 has no tensorrt artifact 'append'; run: genrec compile" in caplog.text


def test_an_append_engine_takes_as_many_new_rows_as_encode_attends_at_once(compiled_hstu):
    config = {**compiled_hstu.manifest.model.config, "max_history": 2048, "max_length": 2059}
    manifest = compiled_hstu.manifest.model_copy(update={"model": ModelRecord(family="hstu", config=config)})
    assert profile_ranges("append", manifest)["new"] == (1, 1, 258)
    assert profile_ranges("append", compiled_hstu.manifest)["new"][2] <= 32
