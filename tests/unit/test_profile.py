"""Profiles of Ray Serve: which is chosen, and that two clusters on a machine share nothing."""

import os
import random
import re
import resource
import socket
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cluster import ports, profile
from cluster.config import Settings
from cluster.errors import ConfigError
from cluster.values import Availability
from deployments.cli.cluster import app
from tests.documents import ROOT


@pytest.fixture
def without_haproxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "works", lambda: Availability.no("haproxy is not here"))


@pytest.fixture
def with_haproxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "works", Availability.yes)


def test_the_fast_profile_is_taken_where_it_works(with_haproxy):
    assert profile.environment() == profile.environment("fast") == profile.fast()
    assert profile.environment("default") == profile.default()


@pytest.mark.parametrize("said", ["20k", "0", "-1", "10s", "1.5", " "])
def test_a_limit_of_the_proxy_that_is_none_is_refused(with_haproxy, monkeypatch: pytest.MonkeyPatch, said: str):
    assert all(name in profile.STARTER.read_text() for name in profile.LIMITS)
    monkeypatch.setenv("GENREC_HAPROXY_PER_CALLER", said)
    with pytest.raises(ConfigError, match=f"GENREC_HAPROXY_PER_CALLER is '{said}', which is no limit; give a whole number above 0"):
        profile.environment()
    profile.environment("default")
    for right in ("20000", ""):
        monkeypatch.setenv("GENREC_HAPROXY_PER_CALLER", right)
        profile.environment()


def test_a_certificate_that_cannot_be_read_is_refused(with_haproxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(profile.CERTIFICATE, str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match=r"GENREC_HAPROXY_CERTIFICATE is .*none.pem', which cannot be read; name a PEM file"):
        profile.environment()
    (tmp_path / "none.pem").touch()
    profile.environment()


@pytest.mark.parametrize("said", ["70000", "65536", "0", "-1", "https", "8443 ", "08443"])
def test_a_port_of_https_that_is_none_is_refused(with_haproxy, monkeypatch: pytest.MonkeyPatch, said: str):
    monkeypatch.setenv(profile.TLS_PORT, said)
    refused = CliRunner().invoke(app, ["env"]).exception
    assert isinstance(refused, ConfigError)
    assert f"GENREC_HAPROXY_TLS_PORT is {said!r}, which is no port; give one of 1 to 65535" in str(refused)
    profile.environment("default")
    for right in ("65535", "1", ""):
        monkeypatch.setenv(profile.TLS_PORT, right)
        assert CliRunner().invoke(app, ["env"]).exit_code == 0


@pytest.mark.parametrize("said", ["8443", "", None])
def test_https_and_plain_http_are_not_served_on_one_port(with_haproxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str | None):
    """HAProxy takes such a port twice, and gives each kind a part of the connections of the other."""
    assert f":={profile.TLS_PORT_DEFAULT}" in profile.STARTER.read_text()
    if said is not None:
        monkeypatch.setenv(profile.TLS_PORT, said)
    profile.of_one_machine(20_000, http_port=8443)
    (tmp_path / "certificate.pem").touch()
    monkeypatch.setenv(profile.CERTIFICATE, str(tmp_path / "certificate.pem"))
    with pytest.raises(ConfigError, match="HTTPS and plain HTTP cannot both be served on port 8443; set GENREC_HAPROXY_TLS_PORT"):
        profile.of_one_machine(20_000, http_port=8443)
    profile.of_one_machine(20_000, http_port=8000)


def test_the_default_profile_is_taken_where_haproxy_is_not(without_haproxy):
    assert profile.environment() == profile.default()
    with pytest.raises(ConfigError, match=r"haproxy is not here; or choose --profile default"):
        profile.environment("fast")


def test_a_program_that_does_not_run_makes_the_fast_profile_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = tmp_path / "haproxy"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(broken))
    available = profile.works()
    assert not available.ok
    assert "exit status 3" in available.reason


def test_cluster_env_says_why_it_prints_the_default_profile(without_haproxy):
    done = CliRunner().invoke(app, ["env"])
    assert (done.exit_code, "RAY_SERVE_ENABLE_HA_PROXY" in done.stdout) == (0, False)
    assert "haproxy is not here; so this is the default profile, which all nodes need" in done.stderr
    assert CliRunner().invoke(app, ["env", "--profile", "default"]).stderr == ""


