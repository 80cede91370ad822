"""Which tests run together, and which first: `pytest --numprocesses 3` gives the tests of a shared cluster to one process, in one go.

Of what is left each file goes to one process, so that what a file sets up is set up once. Clusters come first, since they take longest.

Processes of several checkouts on a machine take turns: one that is to start a cluster waits while as many run as the machine has cores. Of
four clusters on two cores each takes far more than twice as long as of two, and what waits for them for minutes gives up. A process beyond
the machine's turns takes files without a cluster as long as there are any, and gives way to clusters, which leave it what they do not use:
their tests wait for a good part of their time.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from cluster import ports
from tests import clusters
from tests.waiting import eventually

CLUSTERS = {
    "default": (
        "tests/integration/test_autoscaling.py",
        "tests/integration/test_user_affinity.py",
        "tests/integration/test_handover.py",
        "tests/integration/test_slow_callers.py",
        "tests/integration/test_rollout.py",
        "tests/integration/test_generation.py",
    ),
    "fast": (
        "tests/integration/live/",
        "tests/integration/test_playground_browser.py",
        "tests/chaos/test_artifacts_and_disks.py",
        "tests/chaos/test_cancelled_work.py",
        "tests/chaos/test_broken_stages.py",
        "tests/chaos/test_changes_under_load.py",
        "tests/chaos/test_overload.py",
        "tests/chaos/test_tenants.py",
        "tests/chaos/test_soak.py",
        "tests/chaos/test_erasure_drill.py",
        "tests/chaos/test_malformed.py",  # from here on one application, of which the last ones kill processes
        "tests/chaos/test_killed_caches.py",
        "tests/chaos/test_killed_processes.py",
    ),
    "bare": ("tests/integration/test_cache_actors.py", "tests/contract/test_shared_caches.py"),
}
"""Which files deploy to which cluster, in the order in which they run."""
ORDER = {path: place for place, path in enumerate(path for paths in CLUSTERS.values() for path in paths)}
CLUSTER_OF = {path: name for name, paths in CLUSTERS.items() for path in paths}
assert len(ORDER) == sum(map(len, CLUSTERS.values())), "a file is listed twice in CLUSTERS; its tests run in one place"

TURNS = range(1, 1 + max(2, os.cpu_count() or 1))
"""The turns of this machine: each is the claim on a port that no cluster can have."""
WITHOUT_CLUSTER = (
    "tests/integration/test_add_items.py",
    "tests/integration/test_backends_command.py",
    "tests/integration/test_event_durability.py",
    "tests/integration/test_launch_files.py",
    "tests/integration/test_own_backend.py",
    "tests/integration/test_power_loss.py",
    "tests/integration/test_train_command.py",
)
"""Which files of tests/integration start no cluster."""
BESIDE_NICENESS = 5
"""Of a process beyond the machine's turns, so that clusters go before it."""
GROUP = pytest.StashKey[str]()
"""The group of tests that this process has taken a turn for, or has gone on without one."""
TURN_WITHIN_S = 3600.0
"""A cluster that has had no turn for so long starts without one: what has them may hang."""


def place_of(nodeid: str) -> int:
    """Where a test runs among the others; those without a cluster come last, in the order in which they were found."""
    return ORDER.get(_listed(nodeid), len(ORDER))


def group_of(nodeid: str) -> str:
    """What one process runs in one go: the tests of a cluster, or of a file."""
    return CLUSTER_OF.get(_listed(nodeid), nodeid.partition("::")[0])


def _listed(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return next((path for path in ORDER if file == path or (path.endswith("/") and file.startswith(path))), "")


def needs(item: pytest.Item) -> set[str]:
    """The clusters that a test asks for."""
    return set(CLUSTERS) & set(getattr(item, "fixturenames", ()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clusters first. Raises UsageError where a file asks for a cluster that it is not listed with."""
    items.sort(key=lambda item: place_of(item.nodeid))
    for item in filter(needs, items):
        if group_of(item.nodeid) not in needs(item):
            raise pytest.UsageError(f"{item.nodeid} deploys to {needs(item)}; list its file with that cluster in tests/scheduling.py")


def has_a_cluster(nodeid: str) -> bool:
    """Whether the test deploys to a shared cluster, or starts one of its own."""
    return bool(_listed(nodeid)) or (nodeid.startswith(("tests/integration/", "tests/chaos/")) and not nodeid.startswith(WITHOUT_CLUSTER))


def is_beside(process: str) -> bool:
    """Whether a process of xdist's, "gw0" and so on, is beyond the machine's turns."""
    return int(process.removeprefix("gw")) >= len(TURNS)


def take_turn(turns: Sequence[int] = TURNS, within_s: float = TURN_WITHIN_S) -> None:
    """Wait until this process has one of the turns, `within_s` seconds at most. One that has a turn goes on at once."""
    if ports.descriptors(*turns) or any(map(ports.claim, turns)):
        return
    print("waits for a turn: the tests of another checkout have clusters on this machine", file=sys.__stderr__)
    with suppress(AssertionError):
        eventually(lambda: any(map(ports.claim, turns)), "there is a turn", within_s, every_s=1)


def give_turn_back(turns: Sequence[int] = TURNS) -> None:
    for turn in turns:
        ports.release(turn)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") and is_beside(config.workerinput["workerid"]):
        os.nice(BESIDE_NICENESS)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Take a turn for a group before its first test's own time begins. Where all tests run in one process, it does not wait."""
    group = group_of(item.nodeid)
    if hasattr(item.config, "workerinput") and has_a_cluster(item.nodeid) and item.session.stash.get(GROUP, "") != group:
        item.session.stash[GROUP] = group
        with item.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():  # it is seen that this waits
            take_turn()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End a cluster once its last test is over: it is busy even when it is asked nothing."""
    yield
    if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
        clusters.end_all()
        give_turn_back()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In place of xdist's own: `--dist loadgroup` goes by marks, which the process that gives out the tests does not see."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - only where it is asked for

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            if is_beside(node.gateway.id) and (file := self._file_without_a_cluster()):
                self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            others = (other for other in self.nodes if not is_beside(other.gateway.id) and not other.shutting_down)
            if is_beside(node.gateway.id) and not self._file_without_a_cluster() and any(others):
                node.shutdown()  # once it has run what it has: it would wait for a turn that the others take
            else:
                super()._reschedule(node)

        def _file_without_a_cluster(self) -> str | None:
            return next((scope for scope in self.workqueue if scope not in CLUSTERS and not has_a_cluster(scope)), None)

    config.option.loadscopereorder = False  # the order of `pytest_collection_modifyitems` is meant
    return Scheduling(config, log)
