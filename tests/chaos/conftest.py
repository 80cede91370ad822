"""Options of the chaos suite, its model, and a recorder for each test."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.compilation import CompileOptions
from cluster.config_file import read_document
from tests.bundles import make_generative_bundle
from tests.chaos.engines import ENCODERS
from tests.chaos.rows import Row, recorded
from tests.chaos.served import DEPLOYMENTS, Served, served
from tests.clusters import SharedCluster
from tests.compiled import compiled
from tests.documents import ROOT
from tests.integration.conftest import PATIENT, PATIENT_READS

Recorder = Callable[[Row], AbstractContextManager[Row]]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--chaos-results", default=".genrec/chaos", help="where each run's figures are added, to rows.jsonl")
    group.addoption("--chaos-runs", type=int, default=1, help="how often each row is run")
    group.addoption("--chaos-strict", action="store_true", help="claims about time count too")
    group.addoption("--chaos-long", action="store_true", help="phases as long as the fault table has them")
    group.addoption("--chaos-profile", choices=["default", "fast"], default=None, help="how Serve carries requests")
    group.addoption("--chaos-model", default=None, help="a model's directory, in place of a small random one")
    group.addoption("--drill-minutes", type=float, default=60.0, help="how long the drill of erasures may take")
    group.addoption("--soak-minutes", type=float, default=3.0, help="how long the soak takes")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames:
        metafunc.parametrize("run", range(metafunc.config.getoption("--chaos-runs", 1)))


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Recorder:
    """Use as ``with record(Row(fault, must, run)) as row``."""
    config = request.config
    directory = Path(config.getoption("--chaos-results", ".genrec/chaos"))
    return partial(recorded, directory=directory, timings=config.getoption("--chaos-strict", default=False))


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether phases take as long as the table has them; else they are cut short, to fit CI."""
    return bool(request.config.getoption("--chaos-long", default=False))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, fast: SharedCluster, default: SharedCluster) -> SharedCluster:
    """What is broken; neither starts before something is deployed to it."""
    return default if request.config.getoption("--chaos-profile", None) == "default" else fast


@pytest.fixture(scope="session")
def soak_minutes(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--soak-minutes", 3.0))


@pytest.fixture(scope="session")
def drill_minutes(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--drill-minutes", 60.0))


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """The model to serve, with a decoder; copy it before you alter a file."""
    if chosen := request.config.getoption("--chaos-model", None):
        yield BundleStore(Path(chosen)).open()
        return
    root = tmp_path_factory.mktemp("chaos") / "tiny"
    make_generative_bundle(root)
    yield compiled(root, CompileOptions(targets=()), only=["onnx"])


@pytest.fixture(scope="package")
def two(model: Bundle, cluster: SharedCluster, long: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two replicas of each deployment; in short of gateway and encoder, with gateways that have requests wait rather than refuse them: a
    replica's start may take most of what cores there are, and what is then turned away says something of the machine, nothing of what was
    lost with the process. The files that ask for it run one after the other.
    """
    directory = tmp_path_factory.mktemp("two")
    args = {
        "encoder": {"order": ["onnxruntime", "torch"], "backends": ENCODERS},
        "generator": {"order": ["torch_beam"]},
        "events": {"url": f"sqlite:///{directory}/events.db", **({} if long else PATIENT_READS)},
        "gateway": {} if long else PATIENT,
    }
    replicas = dict.fromkeys(DEPLOYMENTS if long else ("gateway", "encoder"), 2)
    with served(cluster, directory, model.path.parent, args, replicas=replicas) as serving:
        yield serving


@pytest.fixture(scope="session")
def deadline_s() -> float:
    """How long a request may take, as the shipped configuration has it: all stages together."""
    gateway = read_document(ROOT / "ray_config.yaml")["applications"][0]["args"]["gateway"]
    return float(gateway["deadline_s"] + gateway.get("generation_deadline_s", 0.0))
