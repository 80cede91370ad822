"""A replica of the generator without Ray, over engines that a test scripts: what happens between a gateway's call and the engines."""

import asyncio
import gc
import sys
import threading
from contextlib import asynccontextmanager
from time import monotonic, sleep
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from cluster.bundle_store import BundleStore
from cluster.config import Settings
from cluster.engines.controller import FrameworkController
from cluster.engines.managed_backend import ManagedBackend
from cluster.engines.roster import Choice
from cluster.engines.skipped import NoBackendAnswered, OutOfTime
from cluster.engines.stage_rules import generator_rules
from cluster.errors import BackendUnavailable, BundleError, ModelGone
from cluster.fleet.board import READY, FleetNews
from cluster.fleet.heartbeat import Orders
from cluster.fleet.rollout import Rollout, RolloutStore, Trial
from cluster.values import Generated, GenerateRequest, SamplingOptions, SkippedBackend, StageAnswer, UserState
from deployments.fleet.heartbeat import Heartbeat
from deployments.fleet.switchboard import SwitchboardDeployment
from deployments.replicas import replica as replica_module
from deployments.replicas.generator import Generator, GeneratorModel, merged
from tests.bundles import make_generative_bundle, random_sequence
from tests.fakes.clock import Clock
from tests.fakes.engines import Queueing, Script, completed, generated, generating
from tests.fakes.handles import Handle
from tests.waiting import until


