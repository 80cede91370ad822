"""What several test files need."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

from cluster.bundle import Bundle, BundleStore
from cluster.compilation import CompileOptions
from pipelines.compile import compile_bundle
from tests.bundles import make_bundle, make_ranking_bundle

settings.register_profile("genrec", deadline=None)  # an example's time says more of the machine than of the code
settings.load_profile("genrec")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--api-cases", type=int, default=15, help="requests that are made up for each route of the API, and their answers checked"
    )


def shared_data() -> Path:
    """The directory with real data sets: GENREC_TEST_DATA, or `shared/data` beside the checkout. Skips the test where there is none."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    directory = Path(os.environ.get("GENREC_TEST_DATA", beside))
    if not directory.is_dir():
        pytest.skip(f"no test data: {directory} is not a directory; set GENREC_TEST_DATA")
    return directory


@pytest.fixture(scope="session")
def _three_versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("versions") / "tiny"
    for items in (20, 30, 40):
        make_bundle(root, items=items)
    return root


@pytest.fixture
def three_versions(_three_versions: Path, tmp_path: Path) -> Path:
    """The test's own directory of a model with versions 1 to 3, of 20, 30 and 40 items, promoted in that order."""
    return Path(shutil.copytree(_three_versions, tmp_path / "tiny"))


@pytest.fixture(scope="session")
def compiled_hstu(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A small HSTU and ranker with all their artifacts, engines for two architectures among them. Copy it before you alter a file."""
    root = tmp_path_factory.mktemp("compiled") / "tiny-hstu"
    make_ranking_bundle(root)
    return _compiled(root)


@pytest.fixture(scope="session")
def compiled_sasrec(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A small SASRec with all its artifacts."""
    root = tmp_path_factory.mktemp("compiled") / "tiny-sasrec"
    make_bundle(root, family="sasrec")
    return _compiled(root)


def _compiled(root: Path) -> Bundle:
    return compile_bundle(BundleStore(root), CompileOptions(targets=("sm_80", "sm_89")))
