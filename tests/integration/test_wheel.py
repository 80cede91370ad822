"""genrec from its wheel, where there is no checkout: what is in it, and the commands of docs/your-data.md as they stand there, one after
the other, from `genrec init` over a table to answers that know of the newest item.

Only what has to differ here does: how long it trains, which artifacts are made, the port, the deadlines, and that vLLM is left out.
"""

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import yaml

from cluster import ports
from deployments.cli.processes import kill_session, session_members
from tests.documents import ROOT, shell_lines
from tests.ports import free_port
from tests.waiting import eventually

LINES = [line.partition(" #")[0].strip() for line in shell_lines((ROOT / "docs" / "your-data.md").read_text())]
SHELVES = ["tea", "bread", "soap", "lamps", "toys"]
ACTOR_S, SERVICE_S = 60, 600
"""How long an actor and the whole service may take to come or go, on a machine that does much else."""
ORIGINS = """
import json, sys
import cluster.profile, deployments.app, integrations.hstu, pipelines.compile
ours = ("cluster", "deployments", "integrations", "pipelines")
files = {name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] in ours}
print(json.dumps({"path": sys.path, "modules": {name: file for name, file in files.items() if file}}))
"""


def line(beginning: str, *holding: str) -> str:
    """The first command of the document that begins so and holds that."""
    return next(one for one in LINES if one.startswith(beginning) and all(part in one for part in holding))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that no build folder is left in the checkout, or found there."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [one.removesuffix("*") for one in project["tool"]["setuptools"]["packages"]["find"]["include"]]
    for name in (*packages, "examples"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "ray_config.yaml"):
        shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        built,
        source,
    ]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = built.iterdir()
    return found


def test_the_wheel_has_every_launch_file_and_the_demos_model_as_they_are_here(wheel: Path):
    shipped = {"cluster/launch": ROOT / "cluster" / "launch", "deployments/demo_model": ROOT / "examples" / "ml-100k"}
    with zipfile.ZipFile(wheel) as archive:
        for place, source in shipped.items():
            here = {f"{place}/{file.relative_to(source)}": file.read_bytes() for file in source.rglob("*") if file.is_file()}
            there = {name: archive.read(name) for name in archive.namelist() if name.startswith(f"{place}/")}
            assert there == here
        assert archive.read("cluster/launch/ray_config.yaml") == (ROOT / "ray_config.yaml").read_bytes()
        haproxy = archive.getinfo("cluster/haproxy.sh")
    assert haproxy.external_attr >> 16 & 0o111, "Serve starts it"


