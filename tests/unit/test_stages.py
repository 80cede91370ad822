"""Where the stages are computed, split or colocated: what a replica gives as a value is raised, and whose business a failure is."""

import asyncio
from contextvars import ContextVar

import pytest
from msgspec.structs import replace
from ray.exceptions import ActorDiedError, RayTaskError

from cluster.config import FlagSettings
from cluster.engines.skipped import Declined, NoBackendAnswered, OutOfTime
from cluster.errors import BackendFailed, BackendUnavailable, ModelGone
from cluster.fleet.board import READY, FleetBoard, FleetNews, Presence
from cluster.stages import ENCODER, GENERATOR, RANKER
from cluster.traffic.hedging import Hedge
from cluster.traffic.user_router import home_of
from cluster.values import EncodeRequest, Outcomes, SkippedBackend
from deployments.replicas.batching import TOO_LATE
from deployments.replicas.replica import due
from deployments.stages import ColocatedStages, ScaleUpTrigger, SplitStages
from tests.bundles import random_sequence
from tests.fakes.handles import NEVER, Raw, ScriptedHandle
from tests.waiting import until

pytestmark = pytest.mark.virtual_time

NOBODY = NoBackendAnswered("encoder", (SkippedBackend("torch", "broke", failed=True),))
LATE = NoBackendAnswered("encoder", (OutOfTime("encoder", TOO_LATE),))
GONE = ModelGone("this replica holds tiny/1, not tiny/2")
ASKED = EncodeRequest(random_sequence(3), 5)


async def listed(pieces):
    return [piece async for piece in pieces]


@pytest.mark.parametrize("stage", [ENCODER, GENERATOR], ids=lambda stage: stage.name)
@pytest.mark.parametrize("failure", [NOBODY, GONE], ids=["engines broken", "version not held"])
async def test_a_replica_that_has_no_answer_is_passed_over_for_one_that_has(failure, stage):
    handle = ScriptedHandle(failure, "the answer")
    assert await SplitStages(handle, handle, ScriptedHandle()).ask(stage, ASKED, 5.0) == "the answer"
    handle = ScriptedHandle(failure, failure, failure)
    with pytest.raises(type(failure)):
        await SplitStages(handle, handle, ScriptedHandle()).ask(stage, ASKED, 5.0)
    assert handle.outcomes == []


class Late(ScriptedHandle):
    """Says of every request that its time was over, as long before its deadline as a replica does."""

    def _together(self, together):
        self.calls += together.requests
        answer, (asked, within_s) = asyncio.get_running_loop().create_future(), together.requests[0]
        late_s = due(asked, 0.0, within_s).deadline
        asyncio.get_running_loop().call_later(late_s, lambda: answer.done() or answer.set_result(Outcomes([(0, LATE)])))
        return answer


async def test_what_was_out_of_time_at_one_replica_is_not_asked_again_with_what_is_left_of_it():
    """The second call is the copy of one that seems to have stalled, at half of the time."""
    handle = Late()
    stages = SplitStages(handle, ScriptedHandle(), ScriptedHandle())
    with pytest.raises(NoBackendAnswered, match="waited for a batch"):
        await stages.ask(ENCODER, ASKED, 0.3)
    assert [within_s for _, within_s in handle.calls] == [pytest.approx(0.3, abs=0.01), pytest.approx(0.15, abs=0.01)]


@pytest.mark.parametrize("failure", [NOBODY, GONE], ids=["engines broken", "version not held"])
async def test_a_stream_that_a_replica_has_nothing_for_is_begun_by_one_that_has(failure):
    handle = ScriptedHandle([failure], [1, 2])
    assert await listed(SplitStages(ScriptedHandle(), handle, ScriptedHandle()).stream(None, 5.0)) == [1, 2]
    assert all(response.was_cancelled for response in handle.responses)
    handle = ScriptedHandle([failure], [failure], [failure])
    with pytest.raises(type(failure)):
        await listed(SplitStages(ScriptedHandle(), handle, ScriptedHandle()).stream(None, 5.0))
    assert handle.outcomes == []


async def test_what_was_out_of_time_at_one_generator_is_not_tried_on_the_next_one():
    for outcomes, call in (
        ((LATE, "the items"), lambda stages: stages.ask(GENERATOR, None, 5.0)),
        (([LATE], ["the items"]), lambda stages: listed(stages.stream(None, 5.0))),
    ):
        handle = ScriptedHandle(*outcomes)
        with pytest.raises(NoBackendAnswered, match="waited for a batch"):
            await call(SplitStages(ScriptedHandle(), handle, ScriptedHandle()))
        assert handle.outcomes == [outcomes[1]]


