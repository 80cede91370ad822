"""The audit log: what stands in a line, what does not, and what becomes of a call where its line cannot be written."""

import asyncio
import hashlib
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import httpx
import pytest
from typer.testing import CliRunner

from cluster.audit import audited
from cluster.config import GatewaySettings, parse
from cluster.errors import BackendUnavailable, BundleError, ConfigError, InvalidRequest
from cluster.events.store import Event, closing_store
from cluster.values import Behaviour
from deployments.cli import events, models
from deployments.http.api import create_api
from deployments.http.messages import SwitchOut
from deployments.user_data import UserData
from tests.disks import largest_file
from tests.fakes.data import Data
from tests.fakes.service import Service

KEY = {"name": "boss", "sha256": hashlib.sha256(b"genrec_boss").hexdigest(), "rights": ["read", "events", "erase", "operate"]}
ASKED = {"authorization": "Bearer genrec_boss", "x-request-id": "r-7"}
USER = "ada@example.org"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "audit.jsonl"


@pytest.fixture(autouse=True)
def _however_slow_the_disk(monkeypatch):
    monkeypatch.setattr("deployments.http.audit.WRITTEN_WITHIN_S", 300)


async def ask(method, path, body=None, data=None, file=None, **settings):
    api = create_api(Service(), data or Data(), GatewaySettings.model_validate({"audit_log": file and str(file), **settings}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api, raise_app_exceptions=False), base_url="http://localhost") as client:
        return await client.request(method, path, json=body, headers=ASKED)


