"""What a replica of the encoder does with a new user_config while it serves."""

import asyncio
import threading
import weakref
from pathlib import Path
from typing import ClassVar

import pytest

from cluster.bundle import WEIGHTS
from cluster.bundle_store import BundleStore
from cluster.config import parse
from cluster.engines.skipped import NoBackendAnswered
from cluster.errors import ConfigError, ModelGone
from cluster.fleet.board import READY
from cluster.stages import ENCODER
from cluster.traffic.breaker import BreakerState
from cluster.values import Behaviour, EncodeRequest, RecommendRequest, Together
from deployments.fleet import model_cache
from deployments.fleet.heartbeat import Heartbeat
from deployments.fleet.switchboard import SwitchboardDeployment
from deployments.replicas import replica as replica_module
from deployments.replicas.batched_model import BatchedModel
from deployments.replicas.encoder import Encoder
from deployments.stages import SplitStages
from pipelines.recommend import Recommender
from tests.broken_backends import Sound
from tests.bundles import make_bundle, random_sequence
from tests.fakes.handles import Handle, ScriptedHandle
from tests.waiting import passed, settled, until


class Mine(Sound):
    """A user's own backend."""


class EndsSlowly(Sound):
    """Its end takes as long as `may_end` says."""

    ending: ClassVar[threading.Event] = threading.Event()
    may_end: ClassVar[threading.Event] = threading.Event()

    def close(self) -> None:
        self.ending.set()
        assert self.may_end.wait(60)


class Held(Sound):
    """It answers once `may_answer` says so."""

    may_answer: ClassVar[threading.Event] = threading.Event()

    def batch_infer(self, requests):
        assert self.may_answer.wait(60)
        return super().batch_infer(requests)


class Stalls(Sound):
    """Takes requests one by one; one of seven events it answers never, and none at all while it is `stuck` or `broken`."""

    stuck: ClassVar[bool] = False
    broken: ClassVar[bool] = False

    async def ainfer(self, request):
        if self.broken:
            raise RuntimeError("out of memory")
        if self.stuck or len(request.sequence) == 7:
            await asyncio.Event().wait()
        return self.infer(request)


MINE = {"backends": {"mine": f"{__name__}:Mine"}, "order": ["mine", "torch"]}


@pytest.fixture
def settings(three_versions):
    return {"model_dir": str(three_versions), "encoder": {"order": ["torch"]}}


@pytest.fixture
def board(settings):
    return SwitchboardDeployment(settings)


@pytest.fixture
async def replica(settings, board):
    """One that serves by PyTorch."""
    made = Encoder(tree := parse(settings), Heartbeat(tree, Handle(board), "a"))
    await made.start()
    yield made
    await made.close()


async def asked(replica, within_s=300.0, *, events=3):
    return await replica.answer(EncodeRequest(random_sequence(events, items=20), 5), within_s)


async def served_by(replica):
    return (await asked(replica)).report.backend


async def test_the_autoscaler_is_told_of_every_request_of_a_call(replica):
    async def held_serves():
        return await served_by(replica) == "held"

    Held.may_answer.set()
    await replica.reconfigure({"backends": {"held": f"{__name__}:Held"}, "order": ["held", "torch"]})
    await until(held_serves)
    Held.may_answer.clear()
    requests = tuple((EncodeRequest(random_sequence(3, items=20), 5), 300.0) for _ in range(64))
    call = asyncio.create_task(replica.together(Together(requests)))

    async def told():
        return (await replica.record_autoscaling_stats())["requests"]

    async def of_all():
        return await told() == len(requests)

    try:
        await until(of_all)
    finally:
        Held.may_answer.set()
    assert len((await call).by_place) == len(requests)
    assert await told() == 0


class OneByOne(Sound):
    """It answers as many batches as `may_answer` was released for. `batches`: how many requests each had that it was given."""

    may_answer: ClassVar[threading.Semaphore] = threading.Semaphore(0)
    batches: ClassVar[list[int]] = []

    def batch_infer(self, requests):
        self.batches.append(len(requests))
        assert self.may_answer.acquire(timeout=300)
        return super().batch_infer(requests)


