"""Trial clusters without Ray: how nodes are planned, and how all processes of one are found and killed."""

import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cluster import ports, profile
from cluster.errors import BundleError, ConfigError
from deployments.cli import node_plan
from deployments.cli.local_cluster import STATE_FILE, LocalCluster, Node
from deployments.cli.node_plan import NodePlan, durable_head, plan_nodes
from deployments.cli.processes import kill_session, session_members
from tests.bundles import make_bundle
from tests.disks import largest_file
from tests.documents import ROOT
from tests.ports import free_port
from tests.waiting import eventually, until_right

UP = """
import signal, sys
from pathlib import Path
from deployments.cli import cluster, node_plan
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run with `nohup`
serve, config, port, directory = sys.argv[1:]
node_plan.serve_command = lambda: serve
cluster.up(Path(config), nodes=2, port=int(port), profile="default", directory=Path(directory))
"""


def options(command: list[str]) -> dict[str, str]:
    return dict(part.split("=", 1) for part in command if part.startswith("--") and "=" in part)


def given_up(plan: NodePlan) -> None:
    Path(plan.temporary).rmdir()
    ports.release(plan.block)


def test_a_killed_session_takes_processes_along_whose_parent_is_gone():
    script = "(sleep 60 & echo started; exec >&-) & wait; exec sleep 60"  # the inner sleep is nobody's child any more
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout
        leader.stdout.readline()
        assert len(session_members(leader.pid)) >= 2
        kill_session(leader.pid)
        assert session_members(leader.pid) == []


def test_each_node_has_ports_of_its_own_and_the_head_no_cpu():
    plan = plan_nodes(3, cpus=4, port=18000, redis=None, name="default")
    starts = [options(plan.command(index)) for index in range(3)]
    assert [start["--num-cpus"] for start in starts] == ["0", "4", "4"]
    assert len({start["--dashboard-agent-listen-port"] for start in starts}) == 3
    assert [start.get("--address") for start in starts] == [None, plan.address, plan.address]
    assert [plan.url(index).rpartition(":")[2] for index in range(3)] == [
        "18000",
        *(plan.node_environment(index)["RAY_SERVE_WORKER_PROXY_HTTP_PORT"] for index in (1, 2)),
    ]
    assert "RAY_SERVE_WORKER_PROXY_HTTP_PORT" not in plan.node_environment(0)
    given_up(plan)


def test_a_single_node_runs_the_replicas_itself():
    plan = plan_nodes(1, cpus=4, port=None, redis=None, name="default")
    assert options(plan.command(0))["--num-cpus"] == "4"
    given_up(plan)


def test_sockets_have_paths_that_linux_takes_wherever_temporary_files_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (elsewhere := tmp_path / ("x" * 60)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    plan = plan_nodes(1, cpus=4, port=None, redis=None, name="default")
    of_one = profile.of_one_machine(plan.block)
    for environment in (plan.node_environment(0), of_one):
        for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
            socket_file, node_id = Path(environment[name]), "0" * 56
            assert len(f"{socket_file.parent}/{node_id}/{socket_file.name}.{2**22}.tmp") <= 107
    given_up(plan)


def test_the_users_own_variables_go_before_a_profile_s_and_another_cluster_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "7")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    plan = plan_nodes(2, cpus=4, port=None, redis=None, name="default")
    environment = plan.node_environment(1)
    assert environment["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"] == "7"
    assert "RAY_ADDRESS" not in environment
    given_up(plan)


def test_a_plan_does_not_show_its_token():
    plan = plan_nodes(2, cpus=4, port=None, redis=None, name="default")
    assert plan.environment["RAY_AUTH_TOKEN"] not in repr(plan)
    given_up(plan)


def test_two_clusters_in_one_redis_have_names_of_their_own():
    one, other = durable_head("redis://127.0.0.1:6379"), durable_head("redis://127.0.0.1:6379/0")
    assert one["RAY_REDIS_ADDRESS"] == other["RAY_REDIS_ADDRESS"] == "127.0.0.1:6379"
    assert one["RAY_external_storage_namespace"] != other["RAY_external_storage_namespace"]