@pytest.mark.parametrize(
    ("limits", "soft"), [((1024, 4096), 4096), ((1024, 2**20), 65536), ((65536, 65536), 65536), ((2**19, 2**20), 2**19)]
)
def test_the_limit_of_open_files_is_raised_as_far_as_the_system_lets_it(
    limits: tuple[int, int], soft: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    assert profile.open_files() == (soft, limits[1])


def test_serve_is_never_throughput_optimised_without_haproxy():
    assert profile.fast()["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert not any("THROUGHPUT" in name or "HA_PROXY" in name for name in profile.default())


def the_variables() -> list[str]:
    return sorted(
        (profile.fast() | profile.apart(20_000, Path("/d")) | profile.node_ports(20_000, 0)).keys() - {profile.PROGRAM, *profile.TOKEN}
    )


@pytest.mark.parametrize("name", the_variables())
def test_ray_serve_reads_each_variable(name: str):
    """A variable that a later Ray no longer reads would do nothing, and say nothing."""
    private = Path(import_module("ray").__file__ or "").parent / "serve" / "_private"
    assert subprocess.run(["grep", "-rqw", name, str(private), "--include=*.py"], check=False).returncode == 0


def test_a_cluster_s_ports_are_its_own():
    block = profile.free_block(random.Random(1))
    mine = [profile.apart(block, Path("/d")), *(profile.node_ports(block, node) for node in range(8))]
    named = [int(value) for part in mine for name, value in part.items() if name.endswith("PORT")]
    assert len(set(named)) == len(named)
    assert set(named) <= set(range(block, block + profile.BLOCK))
    ports.release(block)


@pytest.mark.parametrize(
    ("free", "store"),
    [(2**30, str(3 * 2**28)), (64 * 2**20, None), (2**36, None)],
    ids=["as compose.yaml gives it", "too little", "so much that Ray sees to it itself"],
)
def test_rays_object_store_takes_no_more_than_a_containers_shared_memory_has(free: int, store: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bsize=4096, f_bavail=free // 4096))
    assert profile.of_one_machine(20_000, "default").get(profile.LARGEST_STORE) == store
    constants = Path(import_module("ray").__file__ or "").parent / "_private" / "ray_constants.py"
    assert f'"{profile.LARGEST_STORE}"' in constants.read_text()


@pytest.mark.parametrize("document", ["SECURITY.md", "docs/deploy.md", "docs/operating-proxy.md"])
def test_the_documents_name_the_ports_that_are_drawn_for_one_machine(document: str):
    assert f"{profile.LOWEST_BLOCK} to {profile.PAST_BLOCKS - 1}" in (ROOT / document).read_text()


def test_a_block_of_ports_is_one_where_nothing_listens():
    first = profile.free_block(random.Random(7))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 17))
        taken.listen()
        ports.release(first)
        second = profile.free_block(random.Random(7))
    assert second != first
    ports.release(second)


def test_a_block_of_ports_is_given_to_one_cluster_at_a_time():
    first, second = (profile.free_block(random.Random(7)) for _ in range(2))
    assert second != first
    ports.release(first)
    ports.release(second)


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., str]:
    """What HAProxy is given to read when it is started with these arguments, after the file that Ray wrote."""
    program, config = tmp_path / "haproxy", tmp_path / "haproxy.cfg"
    program.write_text('#!/bin/sh\ncat "$3"\n')
    program.chmod(0o755)

    def start(written: str, *arguments: str) -> str:
        config.write_text(written)
        command = [profile.STARTER, "-db", "-f", config, "-dR", *arguments]
        done = subprocess.run(command, env={**os.environ, profile.PROGRAM: str(program)}, capture_output=True, text=True, check=True)
        return done.stdout

    return start


def test_a_haproxy_that_replaces_a_dead_one_begins_with_the_gateways_that_one_knew(started: Callable[..., str]):
    assert started("no gateway") == "no gateway"
    assert started("two gateways", "-sf", "17", "-x", "admin.sock") == "two gateways"
    assert started("no gateway") == "two gateways"


