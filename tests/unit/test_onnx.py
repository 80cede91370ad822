import logging
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from cluster.bundle import Bundle, FileRecord
from cluster.bundle_store import BundleStore
from cluster.checksums import sha256
from cluster.compilation import CompileOptions
from cluster.errors import BackendFailed, BackendUnavailable, CompileError
from cluster.values import EncodeRequest
from integrations import gpu
from integrations.hstu.config import HSTUConfig
from integrations.hstu.kernels import buckets
from integrations.hstu.model import HSTU
from integrations.hstu.weights import load_model, load_ranker
from integrations.onnx.encoder import OnnxRuntimeEncoder
from integrations.onnx.export import export, session_run
from integrations.onnx.files import graph_file
from integrations.onnx.graphs import Graph, graphs, ranker_graphs
from integrations.onnx.half import halved
from integrations.onnx.layers import by_layer
from integrations.onnx.parity import measure, require_parity
from integrations.onnx.samples import history, samples
from integrations.onnx.session import _warn_of_lost, computes_here, open_session
from pipelines.compile import compile_bundle
from tests.bundles import last_states, make_bundle, make_ranking_bundle, random_sequence


@pytest.fixture(scope="module")
def model(compiled_hstu):
    return load_model(compiled_hstu)


@pytest.fixture(scope="module")
def encode(compiled_hstu):
    return session_run(compiled_hstu.path / graph_file("encode", "fp32"))


@pytest.fixture(scope="module")
def append(compiled_hstu):
    return session_run(compiled_hstu.path / graph_file("append", "fp32"))


@pytest.fixture
def altered(compiled_hstu, tmp_path):
    """A copy of the compiled bundle that a test may damage."""
    shutil.copytree(compiled_hstu.path, tmp_path / "2")
    return Bundle(tmp_path / "2", compiled_hstu.manifest)


def test_the_manifest_says_how_far_each_graph_is_from_the_model(compiled_hstu):
    parity = {(a.graph, a.precision): a.parity for a in compiled_hstu.manifest.artifacts if a.kind == "onnx"}
    built_from = ("encode", "append", "rank", "rank_append")
    assert parity.keys() == {(g, "fp32") for g in ("retrieve", *built_from)} | {(g, "fp16") for g in built_from}
    for (_, precision), figures in parity.items():
        assert 0 <= figures["max_abs_error"] < (1e-5 if precision == "fp32" else 2e-2)
        assert figures["top10_agreement"] >= 0.9


def test_prunes_to_the_last_row_without_changing_it(model):
    inputs = history(model.config, 4, 20, torch.Generator().manual_seed(3))
    with torch.no_grad():
        rows = model(inputs["items"], inputs["times"], inputs["next_times"])
        expected = rows[torch.arange(4), inputs["lengths"] - 1]
        assert last_states(model, *inputs.values()).numpy() == pytest.approx(expected.numpy(), abs=1e-6)


def test_divides_by_the_models_constant_whatever_the_length_of_the_inputs(model, encode):
    inputs = history(model.config, 2, 6, torch.Generator().manual_seed(4))
    wider = {name: torch.nn.functional.pad(value, (0, 9)) if value.dim() == 2 else value for name, value in inputs.items()}
    assert encode(wider)["state"] == pytest.approx(encode(inputs)["state"], abs=1e-6)
    with torch.no_grad():
        assert encode(inputs)["state"] == pytest.approx(last_states(model, *inputs.values()).numpy(), abs=1e-5)


@pytest.mark.parametrize(("users", "longest", "length"), [(1, 1, 4), (5, 3, 5), (3, 13, 13), (7, 31, 31)])
def test_answers_as_the_model_for_sizes_that_it_was_not_traced_with(model, encode, users, longest, length):
    inputs = history(model.config, users, length, torch.Generator().manual_seed(length), longest=longest)
    with torch.no_grad():
        assert encode(inputs)["state"] == pytest.approx(last_states(model, *inputs.values()).numpy(), abs=1e-5)


def test_a_graph_takes_all_inputs_though_its_model_may_not_need_them(compiled_sasrec):
    encode = onnx.load(compiled_sasrec.path / graph_file("encode", "fp32"))
    taken = {value.name: [size.dim_param for size in value.type.tensor_type.shape.dim] for value in encode.graph.input}
    history = ["batch", "length"]
    assert taken == {"items": history, "times": history, "next_times": history, "lengths": ["batch"]}