@pytest.mark.parametrize("url", ["redis", "redis://host", "redis://host:port", "redis://a:b@host:1"])
def test_a_redis_that_has_no_host_and_port_is_refused(url: str):
    with pytest.raises(ConfigError, match=r"such as redis://127\.0\.0\.1:6379"):
        durable_head(url)


@pytest.mark.parametrize("nodes", [0, 9])
def test_a_number_of_nodes_that_a_machine_cannot_bear_is_refused(nodes: int):
    with pytest.raises(ConfigError, match=f"1 to 8 nodes, not {nodes}"):
        plan_nodes(nodes, cpus=4, port=None, redis=None, name="default")


def test_a_cluster_that_was_not_started_is_said_to_be_so(tmp_path: Path):
    with pytest.raises(ConfigError, match="genrec cluster up"):
        LocalCluster.find(tmp_path)


def test_what_was_started_before_the_machine_was_is_not_taken_for_running(tmp_path):
    (tmp_path / STATE_FILE).write_text(json.dumps({"plan": {}, "nodes": [{"pid": 1}], "document": {}, "boot": "another one"}))
    with pytest.raises(ConfigError, match="was started anew since"):
        LocalCluster.find(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        LocalCluster.find(tmp_path)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster without nodes, of which Serve takes every configuration."""
    make_bundle(tmp_path / "tiny")
    changes = {"model_dir": str(tmp_path / "tiny")}
    cluster = LocalCluster(ROOT / "ray_config.yaml", changes, nodes=1, profile="default", directory=tmp_path)
    monkeypatch.setattr(LocalCluster, "_ask", lambda *_, **__: httpx.Response(200))
    yield cluster
    cluster.stop()


def test_a_full_disk_leaves_the_state_of_a_cluster_as_it_was(planned: LocalCluster, tmp_path: Path):
    planned.deploy({"applications": []}, wait=False)
    with largest_file(50), pytest.raises(OSError, match=STATE_FILE):
        planned.deploy({"applications": ["another"]}, wait=False)
    assert planned.document == LocalCluster.find(tmp_path).document == {"applications": []}
    assert stat.S_IMODE((tmp_path / STATE_FILE).stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir() if STATE_FILE in file.name] == [STATE_FILE]


KILLED_WHILE_IT_WRITES = """
import os, signal, sys
from pathlib import Path
from cluster.disk import write_whole
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_whole(Path(sys.argv[1]), "a token")
"""


def test_a_cluster_that_is_stopped_leaves_no_state_of_a_process_that_was_killed_while_it_wrote_it(planned: LocalCluster, tmp_path: Path):
    planned.deploy({"applications": []}, wait=False)
    subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_WRITES, str(tmp_path / STATE_FILE)], check=False, cwd=ROOT)
    assert len([file for file in tmp_path.iterdir() if STATE_FILE in file.name]) == 2
    planned.stop()
    assert [file for file in tmp_path.iterdir() if STATE_FILE in file.name] == []


def test_a_node_that_a_full_disk_keeps_out_of_the_state_is_ended(monkeypatch: pytest.MonkeyPatch, planned: LocalCluster, tmp_path: Path):
    (ray := tmp_path / "ray").write_text("#!/bin/sh\nexec sleep 3600\n")
    ray.chmod(0o755)
    monkeypatch.setattr(node_plan, "serve_command", lambda: str(tmp_path / "serve"))
    with subprocess.Popen(["sleep", "3600"], start_new_session=True) as before:
        planned.nodes = [Node(0, before.pid, "", planned.url)]
        with largest_file(50), pytest.raises(OSError, match=STATE_FILE):
            planned.start_node(0)
    assert planned.nodes[0].pid != before.pid
    assert not planned.nodes[0].alive


@pytest.mark.parametrize("text", ["", '{"plan": '])
def test_a_state_that_was_cut_off_is_told_with_what_to_do(tmp_path: Path, text: str):
    (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(ConfigError, match=rf"{STATE_FILE} is no state of a trial cluster \(.*\); end the nodes .*, and remove the file"):
        LocalCluster.find(tmp_path)


@pytest.mark.parametrize("why", ["model", "port", "redis"])
def test_a_cluster_that_is_refused_leaves_no_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str):
    make_bundle(tmp_path / "tiny")
    (places := tmp_path / "places").mkdir()
    monkeypatch.setattr(profile, "temporary_directory", lambda: str(places))
    changes = {"model_dir": str(tmp_path / ("none" if why == "model" else "tiny"))}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, redis = taken.getsockname()[1] if why == "port" else None, "redis" if why == "redis" else None
        with pytest.raises((ConfigError, BundleError)):
            LocalCluster(ROOT / "ray_config.yaml", changes, nodes=1, port=port, redis=redis, profile="default", directory=tmp_path).start()
    assert list(places.iterdir()) == []


@pytest.mark.parametrize("why", ["redis", "profile", "directory", "model"])
def test_a_cluster_that_is_refused_leaves_its_ports_to_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str):
    blocks, free_block = list[int](), profile.free_block
    monkeypatch.setattr(profile, "free_block", lambda: blocks.append(free_block()) or blocks[-1])
    monkeypatch.setattr(profile, "works", lambda: profile.Availability.no("it is none"))
    monkeypatch.setattr(profile, "temporary_directory", lambda: str(tmp_path / "none" if why == "directory" else tmp_path))
    name: profile.ProfileName = "fast" if why == "profile" else "default"
    with pytest.raises((ConfigError, BundleError, FileNotFoundError)):
        LocalCluster(
            ROOT / "ray_config.yaml", {"model_dir": str(tmp_path / "none")}, redis="redis" if why == "redis" else None, profile=name
        )
    assert ports.descriptors(*blocks) == []


def test_a_cluster_that_is_stopped_leaves_its_ports_to_others(planned: LocalCluster):
    claimed = planned.plan.block, planned.plan.port
    assert len(ports.descriptors(*claimed)) == 2
    planned.stop()
    assert ports.descriptors(*claimed) == []


@pytest.fixture
def _files_as_a_login_lets_a_process_open() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_files_as_a_login_lets_a_process_open")
def test_a_node_may_open_as_many_files_as_the_system_lets_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    ray = tmp_path / "ray"
    ray.write_text("#!/bin/sh\necho may open $(ulimit -S -n)\nexit 3\n")
    ray.chmod(0o755)
    monkeypatch.setattr(node_plan, "serve_command", lambda: str(tmp_path / "serve"))
    make_bundle(tmp_path / "tiny")
    changes, most = {"model_dir": str(tmp_path / "tiny")}, min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 65536)
    cluster = LocalCluster(ROOT / "ray_config.yaml", changes, nodes=1, profile="default", directory=tmp_path / "cluster")
    with pytest.raises(ConfigError, match=rf"ended with status 3;[^;]*\bmay open {most}$"):
        cluster.start()


@contextmanager
def starting(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`genrec cluster up`, and the process of its head, which never joins."""
    ray, config, state = tmp_path / "ray", tmp_path / "config.yaml", tmp_path / "cluster" / STATE_FILE
    ray.write_text("#!/bin/sh\nexec sleep 3600\n")
    ray.chmod(0o755)
    make_bundle(tmp_path / "ml-100k")
    config.write_text((ROOT / "ray_config.yaml").read_text().replace("models/ml-100k", str(tmp_path / "ml-100k")))
    ports.release(port := free_port())  # the cluster claims it
    given = [tmp_path / "serve", config, port, state.parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", UP, *map(str, given)], env=environment, stderr=subprocess.PIPE) as up:
        until_right(state.exists, lambda there: there or up.poll() is not None)
        assert up.poll() is None, up.communicate()
        eventually(lambda: json.loads(state.read_text()), "its state is written")
        (head,) = json.loads(state.read_text())["nodes"]
        try:
            yield up, head["pid"]
        finally:
            up.kill()
            kill_session(head["pid"])


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGHUP])
def test_a_cluster_that_is_stopped_while_it_starts_leaves_no_node(by: signal.Signals, tmp_path: Path):
    with starting(tmp_path) as (up, head):
        up.send_signal(by)
        up.communicate()
        assert session_members(head) == []
        assert not (tmp_path / "cluster" / STATE_FILE).exists()


def test_what_a_cluster_had_started_when_its_start_was_killed_is_found_and_ended(tmp_path: Path):
    with starting(tmp_path) as (up, head):
        up.kill()
        up.wait()
        assert session_members(head) == [head]
        LocalCluster.find(tmp_path / "cluster").stop()
        assert session_members(head) == []
