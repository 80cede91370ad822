"""What several test files need."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from cluster.bundle import Bundle, BundleStore
from cluster.compilation import CompileOptions
from pipelines.compile import compile_bundle
from tests.bundles import make_bundle

settings.register_profile("genrec", deadline=None)  # an example's time says more of the machine than of the code
settings.load_profile("genrec")


def shared_data() -> Path:
    """The directory with real data sets: GENREC_TEST_DATA, or `shared/data` beside the checkout. Skips the test where there is none."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    directory = Path(os.environ.get("GENREC_TEST_DATA", beside))
    if not directory.is_dir():
        pytest.skip(f"no test data: {directory} is not a directory; set GENREC_TEST_DATA")
    return directory


@pytest.fixture(scope="session")
def compiled_hstu(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A small HSTU with all its artifacts, engines for two architectures among them. Copy it before you alter a file."""
    return _compiled(tmp_path_factory.mktemp("compiled") / "tiny-hstu", "hstu")


@pytest.fixture(scope="session")
def compiled_sasrec(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A small SASRec with all its artifacts."""
    return _compiled(tmp_path_factory.mktemp("compiled") / "tiny-sasrec", "sasrec")


def _compiled(root: Path, family: str) -> Bundle:
    make_bundle(root, family=family)
    return compile_bundle(BundleStore(root), CompileOptions(targets=("sm_80", "sm_89")))
