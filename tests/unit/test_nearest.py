"""What every index must do, run over all that are registered, and how one is chosen. One that cannot be made here is skipped."""

from functools import partial

import numpy as np
import pytest

from cluster import nearest
from cluster.errors import BackendFailed, BackendUnavailable, UnknownChoice
from cluster.nearest import NearestItems, index_availability, make_index
from cluster.registry import INDEXES
from cluster.values import Availability, EncodeRequest
from integrations.hstu.encoder import CompiledTorchEncoder, TorchEncoder
from integrations.index.bf16 import Bf16Items
from integrations.index.cuda import CudaItems
from integrations.index.rounding import Rounding
from integrations.onnx.encoder import OnnxRuntimeEncoder
from integrations.openvino.encoder import OpenVinoEncoder
from integrations.tensorrt.encoder import TensorRTEncoder
from tests.bundles import make_bundle, random_sequence

ENCODERS = (TorchEncoder, CompiledTorchEncoder, OnnxRuntimeEncoder, OpenVinoEncoder, TensorRTEncoder)


class OnTheCpu(CudaItems):
    """What searches on a GPU, where there is none."""

    device = "cpu"


@pytest.fixture(params=[*INDEXES, OnTheCpu])
def make(request):
    """What makes an index of vectors."""
    if request.param is OnTheCpu:
        return OnTheCpu
    if not (availability := index_availability(request.param)).ok:
        pytest.skip(availability.reason)
    return partial(make_index, request.param)


@pytest.fixture
def vectors():
    return table(np.random.default_rng(0).normal(size=(50, 8)))


def table(raw):
    """L2-normalised rows in fp32 below a row of zeros, which is padding."""
    unit = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    return np.concatenate([np.zeros((1, raw.shape[1])), unit]).astype(np.float32)


def ask(index, state, top_n, among=None):
    among = None if among is None else np.array(among, np.int32)
    return index.answer([EncodeRequest(random_sequence(1), top_n, among)], state[None])[0]


@pytest.mark.parametrize("top_n", [1, 10, 50])
def test_returns_the_same_items_as_a_full_sort(make, vectors, top_n):
    answer = ask(make(vectors), vectors[7], top_n)
    expected = np.argsort(-(vectors[1:] @ vectors[7]), kind="stable")[:top_n] + 1
    assert answer.items.tolist() == expected.tolist()
    assert answer.items[0] == 7
    assert answer.scores == pytest.approx(vectors[expected] @ vectors[7], abs=1e-6)
    assert (answer.items.dtype, answer.scores.dtype) == (np.int32, np.float32)


def test_never_returns_padding_even_when_every_score_is_negative(make, vectors):
    one_side = np.abs(vectors)
    answer = ask(make(one_side), -one_side[3], 100)
    assert sorted(answer.items.tolist()) == list(range(1, 51))


def test_orders_equal_scores_by_index_whether_or_not_all_are_asked_for(make, vectors):
    equal = make(np.repeat(vectors[:1], 51, axis=0))
    assert ask(equal, vectors[1], 5).items.tolist() == [1, 2, 3, 4, 5]
    assert ask(equal, vectors[1], 50).items.tolist() == list(range(1, 51))


def test_searches_only_among_the_given_items_once_each_and_ignores_what_is_no_item(make, vectors):
    answer = ask(make(vectors), vectors[7], 10, among=[9, 7, 7, 0, -3, 51, 30])
    assert set(answer.items.tolist()) == {7, 9, 30}
    assert answer.items[0] == 7


def test_searches_among_nothing_without_complaint(make, vectors):
    assert ask(make(vectors), vectors[7], 10, among=[]).items.tolist() == []


def test_keeps_the_order_of_requests_that_search_all_and_part_of_the_catalogue(make, vectors):
    requests = [EncodeRequest(random_sequence(1), 1, among) for among in (None, np.array([5], np.int32), None)]
    answers = make(vectors).answer(requests, vectors[[3, 4, 6]])
    assert [answer.items.tolist() for answer in answers] == [[3], [5], [6]]
    assert [answer.state.tolist() for answer in answers] == vectors[[3, 4, 6]].tolist()