async def test_what_engines_decline_is_not_asked_of_another_replica():
    handle = ScriptedHandle(NoBackendAnswered("generator", (Declined("vllm", "draws no items"),)), "the items")
    with pytest.raises(NoBackendAnswered, match="draws no items"):
        await SplitStages(ScriptedHandle(), handle, ScriptedHandle()).ask(GENERATOR, None, 5.0)
    assert handle.outcomes == ["the items"]


@pytest.mark.parametrize("failure", [NOBODY, GONE], ids=["engines broken", "version not held"])
async def test_a_stream_whose_replica_fails_midway_is_not_begun_again(failure):
    handle = ScriptedHandle([1, failure], ["the items"])
    with pytest.raises(type(failure)):
        await listed(SplitStages(ScriptedHandle(), handle, ScriptedHandle()).stream(None, 5.0))
    assert (handle.outcomes, handle.responses[0].was_cancelled) == ([["the items"]], True)


async def test_a_generator_that_raises_is_not_tried_on_the_next_one():
    handle = ScriptedHandle(Raw(BackendFailed("it broke")), "the items")
    with pytest.raises(BackendFailed, match="it broke"):
        await SplitStages(ScriptedHandle(), handle, ScriptedHandle()).ask(GENERATOR, None, 5.0)
    assert handle.outcomes == ["the items"]


async def test_a_stream_whose_replica_dies_is_not_begun_again():
    handle = ScriptedHandle([1, ActorDiedError()], [1, 2])
    with pytest.raises(BackendUnavailable, match="no replica of encoder could be reached"):
        await listed(SplitStages(ScriptedHandle(), handle, ScriptedHandle()).stream(None, 5.0))
    assert handle.outcomes == [[1, 2]]


BUG = ZeroDivisionError("no")


@pytest.mark.parametrize("raised", [RayTaskError("generate_stream", "the trace", BUG), Raw(BUG)], ids=["ray", "grpc"])
async def test_what_a_stream_raises_is_an_error_of_ours_and_is_not_tried_on_another_replica(raised):
    handle = ScriptedHandle([1, raised], [1, 2])
    with pytest.raises(BackendFailed, match="ZeroDivisionError"):
        await listed(SplitStages(ScriptedHandle(), handle, ScriptedHandle()).stream(None, 5.0))
    assert handle.outcomes == [[1, 2]]


async def test_that_the_time_is_over_is_for_the_pipeline_to_say():
    """A handle answers late or never; the pipeline gives up at its deadline and says so."""
    whole = SplitStages(ScriptedHandle(), ScriptedHandle(*[NEVER] * 3), ScriptedHandle()).ask(GENERATOR, None, 0.01)
    pieces = SplitStages(ScriptedHandle(), ScriptedHandle(*[[NEVER]] * 3), ScriptedHandle()).stream(None, 0.01)
    for call in (whole, listed(pieces)):
        with pytest.raises(TimeoutError):  # the test's own, while the call still waits
            await asyncio.wait_for(call, 0.1)


async def test_a_stream_that_nobody_reads_any_more_is_cancelled():
    handle = ScriptedHandle([1, NEVER])
    pieces = SplitStages(ScriptedHandle(), handle, ScriptedHandle()).stream(None, 5.0)
    assert await anext(pieces) == 1
    await pieces.aclose()
    assert handle.responses[0].was_cancelled


async def test_split_a_version_is_ready_once_the_switchboard_says_so_of_everybody():
    stages = SplitStages(ScriptedHandle(), ScriptedHandle(), ScriptedHandle())
    stages.update(FleetNews(ready=frozenset({1})))
    assert not stages.ready(2)
    stages.update(FleetNews(ready=frozenset({1, 2})))
    assert stages.ready(2)


async def test_a_restarted_switchboard_that_has_heard_of_few_encoders_moves_no_users_home():
    """Requests of users with one home share a call."""
    ada, carl = (replace(ASKED, user_id=user) for user in ("ada", "carl"))
    assert home_of(ada, ["one", "two"]) != home_of(carl, ["one", "two"])
    stages = SplitStages(handle := ScriptedHandle(*["an answer"] * 10), ScriptedHandle(), ScriptedHandle())

    async def calls(*replicas: str, settled: bool) -> int:
        """How many the requests of both users take after such news."""
        stages.update(FleetNews(settled=settled, replicas={"encoder": replicas}))
        before = len(handle.responses)
        await asyncio.gather(*(stages.ask(ENCODER, one, 5.0) for one in (ada, carl)))
        return len(handle.responses) - before

    assert [await calls("one", settled=False), await calls("one", "two", settled=False)] == [1, 2], "a new gateway takes what is known"
    assert await calls("one", "two", settled=True) == 2
    assert await calls("one", settled=False) == 2, "others may not have reported yet"
    assert await calls("one", settled=True) == 1