def test_refuses_a_model_that_takes_a_number_from_its_example(model, tmp_path):
    class Fixed(torch.nn.Module):
        def forward(self, items, times, next_times, lengths):
            return items * lengths.max().item()

    graph = Graph("encode", Fixed(), graphs(model)[0].inputs, ("state",))
    with pytest.raises(CompileError, match="constant in the future"):
        export(graph, model.config, tmp_path / "graph.onnx")


def test_takes_the_time_of_the_request_as_the_last_rows_next_time(encode):
    inputs = history(SimpleNamespace(items=200), 1, 5, torch.Generator().manual_seed(5))
    moved = inputs["next_times"].clone()
    moved[0, -1] = 10**7
    assert np.abs(encode({**inputs, "next_times": moved})["state"] - encode(inputs)["state"]).max() > 1e-3


def test_takes_times_as_old_as_int32_holds(model, encode):
    oldest = torch.tensor([[-(2**31) + 1, -5]], dtype=torch.int32)
    inputs = {
        "items": torch.tensor([[3, 4]]),
        "times": oldest,
        "next_times": torch.tensor([[-5, 0]], dtype=torch.int32),
        "lengths": torch.tensor([2]),
    }
    with torch.no_grad():
        assert encode(inputs)["state"] == pytest.approx(last_states(model, *inputs.values()).numpy(), abs=1e-5)


@pytest.mark.parametrize("split", [0, 1, 5, 14])
def test_appending_to_a_kept_state_is_encoding_the_whole_history(model, encode, append, split):
    whole = history(model.config, 1, 15, torch.Generator().manual_seed(6))
    with torch.no_grad():
        states, kt, v = model.encode_with_state(whole["items"], whole["times"], whole["next_times"])
    new = {name: whole[name][:, split:] for name in ("items", "times", "next_times")}
    past = {"past_times": whole["times"][:, :split], **by_layer(kt[..., :split], v[..., :split, :])}
    appended = append({**new, **past, "lengths": whole["lengths"] - split, "past_lengths": torch.tensor([split])})
    assert appended["state"] == pytest.approx(encode(whole)["state"], abs=1e-5)
    assert appended["states"] == pytest.approx(states[:, split:].numpy(), abs=1e-5)
    assert appended["kt"] == pytest.approx(kt[..., split:].numpy(), abs=1e-5)
    assert appended["v"] == pytest.approx(v[..., split:, :].numpy(), abs=1e-5)


def test_one_append_serves_users_with_pasts_of_different_lengths(model, encode, append):
    wholes = [history(model.config, 1, length, torch.Generator().manual_seed(length)) for length in (4, 9)]
    layers = model.config.layers
    kt, v = torch.zeros(layers, 2, 2, 8, 8), torch.zeros(layers, 2, 2, 8, 8)
    past_times = torch.zeros(2, 8, dtype=torch.int32)
    for user, whole in enumerate(wholes):
        kept = whole["items"].shape[1] - 1
        with torch.no_grad():
            _, user_kt, user_v = model.encode_with_state(whole["items"], whole["times"], whole["next_times"])
        kt[:, user, ..., :kept], v[:, user, :, :kept] = user_kt[:, 0, ..., :kept], user_v[:, 0, :, :kept]
        past_times[user, :kept] = whole["times"][0, :kept]
    last = {name: torch.cat([whole[name][:, -1:] for whole in wholes]) for name in ("items", "times", "next_times")}
    past = {"past_times": past_times, "past_lengths": torch.tensor([3, 8]), **by_layer(kt, v)}
    states = append({**last, **past, "lengths": torch.ones(2, dtype=torch.long)})["state"]
    for whole, state in zip(wholes, states, strict=True):
        assert state == pytest.approx(encode(whole)["state"][0], abs=1e-5)


