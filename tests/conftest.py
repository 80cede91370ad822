"""What several test files need. PyTorch is imported where it is used: the process that hands out the tests to others needs none."""

import asyncio
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from cluster.bundle import Bundle
from cluster.compilation import CompileOptions
from tests import repetitions
from tests.clusters import _bare_ray, bare, default, fast  # noqa: F401 - fixtures
from tests.compiled import compiled
from tests.virtual_time import VirtualLoop

pytest_plugins = ["tests.hangs", "tests.scheduling"]
# else all that runs beside them goes before Ray's workers, which then take minutes to start
os.environ.setdefault("RAY_worker_niceness", "0")
ENGINES = CompileOptions(targets=("sm_80", "sm_89"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="repeat in full what is drawn at random, as make chaos does")
    parser.addoption("--api-cases", type=int, help="requests that are made up for each route of the API, and their answers checked")


QUIET = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    "RAY_task_events_report_interval_ms": "0",
}
"""What clusters do less of, since several run at a time: Serve's controller looks three times a second instead of ten, each replica gives
its figures to Ray's metrics once a second instead of ten times, and what a task has been through is not recorded. `make chaos` measures
clusters as they are.
"""


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--chaos-long", default=False):
        os.environ.update(QUIET)
    repetitions.choose(thorough=config.getoption("--thorough"))


def pytest_collection_finish() -> None:
    """From here on no garbage collection walks through what was imported: it was a third of the tests' processor time."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualLoop}
    real = {"real": asyncio.new_event_loop}
    return real | {"uvloop": uvloop.new_event_loop} if item.get_closest_marker("worker_loops") else real


def shared_data() -> Path:
    """The directory with real data sets: GENREC_TEST_DATA, or `shared/data` beside the checkout. Skips the test where there is none."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    directory = Path(os.environ.get("GENREC_TEST_DATA", beside))
    if not directory.is_dir():
        pytest.skip(f"no test data: {directory} is not a directory; set GENREC_TEST_DATA")
    return directory


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Where what also runs on a GPU runs: on the CPU everywhere, and on CUDA where it is."""
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU with a driver is usable here")
    return str(request.param)


@pytest.fixture
def _as_in_the_background() -> Iterator[None]:
    """Signals are handled as in a program that a script starts in the background without `nohup`: SIGINT is ignored, and SIGHUP is not."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory for sockets, as their paths may have 107 characters: in /tmp, wherever other temporary files are kept."""
    with tempfile.TemporaryDirectory(prefix="genrec-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def _three_versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.bundles import make_bundle

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
    from tests.bundles import make_ranking_bundle

    root = tmp_path_factory.mktemp("compiled") / "tiny-hstu"
    make_ranking_bundle(root)
    return compiled(root, ENGINES)


@pytest.fixture(scope="session")
def compiled_sasrec(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A small SASRec with all its artifacts."""
    from tests.bundles import make_bundle

    root = tmp_path_factory.mktemp("compiled") / "tiny-sasrec"
    make_bundle(root, family="sasrec")
    return compiled(root, ENGINES)