@dataclass(frozen=True)
class Installed:
    """An environment that has genrec from the wheel, and a directory in which it is called as from a terminal."""

    environment: Path
    home: Path
    variables: dict[str, str]

    def typed(self, command: str) -> str:
        """What the command prints on its standard output. Fails the test where it fails."""
        done = subprocess.run(["bash", "-c", command], cwd=self.home, env=self.variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def in_the_background(self, command: str, url: str, log: Path) -> Iterator[None]:
        """Until it is ready, then ended by SIGTERM, which it obeys in order; nothing of it stays."""
        with log.open("wb") as output:
            serving = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.home, env=self.variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            answered(f"{url}/readyz", log, serving)
            yield
            serving.terminate()
            assert (serving.wait(SERVICE_S), "shutting down" in log.read_text()) == (0, True), log.read_text()
            eventually(lambda: not session_members(serving.pid), "Ray's processes have ended", within_s=SERVICE_S)
        finally:
            kill_session(serving.pid)
            serving.wait()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The packages that genrec needs are those of this environment, less the checkout that it is installed from: of a directory that a
    .pth file names, no .pth file is read.
    """
    environment, home = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("home")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(pip, check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "requirements.pth").write_text("\n".join(paths))
    temporary = tempfile.mkdtemp(prefix="r", dir="/tmp")  # the paths of Ray's sockets have to be short
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "RAY_ADDRESS")}
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    patient = {"RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(SERVICE_S)}
    yield Installed(environment, home, {**variables, **patient, "PATH": path, "RAY_TMPDIR": temporary, "OMP_NUM_THREADS": "1"})
    shutil.rmtree(temporary, ignore_errors=True)


def test_what_is_imported_is_the_wheels(installed: Installed):
    told = json.loads(installed.typed(f"python -c {shlex.quote(ORIGINS)}"))
    assert str(ROOT) not in told["path"]
    assert [name for name, file in told["modules"].items() if not Path(file).is_relative_to(installed.environment)] == []


def answered(url: str, log: Path, serving: subprocess.Popen[bytes]) -> None:
    """Wait until that is answered 200."""

    def holds() -> bool:
        assert serving.poll() is None, log.read_text()
        return httpx.get(url, timeout=ACTOR_S).is_success

    try:
        eventually(holds, f"{url} is answered", within_s=SERVICE_S, every_s=0.5)
    except AssertionError:
        pytest.fail(f"{url} was not answered\n{log.read_text()}")


def write_tables(home: Path) -> None:
    """A table of events, one of items, and a product that comes later."""
    rng = random.Random(0)
    rows = ["user_id,item_id,timestamp,action"]
    for user in ["ada", *(f"s{number}" for number in range(59))]:
        shelf, when = rng.randrange(5), 1_767_000_000 + rng.randrange(10**5)
        rows += [f"{user},P-{300 + shelf + 5 * step:04},{when + 60 * step},view" for step in rng.sample(range(12), 10)]
    (home / "events.csv").write_text("\n".join(rows) + "\n")
    items = [f"P-{300 + number:04},{SHELVES[number % 5]} no. {number},{SHELVES[number % 5]}" for number in range(60)]
    (home / "items.csv").write_text("\n".join(["item_id,title,shelf", *items]) + "\n")
    (home / "new.csv").write_text("item_id,title,shelf\nP-0400,tea no. 100,tea\n")


def make_patient(config: Path) -> None:
    """Let every answer be whole, however slow the machine is, and leave out vLLM."""
    document = yaml.safe_load(config.read_text())
    args = document["applications"][0]["args"]
    args["generator"]["order"] = ["torch_beam"]
    deadlines = dict.fromkeys(("deadline_s", "generation_deadline_s", "ranking_deadline_s"), SERVICE_S)
    args["gateway"] = {**deadlines, "request_within_s": 2 * SERVICE_S}
    args["events"] = {"read_deadline_ms": 1000 * ACTOR_S}
    document["http_options"]["request_timeout_s"] = SERVICE_S
    config.write_text(yaml.safe_dump(document))


@pytest.mark.cluster
@pytest.mark.timeout(3600)  # what it waits for may take SERVICE_S each time, and it trains a model before
def test_the_way_from_a_table_to_answers_is_as_the_document_shows_it(installed: Installed):
    port = free_port()
    url = f"http://localhost:{port}"
    inside = replace(installed, home=installed.home / "shop")

    def typed(command: str) -> str:
        return inside.typed(command.replace("localhost:8000", f"localhost:{port}"))

    assert "one_machine.yaml" in installed.typed(line("genrec init"))
    write_tables(inside.home)
    make_patient(inside.home / "one_machine.yaml")
    assert "600" in typed(line("genrec data inspect"))
    assert "unified" in typed(line("genrec train table", "--model-dir models/shop") + " --epochs 2 --decoder-epochs 1 --ranker-epochs 1")
    assert "onnx" in typed(line("genrec compile", "models/shop") + " --only onnx --precision fp32 2>&1")
    assert "60 users' last events" in typed(line("genrec evaluate"))
    log = inside.home / "serve.log"
    ports.release(port)  # `genrec serve` claims it
    with inside.in_the_background(f"{line('genrec serve')} --port {port}", url, log):
        answer = json.loads(typed(line("curl", "behaviours")))
        assert (len(answer["items"]), answer["degraded"], answer["unknown_items"]) == (3, False, [])
        assert {stage["stage"]: stage["backend"] for stage in answer["stages"]}["encode"] == "onnxruntime"
        assert "stored 600 events" in typed(line("genrec events import"))
        known = json.loads(typed(line("curl", '"k": 3}')))
        assert (known["stages"][0]["stage"], known["unknown_items"]) == ("history", [])
        assert "1 items added" in typed(line("genrec add-items"))
        eventually(lambda: httpx.get(f"{url}/v1/items/P-0400", timeout=ACTOR_S).is_success, "the new item is served", within_s=SERVICE_S)