def test_half_precision_narrows_weights_and_keeps_the_types_of_inputs_and_outputs(compiled_hstu):
    full, half = (onnx.load(compiled_hstu.path / graph_file("encode", precision)) for precision in ("fp32", "fp16"))
    types = [[value.type for value in (*model.graph.input, *model.graph.output)] for model in (full, half)]
    assert types[0] == types[1]
    assert half.ByteSize() < full.ByteSize()
    tables = [tensor for tensor in half.graph.initializer if len(tensor.dims) == 2 and tensor.dims[0] > 1]
    assert {tensor.data_type for tensor in tables} == {onnx.TensorProto.FLOAT16}


def test_half_precision_shares_one_narrowed_copy_of_a_tensor_that_two_products_use():
    make = onnx.helper
    nodes = [
        make.make_node("MatMul", ["x", "w"], ["y"]),
        make.make_node("MatMul", ["y", "w"], ["z"]),
        make.make_node("Add", ["z", "w"], ["out"]),
    ]
    values = [make.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 2]) for name in ("x", "out")]
    weights = [onnx.numpy_helper.from_array(np.eye(2, dtype=np.float32), "w")]
    graph = make.make_graph(nodes, "twice", values[:1], values[1:], weights)
    half = halved(make.make_model(graph, opset_imports=[make.make_opsetid("", 20)]))
    assert sorted(tensor.name for tensor in half.graph.initializer) == ["w", "w_fp16"]
    half.ir_version = 10
    session = onnxruntime.InferenceSession(half.SerializeToString())
    x = np.array([[1, 2], [3, 4]], np.float32)
    assert session.run(None, {"x": x})[0] == pytest.approx(x + np.eye(2))


def test_refuses_a_graph_whose_answers_are_not_the_models(model, encode):
    graph = graphs(model)[0]
    vectors = model.item_vectors().detach().numpy()

    def off(inputs):
        return {"state": encode(inputs)["state"] + np.float32(0.01)}

    parity = measure(graph, off, samples(graph, model.config), vectors)
    with pytest.raises(CompileError, match=r"0\.01 from the model's; fp32 allows at most 0\.0001"):
        require_parity(parity, "fp32")
    with pytest.raises(CompileError, match=r"ten nearest items"):
        require_parity({"max_abs_error": 0.0, "state_error": 0.0, "top10_agreement": 0.5}, "fp32")
    with pytest.raises(CompileError, match="nan"):
        require_parity({"max_abs_error": float("nan"), "state_error": 0.0, "top10_agreement": 1.0}, "fp32")


@pytest.mark.parametrize("output", ["state", "states"])
def test_refuses_in_fp16_a_state_by_which_backends_disagree_and_takes_keys_that_are_as_far_off(model, append, output):
    graph = graphs(model)[2]
    vectors, inputs = model.item_vectors().detach().numpy(), list(samples(graph, model.config))

    def off(name):
        def run(inputs):
            outputs = append(inputs)
            return {**outputs, name: outputs[name] + np.float32(0.015)}

        return measure(graph, run, inputs, vectors)

    with pytest.raises(CompileError, match=r"its states are 0\.015 from the model's; every precision allows at most 0\.01"):
        require_parity(off(output), "fp16")
    require_parity(off("kt"), "fp16")


def test_refuses_a_graph_that_answers_nan_in_any_sample_but_the_first(model, encode):
    graph = graphs(model)[0]
    calls = []

    def broken_at_the_second_call(inputs):
        calls.append(inputs)
        return {"state": encode(inputs)["state"] * np.float32(np.nan if len(calls) == 2 else 1)}

    parity = measure(graph, broken_at_the_second_call, samples(graph, model.config), model.item_vectors().detach().numpy())
    with pytest.raises(CompileError, match="nan"):
        require_parity(parity, "fp32")


@pytest.mark.parametrize("longest", [1, 2, 6, 8, 31])
def test_samples_fit_a_model_whatever_the_length_of_its_histories(longest):
    model = HSTU(HSTUConfig(items=9, dim=4, max_length=longest, max_history=longest))
    for graph in graphs(model):
        for inputs in samples(graph, model.config):
            assert 1 <= inputs["items"].shape[1] + (inputs["past_times"].shape[1] if graph.name == "append" else 0) <= longest