@pytest.mark.parametrize("among", [None, [1, 2]])
def test_refuses_a_state_that_is_not_finite(make, vectors, among):
    with pytest.raises(BackendFailed, match="not finite"):
        ask(make(vectors), np.full(8, np.nan, np.float32), 3, among)


def random_items(rng, count=60_000, dim=32):
    return rng.normal(size=(count, dim))


def clustered_items(rng, spread):
    """300 groups of 200 items, whose distance to their centre, of length 1, is about `spread`."""
    centres = rng.normal(size=(300, 32))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    return (centres[:, None] + rng.normal(size=(300, 200, 32)) * spread / np.sqrt(32)).reshape(-1, 32)


CATALOGUES = {
    "random": random_items,
    "wide": partial(random_items, count=20_011, dim=200),
    "clustered": partial(clustered_items, spread=0.3),
    "alike": partial(clustered_items, spread=1e-3),
    "one direction": lambda rng: 1 + 0.01 * rng.normal(size=(30_000, 32)),
    "one side": lambda rng: np.abs(rng.normal(size=(30_000, 32))),
}


@pytest.fixture(params=CATALOGUES)
def large(request):
    """(item vectors, states): items themselves, their opposites, and random ones."""
    rng = np.random.default_rng(1)
    vectors = table(CATALOGUES[request.param](rng))
    drawn = vectors[1 + rng.choice(len(vectors) - 1, 6)]
    return vectors, np.concatenate([drawn, -drawn, table(rng.normal(size=drawn.shape))[1:]])


@pytest.mark.parametrize("top_n", [1, 100, 500])
def test_misses_no_item_of_a_large_catalogue_and_gives_exact_scores(make, large, top_n):
    vectors, states = large
    answers = make(vectors).answer([EncodeRequest(random_sequence(1), top_n)] * len(states), states)
    for state, answer in zip(states, answers, strict=True):
        cosines = vectors.astype(np.float64) @ state
        assert len(set(answer.items.tolist())) == top_n
        assert answer.scores == pytest.approx(cosines[answer.items], abs=1e-6)
        assert answer.scores == pytest.approx(np.sort(cosines[1:])[::-1][:top_n], abs=1e-6)
        assert (np.diff(answer.scores) <= 0).all()


def test_answers_a_batch_in_which_each_asks_for_another_number_as_it_answers_each_alone(make):
    vectors = table(random_items(np.random.default_rng(2)))
    requests = [EncodeRequest(random_sequence(1), count) for count in (1, 300, 20)]
    index, states = make(vectors), vectors[[5, 60_000, 7]]
    for request, state, answer in zip(requests, states, index.answer(requests, states), strict=True):
        assert answer.items.tolist() == ask(index, state, request.top_n).items.tolist()


def test_orders_the_equal_scores_of_a_large_catalogue_by_index(make):
    """Corners of a cube, whose products are exact in any precision and any order of summation."""
    corners = table(np.random.default_rng(3).choice([-1.0, 1.0], size=(50_000, 16)))
    for state, top_n in ((corners[9], 30), (corners[10], 1000), (-corners[11], 100)):
        scores = corners[1:] @ state
        expected = np.lexsort((np.arange(len(scores)), -scores))[:top_n]
        answer = ask(make(corners), state, top_n)
        assert answer.items.tolist() == (expected + 1).tolist()
        assert answer.scores.tolist() == scores[expected].tolist()


@pytest.mark.parametrize("name", ["bf16", "faiss"])
def test_what_a_scan_can_rule_out_is_not_searched_in_fp32(name, monkeypatch):
    if not (availability := index_availability(name)).ok:
        pytest.skip(availability.reason)
    vectors = table(random_items(np.random.default_rng(4)))
    index, searched = make_index(name, vectors), []
    monkeypatch.setattr(NearestItems, "search", lambda *_: pytest.fail("all items were searched in fp32"))
    among = index.among
    monkeypatch.setattr(index, "among", lambda items, *rest: searched.append(len(items)) or among(items, *rest))
    assert len(ask(index, vectors[3], 100).items) == 100
    assert searched[0] < 1000