def test_pieces_become_the_most_probable_items_each_once():
    whole = merged([generated(4, 5, first=-2.0), generated(1, 5, first=-1.0), generated(9, first=-7.0)], k=3)
    assert whole.items.tolist() == [1, 5, 4]
    assert whole.log_probs.tolist() == pytest.approx([-1.0, -1.1, -2.0])
    nothing = merged([], k=3)
    assert (nothing.items.tolist(), nothing.items.dtype, nothing.log_probs.dtype) == ([], np.int32, np.float32)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_generative_bundle(tmp_path_factory.mktemp("models") / "tiny", items=50)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The directory of a model of which 2 is stable and 4 on trial; both have a decoder."""
    root = tmp_path_factory.mktemp("models") / "tiny"
    for items in (50, 40):
        make_generative_bundle(root, items=items)
    rollouts = RolloutStore(BundleStore(root))
    rollouts.promote(2)
    rollouts.promote(4, Trial(version=4, share=0.5))
    return root


@asynccontextmanager
async def started(settings: Settings):
    """A replica that has warmed up."""
    replica = Generator(settings, Heartbeat(settings, Handle(SwitchboardDeployment({"model_dir": str(settings.model_dir)})), "a"))
    await replica.start()
    try:
        yield replica
    finally:
        await replica.close()


def wanted(k: int = 2, **more) -> GenerateRequest:
    """The request of a user with one known state."""
    state = np.full((1, 16), 0.25, np.float32)
    return GenerateRequest(UserState(state, random_sequence(1, items=40)), k, beam=4, blocked=np.zeros(0, np.int32), **more)


async def served_by(replica: Generator, version: int | None = None) -> str:
    """The engine that answers a request, of this version where one is given; "" where none does."""
    identity = replica.model_cache.get(version).bundle.identity if version else ""
    answer = await replica.answer(wanted(model_version=identity), 60.0)
    return answer.report.backend if isinstance(answer, StageAnswer) else ""


def sizes(script: Script) -> list[list[int]]:
    """The `k` of the requests of every batch."""
    return [[request.k for request in batch] for batch in script.asked]


async def test_a_request_counts_as_load_and_a_warm_up_does_not(bundle):
    def slowly(request, bundle):
        sleep(0.01)
        return generated(1)

    async with started(generating(bundle.path.parent, torch_beam=Script(slowly))) as replica:
        assert (await replica.record_autoscaling_stats())["utilisation"] == 0.0
        await replica.answer(wanted(), 60.0)
        assert (await replica.record_autoscaling_stats())["utilisation"] > 0.0


async def test_the_router_is_told_how_fast_a_machine_is_where_engines_take_batches_whatever_they_tell_of_their_caches(bundle, monkeypatch):
    def slowly(request, bundle):
        sleep(0.01)
        return generated(1)

    monkeypatch.setattr(replica_module, "FEWEST_ANSWERS", 1)
    async with started(generating(bundle.path.parent, torch_beam=Script(slowly, queue={"logits_cache_hits": 3.0}))) as replica:
        await replica.answer(wanted(), 60.0)
        assert 0 < (await replica.record_routing_stats())["weight"] <= 100
    async with started(generating(bundle.path.parent, vllm=Script(), torch_beam=Script())) as replica:
        await replica.answer(wanted(), 60.0)

        async def told_nothing() -> bool:
            return await replica.record_routing_stats() == {}

        await until(told_nothing, "an engine with a queue of its own is loaded")


async def test_the_deadline_counts_from_the_arrival_on_this_processs_clock(bundle):
    script = Script()
    async with started(generating(bundle.path.parent, torch_beam=script)) as replica:
        script.asked.clear()
        began = monotonic()
        answer = await replica.answer(wanted(), 70.0)
        assert (answer.result.items.tolist(), answer.report.stage, answer.report.backend) == ([3, 1], "generate", "torch_beam")
        assert answer.model_version == bundle.identity
        ((asked,),) = script.asked
        assert began + 69.9 <= asked.deadline < monotonic() + 70, "a little time is left to say that it is over"


async def test_a_short_deadline_leaves_most_of_its_time_to_the_engine(bundle):
    script = Script()
    async with started(generating(bundle.path.parent, vllm=script)) as replica:
        await until(lambda: served_by(replica), "the engine is loaded")
        script.asked.clear()
        limit = 0.2
        while not script.asked:  # a busy machine lets a short one pass before the engine is asked
            limit, began = 2 * limit, monotonic()
            assert limit < 100
            await replica.answer(wanted(), limit)
        assert began + 0.89 * limit < script.asked[0][0].deadline < monotonic() + limit


@pytest.mark.parametrize("retries", [0, 2], ids=["the next engine", "the halves of the batch, then the next engine"])
async def test_what_is_late_once_an_engine_has_broken_is_computed_no_more_and_the_others_are(bundle, retries):
    clock, breaks, answers = Clock(), Script(), Script()

    def late_and_in_vain(request, bundle):
        clock.advance(1)
        raise RuntimeError("late and in vain")

    breaks.answer = late_and_in_vain
    table = dict.fromkeys(("breaks", "answers"), "tests.fakes.engines:Batching")
    options = {"breaks": {"script": breaks}, "answers": {"script": answers}}
    controller: FrameworkController[GenerateRequest, Generated] = FrameworkController(
        "generator", Choice(table, [*table], options=options), bundle, generator_rules(bundle.items), retries=retries, clock=clock
    )
    late, patient, unhurried = wanted(1, deadline=clock() + 0.5), wanted(2, deadline=clock() + 60), wanted(3)
    gone, *served = await controller.call([late, patient, unhurried])
    assert [one.backend for one in served] == ["answers", "answers"]
    assert sizes(answers) == [[2, 3]]
    assert isinstance(gone, NoBackendAnswered)
    assert [type(one) for one in gone.skipped] == [SkippedBackend, OutOfTime]
    assert sizes(breaks)[0] == [1, 2, 3]
    assert not any(1 in batch for batch in sizes(breaks)[1:])
    assert len(sizes(breaks)) == 1 if not retries else len(sizes(breaks)) > 1
    controller.close()


async def test_that_no_engine_answered_is_a_value(bundle):
    script = Script()
    async with started(generating(bundle.path.parent, torch_beam=script)) as replica:
        script.answer = None
        (streamed,) = [part async for part in replica.stream(wanted(), 60.0)]
        for unanswered in (await replica.answer(wanted(), 60.0), streamed):
            assert isinstance(unanswered, NoBackendAnswered)
            assert [(one.backend, one.failed) for one in unanswered.skipped] == [("torch_beam", True)]


async def test_a_stream_ends_with_the_whole_answer(bundle):
    pieces = generated(4, first=-2.0), generated(1)
    async with started(generating(bundle.path.parent, vllm=Script(pieces=pieces))) as replica:
        await until(lambda: served_by(replica), "the engine is loaded")
        *found, answer = [part async for part in replica.stream(wanted(), 60.0)]
    assert found == list(pieces)
    assert isinstance(answer, StageAnswer)
    assert answer.result.items.tolist() == [1, 4]


class Few(Queueing):
    """Names one item, however many are asked for, and in streams too; the controller's own samples, which have no user, get all."""

    def batch_infer(self, requests):
        return [generated(7) if request.user_id else completed(generated(7), request, 50) for request in requests]

    async def astream(self, request):
        yield generated(7)