@pytest.fixture
async def paced(replica):
    """The replica, with an engine that computes each batch of 16 once `OneByOne.may_answer` is released."""

    async def serves():
        OneByOne.may_answer.release()
        return await served_by(replica) == "paced"

    await replica.reconfigure({"backends": {"paced": f"{__name__}:OneByOne"}, "order": ["paced", "torch"]})
    await until(serves)
    while OneByOne.may_answer.acquire(blocking=False):
        pass
    OneByOne.batches.clear()
    yield replica
    OneByOne.may_answer.release(100)


async def test_a_member_of_a_call_has_its_answer_though_later_batches_of_the_call_are_still_computed(paced):
    stages = SplitStages(handle := Handle(paced), ScriptedHandle(), ScriptedHandle())
    asked = [asyncio.create_task(stages.ask(ENCODER, EncodeRequest(random_sequence(3, items=20), 5), 300.0)) for _ in range(64)]
    for done in (16, 32, 48, 64):
        await until(lambda done=done: sum(OneByOne.batches) >= done)
        OneByOne.may_answer.release()
        await until(lambda done=done: sum(one.done() for one in asked) == done, f"{done} have their answers")
        assert all(one.done() for one in asked[:done]), "the longest-waiting ones"
    assert len(handle.calls) == 1
    assert {answer.report.backend for answer in await asyncio.gather(*asked)} == {"paced"}


async def test_a_call_that_is_answered_as_a_whole_says_how_long_its_first_batch_waited_for_the_last(paced):
    asked = EncodeRequest(random_sequence(3, items=20), 5)
    call = asyncio.create_task(paced.together(Together(((asked, 300.0),) * 32)))
    await until(lambda: sum(OneByOne.batches) >= 16)
    OneByOne.may_answer.release()
    await until(lambda: sum(OneByOne.batches) >= 32, "the first batch has ended, and the second has begun")
    await settled()
    waited_s = await passed(0.05)
    OneByOne.may_answer.release()
    outcomes = await call
    assert len(outcomes.by_place) == 32
    assert outcomes.spread_s >= waited_s / 2


async def test_every_request_of_several_batches_is_told_that_its_version_is_not_held(replica):
    asked = EncodeRequest(random_sequence(3, items=20), 5, model_version="tiny/9")
    (part,) = [part async for part in replica.together_in_parts(Together(((asked, 300.0),) * 64))]
    assert [(place, type(outcome)) for place, outcome in part.by_place] == [(place, ModelGone) for place in range(64)]


async def test_an_error_of_a_batch_that_nothing_explains_is_told_by_its_kind(replica, monkeypatch):
    def bug(*_):
        raise ValueError("ada at 10.0.0.7")

    monkeypatch.setattr(BatchedModel, "_reported", bug)
    asked = EncodeRequest(random_sequence(3, items=20), 5)
    [(_, raised)] = (await replica.together(Together(((asked, 300.0),)))).by_place
    assert f"{raised.error}" == "the encoder raised ValueError; its log has the trace"


@pytest.mark.parametrize("together", [False, True])
async def test_what_a_replica_refuses_makes_it_no_faster_for_the_router(replica, monkeypatch, together):
    """As of a replica without a sound engine, which refuses each request at once; here their time is over as they come."""
    assert await served_by(replica) == "torch"
    monkeypatch.setattr(replica_module, "FEWEST_ANSWERS", 2)
    late = EncodeRequest(random_sequence(3, items=20), 5), 0.0
    for _ in range(5):
        refused = (await replica.together(Together((late,)))).by_place[0][1] if together else await replica.answer(*late)
        assert isinstance(refused, NoBackendAnswered)
    assert await replica.record_routing_stats() == {}
    assert await served_by(replica) == "torch"
    assert (await replica.record_routing_stats())["weight"] > 0


