"""The commands of docs/your-data.md as they stand there, one after the other: from a table to answers that know of the newest item.

Only what has to differ here does: how long it trains, which artifacts are made, the port.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.documents import ROOT, shell_lines
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
LINES = [line.partition(" #")[0].strip() for line in shell_lines((ROOT / "docs" / "your-data.md").read_text())]
SHELVES = ["tea", "bread", "soap", "lamps", "toys"]


def line(beginning: str, *holding: str) -> str:
    """The first command of the document that begins so and holds that."""
    return next(one for one in LINES if one.startswith(beginning) and all(part in one for part in holding))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where it is typed: a table of events, one of items, and a product that comes later."""
    rng = random.Random(0)
    rows = ["user_id,item_id,timestamp,action"]
    for user in ["ada", *(f"s{number}" for number in range(59))]:
        shelf, when = rng.randrange(5), 1_767_000_000 + rng.randrange(10**5)
        rows += [f"{user},P-{300 + shelf + 5 * step:04},{when + 60 * step},view" for step in rng.sample(range(12), 10)]
    (tmp_path / "events.csv").write_text("\n".join(rows) + "\n")
    items = [f"P-{300 + number:04},{SHELVES[number % 5]} no. {number},{SHELVES[number % 5]}" for number in range(60)]
    (tmp_path / "items.csv").write_text("\n".join(["item_id,title,shelf", *items]) + "\n")
    (tmp_path / "new.csv").write_text("item_id,title,shelf\nP-0400,tea no. 100,tea\n")
    (tmp_path / "cluster").symlink_to(ROOT / "cluster")
    return tmp_path


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """As in a terminal with genrec installed; a Ray cluster that somebody started here is not joined."""
    temporary = tempfile.mkdtemp(prefix="r", dir="/tmp")  # the paths of Ray's sockets have to be short
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    yield {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": temporary, "OMP_NUM_THREADS": "1"}
    shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def in_the_background(command: str, home: Path, environment: dict[str, str], url: str) -> Iterator[None]:
    """Until it is ready, and ended with Ctrl-C."""
    log = home / "serve.log"
    with log.open("wb") as output:
        serving = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=home, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        eventually(f"{url}/readyz", log)
        yield
    finally:
        os.killpg(serving.pid, signal.SIGINT)
        serving.wait(60)


def eventually(url: str, log: Path, within_s: float = 300) -> None:
    """Until that is answered 200."""
    deadline, said = time.monotonic() + within_s, ""
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(url, timeout=5)
        except httpx.TransportError as error:  # nobody listens yet
            said = str(error)
        else:
            if answer.is_success:
                return
            said = answer.text
        time.sleep(0.5)
    pytest.fail(f"{url} was not answered within {within_s} s, lastly: {said}\n{log.read_text()}")


def test_the_way_from_a_table_to_answers_is_as_the_document_shows_it(home: Path, environment: dict[str, str]):
    port = free_port()

    def typed(command: str) -> str:
        local = command.replace("localhost:8000", f"localhost:{port}")
        done = subprocess.run(["bash", "-c", local], cwd=home, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{local}\n{done.stdout}{done.stderr}"
        return done.stdout

    assert "600" in typed(line("genrec data inspect"))
    assert "unified" in typed(line("genrec train table", "--model-dir models/shop") + " --epochs 2 --decoder-epochs 1 --ranker-epochs 1")
    assert "onnx" in typed(line("genrec compile", "models/shop") + " --only onnx 2>&1")
    assert "60 users' last events" in typed(line("genrec evaluate"))
    url = f"http://localhost:{port}"
    with in_the_background(f"{line('genrec serve')} --port {port}", home, environment, url):
        answer = json.loads(typed(line("curl", "behaviours")))
        assert (len(answer["items"]), answer["degraded"], answer["unknown_items"]) == (3, False, [])
        assert {stage["stage"]: stage["backend"] for stage in answer["stages"]}["encode"] == "onnxruntime"
        assert "stored 600 events" in typed(line("genrec events import"))
        known = json.loads(typed(line("curl", '"k": 3}')))
        assert (known["stages"][0]["stage"], known["unknown_items"]) == ("history", [])
        assert "1 items added" in typed(line("genrec add-items"))
        eventually(f"{url}/v1/items/P-0400", home / "serve.log")