async def test_an_engine_that_names_too_few_items_gives_way_to_the_next_one(bundle):
    table = {"few": "tests.unit.test_generator_deployment:Few", "whole": "tests.fakes.engines:Batching"}
    options = {name: {"script": Script()} for name in table}
    settings = generating(bundle.path.parent, backends=table, order=[*table], options=options)
    async with started(settings) as replica:

        async def few_is_loaded() -> bool:
            return await served_by(replica) == "few"

        await until(few_is_loaded)
        whole = await replica.answer(wanted(user_id="ada"), 60.0)
        *found, last = [part async for part in replica.stream(wanted(user_id="ada"), 60.0)]
    for answer in (whole, last):
        assert (answer.report.backend, answer.result.items.tolist()) == ("whole", [3, 1])
        (passed_over,) = answer.report.fallback_from
        assert (passed_over.backend, passed_over.reason) == ("few", "named 1 items to k 2 where 50 might be named")
    assert [piece.items.tolist() for piece in found] == [[7], [3, 1]]


async def test_requests_that_wait_are_answered_in_one_batch_and_the_late_ones_are_left_out(bundle):
    script = Script(lambda request, bundle: generated(request.k))
    async with started(generating(bundle.path.parent, torch_beam=script)) as replica:
        script.asked.clear()
        asking = ((1, 60.0), (2, -1.0), (3, 60.0))
        first, late, last = await asyncio.gather(*(replica.answer(wanted(k), within_s) for k, within_s in asking))
    assert sizes(script) == [[1, 3]]
    assert (first.result.items.tolist(), last.result.items.tolist()) == ([1], [3, 1, 2])
    assert isinstance(late, NoBackendAnswered)
    (reason,) = late.skipped
    assert isinstance(reason, OutOfTime)
    assert "the time was over" in reason.reason
    assert not reason.failed, "it is no fault of the backend"


@pytest.mark.parametrize("wide", [{"beam": 1000}, {"sampling": SamplingOptions(samples=1000)}], ids=["beam", "samples"])
async def test_a_batch_is_bounded_by_its_requests_paths_too(bundle, wide):
    script = Script(lambda request, bundle: generated(request.k))
    room = 1.5 * (1 + 1000 * (bundle.semantic_ids.levels - 1))
    settings = generating(bundle.path.parent, torch_beam=script, batching={"max_tokens": int(room)})
    requests = [wanted(1), wanted(2), replace(wanted(3), **wide), replace(wanted(4), **wide)]
    async with started(settings) as replica:
        script.asked.clear()
        await asyncio.gather(*(replica.answer(request, 60.0) for request in requests))
    assert sizes(script) == [[1, 2], [3], [4]]


