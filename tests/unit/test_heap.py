"""What is frozen costs later collections nothing; what is discarded is collected all the same."""

import gc
import os
import subprocess
import sys
import weakref

import pytest

from cluster.engines.heap import collect_discarded, collect_rarely, freeze_loaded

FREED = """
import resource
from pathlib import Path
from cluster.engines.heap import freeze_loaded

resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
blocks = [bytearray(100_000) for _ in range(1000)]  # each below the size from which on memory is mapped by itself
kept = bytearray(100_000)  # behind them: the end of the heap cannot move down
full = resident()
del blocks
freeze_loaded()
print(full - resident())
"""


class Model:
    """Keeps itself alive by a reference cycle, as many modules and sessions do."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def thawed():
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as it was
    gc.set_threshold(*thresholds)


def test_loaded_objects_are_left_out_of_collections():
    model = Model()
    gone = weakref.ref(model)
    freeze_loaded()
    del model
    gc.collect()
    freeze_loaded()
    assert gone() is not None, "a frozen object was walked, so a full collection costs what the process holds"


def test_a_few_requests_under_way_are_no_reason_to_collect():
    collect_rarely()
    before = gc.get_stats()[0]["collections"]
    under_way = [[] for _ in range(5_000)]
    assert gc.get_stats()[0]["collections"] == before, f"{len(under_way)} objects are walked"


def test_discarded_objects_are_collected_although_they_were_frozen():
    model = Model()
    gone = weakref.ref(model)
    freeze_loaded()
    del model
    collect_discarded()
    assert gone() is None


def test_garbage_of_loading_is_not_kept_for_ever():
    model = Model()
    gone = weakref.ref(model)
    del model
    freeze_loaded()
    assert gone() is None


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="only glibc is asked to return memory")
def test_what_a_load_freed_goes_back_to_the_system():
    given_back = int(subprocess.run([sys.executable, "-c", FREED], capture_output=True, check=True, text=True).stdout)
    assert given_back >= 90_000_000