def written(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def lines(file):
    """How acts ended; each stands there as begun before."""
    begun, ended = {}, []
    for line in written(file):
        act, asked = line.pop("act"), {name: line[name] for name in ("action", "object")}
        if line["outcome"] == "begun":
            begun[act] = asked
        else:
            assert begun.pop(act) == asked
            ended.append(line)
    assert not begun
    return ended


SWITCHED = ("POST", "/v1/backends/encoder/torch:disable", None)
ERASED = ("DELETE", f"/v1/users/{USER}/history?tenant=shop", None)
CALLS = [
    (SWITCHED, {"action": "backend.disable", "object": "encoder/torch", "everywhere": False}),
    (("POST", "/v1/backends/encoder/torch:first", None), {"action": "backend.first", "object": "encoder/torch", "everywhere": False}),
    (
        ("POST", "/v1/backends/encoder/none:enable", None),
        {"action": "backend.enable", "object": "encoder/none", "outcome": "UnknownChoice"},
    ),
    (ERASED, {"action": "user.erase", "object": "shop/digest-15", "events": 3, "everywhere": True}),
    (("POST", "/v1/cache:invalidate", {}), {"action": "cache.invalidate", "object": "*", "dropped": 2, "everywhere": True}),
    (
        ("POST", "/v1/cache:invalidate", {"tenant": "shop"}),
        {"action": "cache.invalidate", "object": "shop", "dropped": 2, "everywhere": True},
    ),
    (
        ("POST", "/v1/cache:invalidate", {"tenant": "shop", "user_id": USER}),
        {"action": "cache.invalidate", "object": "shop/digest-15", "dropped": 2, "everywhere": True},
    ),
]


@pytest.mark.parametrize(("call", "told"), CALLS, ids=[told["action"] + " " + told["object"] for _, told in CALLS])
async def test_each_operators_call_and_each_erasure_leaves_one_line_that_names_no_user(call, told, file):
    answer = await ask(*call, file=file, api_keys=[KEY])
    [line] = lines(file)
    assert abs(datetime.now(UTC) - datetime.fromisoformat(line.pop("time"))) < timedelta(minutes=5)
    assert line == {"key": "boss", "request_id": "r-7", "outcome": "done", **told}
    assert USER not in file.read_text()
    assert "genrec-audit" not in answer.headers


async def test_where_no_keys_are_asked_for_a_line_names_none(file):
    await ask(*SWITCHED, file=file)
    assert lines(file)[0]["key"] is None


@pytest.mark.parametrize("error", [BackendUnavailable(f"no {USER}"), InvalidRequest("user_id", USER), RuntimeError(USER)])
async def test_a_call_that_fails_leaves_the_kind_of_error_and_not_its_text(error, file):
    data = Data()
    data.error = error
    assert (await ask(*ERASED, data=data, file=file)).status_code in {422, 500, 503}
    assert lines(file)[0]["outcome"] == type(error).__name__
    assert USER not in file.read_text()


async def test_a_user_whose_digest_cannot_be_had_is_erased_and_named_by_the_tenant(file):
    data = Data()
    data.digest_error = BackendUnavailable("the store is away")
    assert (await ask(*ERASED, data=data, file=file)).status_code == 200
    assert lines(file)[0]["object"] == "shop/?"


@pytest.mark.virtual_time
@pytest.mark.parametrize("call", [ERASED, ("POST", "/v1/cache:invalidate", {"tenant": "shop", "user_id": USER})])
async def test_a_store_that_is_long_in_opening_keeps_no_erasure_from_its_caches_and_its_line(call, file):
    class Opening(Data):
        async def digest(self, tenant, user_id):
            await asyncio.Event().wait()

    assert (await ask(*call, data=Opening(), file=file, api_keys=[KEY])).status_code == 200
    [line] = lines(file)
    assert (line["object"], line["outcome"]) == ("shop/?", "done")


async def test_a_call_that_is_refused_or_only_reads_leaves_no_line(file):
    assert (await ask(*SWITCHED, file=file, api_keys=[{**KEY, "rights": ["read"]}])).status_code == 403
    assert (await ask("GET", "/v1/gateway", file=file)).status_code == 200
    assert not file.exists()


async def test_a_pipe_that_has_no_reader_holds_up_no_call(file, caplog):
    os.mkfifo(file)
    asked = asyncio.create_task(asyncio.to_thread(asyncio.run, ask(*ERASED, file=file)))
    with caplog.at_level(logging.ERROR, "cluster.audit"):
        await asyncio.wait([asked], timeout=120)
    os.close(os.open(file, os.O_RDONLY | os.O_NONBLOCK))  # for a call that waits for it
    answer = await asked
    assert (answer.status_code, answer.headers["genrec-audit"]) == (200, "lost")
    assert len(caplog.records) == 2
    assert all(f"the audit log {file} cannot be written (" in record.message for record in caplog.records)


async def test_a_pipe_that_is_read_has_both_lines(file):
    os.mkfifo(file)
    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        answer = await ask(*SWITCHED, file=file)
        told = [json.loads(line)["outcome"] for line in os.read(reader, 2**16).splitlines()]
    finally:
        os.close(reader)
    assert (answer.status_code, "genrec-audit" in answer.headers, told) == (200, False, ["begun", "done"])


@pytest.mark.parametrize("call", [SWITCHED, ERASED, ("POST", "/v1/backends/encoder/none:enable", None)])
async def test_a_line_that_cannot_be_written_is_told_in_the_answer_and_whole_in_the_log(call, tmp_path, caplog):
    """A switch may be what ends an outage, and an erasure is owed: neither waits for the disk of the log."""
    missing = tmp_path / "missing" / "audit.jsonl"
    with caplog.at_level(logging.ERROR, "cluster.audit"):
        answer = await ask(*call, file=missing)
    assert answer.status_code in {200, 404}
    assert answer.headers["genrec-audit"] == "lost"
    assert ['"outcome": "begun"' in record.message for record in caplog.records] == [True, False]
    for record in caplog.records:
        assert f"the audit log {missing} cannot be written (" in record.message
        assert '"outcome": ' in record.message
        assert USER not in record.message


async def test_without_a_file_nothing_is_written_or_asked():
    data = Data()
    data.digest_error = RuntimeError("asked in vain")
    answer = await ask(*ERASED, data=data)
    assert (answer.status_code, "genrec-audit" in answer.headers) == (200, False)


def test_a_file_is_made_for_its_user_alone_and_made_anew_where_logrotate_has_moved_it(file):
    for number in range(2):
        with audited(file, "model.promote", f"shop/{number}"):
            pass
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.rename(moved := file.with_suffix(".1"))
    with audited(file, "model.promote", "shop/2"):
        pass
    assert [[line["object"] for line in lines(one)] for one in (moved, file)] == [["shop/0", "shop/1"], ["shop/2"]]


def test_a_line_that_a_full_disk_cut_off_spoils_no_later_one(file):
    with audited(file, "user.erase", "before"):
        pass
    with largest_file(file.stat().st_size + 30), audited(file, "user.erase", "cut off") as line:
        pass
    assert line.lost
    for number in range(2):
        with audited(file, "user.erase", f"after {number}"):
            pass
    told = file.read_text().splitlines()
    assert len(told.pop(2)) == 30
    assert [json.loads(line)["object"] for line in told] == ["before"] * 2 + ["after 0"] * 2 + ["after 1"] * 2


async def test_a_call_stands_in_the_log_before_it_is_carried_out(file, monkeypatch):
    seen = []

    async def switch(self, stage, name, to):
        seen.extend(written(file))
        return SwitchOut(stage=stage, name=name, enabled=to != "off", first=to == "first", applied=True)

    monkeypatch.setattr(Service, "switch", switch)
    await ask(*SWITCHED, file=file, api_keys=[KEY])
    assert [(line["action"], line["object"], line["key"], line["outcome"]) for line in seen] == [
        ("backend.disable", "encoder/torch", "boss", "begun")
    ]
    assert len(lines(file)) == 1


def test_an_act_whose_process_is_killed_midway_has_left_its_line(file):
    act = (
        "import os, pathlib, signal, sys; from cluster.audit import audited\n"
        "with audited(pathlib.Path(sys.argv[1]), 'user.erase', 'shop/1'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", act, file], check=False).returncode == -signal.SIGKILL
    assert [(line["action"], line["object"], line["outcome"]) for line in written(file)] == [("user.erase", "shop/1", "begun")]


