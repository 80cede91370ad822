"""What the event store in a file has acknowledged outlives a failure of the power at any moment, and a user it has erased stays erased."""

import asyncio
import random
import shutil
import sys
from pathlib import Path

import pytest

from cluster.events.store import closing_store
from tests.documents import ROOT
from tests.power_loss import Disk, Operation, obstacle, recorded
from tests.repetitions import times

ROUNDS, FAILURES = times(30, 8), times(1500, 150)

KINDS = ("began", "erasing", "erased")


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Operation]]:
    """What a process did that stored events and erased users, and where."""
    if problem := obstacle():
        pytest.skip(problem)
    directory = tmp_path_factory.mktemp("recorded")
    command = [sys.executable, "-m", "tests.erasing_writer", f"sqlite:///{directory}/events.db", str(ROUNDS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return directory, recorded(command, directory)


class Told:
    """What the process had printed by then."""

    def __init__(self, operations: list[Operation]) -> None:
        whole, _, _ = b"".join(one.data for one in operations if one.kind == "told").decode().rpartition("\n")
        words = [line.split() for line in whole.splitlines()]
        self.stored = {key for first, *rest in words if first == "stored" for key in rest}
        self.began, self.erasing, self.erased = ({one for first, *rest in words if first == kind for one in rest} for kind in KINDS)


def user_of(name: str) -> str:
    return f"user-{int(name.partition('.')[0]):04}"


async def items(directory: Path, users: set[str]) -> dict[str, list[str]]:
    """What each user has in the store that opens on these files."""
    async with closing_store(f"sqlite:///{directory}/events.db") as store:
        histories = {user: await store.history("default", user, 1000) for user in sorted(users)}
        assert (await store.statistics()).events == sum(len(history.behaviours) for history in histories.values())
    return {user: [one.item_id for one in history.behaviours] for user, history in histories.items()}


def test_what_was_acknowledged_is_there_after_the_power_failed_at_any_moment(operations, tmp_path: Path):
    _, everything = operations
    draw = random.Random(0)
    for number in range(FAILURES):
        cut = draw.randrange(len(everything) + 1)
        disk, told, there = Disk(), Told(everything[:cut]), tmp_path / str(number)
        for operation in everything[:cut]:
            disk.apply(operation)
        there.mkdir()
        disk.crash(there, draw)
        found = asyncio.run(items(there, told.began))
        for user, names in found.items():
            stored = {name for name in told.stored if user_of(name) == user}
            assert len(names) == len(set(names)), (cut, user)
            assert not names or stored <= set(names), f"{cut}: of {user}, some of what was acknowledged is gone"
            assert names or not stored or user in told.erasing, f"{cut}: {user} is gone"
            assert not names or user not in told.erased, f"{cut}: {user} is back"
        left = [file.name for file in there.iterdir() if any(user.encode() in file.read_bytes() for user in told.erased)]
        assert left == [], f"{cut}: bytes of a user that was erased"
        shutil.rmtree(there)


def test_the_record_is_whole(operations, tmp_path: Path):
    """Replayed to its end, with all that was written, it is what the process left: nothing it did to its files went unseen."""
    directory, everything = operations
    disk = Disk()
    for operation in everything:
        disk.apply(operation)
    disk.crash(tmp_path, Everything())
    left = {file.name: file.read_bytes() for file in directory.iterdir()}
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if not file.name.endswith("-shm")} == left


class Everything(random.Random):
    """All of what was not synced is there."""

    def random(self) -> float:
        return 0.0

    def choice(self, options):
        return options[-1]