async def test_the_autoscaler_is_told_of_all_queues_in_paths(bundle):
    go_on, entered = threading.Event(), threading.Event()
    busy, batches = Script(declines="not these", queue={"waiting": 5.0, "kv_cache_usage": 0.25}), Script()
    settings = generating(bundle.path.parent, vllm=busy, torch_beam=batches)

    def held_up(request, bundle):
        entered.set()
        go_on.wait(300)
        return generated(1)

    async with started(settings) as replica:

        async def told(paths: float) -> bool:
            return (await replica.record_autoscaling_stats())["waiting"] == paths

        await until(lambda: told(5.0), "vllm is loaded")
        batches.answer = held_up
        asking = [asyncio.create_task(replica.answer(wanted(), 300.0))]
        try:
            await until(entered.is_set, "the engine has begun with the first")
            asking += [asyncio.create_task(replica.answer(wanted(), 300.0)) for _ in range(2)]
            await until(lambda: told(2 * settings.generator.beam + 5.0), "two wait behind a batch, and vllm has a queue of its own")
            assert (await replica.record_autoscaling_stats())["kv_cache_usage"] == 0.25
        finally:
            go_on.set()
        await asyncio.gather(*asking)
        assert await told(5.0)


async def test_what_waits_stands_beside_what_the_engine_says_of_itself(bundle):
    model = GeneratorModel(generating(bundle.path.parent, torch_beam=Script(queue={"logits_cache_hits": 3.0})), bundle)
    await model.warm_up()
    assert model.figures()["torch_beam"] == {"logits_cache_hits": 3.0}
    await model.answer(wanted())
    assert model.figures()["torch_beam"] == {"waiting": 0.0, "logits_cache_hits": 3.0}
    model.close()


async def test_a_backend_that_is_taken_out_of_the_configuration_leaves_nothing_behind(bundle):
    def configured(*names: str) -> Settings:
        options = {name: {"script": scripts[name]} for name in names}
        return generating(bundle.path.parent, backends=dict.fromkeys(names, "tests.fakes.engines:Batching"), order=names, options=options)

    scripts = {"own": Script(), "torch_beam": Script()}
    model = GeneratorModel(configured("own", "torch_beam"), bundle)
    await model.warm_up()
    await model.answer(wanted())
    model.controller.prefer("torch_beam")
    await model.answer(wanted())
    assert model.figures() == {"own": {"waiting": 0.0}, "torch_beam": {"waiting": 0.0}}
    await model.reconfigure(configured("torch_beam").engines("generator"))
    assert model.figures() == {"torch_beam": {"waiting": 0.0}}
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is ManagedBackend and one.name == "own"]
    model.close()


async def test_a_version_that_is_not_held_is_a_value_and_reaches_no_engine(bundle):
    script = Script()
    async with started(generating(bundle.path.parent, torch_beam=script)) as replica:
        answer = await replica.answer(wanted(model_version=bundle.identity), 60.0)
        assert answer.result.items.tolist() == [3, 1]
        script.asked.clear()
        older = wanted(model_version="tiny/1")
        for refused in (await replica.answer(older, 60.0), *[part async for part in replica.stream(older, 60.0)]):
            assert isinstance(refused, ModelGone)
            assert str(refused) == f"this replica of the generator holds {bundle.identity}, not tiny/1: a version is being rolled out"
    assert script.asked == []


async def test_each_request_is_computed_by_the_version_it_names(two):
    script = Script(lambda request, bundle: generated(bundle.manifest.version))
    versions = {number: BundleStore(two).open(number).identity for number in (4, 2)}
    async with started(generating(two, torch_beam=script)) as replica:
        answers = [await replica.answer(wanted(model_version=version), 60.0) for version in versions.values()]
    assert [(one.model_version, one.result.items[0]) for one in answers] == [(versions[4], 4), (versions[2], 2)]


async def test_samples_are_what_a_decoder_takes(bundle):
    script = Script()
    async with started(generating(bundle.path.parent, torch_beam=script)):
        (samples,) = script.asked
    assert [len(sample.state) for sample in samples] == [1, bundle.prompt_length]
    for sample in samples:
        assert np.linalg.norm(sample.state.states, axis=1) == pytest.approx(np.ones(len(sample.state)))
        assert len(sample.state.sequence) == len(sample.state)
        assert sample.deadline is None
        assert generator_rules(50).problem(sample, generated(*range(1, sample.k + 1))) == ""


