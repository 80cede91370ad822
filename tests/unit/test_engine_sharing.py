"""Which holders share an engine, and when it ends."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from integrations.vllm.sharing import SharedEngines
from tests.waiting import eventually


class FakeEngine:
    def __init__(self) -> None:
        self.lives, self.closed = True, 0

    def alive(self) -> bool:
        return self.lives

    def queue(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def engines() -> SharedEngines[FakeEngine]:
    return SharedEngines()


def test_the_same_key_shares_an_engine_that_ends_with_its_last_holder(engines):
    first, second = engines.take("decoder", FakeEngine), engines.take("decoder", FakeEngine)
    assert first.engine is second.engine
    assert (first.first, second.first) == (True, False)
    first.release()
    first.release()
    assert first.engine.closed == 0
    assert second.first
    second.release()
    assert second.engine.closed == 1


def test_what_comes_after_the_last_holder_starts_an_engine_of_its_own(engines):
    ended = engines.take("decoder", FakeEngine)
    ended.release()
    fresh = engines.take("decoder", FakeEngine)
    assert fresh.engine is not ended.engine
    assert (fresh.alive(), fresh.engine.closed) == (True, 0)


def test_another_key_has_another_engine(engines):
    assert engines.take("decoder", FakeEngine).engine is not engines.take("other decoder", FakeEngine).engine


def test_an_engine_that_died_or_does_not_work_is_given_to_no_other(engines):
    died = engines.take("decoder", FakeEngine)
    died.engine.lives = False
    condemned = engines.take("decoder", FakeEngine)
    holder = engines.take("decoder", FakeEngine)
    assert condemned.engine is holder.engine is not died.engine
    condemned.condemn()
    assert not holder.alive()
    fresh = engines.take("decoder", FakeEngine)
    assert fresh.engine is not holder.engine
    for lease in (died, condemned, holder):
        lease.release()
    assert (died.engine.closed, holder.engine.closed, fresh.engine.closed) == (1, 1, 0)


def test_an_engine_can_be_shared_while_it_lives_and_has_a_holder(engines):
    assert not engines.runs("decoder")
    holder = engines.take("decoder", FakeEngine)
    assert (engines.runs("decoder"), engines.runs("other decoder")) == (True, False)
    holder.release()
    assert not engines.runs("decoder")
    engines.take("decoder", FakeEngine).condemn()
    assert not engines.runs("decoder")


def test_a_second_holder_waits_for_the_start_that_is_under_way(engines):
    go_on, starts = threading.Event(), []

    def slowly():
        starts.append(FakeEngine())
        assert go_on.wait(60)
        return starts[-1]

    with ThreadPoolExecutor(2) as threads:
        holders = [threads.submit(engines.take, "decoder", slowly) for _ in range(2)]
        eventually(lambda: starts, "one of them starts it", every_s=0.005)
        assert engines.runs("decoder")
        go_on.set()
        first, second = (holder.result(60) for holder in holders)
    assert first.engine is second.engine
    assert len(starts) == 1


def test_where_the_start_fails_the_next_tries_itself(engines):
    def broken():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        engines.take("decoder", broken)
    assert not engines.runs("decoder")
    assert engines.take("decoder", FakeEngine).first