async def test_a_generator_is_woken_in_the_context_of_none_of_the_requests():
    """Serve cancels the calls that were made in the context of a request as its client leaves."""
    caller, seen = ContextVar("caller", default="none"), []

    class Handle(ScriptedHandle):
        def _remote(self, *args):
            seen.append(caller.get())
            return super()._remote(*args)

    trigger = ScaleUpTrigger(Handle(None))
    caller.set("the first one's")
    trigger.pull()
    trigger.pull()
    await until(lambda: seen)
    assert seen == ["none"]


async def test_a_generator_that_is_starting_is_not_waited_for():
    stages = SplitStages(ScriptedHandle(), generator := ScriptedHandle(NEVER), ScriptedHandle())
    board = FleetBoard()
    board.report("generator/x", Presence("generator", {}), now=10)
    stages.update(board.news(now=10))
    with pytest.raises(BackendUnavailable, match="no generator runs now"):
        await asyncio.wait_for(stages.ask(GENERATOR, None, 5.0), 0.01)
    with pytest.raises(BackendUnavailable, match="no generator runs now"):
        await asyncio.wait_for(listed(stages.stream(None, 5.0)), 0.01)
    await asyncio.sleep(0)
    stages.update(FleetNews(settled=False))  # of a restarted switchboard, which does not know yet whether one runs
    with pytest.raises(BackendUnavailable, match="no generator runs now"):
        await asyncio.wait_for(stages.ask(GENERATOR, None, 5.0), 0.01)
    await asyncio.sleep(0)
    assert generator.calls == [()], "Serve is asked for one, once"


async def test_hedging_follows_its_flag():
    stages = SplitStages(ScriptedHandle(), ScriptedHandle(), ScriptedHandle(), hedge := Hedge(on=False))
    await stages.reconfigure({}, FlagSettings(hedge=True))
    assert hedge.on
    await stages.reconfigure({}, FlagSettings())
    assert not hedge.on


class FakeReplica:
    """A stage's replica in this process that gives `outcome`, and remembers what it was told. `held`: versions it has."""

    def __init__(self, outcome=None, held=(1,)):
        self.outcome, self.told, self.holds = outcome, [], dict.fromkeys(held, READY)

    async def ask(self, request, within_s):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome if self.outcome is not NEVER else await asyncio.Event().wait()

    async def stream(self, request, within_s):
        try:
            for piece in self.outcome:
                yield piece
        finally:
            self.told.append("stream closed")

    async def reconfigure(self, user_config):
        self.told.append(user_config)

    async def check_health(self):
        if self.outcome is NEVER:
            raise TimeoutError("the engine thread is stuck")

    async def close(self):
        self.told.append("close")


def colocated(encoder=None, generator=None, ranker=None):
    return ColocatedStages(encoder or FakeReplica(), generator or FakeReplica(), ranker or FakeReplica(held=(1, 2)))


async def test_colocated_an_answer_comes_from_this_process_and_an_error_is_raised():
    stages = colocated(FakeReplica("the state"), FakeReplica("the items"), FakeReplica("the order"))
    answers = await stages.ask(ENCODER, None, 5.0), await stages.ask(GENERATOR, None, 5.0), await stages.ask(RANKER, None, 5.0)
    assert answers == ("the state", "the items", "the order")
    for failure in (NOBODY, GONE):
        broken = colocated(FakeReplica(failure), FakeReplica(failure), FakeReplica(failure))
        for call in (broken.ask(ENCODER, None, 5.0), broken.ask(GENERATOR, None, 5.0), broken.ask(RANKER, None, 5.0)):
            with pytest.raises(type(failure)):
                await call
        streaming = FakeReplica([1, failure])
        with pytest.raises(type(failure)):
            await listed(colocated(generator=streaming).stream(None, 5.0))
        assert streaming.told == ["stream closed"]


async def test_colocated_a_version_is_ready_once_all_stages_here_have_it_whoever_else_does():
    stages = colocated(FakeReplica(held=(1, 2)), generator := FakeReplica(held=(1,)))
    stages.update(FleetNews(ready=frozenset({1, 2, 3})))
    assert [stages.ready(version) for version in (1, 2, 3)] == [True, False, False]
    generator.holds[2] = "it is being loaded"
    assert not stages.ready(2)
    generator.holds[2] = READY
    assert stages.ready(2)


async def test_colocated_stages_start_follow_their_own_settings_and_end_with_the_gateway():
    stages = colocated(encoder := FakeReplica(), generator := FakeReplica())
    await stages.reconfigure({"encoder": {"order": ["torch"]}, "max_k": 5}, FlagSettings())
    await stages.check_health()
    await stages.close()
    assert encoder.told == [{"order": ["torch"]}, "close"]
    assert generator.told == [{}, "close"]


async def test_a_gateway_is_unhealthy_where_an_engine_thread_of_its_own_is_stuck():
    with pytest.raises(TimeoutError, match="stuck"):
        await colocated(generator=FakeReplica(NEVER)).check_health()