async def test_a_version_that_loads_for_long_holds_no_other_up(two, monkeypatch):
    monkeypatch.setattr(replica_module, "REFRESH_INTERVAL_S", 0.005)
    go_on = threading.Event()
    slow = Script(loading=lambda bundle: bundle.manifest.version == 4 or go_on.wait(300))
    async with started(generating(two, vllm=slow, torch_beam=Script())) as replica:

        async def newer_has_its_first_choice() -> bool:
            return await served_by(replica, 4) == "vllm"

        try:
            await until(newer_has_its_first_choice)
            assert await served_by(replica, 2) == "torch_beam"
        finally:
            go_on.set()


def damaged_in(*versions):
    """A load that fails for these versions."""

    def loading(bundle):
        if bundle.manifest.version in versions:
            raise BackendUnavailable("its decoder is damaged", told="unfit")

    return loading


@pytest.mark.parametrize("order", [(2, 4), (4, 2)])
async def test_a_version_for_which_no_engine_loads_is_refused_where_another_ones_serve(two, order):
    """A damaged decoder, or a version that is not compiled: it never takes the place of one that answers."""
    settings = generating(two, torch_beam=Script(loading=damaged_in(4)))
    replica = Generator(settings, Heartbeat(settings, Handle(None), "a"))
    await replica.load(order, only=False)
    try:
        assert replica.holds[2] == READY
        assert "none of its engines works here, and another version's do" in replica.holds[4]
        assert "its decoder is damaged" in replica.holds[4]
        assert await served_by(replica, 2) == "torch_beam"
    finally:
        await replica.close()


async def test_a_replica_that_hears_late_of_the_version_in_use_holds_no_newer_one_without_an_engine(two):
    """As one that starts while the switchboard is away."""
    settings = generating(two, torch_beam=Script(loading=damaged_in(4)))
    replica = Generator(settings, Heartbeat(settings, Handle(None), "a"))
    await replica.load([4], only=False)
    try:
        assert replica.holds == {4: READY}
        replica.model_cache.want([4, 2])
        await replica.model_cache.settled()
        assert (replica.holds[2], replica.holds[4][:35]) == (READY, "none of its engines works here, and")
        assert await served_by(replica, 2) == "torch_beam"
    finally:
        await replica.close()


async def test_a_version_that_has_lost_its_engine_for_now_is_held_while_another_one_loads(two):
    """Its breaker is open: the engine is loaded anew at its next trial."""

    def loading(bundle):
        if bundle.manifest.version == 2 and breaks:
            raise BackendUnavailable("it is away for now")

    def answered(request, bundle):
        if bundle.manifest.version == 2 and breaks:
            raise ValueError("it broke")
        return generated(1)

    breaks, settings = [], generating(two, torch_beam=Script(answered, loading=loading))
    replica = Generator(settings, Heartbeat(settings, Handle(None), "a"))
    await replica.load([2], only=False)
    try:
        (model,) = replica.model_cache.models
        breaks.append(2)
        for _ in range(3):  # as many as open its breaker
            assert await served_by(replica, 2) == ""
        await until(lambda: not model.controller.loaded)
        replica.model_cache.want([4, 2])
        await replica.model_cache.settled()
        assert replica.holds == {2: READY, 4: READY}
    finally:
        await replica.close()


async def test_a_pinned_version_for_which_no_engine_loads_ends_the_start_where_another_ones_serve(two):
    settings = generating(two, torch_beam=Script(loading=damaged_in(4)))
    replica = Generator(settings, Heartbeat(settings, Handle(None), "a"))
    try:
        with pytest.raises(BundleError, match="version 4 is the only one to serve, and cannot be: none of its engines works here"):
            await replica.load([4, 2], only=True)
    finally:
        await replica.close()


async def test_where_no_version_has_an_engine_that_loads_the_wanted_ones_are_held_all_the_same(two):
    settings = generating(two, torch_beam=Script(loading=damaged_in(2, 4)))
    replica = Generator(settings, Heartbeat(settings, Handle(None), "a"))
    await replica.load([2, 4], only=False)
    try:
        assert replica.holds == {2: READY, 4: READY}
    finally:
        await replica.close()