def test_compiles_a_model_of_short_histories(tmp_path):
    make_bundle(tmp_path / "short", max_length=6, max_history=5)
    bundle = compile_bundle(BundleStore(tmp_path / "short"), CompileOptions(precisions=("fp32",)), only=["onnx"])
    assert not bundle.manifest.failed_steps
    assert {artifact.graph for artifact in bundle.manifest.artifacts} == {"encode", "retrieve", "append"}


def test_counts_a_wrong_item_against_the_agreement(model, compiled_hstu):
    graph = graphs(model)[1]
    run = session_run(compiled_hstu.path / graph_file("retrieve", "fp32"))

    def shifted(inputs):
        outputs = run(inputs)
        return {**outputs, "nearest": outputs["nearest"] % 200 + 1}

    parity = measure(graph, shifted, samples(graph, model.config), model.item_vectors().detach().numpy())
    assert parity["max_abs_error"] < 1e-5
    assert parity["top10_agreement"] < 0.5


@pytest.fixture
def few_items(tmp_path):
    """(graph, samples, vectors): `rank` for so few items that candidates are listed many times."""
    bundle = make_ranking_bundle(tmp_path / "few", items=20)
    ranker = load_ranker(bundle)
    graph = ranker_graphs(ranker)[1]
    return graph, list(samples(graph, ranker.config)), bundle.item_vectors


def test_candidates_that_are_listed_twice_may_change_places(few_items):
    graph, inputs, vectors = few_items
    rng = np.random.default_rng(0)

    def rounds_otherwise(inputs):
        with torch.no_grad():
            predictions = graph.module(*inputs.values()).numpy()
        return {"predictions": predictions + rng.uniform(-1e-6, 1e-6, predictions.shape).astype(np.float32)}

    parity = measure(graph, rounds_otherwise, inputs, vectors)
    assert parity["top10_agreement"] == 1
    require_parity(parity, "fp32")


def test_a_wrong_order_of_many_candidates_is_not_made_up_for_by_samples_of_a_few_that_are_the_best_in_any_order(few_items):
    graph, inputs, vectors = few_items

    def reversed_order(inputs):
        with torch.no_grad():
            return {"predictions": -graph.module(*inputs.values()).numpy()}

    few = [one for one in inputs if len(one["candidates"]) <= 10]
    assert 0 < len(few) < len(inputs)
    assert measure(graph, reversed_order, inputs, vectors)["top10_agreement"] == 0
    assert measure(graph, reversed_order, few, vectors)["top10_agreement"] == 1


@pytest.mark.parametrize("longest", [1, 2, 6, 20])
def test_samples_of_a_ranker_have_a_new_event_whatever_the_length_of_its_histories(tmp_path, longest):
    ranker = load_ranker(make_ranking_bundle(tmp_path / "short", items=9, max_history=longest))
    append, rank = ranker_graphs(ranker)
    assert all(1 <= len(inputs["items"]) + len(inputs["past_times"]) <= longest for inputs in samples(append, ranker.config))
    assert all(len(inputs["items"]) for inputs in samples(append, ranker.config))
    assert all(len(inputs["past_times"]) < longest for inputs in samples(rank, ranker.config) if longest > 1)


def test_compiles_a_ranker_of_one_event(tmp_path):
    make_ranking_bundle(tmp_path / "short", items=20, max_history=1)
    bundle = compile_bundle(BundleStore(tmp_path / "short"), CompileOptions(precisions=("fp32",)), only=["onnx"])
    assert not bundle.manifest.failed_steps


def test_says_why_a_model_cannot_be_exported(model, tmp_path):
    class Stubborn(torch.nn.Module):
        def forward(self, items, times, next_times, lengths):
            return torch.zeros(1) if items.sum().item() > 3 else torch.ones(1)

    graph = Graph("encode", Stubborn(), graphs(model)[0].inputs, ("state",))
    with pytest.raises(CompileError, match=r"torch\.onnx\.export could not express it"):
        export(graph, model.config, tmp_path / "graph.onnx")


def test_says_that_a_graph_is_too_large_for_a_file_and_how_large(model, tmp_path, monkeypatch):
    encode, retrieve, *_ = graphs(model)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    monkeypatch.setattr("integrations.onnx.export.MOST_BYTES", size)
    size += 4 * (model.item_vectors().numel() - model.config.dim)
    with pytest.raises(CompileError, match=rf"larger than the 2 GiB .*: its weights take {size:,} bytes; .* smaller --dim"):
        export(retrieve, model.config, tmp_path / "graph.onnx")
    export(encode, model.config, tmp_path / "graph.onnx")


