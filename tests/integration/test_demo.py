"""What a newcomer runs first: `genrec demo --once`."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import ports
from cluster.errors import DataError
from deployments.training.dataset_options import DatasetOptions
from tests.ports import free_port

GENREC = Path(sys.executable).with_name("genrec")


def genrec(*arguments: object, within: Path) -> subprocess.CompletedProcess[str]:
    command = [str(GENREC), *(str(argument) for argument in arguments)]
    return subprocess.run(command, cwd=within, capture_output=True, text=True, check=False, timeout=3600)


@pytest.mark.cluster
@pytest.mark.timeout(3900)  # the demo itself may take 3600
def test_recommends_real_films_and_ends_with_the_answer_as_json(tmp_path: Path):
    try:
        DatasetOptions(name="ml-100k").read()
    except DataError as error:
        pytest.skip(f"MovieLens-100K cannot be had: {error}")
    ports.release(port := free_port())  # the demo claims it
    done = genrec("demo", "--once", "--port", port, "--users", 2, within=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    (first,) = (line for line in lines if line.startswith("answer"))
    assert "encode=torch, generate=" in first, "it waited for no compiler"
    assert lines.index(first) < min(number for number, line in enumerate(lines) if line.startswith("built"))
    assert re.search("encode by (tensorrt|onnxruntime) instead of torch", done.stdout)
    answer = json.loads(lines[-1])
    assert [len(answer["items"]), answer["degraded"]] == [5, False]
    assert [stage["stage"] for stage in answer["stages"]] == ["encode", "generate", "blend"]
    assert answer["stages"][0]["backend"] in ("tensorrt", "onnxruntime")
    assert answer["stages"][1]["backend"] == "vllm"
    for item in answer["items"]:
        assert item["attributes"]["year"] in item["title"]
        assert item["title"][:20] in done.stdout
    assert answer["model_version"] == "ml-100k/2"
    assert (tmp_path / "models/ml-100k/current").read_text().strip() == "2"


def test_a_taken_port_is_told_before_anything_is_done(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = genrec("demo", "--once", "--port", port, within=tmp_path)
    assert done.returncode == 1
    assert f"genrec: port {port} of this machine cannot be had" in done.stderr
    assert "--port" in done.stderr
    assert list(tmp_path.iterdir()) == []
