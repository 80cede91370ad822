"""Whole seconds beside the edges of HSTU's time buckets: every engine puts them where Meta's fp32 arithmetic does."""

import shutil

import numpy as np
import pytest
import torch

from integrations.hstu.time_buckets import ENDS, time_buckets
from tests.hstu_oracle import time_bucket
from tests.kernel_examples import beside_bucket_edges

LAST = 128
EXPORTS = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the exporter itself


@pytest.fixture(scope="module")
def seconds():
    return torch.from_numpy(beside_bucket_edges())


@pytest.fixture(scope="module")
def metas(seconds):
    """Meta's own expression, each step rounded to fp32."""
    return torch.tensor([time_bucket(second) for second in seconds.tolist()])


def asked(seconds):
    """The time of one event, before as many others: (1, L) and (1, 1)."""
    return seconds.unsqueeze(0), torch.zeros(1, 1, dtype=seconds.dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sign", [1, -1])
def test_torch_finds_metas_buckets(seconds, metas, dtype, sign):
    assert torch.equal(time_buckets(*asked(sign * seconds.to(dtype)), LAST).flatten(), metas.int())


def test_metas_expression_in_torch_is_off_by_the_last_bit_of_a_logarithm_at_most(seconds, metas):
    """On some processors it is, as on AMD's in torch 2.13: another bucket then is one of the two that meet there."""
    there = torch.log(torch.abs(seconds.long()).clamp(min=1)) / 0.301
    edges = torch.maximum(metas, there.long()).float()
    assert ((there.long() == metas) | ((there - edges).abs() <= 4 * torch.finfo(torch.float32).eps * edges)).all()


def test_each_bucket_ends_where_metas_arithmetic_says():
    ends, buckets = np.unique(np.array(ENDS[:-1]), return_index=True)
    last_of, first_after = ([time_bucket(int(end) + step) for end in ends] for step in (0, 1))
    assert all(last <= bucket < first for last, bucket, first in zip(last_of, buckets, first_after, strict=True))
    assert list(ENDS) == sorted(ENDS)


def test_the_last_bucket_takes_all_that_is_later(seconds, metas):
    for last in (1, 64, 70, 71, 72):
        assert torch.equal(time_buckets(*asked(seconds), last).flatten(), metas.clamp(max=last).int())


class Buckets(torch.nn.Module):
    def forward(self, next_times, times):
        return time_buckets(next_times, times, LAST)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """The buckets alone, exported as the model's graphs are."""
    path = tmp_path_factory.mktemp("graph") / "buckets.onnx"
    example = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    torch.onnx.export(
        Buckets(), example, path, dynamo=False, input_names=["next_times", "times"], output_names=["buckets"], opset_version=20,
        dynamic_axes={"next_times": {0: "B", 1: "L"}, "times": {0: "B", 1: "P"}},
    )  # fmt: skip
    return path


@EXPORTS
def test_onnxruntime_finds_metas_buckets(graph, seconds, metas):
    session = pytest.importorskip("onnxruntime").InferenceSession(graph)
    next_times, times = (tensor.numpy() for tensor in asked(seconds))
    (buckets,) = session.run(None, {"next_times": next_times, "times": times})
    assert np.array_equal(buckets.flatten(), metas)


@EXPORTS
def test_openvino_finds_metas_buckets(graph, seconds, metas):
    openvino = pytest.importorskip("openvino")
    buckets = openvino.Core().compile_model(graph, "CPU")([tensor.numpy() for tensor in asked(seconds)])[0]
    assert np.array_equal(buckets.flatten(), metas)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_torch_finds_metas_buckets(seconds, metas):
    compiled = torch.compile(time_buckets, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(*asked(seconds), LAST).flatten(), metas.int())