def test_says_that_the_bundle_was_never_compiled_and_how_to(compiled_hstu):
    bare = replace(compiled_hstu, manifest=compiled_hstu.manifest.model_copy(update={"artifacts": []}))
    cure = f"run: genrec compile --model-dir {bare.path.parent}"
    found = OnnxRuntimeEncoder().get_availability(bare)
    assert found.reason == f"tiny-hstu/2 has no onnx artifact 'retrieve'; {cure}"
    assert found.told == "tiny-hstu/2 has no onnx artifact 'retrieve'; run: genrec compile"
    with pytest.raises(BackendUnavailable, match="genrec compile"):
        OnnxRuntimeEncoder().load(bare)


def test_is_unavailable_where_its_graph_is_missing_or_altered(altered):
    file = graph_file("retrieve", "fp32")
    encoder = OnnxRuntimeEncoder()
    assert encoder.get_availability(altered).ok
    damaged = altered.path / file
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert "checksum" in encoder.get_availability(altered).reason
    found = encoder.get_availability(altered)
    assert found.reason.endswith(f"run: genrec compile --model-dir {altered.path.parent}")
    assert found.told.startswith(f"{file} does not match the checksum in the manifest")
    assert found.told.endswith("; run: genrec compile")
    damaged.unlink()
    assert file in encoder.get_availability(altered).reason
    with pytest.raises(BackendUnavailable) as refused:
        encoder.load(altered)
    assert refused.value.told.startswith(f"{file} is missing; run: genrec compile")
    assert str(altered.path.parent) not in refused.value.told


def serves_without_state(bundle, caplog):
    """The one reason that is logged, once the encoder has answered."""
    encoder = OnnxRuntimeEncoder(keep_from=1)
    encoder.load(bundle)
    for _ in range(2):
        encoder.infer(EncodeRequest(random_sequence(9), 3, user_id="ann"))
    assert encoder.kept() == {}
    (record,) = caplog.records
    return record.getMessage()


def test_keeps_no_state_with_a_graph_of_an_older_release_and_says_what_to_do(altered, caplog):
    file = graph_file("append", "fp32")
    older = onnx.load(altered.path / file)
    older.graph.output.remove(next(output for output in older.graph.output if output.name == "states"))
    onnx.save(older, altered.path / file)
    record = FileRecord(size=(altered.path / file).stat().st_size, sha256=sha256(altered.path / file))
    files = {**altered.manifest.files, file: record}
    said = serves_without_state(replace(altered, manifest=altered.manifest.model_copy(update={"files": files})), caplog)
    assert "tiny-hstu/2's graph onnx/append.fp32.onnx lacks states: an older genrec compiled it" in said
    assert said.endswith(f"run: genrec compile --model-dir {altered.path.parent}")


def test_keeps_no_state_where_the_append_graph_is_missing_or_altered(altered, caplog):
    artifacts = [artifact for artifact in altered.manifest.artifacts if artifact.graph != "append"]
    bare = replace(altered, manifest=altered.manifest.model_copy(update={"artifacts": artifacts}))
    assert "has no onnx artifact 'append'; run: genrec compile" in serves_without_state(bare, caplog)
    caplog.clear()
    (altered.path / graph_file("append", "fp32")).write_bytes(b"noise")
    assert "run: genrec compile" in serves_without_state(altered, caplog)


