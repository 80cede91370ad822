"""The backends under examples/backends pass the checks that are shipped, as packages of which no file of genrec knows."""

import pytest

from cluster.checks.report import Result
from cluster.checks.suite import check
from cluster.registry import BACKENDS, resolve
from cluster.values import EncodeRequest
from integrations.hstu.encoder import TorchEncoder
from tests.bundles import make_complete_bundle, make_generative_bundle, random_sequence
from tests.examples import entry_points, make_importable
from tests.histories import taste_data

make_importable()

from tests.v2_server import encode_graph, running  # noqa: E402 - the server is an example's


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_complete_bundle(tmp_path_factory.mktemp("outside") / "tiny")


def assert_passes(name, bundle, **options):
    ((place, import_string),) = entry_points(name).items()
    report = check(import_string, place.split(".")[0], bundle, options=options)
    assert report.unavailable == ""
    assert [outcome for outcome in report.outcomes if outcome.result is Result.FAILED] == []


def unavailable(name, bundle, **options):
    ((place, import_string),) = entry_points(name).items()
    report = check(import_string, place.split(".")[0], bundle, options=options)
    assert not report.failed
    return report.unavailable


@pytest.mark.parametrize("name", ["item_to_item", "kserve", "rwkv"])
def test_registers_a_class_under_a_name_that_is_not_ours(name):
    ((place, import_string),) = entry_points(name).items()
    stage, registered = place.split(".")
    assert registered == name
    assert registered not in BACKENDS[stage]
    assert resolve(import_string)


def test_item_to_item_passes_the_checks(bundle, tmp_path):
    from genrec_item_to_item.neighbours import fit, write  # noqa: PLC0415

    data = taste_data(items=len(bundle.catalogue))
    write(fit(data.interactions, len(data.catalogue)), data, tmp_path / "neighbours.npz")
    assert_passes("item_to_item", bundle, neighbours=str(tmp_path / "neighbours.npz"))


def test_item_to_item_says_what_is_missing(bundle, tmp_path):
    assert "python -m genrec_item_to_item fit" in unavailable("item_to_item", bundle)
    assert unavailable("item_to_item", bundle, neighbours=str(tmp_path / "none.npz")).startswith(f"{tmp_path}/none.npz is not there")


@pytest.fixture(scope="module")
def v2_url(bundle, tmp_path_factory):
    """A real server that runs the bundle's graph."""
    with running(encode_graph(bundle, tmp_path_factory.mktemp("v2") / "encode.onnx"), "tiny-2") as url:
        yield url


@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
def test_kserve_passes_the_checks_with_a_real_server(binary, bundle, v2_url):
    assert_passes("kserve", bundle, url=v2_url, binary=binary, timeout_s=30)


def test_kserve_answers_what_torch_answers(bundle, v2_url):
    theirs, ours = resolve("genrec_kserve:KServeEncoder")(v2_url, timeout_s=30), TorchEncoder()
    theirs.load(bundle)
    ours.load(bundle)
    requests = [EncodeRequest(random_sequence(length), 10) for length in (1, 7, 64, 100)]
    for one, other in zip(theirs.batch_infer(requests), ours.batch_infer(requests), strict=True):
        assert one.items.tolist() == other.items.tolist()
        assert one.states == pytest.approx(other.states, abs=1e-4)
    theirs.close()
    ours.close()


def test_kserve_says_that_no_server_is_there(bundle):
    assert "no server is configured" in unavailable("kserve", bundle)
    assert "http://127.0.0.1:9 cannot be reached (ConnectError" in unavailable("kserve", bundle, url="http://127.0.0.1:9")


@pytest.fixture(scope="module")
def rwkv_weights(bundle, tmp_path_factory):
    """Trained for an epoch."""
    from genrec_rwkv.train import Options, save, train  # noqa: PLC0415

    path = tmp_path_factory.mktemp("rwkv") / "weights.safetensors"
    data = taste_data(items=len(bundle.catalogue))
    save(train(bundle, data, Options(channels=16, epochs=1, events=8), lambda *_: None), bundle, path)
    return str(path)


def test_rwkv_passes_the_checks(bundle, rwkv_weights):
    assert_passes("rwkv", bundle, weights=rwkv_weights)


def test_rwkv_says_what_is_missing_and_whose_weights_it_has(bundle, rwkv_weights, tmp_path):
    assert "python -m genrec_rwkv train" in unavailable("rwkv", bundle)
    assert unavailable("rwkv", bundle, weights=str(tmp_path / "none")).startswith(f"{tmp_path}/none is not there; make it")
    other = make_generative_bundle(tmp_path / "other", seed=7)
    reason = unavailable("rwkv", other, weights=rwkv_weights)
    assert f"was trained for the semantic IDs {bundle.semantic_ids.version}, other/2 has {other.semantic_ids.version}" in reason
