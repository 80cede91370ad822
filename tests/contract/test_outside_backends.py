"""The backends under examples/backends pass the checks that are shipped, as packages of which no file of genrec knows."""

import pytest

from cluster.checks.report import Result
from cluster.checks.suite import check
from cluster.registry import BACKENDS, resolve
from tests.bundles import make_complete_bundle
from tests.examples import entry_points, make_importable

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


@pytest.mark.parametrize("name", ["item_to_item", "kserve"])
def test_registers_a_class_under_a_name_that_is_not_ours(name):
    ((place, import_string),) = entry_points(name).items()
    stage, registered = place.split(".")
    assert registered == name
    assert registered not in BACKENDS[stage]
    assert resolve(import_string)


def test_item_to_item_passes_the_checks(bundle, tmp_path):
    from genrec_item_to_item.neighbours import fit, write  # noqa: PLC0415

    from tests.histories import taste_data  # noqa: PLC0415

    data = taste_data(items=len(bundle.catalogue))
    write(fit(data.interactions, len(data.catalogue)), data, tmp_path / "neighbours.npz")
    assert_passes("item_to_item", bundle, neighbours=str(tmp_path / "neighbours.npz"))


def test_item_to_item_says_what_is_missing(bundle, tmp_path):
    assert "python -m genrec_item_to_item fit" in unavailable("item_to_item", bundle)
    assert unavailable("item_to_item", bundle, neighbours=str(tmp_path / "none.npz")).startswith(f"{tmp_path}/none.npz is not there")


@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
def test_kserve_passes_the_checks_with_a_real_server(binary, bundle, tmp_path):
    with running(encode_graph(bundle, tmp_path / "encode.onnx"), "tiny-2") as url:
        assert_passes("kserve", bundle, url=url, binary=binary)


def test_kserve_says_that_no_server_is_there(bundle):
    assert "no server is configured" in unavailable("kserve", bundle)
    assert "http://127.0.0.1:9 cannot be reached (ConnectError" in unavailable("kserve", bundle, url="http://127.0.0.1:9")
