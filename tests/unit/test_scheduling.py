"""The tests of a cluster run in one process, and first; of what is left, each file. Checkouts take turns of the machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from cluster import ports
from tests.documents import ROOT
from tests.ports import free_port
from tests.scheduling import (
    ORDER,
    TURNS,
    WITHOUT_CLUSTER,
    give_turn_back,
    group_of,
    has_a_cluster,
    is_beside,
    place_of,
    pytest_xdist_make_scheduler,
    take_turn,
)

OTHER = """
import sys
from tests.scheduling import take_turn
take_turn([int(sys.argv[1])])
print("has it", flush=True)
sys.stdin.read()
"""


def test_every_listed_file_is_there():
    assert [path for path in ORDER if not (ROOT / path).exists()] == []


def test_the_files_of_a_cluster_are_one_group_and_any_other_file_is_its_own():
    live, rows = "tests/integration/live/test_top.py::test_it[1]", "tests/chaos/test_malformed.py::test_it"
    assert {group_of(live), group_of(rows)} == {"fast"}
    assert group_of("tests/integration/test_rollout.py::test_it[split]") == "default"
    assert group_of("tests/contract/test_shared_caches.py::test_it[actors]") == group_of("tests/integration/test_cache_actors.py") == "bare"
    assert group_of("tests/unit/test_trie.py::TestIt::test_it[a::b]") == "tests/unit/test_trie.py"


def test_clusters_come_first_and_what_kills_a_cluster_is_the_last_on_it():
    unit, killed = place_of("tests/unit/test_trie.py::test_it"), "tests/chaos/test_killed_processes.py"
    assert all(place_of(f"{path}::test_it") < unit for path in ORDER if path.endswith(".py"))
    assert place_of(f"{killed}::test_it") == max(place for path, place in ORDER.items() if group_of(path) == group_of(killed))


def test_what_starts_a_cluster_is_told_from_what_does_not():
    assert has_a_cluster("tests/contract/test_shared_caches.py::test_it[actors]")
    assert has_a_cluster("tests/integration/test_nodes.py::test_it")
    assert not has_a_cluster("tests/unit/test_trie.py::test_it")
    assert not any(has_a_cluster(f"{path}::test_it") for path in WITHOUT_CLUSTER)


@pytest.mark.parametrize("path", WITHOUT_CLUSTER)
def test_a_file_without_a_cluster_has_no_mark_of_one(path: str):
    assert "mark.cluster" not in (ROOT / path).read_text()


class Node:
    """A process of xdist's, which notes the files that it is given; it runs all of one before it asks for the next."""

    def __init__(self, number: int) -> None:
        self.gateway, self.shutting_down, self.given = SimpleNamespace(id=f"gw{number}"), False, list[int]()

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_process_beyond_the_turns_takes_files_without_a_cluster_and_ends_where_clusters_are_left():
    files = [*(f"tests/integration/test_{number}.py" for number in range(len(TURNS) + 1)), "tests/unit/test_trie.py"]
    config = SimpleNamespace(option=SimpleNamespace(loadscopereorder=True), getvalue=lambda _: ["popen"] * (len(TURNS) + 1))
    nodes = [Node(number) for number in range(len(TURNS) + 1)]
    scheduling = pytest_xdist_make_scheduler(config, None)
    tests = [f"{file}::test_{number}" for file in files for number in range(4)]
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, tests)
    scheduling.schedule()
    beside = nodes[-1]
    assert [tests[index] for index in beside.given] == [f"{files[-1]}::test_{number}" for number in range(4)]
    for index in list(beside.given):
        scheduling.mark_test_complete(beside, index)
    assert beside.shutting_down
    assert len(beside.given) == 4, "what is left are clusters"


def test_processes_beyond_the_turns_of_the_machine_are_told_from_the_others():
    assert [is_beside(f"gw{number}") for number in (0, len(TURNS) - 1, len(TURNS))] == [False, False, True]


@pytest.fixture
def turns() -> Iterator[list[int]]:
    """Two turns that no test run takes."""
    found = [free_port(), free_port()]
    give_turn_back(found)
    yield found
    give_turn_back(found)


@pytest.fixture
def turn(turns: list[int]) -> int:
    return turns[0]


@contextmanager
def other_checkout(turn: int) -> Iterator[subprocess.Popen[str]]:
    """A process that takes the turn, says so, and has it until its input ends."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OTHER, str(turn)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_checkout_waits_until_another_one_gives_its_turn_back(turn: int):
    take_turn([turn])
    with other_checkout(turn) as other:
        assert other.stderr
        assert "waits for a turn" in other.stderr.readline()
        give_turn_back([turn])
        assert other.stdout
        assert other.stdout.readline() == "has it\n"
        assert not ports.claim(turn)


def test_a_cluster_without_a_turn_for_long_starts_all_the_same(turn: int):
    with other_checkout(turn) as other:
        assert other.stdout
        assert other.stdout.readline() == "has it\n"
        take_turn([turn], within_s=0.1)
        assert not ports.claim(turn)


def test_a_process_with_a_turn_takes_no_second_one(turns: list[int]):
    with other_checkout(turns[0]) as other:
        assert other.stdout
        assert other.stdout.readline() == "has it\n"
        take_turn(turns)
    take_turn(turns)
    with other_checkout(turns[0]) as other:
        assert other.stdout
        assert other.stdout.readline() == "has it\n"