def test_a_haproxy_that_takes_over_from_a_living_one_is_told_by_ray_alone(started: Callable[..., str]):
    started("two gateways", "-sf", "17")
    assert started("no gateway", "-sf", "18") == "no gateway"
    assert started("nothing yet") == "no gateway"


def test_clients_have_10_s_for_their_headers_and_serve_leaves_the_watch_over_them_to_the_gateway(started: Callable[..., str]):
    written = "frontend http_frontend\n    bind 127.0.0.1:8000\n    mode http\nfrontend other\n    bind 127.0.0.1:1\n"
    lines = started(written).splitlines()
    of_the_frontend = lines[: lines.index("    mode http")]
    assert of_the_frontend[:2] == written.splitlines()[:2]
    for rule in ("timeout http-request 10s", "http-request set-header x-request-disconnect-disabled ?1"):
        assert f"    {rule}" in of_the_frontend
    assert "    http-request set-header x-request-timeout-seconds 0" in of_the_frontend
    assert [line for line in lines if line in written.splitlines()] == written.splitlines()
    assert started("\n".join(lines)).splitlines() == lines


def test_the_configuration_says_which_proxy_ends_a_request_that_takes_too_long():
    (line,) = [line for line in (ROOT / "ray_config.yaml").read_text().splitlines() if "request_timeout_s:" in line]
    assert "x-request-timeout-seconds 0" in profile.STARTER.read_text(), "by which Serve leaves it to the gateway"
    assert "Serve's own proxy (`--profile default`) alone" in line


def test_the_document_of_the_interface_names_the_429_that_haproxy_gives():
    (row,) = [line for line in (ROOT / "docs" / "api.md").read_text().splitlines() if line.startswith("| 429 |")]
    (most,) = re.findall(r"PER_CALLER:=(\d+)", profile.STARTER.read_text())
    assert "said by HAProxy" in row
    assert f"{int(most):,} requests in 10 s" in row


def test_statistics_and_metrics_are_for_the_machine_itself(started: Callable[..., str]):
    """The lines are those of Ray's own template."""
    template = import_module("ray.serve._private.haproxy_templates").HAPROXY_CONFIG_TEMPLATE
    given = started(template, "-sf", "17")
    wide = ("    bind :{{ config.metrics_port }}", "  bind *:{{ config.stats_port }}")
    for before in wide:
        assert before in template.splitlines()
        assert before not in given.splitlines()
    assert [line.strip() for line in given.splitlines() if "_port" in line and "127.0.0.1" in line] == [
        "bind 127.0.0.1:{{ config.metrics_port }}",
        "bind 127.0.0.1:{{ config.stats_port }}",
    ]


def test_every_node_asks_for_rays_token():
    assert profile.fast()["RAY_AUTH_MODE"] == profile.default()["RAY_AUTH_MODE"] == "token"


def test_the_starter_is_told_the_program_itself_also_within_the_profile(with_haproxy, monkeypatch: pytest.MonkeyPatch):
    outside = profile.fast()
    if profile.PROGRAM not in outside:
        pytest.skip(profile.works().reason)
    for name, value in outside.items():
        monkeypatch.setenv(name, value)
    assert profile.fast()[profile.PROGRAM] == outside[profile.PROGRAM] != str(profile.STARTER)


def test_only_a_haproxy_that_the_starter_starts_is_known_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    binary, link, other = "RAY_SERVE_HAPROXY_BINARY_PATH", tmp_path / "genrec-haproxy", tmp_path / "haproxy"
    link.symlink_to(profile.STARTER)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    monkeypatch.setenv(profile.PROGRAM, "/usr/sbin/haproxy")
    for path, ours in ((profile.STARTER, True), (link, True), (other, False)):
        monkeypatch.setenv(binary, str(path))
        assert profile.starts_haproxy() is ours
    monkeypatch.delenv(binary)
    assert not profile.starts_haproxy()
    monkeypatch.setenv(binary, str(profile.STARTER))
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    assert not profile.starts_haproxy()


def test_haproxy_waits_longer_for_a_gateway_than_any_request_may_take():
    settings = Settings()
    longest_s = settings.longest_answer_s + settings.gateway.admission.max_wait_ms / 1e3
    assert float(profile.HAPROXY["RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S"]) > longest_s
