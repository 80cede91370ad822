"""The gate of int8 on ONNX Runtime and of bf16 on OpenVINO, and what is served behind it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch

from cluster.bundle_store import BundleStore
from cluster.compilation import CompileOptions
from cluster.errors import BackendUnavailable, CompileError, UnknownChoice
from cluster.values import EncodeRequest
from integrations.hstu.weights import build_model, load_model
from integrations.onnx.encoder import OnnxRuntimeEncoder
from integrations.onnx.export import OnnxCompiler, check_quality
from integrations.onnx.files import graph_file
from integrations.onnx.graphs import graphs
from integrations.onnx.quality_gate import LEAST, Quality, figures, probes
from integrations.openvino.encoder import OpenVinoEncoder
from pipelines.compile import compile_bundle
from tests.bundles import make_bundle, random_sequence

INT8 = graph_file("retrieve", "int8")


class RetrieveOnly(OnnxCompiler):
    """The graph that has an int8 form."""

    def steps(self, bundle, draft, options):
        return [step for step in super().steps(bundle, draft, options) if "retrieve" in step.name]


class EncodeOnly(OnnxCompiler):
    """The graph that OpenVINO takes."""

    def steps(self, bundle, draft, options):
        return [step for step in super().steps(bundle, draft, options) if step.name == "onnx encode fp32"]


def compiled(root, compiler="RetrieveOnly", **rest):
    options = CompileOptions(precisions=("fp32", "int8"))
    return compile_bundle(BundleStore(root), options, compilers={"onnx": f"tests.unit.test_quality_gate:{compiler}"}, **rest)


def published(root, family, change, compiler="RetrieveOnly"):
    """A small model with its weights changed, compiled in fp32 and, where it has that form, int8."""

    def changed(record):
        model = build_model(record)
        with torch.no_grad():
            change(model)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("integrations.hstu.random_bundles.build_model", changed)
        make_bundle(root, family=family)
    return compiled(root, compiler)


@pytest.fixture(scope="module", params=["hstu", "sasrec"])
def in_int8(request, tmp_path_factory):
    """A model of each family; SASRec's weights are as large as before training."""

    def quarter(model):
        for parameter in model.parameters():
            parameter.div_(4 if request.param == "sasrec" else 1)

    return published(tmp_path_factory.mktemp(request.param) / "tiny", request.param, quarter)