async def test_the_engines_that_are_shown_are_those_of_the_version_by_which_gateways_answer(two):
    """A promoted version may be held for long before it takes over."""

    def answered(request, bundle):
        if bundle.manifest.version == 2 and breaks:
            raise ValueError("it broke")
        return generated(1)

    breaks, settings, promoted = [], generating(two, torch_beam=Script(answered)), Rollout(stable=4)
    replica = Generator(settings, Heartbeat(settings, Handle(None), "a"))
    await replica.load([2, 4], only=False)

    def failures(rollout, *used):
        replica.follow(rollout, Orders(fleet=FleetNews(used=frozenset(used))))
        return next(one.failures for one in replica.snapshot().backends if one.name == "torch_beam")

    try:
        breaks.append(2)
        assert await served_by(replica, 2) == ""
        assert (failures(promoted, 2) > 0, failures(promoted, 2, 4), failures(promoted)) == (True, 0, 0)
        assert failures(Rollout(stable=3, trial=Trial(version=4, share=0.5)), 2, 4) > 0, "a trial has few of the users"
    finally:
        await replica.close()


async def test_a_version_that_hangs_while_it_is_measured_and_is_rolled_back_holds_no_other_up(two):
    hangs, go_on = threading.Event(), threading.Event()

    def answered(request, bundle):
        if bundle.manifest.version == 4 and threading.current_thread().name.startswith("engine"):
            hangs.set()
            go_on.wait(300)
        return generated(1)

    settings = generating(two, torch_beam=Script(answered), selection="fastest")
    replica = Generator(settings, Heartbeat(settings, Handle(None), "a"))
    await replica.load([2], only=False)
    try:
        replica.model_cache.want([2, 4])
        await until(hangs.is_set, "4 is measured")
        replica.model_cache.want([2])
        await until(lambda: 4 not in replica.holds)
        replica.model_cache.want([2, 3])
        await until(lambda: replica.holds == {2: READY, 3: READY})
    finally:
        go_on.set()
        await replica.close()


async def test_a_refresh_that_breaks_is_heard_of(bundle, monkeypatch):
    async def broken(controller):
        raise ValueError("a bug of ours")

    monkeypatch.setattr(FrameworkController, "refresh", broken)
    monkeypatch.setattr(replica_module, "REFRESH_INTERVAL_S", 0.005)
    async with started(generating(bundle.path.parent, torch_beam=Script())) as replica:
        with pytest.raises(ValueError, match="a bug of ours"):
            await until(replica.check_health, "it is unhealthy")


async def test_a_replica_that_a_fault_has_cut_off_from_its_gpu_is_unhealthy(bundle, monkeypatch):
    gpu = FakeCuda()
    async with started(generating(bundle.path.parent, torch_beam=Script())) as replica:
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=gpu))
        gpu.fault = "CUDA error: an illegal memory access was encountered"
        await replica.check_health()
        gpu.used = True
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await replica.check_health()
        gpu.fault = ""
        await replica.check_health()
    assert all(name.startswith("engine") for name in gpu.asked_by)


async def test_a_replica_whose_process_is_about_to_import_torch_is_healthy(bundle, monkeypatch):
    async with started(generating(bundle.path.parent, torch_beam=Script())) as replica:
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
        await replica.check_health()
        monkeypatch.delitem(sys.modules, "torch")
        await replica.check_health()


class FakeCuda:
    """torch.cuda of a process that has `used` a GPU, or has not; `fault`: what every later call raises. It notes the threads that ask."""

    def __init__(self):
        self.used, self.fault, self.asked_by = False, "", []

    def is_initialized(self):
        return self.used

    def current_stream(self):
        return self

    def synchronize(self):
        self.asked_by.append(threading.current_thread().name)
        if self.fault:
            raise RuntimeError(self.fault)