async def test_a_version_of_another_directory_is_another_one_though_it_has_the_same_name_and_number(replica, tmp_path):
    """Old and new replicas serve side by side while an application changes over to another `model_dir`."""
    (held,) = (model.bundle for model in replica.model_cache.models)
    *_, other = [make_bundle(tmp_path / "other" / held.manifest.name, items=50) for _ in range(held.manifest.version)]
    for bundle, degraded in ((held, False), (other, True)):
        answer = await Recommender(bundle, replica.ask, deadline_s=300.0).recommend(RecommendRequest("ada", (Behaviour("1", 1000),)))
        assert (answer.model_version, answer.degraded) == (held.version, degraded)
    (skipped,) = answer.stages[0].fallback_from
    assert skipped.reason == f"this replica of the encoder holds {held.identity}, not {other.identity}: a version is being rolled out"


async def test_of_a_version_that_was_given_up_nothing_stays_in_memory(settings, board, monkeypatch):
    caches = []

    def made(*arguments, keep_s):
        caches.append(model_cache.ModelCache(*arguments, keep_s=0.0 * keep_s))
        return caches[0]

    monkeypatch.setattr(replica_module, "ModelCache", made)
    replica = Encoder(tree := parse(settings), Heartbeat(tree, Handle(board), "a"))
    await replica.start()
    await caches[0].fill([1])
    bundles = [weakref.ref(bundle) for bundle in caches[0].bundles]
    await until(lambda: [bundle() is None for bundle in bundles] == [False, True])
    await replica.close()


async def test_a_backend_that_user_config_adds_serves_without_a_restart_and_goes_again(replica):
    assert await served_by(replica) == "torch"
    await replica.reconfigure(MINE)

    async def mine_serves():
        return await served_by(replica) == "mine"

    await until(mine_serves)
    await replica.reconfigure({})
    assert await served_by(replica) == "torch"
    assert [one.name for one in replica.snapshot().backends if one.rank is not None] == ["torch"]


@pytest.mark.parametrize("change", ["user_config", "switch"])
async def test_a_version_that_was_refused_is_tried_at_once_after_a_change_of_settings_or_switches(
    replica, settings, board, change, monkeypatch
):
    monkeypatch.setattr(model_cache, "RETRY_AFTER_S", 3600.0)
    weights = Path(settings["model_dir"]) / "2" / WEIGHTS
    whole = weights.read_bytes()
    weights.unlink()
    BundleStore(Path(settings["model_dir"])).promote(2)
    await until(lambda: "is missing" in replica.holds.get(2, ""))
    weights.write_bytes(whole)
    if change == "user_config":
        await replica.reconfigure({})
    else:
        await board.set("encoder", "torch", "first")
    await until(lambda: replica.holds[2] == READY)


async def test_a_user_config_that_names_no_class_or_an_unknown_backend_is_refused_and_changes_nothing(replica):
    for wrong, said in (
        ({**MINE, "backends": {"mine": "mine.py"}}, "not of the form 'module:Class'"),
        ({"order": ["yours"]}, "order names yours, but no such encoder is registered"),
        ({"options": {"torch": {"treads": 2}}}, "options of the encoder torch: .*treads"),
    ):
        with pytest.raises(ConfigError, match=said):
            await replica.reconfigure(wrong)
    assert await served_by(replica) == "torch"


async def test_a_backend_that_cannot_be_imported_leaves_the_next_one_to_serve_and_says_why(replica):
    await replica.reconfigure({"backends": {"mine": "no_such_module:Mine"}, "order": ["mine", "torch"]})
    assert await served_by(replica) == "torch"
    mine = next(one for one in replica.snapshot().backends if one.name == "mine")
    assert "no_such_module:Mine cannot be imported" in mine.reason


async def test_a_backend_that_does_not_take_its_options_leaves_the_next_one_to_serve_and_says_why(replica):
    await replica.reconfigure({**MINE, "options": {"mine": {"treads": 2}}})
    assert await served_by(replica) == "torch"
    mine = next(one for one in replica.snapshot().backends if one.name == "mine")
    assert (mine.available, mine.reason) == (False, "its probe broke: TypeError: Mine() takes no arguments")