def test_runs_in_as_many_threads_as_asked_for_or_as_ray_granted(compiled_hstu, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for threads, expected in ((None, 2), (1, 1)):
        encoder = OnnxRuntimeEncoder(threads=threads)
        encoder.load(compiled_hstu)
        assert encoder._engine.get_session_options().intra_op_num_threads == expected  # noqa: SLF001 - ONNX Runtime's own session tells its threads
        encoder.close()


@pytest.mark.parametrize(("granted", "expected"), [("", 0), ("4,2", 4), ("3", 3)])
def test_reads_omp_num_threads_as_openmp_does(compiled_hstu, monkeypatch, granted, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", granted)
    session = open_session(compiled_hstu.path / graph_file("encode", "fp32"))
    assert session.get_session_options().intra_op_num_threads == expected


class FakeRuntime:
    """ONNX Runtime with a CUDA provider. `refusal`: what it raises at a session with that; "" where it does not, and "lost" where it goes
    on without the provider. Told to fall back, as it is unless told otherwise, it opens one on the CPU instead of raising.
    """

    SessionOptions = onnxruntime.SessionOptions

    def __init__(self, refusal=""):
        self.refusal, self.preloaded, self.asked = refusal, False, []

    def get_available_providers(self):
        return ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]

    def preload_dlls(self):
        self.preloaded = True

    def InferenceSession(self, graph, options, providers, enable_fallback=1):  # noqa: N802 - the library's name
        assert self.preloaded
        self.asked.append(providers)
        names = [name for name, _ in providers]
        if self.refusal and "CUDAExecutionProvider" in names:
            if self.refusal != "lost" and not enable_fallback:
                raise RuntimeError(self.refusal)
            names = ["CPUExecutionProvider"]
        return SimpleNamespace(get_providers=lambda: names)


def test_asks_for_cuda_without_tf32_which_the_fp32_gate_would_refuse(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime := FakeRuntime())
    open_session(tmp_path / "any.onnx")
    assert runtime.asked == [[("CUDAExecutionProvider", {"use_tf32": 0}), ("CPUExecutionProvider", {})]]
    assert not caplog.records


@pytest.mark.parametrize(("on", "here"), [(["CPUExecutionProvider"], True), (["CUDAExecutionProvider", "CPUExecutionProvider"], False)])
def test_a_session_computes_in_the_thread_that_calls_unless_it_has_a_gpu(on, here):
    assert computes_here(SimpleNamespace(get_providers=lambda: on)) is here


@pytest.fixture
def warns_anew():
    _warn_of_lost.cache_clear()


@pytest.mark.parametrize(
    "refusal",
    [
        "lost",
        "CUDA_PATH is set but CUDA wasn't able to be loaded. Please install the correct version",
        "CUDA failure 100: no CUDA-capable device is detected",
        "CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version",
    ],
    ids=["its libraries do not load", "they do not load where CUDA_PATH is set", "there is no GPU", "the driver is old"],
)
def test_says_once_that_cuda_was_lost_where_it_cannot_start(refusal, tmp_path, monkeypatch, caplog, warns_anew):
    monkeypatch.setitem(sys.modules, "onnxruntime", FakeRuntime(refusal))
    sessions = [open_session(tmp_path / "any.onnx") for _ in range(3)]
    assert all(computes_here(session) for session in sessions)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "CUDAExecutionProvider but could not start it" in record.getMessage()


def test_a_full_gpu_is_an_error_and_no_session_on_the_cpu_that_stays(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", FakeRuntime("CUDA failure 2: out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        open_session(tmp_path / "any.onnx")


def test_no_session_opens_on_the_gpu_while_another_thread_records_a_graph(tmp_path, monkeypatch):
    """Opening one waits for all work on the GPU, which CUDA takes for an error of the recording."""
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime := FakeRuntime())
    opening, asked_while_recording = Thread(target=open_session, args=[tmp_path / "any.onnx"]), []

    @contextmanager
    def recording(*_, **__):
        opening.start()
        yield
        opening.join(timeout=0.2)
        asked_while_recording.extend(runtime.asked)

    for name, fake in {"graph": recording, "graph_pool_handle": lambda: None, "CUDAGraph": SimpleNamespace}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(buckets, "_warm_up", lambda *_: None)
    buckets.cuda_graphs()(lambda: None, ())
    opening.join()
    assert (asked_while_recording, len(runtime.asked)) == ([], 1)


def test_a_load_that_hangs_on_the_gpu_keeps_another_waiting_for_a_while_only(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime := FakeRuntime())
    monkeypatch.setattr(gpu, "LONGEST_WAIT_S", 0.01)
    with gpu.alone_on_the_gpu(), pytest.raises(BackendFailed, match="has been loading onto the GPU"):
        open_session(tmp_path / "any.onnx")
    assert runtime.asked == []
    open_session(tmp_path / "any.onnx")
    assert len(runtime.asked) == 1
