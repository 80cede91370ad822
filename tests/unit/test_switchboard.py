"""The switchboard: one switch for all replicas, their statistics added up, and a restart that loses neither."""

import json

import pytest

from cluster.engines.snapshots import BackendSnapshot, StageSnapshot
from cluster.errors import BackendUnavailable, UnknownChoice
from cluster.fleet.switchboard import Switchboard
from cluster.traffic.breaker import BreakerState
from cluster.traffic.latency import LatencySummary

NOW = 1_760_000_000.0
OFF = {("encoder", "torch"): "off"}


def backend(name: str = "torch", **changes: object) -> BackendSnapshot:
    values: dict[str, object] = {
        "name": name,
        "import_string": f"my.{name}:Encoder",
        "available": True,
        "reason": "",
        "enabled": True,
        "rank": 0,
        "loaded": True,
        "breaker": BreakerState.CLOSED,
        "last_error": "",
        "calls": 0,
        "failures": 0,
        "fallbacks": 0,
        "latency": LatencySummary(),
    }
    return BackendSnapshot(**{**values, **changes})


def stage(*backends: BackendSnapshot, explanation: str = "encoder=torch") -> StageSnapshot:
    return StageSnapshot("encoder", explanation, backends or (backend(),))


class Replica:
    """What the encoder deployment does once a second."""

    def __init__(self, name: str, snapshot: StageSnapshot | None = None) -> None:
        self.name, self.snapshot = name, snapshot or stage()
        self.version, self.switches = 0, {}

    def report(self, switchboard: Switchboard, now: float = NOW) -> None:
        switchboard.report("encoder", self.name, self.snapshot, self.version, self.switches, now=now)
        self.version, self.switches = switchboard.switches()


def test_before_any_replica_has_reported_a_switch_is_not_possible_yet():
    with pytest.raises(BackendUnavailable, match="try again in a few seconds"):
        Switchboard().set("encoder", "torch", "off", now=NOW)


def test_a_switch_reaches_every_replica_and_is_applied_only_then():
    switchboard, replicas = Switchboard(), [Replica("a"), Replica("b")]
    for replica in replicas:
        replica.report(switchboard)
    version = switchboard.set("encoder", "torch", "off", now=NOW)
    for replica in replicas:
        assert not switchboard.applied(version, now=NOW)
        replica.report(switchboard)
        assert replica.switches == OFF
    assert not switchboard.applied(version, now=NOW), "a replica follows a switch once it reports its version"
    for replica in replicas:
        replica.report(switchboard)
    assert switchboard.applied(version, now=NOW)


def test_a_replica_that_is_gone_is_neither_waited_for_nor_counted():
    switchboard, alive = Switchboard(ttl_s=5), Replica("alive")
    Replica("gone").report(switchboard, now=NOW)
    alive.report(switchboard, now=NOW + 5.5)
    version = switchboard.set("encoder", "torch", "off", now=NOW + 5.5)
    for _ in range(2):
        alive.report(switchboard, now=NOW + 6)
    assert switchboard.applied(version, now=NOW + 6)
    assert [status.replicas for status in switchboard.status(now=NOW + 6)] == [1]
    assert switchboard.status(now=NOW + 60) == ()


def test_a_restarted_switchboard_that_has_heard_of_no_replica_does_not_say_that_a_switch_is_applied():
    old, replica = Switchboard(), Replica("a")
    replica.report(old)
    version = old.set("encoder", "torch", "off", now=NOW)
    restarted = Switchboard()
    assert not restarted.applied(version, now=NOW + 1)
    replica.report(restarted, now=NOW + 1)
    assert not restarted.applied(version, now=NOW + 1), "the switch was lost before a replica had heard of it"


def test_every_change_has_a_newer_version():
    switchboard = Switchboard()
    Replica("a").report(switchboard)
    versions = [switchboard.set("encoder", "torch", position, now=NOW) for position in ("off", "on", "first")]
    assert sorted(set(versions)) == versions


def test_a_restarted_switchboard_adopts_what_the_replicas_follow():
    old, replica = Switchboard(), Replica("a")
    replica.report(old)
    version = old.set("encoder", "torch", "off", now=NOW)
    replica.report(old)
    restarted, newcomer = Switchboard(), Replica("b")
    newcomer.report(restarted)
    assert newcomer.switches == {}
    replica.report(restarted)
    newcomer.report(restarted)
    assert (newcomer.version, newcomer.switches) == (version, OFF)