async def test_what_an_operator_has_switched_off_is_asked_at_no_moment_of_a_reconfiguration(replica, board):
    slow = {"backends": {**MINE["backends"], "slow": f"{__name__}:EndsSlowly"}, "order": ["slow", *MINE["order"]]}
    await replica.reconfigure(slow)
    await until(lambda: all(one.loaded for one in replica.snapshot().backends if one.rank is not None))

    async def is_known() -> bool:
        return any(backend.name == "slow" for stage in await board.status() for backend in stage.backends)

    await until(is_known, "the replica has told of it")
    await board.set("encoder", "slow", "off")
    await board.set("encoder", "mine", "off")
    await until(lambda: not any(one.enabled for one in replica.snapshot().backends if one.name in ("slow", "mine")))
    assert await served_by(replica) == "torch"
    reconfigured = asyncio.create_task(replica.reconfigure(MINE))
    try:
        await until(EndsSlowly.ending.is_set)
        assert await served_by(replica) == "torch"
    finally:
        EndsSlowly.may_end.set()
        await reconfigured
    assert await served_by(replica) == "torch"


async def serve_by_stalls(replica):
    await replica.reconfigure({"backends": {"stalls": f"{__name__}:Stalls"}, "order": ["stalls", "torch"]})
    await until(lambda: [one.reason for one in replica.snapshot().backends if one.name == "stalls" and one.loaded] == [""])


@pytest.mark.virtual_time
async def test_a_backend_that_takes_requests_one_by_one_and_does_not_return_is_late_and_then_replaced(replica, monkeypatch):
    await serve_by_stalls(replica)

    async def answered_by_torch():
        answer = await asked(replica, within_s=1.0)
        return not isinstance(answer, NoBackendAnswered) and answer.report.backend == "torch"

    async with asyncio.timeout(60):
        late = await asked(replica, within_s=1.0, events=7)
        assert [one.failed for one in late.skipped] == [False]
        assert await served_by(replica) == "stalls"
        monkeypatch.setattr(Stalls, "stuck", True)
        await until(answered_by_torch)


@pytest.mark.virtual_time
async def test_a_request_that_such_a_backend_does_not_answer_holds_up_no_other(replica):
    await serve_by_stalls(replica)
    calls = [asyncio.create_task(asked(replica, events=events)) for events in (7, 3, 7, 3)]
    await settled()
    assert [call.done() for call in calls] == [False, True, False, True]
    assert await served_by(replica) == "stalls"
    assert not calls[0].done()
    await settled()
    told = await replica.record_autoscaling_stats()
    assert (told["requests"], told["waiting"]) == (2, 0), "what is with the engine waits for no replica"
    for call in calls:
        call.cancel()


@pytest.mark.virtual_time
async def test_nor_does_it_hold_up_the_others_of_its_call_to_the_replica(replica):
    await serve_by_stalls(replica)
    stages = SplitStages(handle := Handle(replica), ScriptedHandle(), ScriptedHandle())

    def asked(*events):
        requests = [EncodeRequest(random_sequence(count, items=20), 5) for count in events]
        return [asyncio.create_task(stages.ask(ENCODER, request, 300.0)) for request in requests]

    for _ in range(2):  # so that calls are known to be quick
        await asyncio.gather(*asked(*[3] * 16))
    calls = asked(7, *[3] * 15)
    await until(lambda: sum(call.done() for call in calls) == 15, "all others have their answers", within_s=5)
    assert not calls[0].done()
    assert [len(together.requests) for _, together in handle.calls] == [16] * 3
    calls[0].cancel()


@pytest.mark.virtual_time
async def test_once_such_a_backend_has_failed_the_next_one_answers_beside_the_requests_that_are_still_with_it(replica, monkeypatch):
    await serve_by_stalls(replica)
    hang = [asyncio.create_task(asked(replica, events=7)) for _ in range(8)]
    await settled()
    monkeypatch.setattr(Stalls, "broken", True)

    async def failed():
        assert await served_by(replica) == "torch"
        return next(one for one in replica.snapshot().backends if one.name == "stalls").breaker is not BreakerState.CLOSED

    async with asyncio.timeout(60):
        await until(failed)
        assert [await served_by(replica) for _ in range(3)] == ["torch"] * 3
    assert not any(call.done() for call in hang)
    for call in hang:
        call.cancel()