def test_no_product_of_rounded_vectors_is_further_off_than_the_bound_says():
    rng = np.random.default_rng(5)
    vectors, states = rng.normal(size=(2000, 24)).astype(np.float32), rng.normal(size=(50, 24)).astype(np.float32)

    def halved(part):
        return part.astype(np.float16).astype(np.float32)

    off = np.abs(halved(states) @ halved(vectors).T - states.astype(np.float64) @ vectors.T.astype(np.float64)).max(axis=1)
    bound = Rounding(vectors, halved).bound(states)
    assert (off <= bound).all()
    assert (bound < 20 * off).all()


def test_auto_is_exact_for_small_catalogues_and_bf16_for_large_ones_where_torch_and_the_processor_have_it(vectors, monkeypatch):
    capabilities = {"avx2": True, "avx512_bf16": True}
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert type(make_index("auto", vectors)) is NearestItems
    monkeypatch.setattr(nearest, "BF16_FROM", 50)
    assert type(make_index("auto", vectors)) is Bf16Items
    capabilities["avx512_bf16"] = False
    assert type(make_index("auto", vectors)) is NearestItems
    capabilities["avx512_bf16"] = True
    monkeypatch.setattr("integrations.index.bf16.find_spec", lambda _: None)
    assert type(make_index("auto", vectors)) is NearestItems
    assert index_availability("auto").ok


@pytest.mark.parametrize(("threads", "kind"), [(1, Bf16Items), (2, NearestItems), (16, NearestItems)])
def test_auto_takes_bf16_only_where_torch_computes_with_one_thread(vectors, monkeypatch, threads, kind):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(nearest, "BF16_FROM", 50)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    assert type(make_index("auto", vectors)) is kind


def test_auto_searches_on_the_gpu_for_an_engine_that_computes_there(vectors, monkeypatch):
    assert type(make_index("auto", vectors, on_gpu=True)) is NearestItems, "too few items"
    monkeypatch.setattr(nearest, "CUDA_FROM", 50)
    assert type(make_index("auto", vectors, on_gpu=True)) is (CudaItems if index_availability("cuda").ok else NearestItems)
    monkeypatch.setattr(CudaItems, "get_availability", Availability.yes)
    monkeypatch.setattr(CudaItems, "device", "cpu")
    assert type(make_index("auto", vectors, on_gpu=True)) is CudaItems
    assert type(make_index("auto", vectors)) is NearestItems


@pytest.mark.parametrize(
    ("name", "where", "package", "extra"),
    [("bf16", "bf16", "torch", "cpu"), ("cuda", "bf16", "torch", "gpu"), ("faiss", "faiss", "faiss-cpu", "faiss")],
)
def test_says_which_package_an_index_lacks_and_how_to_install_it(vectors, monkeypatch, tmp_path, name, where, package, extra):
    monkeypatch.setattr(f"integrations.index.{where}.find_spec", lambda _: None)
    reason = f"the index '{name}' needs {package}, which is not installed; install genrec with its extra {extra}"
    assert index_availability(name).reason == reason
    with pytest.raises(BackendUnavailable, match=f"needs {package}"):
        make_index(name, vectors)
    encoder, bundle = TorchEncoder(index=name), make_bundle(tmp_path / "tiny")
    assert encoder.get_availability(bundle).reason == reason
    with pytest.raises(BackendUnavailable, match=f"needs {package}"):
        encoder.load(bundle)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_every_encoder_takes_an_index_by_name_and_refuses_an_unknown_one(encoder):
    for name in (*INDEXES, "auto"):
        encoder(index=name)
    with pytest.raises(UnknownChoice, match="unknown index 'hnsw'; choose from auto, bf16, cuda, exact, faiss"):
        encoder(index="hnsw")


@pytest.mark.parametrize("name", ["bf16", "cuda", "faiss", "auto"])
def test_an_encoder_finds_the_same_items_whatever_its_index(name, tmp_path):
    if not (availability := index_availability(name)).ok:
        pytest.skip(availability.reason)
    bundle = make_bundle(tmp_path / "tiny", items=5000)
    exact, encoder = TorchEncoder(), TorchEncoder(index=name)
    exact.load(bundle)
    encoder.load(bundle)
    requests = [EncodeRequest(random_sequence(length, items=5000), 10) for length in (1, 7, 20)]
    for expected, answer in zip(exact.batch_infer(requests), encoder.batch_infer(requests), strict=True):
        assert answer.items.tolist() == expected.items.tolist()
        assert answer.scores == pytest.approx(expected.scores, abs=1e-6)