@pytest.fixture(scope="module")
def outlying(tmp_path_factory):
    """A model that fp32 holds and int8 cannot: one channel of each layer is 1e4 times as large as the others and counts for as little."""

    def unbalance(model):
        for layer in model.layers:
            layer.uvqk[:, 0] *= 1e4
            layer.output.weight[:, 0] *= 1e-4

    return published(tmp_path_factory.mktemp("outlying") / "tiny", "hstu", unbalance)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A model whose items are all but one, and whose layers look at nothing but what is left: bf16 rounds that away."""

    def draw_together(model):
        apart = torch.randn(model.item_embedding.weight.shape)
        common = torch.randn(apart.shape[1])
        model.item_embedding.weight.copy_(common + 0.003 * apart)
        model.position_embedding.weight.zero_()
        direction = torch.nn.functional.layer_norm(common, common.shape)
        for layer in model.layers:
            layer.uvqk.copy_(5 * torch.randn(layer.uvqk.shape))
            layer.uvqk.sub_(torch.outer(direction, direction @ layer.uvqk) / direction.dot(direction))

    return published(tmp_path_factory.mktemp("crowded") / "tiny", "hstu", draw_together, "EncodeOnly")


@pytest.fixture
def loaded():
    encoders = []

    def load(bundle, **options):
        encoders.append(OnnxRuntimeEncoder(**options))
        encoders[-1].load(bundle)
        return encoders[-1]

    yield load
    for encoder in encoders:
        encoder.close()


def unit(rows, seed=0):
    states = np.random.default_rng(seed).normal(size=(rows, 8)).astype(np.float32)
    return states / np.linalg.norm(states, axis=1, keepdims=True)


def test_the_same_states_are_of_full_quality():
    assert figures(unit(5), unit(5), unit(50, seed=1)) == Quality(overlap=1.0, cosine=pytest.approx(1.0))


def test_the_row_of_padding_is_no_item():
    states, vectors = unit(5), unit(11, seed=1)
    vectors[0] = 9
    assert figures(-states, states, vectors).overlap == 1.0


def test_counts_the_items_that_both_find():
    vectors = np.vstack([np.zeros(8), np.eye(8), 0.1 * np.ones((12, 8))]).astype(np.float32)
    assert figures(vectors[1:2], vectors[2:3], vectors).overlap == pytest.approx(0.9)


def test_the_cosine_is_a_mean_over_users():
    states = unit(8)
    moved = states.copy()
    moved[3] = -moved[3]
    assert figures(moved, states, unit(50, seed=1)).cosine == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("quality", "said"),
    [
        (LEAST, ""),
        (Quality(0.8125, 1.0), "81.2% of the ten nearest items are those of full precision; at least 90% must be"),
        (Quality(1.0, 0.98), "the cosine of states with those of full precision is 0.9800; it must be at least 0.99"),
        (Quality(1.0, float("nan")), "the cosine of states with those of full precision is nan"),
        (Quality(float("nan"), 1.0), "nan% of the ten nearest items"),
    ],
)
def test_says_which_figure_falls_short_and_of_what(quality, said):
    assert quality.shortcoming(LEAST).startswith(said)
    assert bool(quality.shortcoming(LEAST)) == bool(said)


@pytest.mark.parametrize("longest", [1, 2, 20, 200])
def test_probes_are_histories_of_all_lengths_that_the_model_takes(longest):
    batches = list(probes(np.arange(51), longest))
    lengths = np.concatenate([batch.lengths for batch in batches])
    assert (len(lengths), lengths.min() >= 1, lengths.max()) == (32, True, longest)
    for batch in batches:
        present = np.arange(batch.items.shape[1]) < batch.lengths[:, None]
        assert (batch.items[present] >= 1).all()
        assert batch.items.max() <= 50
        assert (batch.times[present] < 0).all()


def test_probes_are_the_same_every_time_and_hold_popular_items_more_often():
    popularity = np.r_[0, np.full(10, 1000), np.zeros(90)].astype(np.int64)
    batches, again = list(probes(popularity, 50)), list(probes(popularity, 50))
    assert all(np.array_equal(batch.items, other.items) for batch, other in zip(batches, again, strict=True))
    items = np.concatenate([batch.items[batch.items > 0] for batch in batches])
    assert np.mean(items <= 10) > 0.95


def test_an_int8_graph_is_kept_with_its_figures(in_int8):
    assert in_int8.manifest.failed_steps == []
    artifact = in_int8.artifact("onnx", "retrieve", precision="int8")
    assert artifact.file == INT8
    assert artifact.parity.keys() == {"top10_agreement", "cosine"}
    assert LEAST.overlap <= artifact.parity["top10_agreement"] <= 1
    assert LEAST.cosine <= artifact.parity["cosine"] < 1.0001


def test_nothing_is_made_in_int8_unless_it_is_asked_for(in_int8):
    with BundleStore(in_int8.path.parent).recompile(in_int8) as draft:
        usual, asked = (
            [step.name for step in OnnxCompiler().steps(in_int8, draft, options) if "int8" in step.name]
            for options in (CompileOptions(), CompileOptions(precisions=("fp32", "int8")))
        )
    assert (usual, asked) == ([], ["onnx retrieve int8"])
    assert in_int8.artifact("onnx", "retrieve").precision == "fp32"


def test_weights_are_in_int8_and_the_table_that_is_searched_in_fp32(in_int8):
    graph = onnx.load(in_int8.path / INT8).graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    weights = [node.input[1] for node in graph.node if node.op_type == "MatMulInteger"]
    assert weights
    assert {kinds[name] for name in weights} == {onnx.TensorProto.INT8}
    (searched,) = [node.input[0] for node in graph.node if node.op_type == "TopK"]
    (product,) = [node for node in graph.node if searched in node.output]
    assert (product.op_type, kinds[product.input[1]]) == ("MatMul", onnx.TensorProto.FLOAT)


def test_serves_int8_where_it_is_asked_for_and_finds_the_same_items(in_int8, loaded):
    coarse, full = loaded(in_int8, precision="int8"), loaded(in_int8)
    requests = [EncodeRequest(random_sequence(length, seed=seed), 10) for seed, length in enumerate([1, 2, 5, 9, 14, 20, 25, 20])]
    pairs = list(zip(coarse.batch_infer(requests), full.batch_infer(requests), strict=True))
    assert np.mean([np.intersect1d(mine.items, theirs.items).size / 10 for mine, theirs in pairs]) >= LEAST.overlap
    moved = max(np.abs(mine.state - theirs.state).max() for mine, theirs in pairs)
    assert 1e-5 < moved < 0.1
    for mine, _ in pairs:
        assert mine.scores == pytest.approx(in_int8.item_vectors[mine.items] @ mine.state, abs=1e-5)


@pytest.mark.parametrize("precision", ["fp16", "bf16", ""])
def test_refuses_a_precision_that_it_does_not_have(precision):
    with pytest.raises(UnknownChoice, match=f"unknown precision '{precision}'; choose from fp32, int8"):
        OnnxRuntimeEncoder(precision=precision)


def test_says_how_to_make_int8_where_nobody_has(in_int8):
    artifacts = [artifact for artifact in in_int8.manifest.artifacts if artifact.precision != "int8"]
    bare = replace(in_int8, manifest=in_int8.manifest.model_copy(update={"artifacts": artifacts}))
    encoder = OnnxRuntimeEncoder(precision="int8")
    cure = f"run: genrec compile --model-dir {bare.path.parent} --precision fp32,fp16,int8"
    assert encoder.get_availability(bare).reason == f"tiny/2 has no onnx artifact 'retrieve' in int8; {cure}"
    with pytest.raises(BackendUnavailable, match="in int8"):
        encoder.load(bare)
    assert OnnxRuntimeEncoder().get_availability(bare).ok


def test_refuses_int8_for_a_model_it_is_too_coarse_for_and_leaves_nothing_of_it(outlying):
    (failed,) = outlying.manifest.failed_steps
    assert failed.step == "onnx retrieve int8"
    assert "of full precision" in failed.reason
    assert failed.reason.endswith("serve this model in fp32 and leave int8 out of --precision")
    assert [artifact.precision for artifact in outlying.manifest.artifacts] == ["fp32"]
    assert [path.name for path in (outlying.path / "onnx").iterdir()] == ["retrieve.fp32.onnx"]


def test_an_encoder_says_why_int8_was_refused_and_serves_fp32(outlying, loaded):
    reason = OnnxRuntimeEncoder(precision="int8").get_availability(outlying).reason
    assert "the step 'onnx retrieve int8' failed: " in reason
    assert "at least" in reason
    assert len(loaded(outlying).infer(EncodeRequest(random_sequence(9), 10)).items) == 10


@pytest.mark.parametrize("noise", [0.3, float("nan")])
def test_refuses_weights_that_were_spoiled(in_int8, tmp_path, noise):
    model = onnx.load(in_int8.path / graph_file("retrieve", "fp32"))
    rng = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if tensor.name.endswith("item_embedding.weight"):
            values = onnx.numpy_helper.to_array(tensor)
            spoiled = values + noise * rng.normal(size=values.shape).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(spoiled.astype(np.float32), tensor.name))
    onnx.save(model, tmp_path / "spoiled.onnx")
    retrieve = next(graph for graph in graphs(load_model(in_int8)) if graph.name == "retrieve")
    with pytest.raises(CompileError, match="of full precision"):
        check_quality(in_int8, in_int8.path, retrieve, tmp_path / "spoiled.onnx")


def test_says_that_there_is_nothing_to_narrow_where_the_export_failed(tmp_path, monkeypatch):
    make_bundle(tmp_path / "tiny")

    def fails(*_):
        raise CompileError("no")

    monkeypatch.setattr("integrations.onnx.export.export", fails)
    steps = {}
    with pytest.raises(CompileError, match="no step made anything"):
        compiled(tmp_path / "tiny", on_step=lambda result: steps.update({result.step: result.failure}))
    assert steps["onnx retrieve int8"] == "there is no fp32 graph 'retrieve' to narrow: its own step failed"


def test_openvino_refuses_bf16_for_a_model_it_is_too_coarse_for_and_serves_f32(crowded):
    openvino = pytest.importorskip("openvino")
    encoder, coarse = OpenVinoEncoder(), OpenVinoEncoder(precision="bf16")
    encoder.load(crowded)
    assert len(encoder.infer(EncodeRequest(random_sequence(9), 10)).items) == 10
    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU multiplies no bf16: OpenVINO computes in f32")
    said = r"openvino in bf16 is too coarse for tiny/2: \d+\.\d% of the ten nearest items are those of full precision; at least 90%"
    with pytest.raises(BackendUnavailable, match=said) as refused:
        coarse.load(crowded)
    assert str(refused.value).endswith("; set its option precision to f32")
    coarse.close()


@pytest.mark.parametrize(("precision", "compared"), [("f32", False), ("bf16", True)])
def test_openvino_compares_its_states_with_those_in_f32_only_where_they_may_differ(crowded, monkeypatch, precision, compared):
    asked = []

    class Nan:
        inputs = (SimpleNamespace(any_name="items"),)

        def __init__(self, graph, threads, precision):
            asked.append(precision)

        def __call__(self, given):
            return {"state": np.full((len(given["items"]), 16), np.nan, np.float32)}

    monkeypatch.setattr("integrations.openvino.encoder.find_spec", lambda _: True)
    monkeypatch.setattr("integrations.openvino.encoder.compiled", Nan)
    encoder = OpenVinoEncoder(precision=precision)
    if not compared:
        encoder.load(crowded)
        assert asked == ["f32"]
        return
    with pytest.raises(BackendUnavailable, match="the cosine of states with those of full precision is nan"):
        encoder.load(crowded)
    assert asked == ["bf16", "f32"]