def test_a_switch_set_right_after_a_restart_is_kept_and_so_are_the_older_ones():
    old, replica, both = Switchboard(), Replica("a"), stage(backend("torch"), backend("onnxruntime"))
    replica.snapshot = both
    replica.report(old)
    old.set("encoder", "torch", "off", now=NOW)
    replica.report(old)
    restarted, newcomer = Switchboard(), Replica("b", both)
    newcomer.report(restarted, now=NOW + 1)
    version = restarted.set("encoder", "onnxruntime", "off", now=NOW + 1)
    newcomer.report(restarted, now=NOW + 1)
    for _ in range(2):
        for one in (replica, newcomer):
            one.report(restarted, now=NOW + 2)
    assert restarted.applied(version, now=NOW + 2)
    assert replica.switches == newcomer.switches == {**OFF, ("encoder", "onnxruntime"): "off"}


def test_the_newer_of_two_settings_of_one_switch_wins_after_a_restart():
    old, replica = Switchboard(), Replica("a")
    replica.report(old)
    old.set("encoder", "torch", "off", now=NOW)
    replica.report(old)
    restarted = Switchboard()
    Replica("b").report(restarted, now=NOW + 1)
    restarted.set("encoder", "torch", "on", now=NOW + 1)
    replica.report(restarted, now=NOW + 2)
    assert replica.switches == {("encoder", "torch"): "on"}


def test_one_backend_of_a_stage_is_the_first_and_a_restart_does_not_make_two():
    old, replica, both = Switchboard(), Replica("a"), stage(backend("torch"), backend("onnxruntime"))
    replica.snapshot = both
    replica.report(old)
    old.set("encoder", "torch", "first", now=NOW)
    old.set("encoder", "onnxruntime", "first", now=NOW)
    replica.report(old)
    assert replica.switches == {("encoder", "torch"): "on", ("encoder", "onnxruntime"): "first"}
    restarted = Switchboard()
    Replica("b", both).report(restarted, now=NOW + 1)
    restarted.set("encoder", "torch", "first", now=NOW + 1)
    replica.report(restarted, now=NOW + 2)
    assert replica.switches == {("encoder", "torch"): "first", ("encoder", "onnxruntime"): "on"}


def test_unknown_names_are_refused_with_the_choices():
    switchboard = Switchboard()
    Replica("a").report(switchboard)
    with pytest.raises(UnknownChoice, match="unknown stage 'generator'; choose from encoder"):
        switchboard.set("generator", "vllm", "off", now=NOW)
    with pytest.raises(UnknownChoice, match="unknown encoder 'trt'; choose from torch"):
        switchboard.set("encoder", "trt", "off", now=NOW)


def test_the_status_adds_up_the_replicas():
    switchboard = Switchboard()
    first = backend(calls=10, failures=1, fallbacks=2, latency=LatencySummary(10, 2.0, (0, 10)))
    second = backend(
        available=False,
        reason="no engine",
        calls=5,
        breaker=BreakerState.OPEN,
        last_error="broke",
        latency=LatencySummary(5, 1.5, (0, 0, 0, 5)),
    )
    Replica("a", stage(first)).report(switchboard)
    Replica("b", stage(second, explanation="encoder=none (torch: no engine)")).report(switchboard)
    (status,) = switchboard.status(now=NOW)
    (torch,) = status.backends
    assert (status.replicas, status.explanations) == (2, ("encoder=torch", "encoder=none (torch: no engine)"))
    assert (torch.replicas, torch.available_on, torch.reasons, torch.last_errors) == (2, 1, ("no engine",), ("broke",))
    assert (torch.calls, torch.failures, torch.fallbacks, torch.breakers) == (15, 1, 2, {"closed": 1, "open": 1})
    assert (torch.latency.count, torch.latency.per_second, torch.latency.buckets) == (15, 3.5, (0, 10, 0, 5))


def test_the_status_of_a_backend_is_plain_json():
    switchboard = Switchboard()
    Replica("a").report(switchboard)
    (status,) = switchboard.status(now=NOW)
    shown = json.loads(json.dumps(status.backends[0].as_json()))
    assert (shown["breakers"], shown["p99_ms"]) == ({"closed": 1}, None)
