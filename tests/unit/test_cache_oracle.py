"""Hit rates against libCacheSim's (github.com/1a1a11a/libCacheSim, by the authors of S3-FIFO), unit weights.

Its parameters are the published ones and its defaults: S3FIFO with small-size-ratio 0.1, ghost-size-ratio 0.9, move-to-main-threshold 2;
ARC and LRU have none. `hashpower` sizes its hash table only.
"""

import numpy as np
import pytest

from cluster.cache.policy import make_policy
from cluster.cache.replay import read_trace, replay
from tests.conftest import shared_data

libcachesim = pytest.importorskip("libcachesim", reason="libcachesim is not installed (pip install '.[dev]')")

ORACLES = {
    "s3fifo": lambda keys: libcachesim.S3FIFO(keys, hashpower=18, small_size_ratio=0.1, ghost_size_ratio=0.9, move_to_main_threshold=2),
    "lru": lambda keys: libcachesim.LRU(keys, hashpower=18),
    "arc": lambda keys: libcachesim.ARC(keys, hashpower=18),
}
A_TWENTIETH_OF_A_POINT = 0.0005  # half a point would let a wrong threshold or a wrong step of ARC's target pass


def zipf_with_scan(accesses=200_000, keys=20_000, exponent=0.8, scan=0.3):
    """Draws from a Zipf distribution, of which the share `scan` is replaced by keys that occur once."""
    rng = np.random.default_rng(20231023)
    odds = np.arange(1, keys + 1) ** -exponent
    trace = rng.choice(keys, accesses, p=odds / odds.sum())
    scanned = rng.random(accesses) < scan
    trace[scanned] = keys + np.arange(scanned.sum())
    return trace.tolist()


def shifting(phases=40, accesses=500):
    """Phases by turns of a skewed hot set, a loop, and a hot set that wanders: what makes ARC's target move both ways."""
    rng = np.random.default_rng(20030331)
    kinds = (
        lambda phase: rng.integers(0, 200, accesses) * rng.integers(0, 200, accesses) // 200,
        lambda phase: np.arange(accesses) % (60 + phase),
        lambda phase: 40 * phase + rng.integers(0, 30, accesses) + np.arange(accesses) // 10,
    )
    return np.concatenate([kinds[rng.integers(len(kinds))](phase) for phase in range(phases)]).tolist()


@pytest.fixture(scope="module")
def synthetic():
    return zipf_with_scan()


@pytest.fixture(scope="module")
def mooncake():
    path = shared_data() / "traces" / "mooncake_conversation.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no trace {path}")
    return read_trace(path)


@pytest.mark.parametrize("policy", ORACLES)
def test_hit_rates_on_a_zipf_trace_with_a_scan_are_those_of_libcachesim(policy, synthetic):
    compare(synthetic, policy)


@pytest.mark.parametrize("policy", ORACLES)
def test_every_single_hit_of_a_workload_that_shifts_is_one_of_libcachesim(policy):
    trace = shifting()
    for capacity in (20, 50, 110):
        oracle = ORACLES[policy](capacity)
        assert hits_of(make_policy(policy, capacity), trace) == oracle_hits(trace, oracle), f"{policy} with {capacity} keys"


@pytest.mark.parametrize("policy", ORACLES)
def test_hit_rates_on_the_mooncake_conversation_trace_are_those_of_libcachesim(policy, mooncake):
    compare(mooncake, policy)


def compare(trace, policy):
    for result in replay(trace, ["1%", "10%"], [policy]):
        oracle = sum(oracle_hits(trace, ORACLES[policy](result.capacity))) / len(trace)
        assert result.hit_rate == pytest.approx(oracle, abs=A_TWENTIETH_OF_A_POINT), f"{policy} with {result.capacity} keys"


def oracle_hits(trace, cache):
    request = libcachesim.Request()
    request.obj_size = 1
    hits = []
    for key in trace:
        request.obj_id = key
        hits.append(cache.get(request))
    return hits


def hits_of(policy, trace):
    hits = []
    for key in trace:
        hits.append(key in policy)
        if hits[-1]:
            policy.touch(key)
        else:
            policy.admit(key, 1)
    return hits
