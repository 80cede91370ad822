"""Steady load for long: memory and open files stay where they are. `--soak-minutes 60` is the fault table's."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.load import Phase
from benchmarks.load_bodies import bodies as requests
from tests.chaos.rows import Row
from tests.chaos.served import REPLICA, Served, served
from tests.clusters import SharedCluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3 * 3600)]
ARGS = {"encoder": {"order": ["onnxruntime", "torch"]}, "generator": {"order": ["torch_beam"]}, "cache": {"l1_bytes": 2**22}}
SAMPLES = 60
SETTLED_AFTER = 0.25
"""Of the soak: caches fill first."""


@pytest.fixture(scope="module")
def one(model, cluster: SharedCluster, tmp_path_factory) -> Iterator[Served]:
    with served(cluster, tmp_path_factory.mktemp("soak"), model.path.parent, ARGS) as serving:
        yield serving


def held(cluster: Served) -> tuple[Counter[str], int]:
    """MiB that the processes hold for themselves, by their titles, and the files they have open: all of Ray's and ours. Memory that is
    shared does not count.
    """
    memory, files = Counter[str](), 0
    for process in psutil.Process(cluster.serving.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            (title, *_), used = process.cmdline() or [process.name()], process.memory_info()
            memory[Path(title).name] += (used.rss - used.shared) / 2**20
            files += process.num_fds()
    return memory, files


def test_memory_and_open_files_stay_where_they_are(one: Served, record, soak_minutes: float):
    seconds = 60 * soak_minutes
    rate = 0.5 * one.capacity()
    bodies = (*requests(one.model_dir, 500, cache="use"), *requests(one.model_dir, 200, cache="bypass", strategy="retrieval"))
    with record(Row(f"{soak_minutes:g} minutes' soak", "RSS growth <= 100 MB, open files flat")) as row:
        at, by_title, files = list[float](), list[Counter[str]](), list[int]()
        with one.load(Phase("soak", rate, seconds), bodies=bodies) as load:
            while load.now < seconds:
                at.append(load.now)
                for series, value in zip((by_title, files), held(one), strict=True):
                    series.append(value)
                time.sleep(seconds / SAMPLES)
            results = load.results()
        settled = np.array(at) >= SETTLED_AFTER * seconds
        memory = [each.total() for each in by_title]
        held_mb, held_files = np.array(memory)[settled], np.array(files)[settled]
        tenth = max(1, len(held_mb) // 10)
        growth = float(np.median(held_mb[-tenth:]) - np.median(held_mb[:tenth])) * 2**20 / 1e6
        row.took(results, at_s=np.round(at, 1).tolist(), memory_mib=np.round(memory, 1).tolist(), open_files=files)
        first, last = by_title[int(np.argmax(settled))], by_title[-1]
        grown = {title: round(last[title] - first[title], 1) for title in last}
        row.figures |= {"replicas": len(one.processes(REPLICA)), "grown_mib": {title: mib for title, mib in grown.items() if abs(mib) >= 1}}
        row.figures["growth_mb_an_hour"] = round(growth * 3600 / (seconds * (1 - SETTLED_AFTER)))
        row.claim("failed requests", results.failed.sum() + results.rejected.sum(), most=0)
        row.claim("growth of memory once settled, MB", growth, most=100)
        row.claim("growth of open files once settled", np.median(held_files[-tenth:]) - np.median(held_files[:tenth]), most=10)