async def test_a_disk_that_hangs_holds_up_no_call_and_the_lines_are_in_the_log(file, monkeypatch, caplog):
    disk = threading.Event()
    monkeypatch.setattr("cluster.audit.append", lambda *_, **__: disk.wait(300))
    monkeypatch.setattr("deployments.http.audit.WRITTEN_WITHIN_S", 0.01)
    try:
        answer = await ask(*SWITCHED, file=file)
    finally:
        disk.set()
    assert (answer.status_code, answer.headers["genrec-audit"]) == (200, "lost")
    logged = [record.message.partition(" (not within 0.01 s); the line is: ") for record in caplog.records]
    assert [json.loads(line)["outcome"] for _, _, line in logged] == ["begun", "done"]


def test_a_call_that_is_given_up_leaves_a_line(file):
    """What it asked for may have happened."""
    with pytest.raises(asyncio.CancelledError), audited(file, "user.erase", "shop/1"):
        raise asyncio.CancelledError
    assert lines(file)[0]["outcome"] == "CancelledError"


def test_a_relative_path_and_a_directory_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"audit_log audit\.jsonl is relative"):
        parse({"gateway": {"audit_log": "audit.jsonl"}})
    with pytest.raises(ConfigError, match=rf"audit_log {tmp_path} is a directory; name a file in it, as {tmp_path}/audit\.jsonl"):
        parse({"gateway": {"audit_log": str(tmp_path)}})


async def test_the_gateway_names_a_user_as_the_store_will_once_it_is_erased(tmp_path):
    async with closing_store(f"sqlite:///{tmp_path}/events.db") as store:
        data = UserData(parse({"model_dir": str(tmp_path)}), None, SimpleNamespace(), cache=None, events=store)
        assert await data.digest("shop", USER) == await store.digest("shop", USER) != await store.digest("other", USER)
        assert len(await store.digest("shop", USER)) == 64
        off = UserData(parse({"model_dir": str(tmp_path)}), None, SimpleNamespace(), cache=None, events=None)
        assert await off.digest("shop", USER) == await store.digest("shop", USER), "an erasure reaches the store all the same"
        await off.close()
    (tmp_path / "none").mkdir()
    without = UserData(parse({"model_dir": str(tmp_path / "none")}), None, SimpleNamespace(), cache=None, events=None)
    with pytest.raises(BackendUnavailable, match="there is no event store"):
        await without.digest("shop", USER)


# Commands


def run(app, *arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_what_commands_do_to_a_model_leaves_lines_that_name_the_login(three_versions, file, monkeypatch):
    monkeypatch.setenv("GENREC_AUDIT_LOG", str(file))
    for arguments in (("promote", 1), ("promote", 2, "--canary", 0.1), ("rollback",), ("promote", 9)):
        run(models.app, *arguments, "--model-dir", three_versions)
    told = [(line["action"], line["object"], line["outcome"]) for line in lines(file)]
    name = three_versions.name
    assert told == [
        ("model.promote", f"{name}/1", "done"),
        ("model.canary", f"{name}/2", "done"),
        ("model.rollback", name, "done"),
        ("model.promote", f"{name}/9", BundleError.__name__),
    ]
    assert all(line["login"] for line in lines(file))


async def _stored(url):
    async with closing_store(url) as store:
        await store.append([Event(USER, Behaviour("1", 1))])
        return await store.digest("default", USER)


async def test_the_command_that_erases_leaves_the_digest(tmp_path, file):
    url = f"sqlite:///{tmp_path}/events.db"
    digest = await _stored(url)
    erased = await asyncio.to_thread(run, events.app, "erase", USER, "--url", url, "--audit-log", file)
    assert (erased.exit_code, [(line["action"], line["object"], line["events"]) for line in lines(file)]) == (
        0,
        [("user.erase", f"default/{digest}", 1)],
    )
    assert USER not in file.read_text()
