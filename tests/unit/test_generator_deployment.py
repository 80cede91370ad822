"""The generator deployment without Ray: what it does between a call and the controller, and when the gateway is ready."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import monotonic, sleep
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from cluster.bundle import BundleStore
from cluster.config import Settings, parse
from cluster.controller import NoBackendAnswered, Served
from cluster.managed_backend import OutOfTime
from cluster.stage_rules import generator_rules
from cluster.switchboard import StageStatus
from cluster.values import GenerateAnswer, Generated, SamplingOptions, SkippedBackend
from deployments import replica as replica_module
from deployments.generator import Generator, GeneratorModel, merged
from deployments.operation import Operation
from deployments.replica import ModelGone
from tests.bundles import make_bundle, make_generative_bundle
from tests.waiting import eventually


def generated(*items: int, first: float = -1.0) -> Generated:
    """These items, each a tenth less probable than the one before."""
    return Generated(np.array(items, np.int32), (first - 0.1 * np.arange(len(items))).astype(np.float32))


def test_pieces_become_the_most_probable_items_each_once():
    whole = merged([generated(4, 5, first=-2.0), generated(1, 5, first=-1.0), generated(9, first=-7.0)], k=3)
    assert whole.items.tolist() == [1, 5, 4]
    assert whole.log_probs.tolist() == pytest.approx([-1.0, -1.1, -2.0])
    nothing = merged([], k=3)
    assert (nothing.items.tolist(), nothing.items.dtype, nothing.log_probs.dtype) == ([], np.int32, np.float32)


class Stage:
    """A controller that remembers what it was asked and answers `parts`: pieces, or errors to raise."""

    def __init__(self, *parts):
        self.parts, self.asked, self.batches = parts, [], []

    async def serve(self, request, batched):
        self.asked.append(request)
        (part,) = self.parts
        if isinstance(part, Exception):
            raise part
        return Served(part, "vllm", (), 1.0)

    async def serve_stream(self, request, batched, merge):
        self.asked.append(request)
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            yield part
        yield Served(merge(self.parts), "vllm", (), 1.0)

    def answer_batch(self, name, requests):
        self.batches.append([request.k for request in requests])
        return [generated(request.k) for request in requests]

    def queues(self):
        return {"vllm": {"waiting": 5.0, "kv_cache_usage": 0.25}, "torch_beam": {"logits_cache_hits": 3.0}}

    def close(self):
        pass


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_generative_bundle(tmp_path_factory.mktemp("models") / "tiny", items=50)


@pytest.fixture
def replica_of(bundle):
    """Makes a replica that holds a model over a controller of the test's."""

    def make(*parts) -> Generator:
        replica = Generator(Settings(), SimpleNamespace(), "a")
        replica._models._models[2] = model_of(bundle, *parts)
        return replica

    return make


def model_of(bundle, *parts) -> GeneratorModel:
    model = object.__new__(GeneratorModel)
    model.controller, model.bundle, model._settings = Stage(*parts), bundle, Settings()
    model._thread, model._batchers, model._busy_s = ThreadPoolExecutor(1), {}, 0.0
    return model


def held_by(replica: Generator) -> GeneratorModel:
    (model,) = replica._models.models
    return model


async def test_a_request_counts_as_load_and_a_warm_up_does_not(replica_of):
    replica = replica_of(generated(3, 1))
    model = held_by(replica)
    model.controller.warm_up = lambda samples: sleep(0.01)
    await model.warm_up()
    assert model.busy_s() == 0.0
    await model.answered(lambda: sleep(0.01))
    assert model.busy_s() >= 0.01


async def test_the_deadline_counts_from_the_arrival_on_this_processs_clock(replica_of):
    replica = replica_of(generated(3, 1))
    (sample, *_) = held_by(replica)._samples()
    began = monotonic()
    answer = await replica.generate(sample, 7.0)
    assert (answer.generated.items.tolist(), answer.report.stage, answer.report.backend) == ([3, 1], "generate", "vllm")
    assert answer.model_version == "tiny/2"
    assert began + 6.9 <= held_by(replica).controller.asked[0].deadline < monotonic() + 7, "a little time is left to say that it is over"
    await replica.generate(sample, 0.001)
    assert began < held_by(replica).controller.asked[1].deadline


async def test_that_nobody_answered_is_a_value(replica_of):
    nobody = NoBackendAnswered("generator", (SkippedBackend("vllm", "gone", failed=True),))
    replica = replica_of(nobody)
    (sample, *_) = held_by(replica)._samples()
    assert await replica.generate(sample, 1.0) is nobody
    assert [part async for part in replica.generate_stream(sample, 1.0)] == [nobody]


async def test_a_stream_ends_with_the_whole_answer(replica_of):
    pieces = generated(4, first=-2.0), generated(1)
    replica = replica_of(*pieces)
    (sample, *_) = held_by(replica)._samples()
    *found, answer = [part async for part in replica.generate_stream(sample, 1.0)]
    assert found == list(pieces)
    assert isinstance(answer, GenerateAnswer)
    assert answer.generated.items.tolist() == [1, 4]


async def test_requests_that_wait_are_answered_in_one_batch_and_the_late_ones_are_left_out(replica_of):
    replica = replica_of()
    (sample, *_) = held_by(replica)._samples()

    def asking(k: int, within_s: float):
        return replace(sample, k=k, deadline=monotonic() + within_s)

    requests = asking(1, 60), asking(2, -1), asking(3, 60)
    first, late, last = await asyncio.gather(*(held_by(replica)._batched("torch_beam", request) for request in requests))
    assert held_by(replica).controller.batches == [[1, 3]]
    assert (first.items.tolist(), last.items.tolist()) == ([1], [3])
    assert isinstance(late, OutOfTime)
    assert "waited for a batch" in late.reason
    assert not late.failed, "it is no fault of the backend"


@pytest.mark.parametrize("wide", [{"beam": 1000}, {"sampling": SamplingOptions(samples=1000)}], ids=["beam", "samples"])
async def test_a_batch_is_bounded_by_its_requests_paths_too(replica_of, bundle, wide):
    replica = replica_of()
    (sample, *_) = held_by(replica)._samples()
    requests = [replace(sample, k=1), replace(sample, k=2), replace(sample, k=3, **wide), replace(sample, k=4, **wide)]
    room = 1.5 * (1 + 1000 * (bundle.semantic_ids.levels - 1))
    held_by(replica)._settings = parse({"generator": {"batching": {"max_tokens": int(room)}}})
    await asyncio.gather(*(held_by(replica)._batched("torch_beam", request) for request in requests))
    assert held_by(replica).controller.batches == [[1, 2], [3], [4]]


async def test_the_autoscaler_is_told_of_all_queues_in_paths(replica_of):
    replica = replica_of()
    (sample, *_) = held_by(replica)._samples()
    waiting = [asyncio.create_task(held_by(replica)._batched("torch_beam", sample)) for _ in range(2)]
    await asyncio.sleep(0)
    busy = await replica.record_autoscaling_stats()
    assert (busy["waiting"], busy["kv_cache_usage"]) == (2 * Settings().generator.beam + 5.0, 0.25)
    await asyncio.gather(*waiting)
    assert (await replica.record_autoscaling_stats())["waiting"] == 5.0
    assert held_by(replica).figures()["torch_beam"] == {"waiting": 0.0, "logits_cache_hits": 3.0}, "what waits and what the engine says"


async def test_a_version_that_is_not_held_is_a_value_and_reaches_no_engine(replica_of, bundle):
    replica = replica_of(generated(3, 1))
    (sample, *_) = held_by(replica)._samples()
    assert (await replica.generate(replace(sample, model_version=bundle.version), 1.0)).generated.items.tolist() == [3, 1]
    held_by(replica).controller.asked.clear()
    older = replace(sample, model_version="tiny/1")
    for refused in (await replica.generate(older, 1.0), *[part async for part in replica.generate_stream(older, 1.0)]):
        assert isinstance(refused, ModelGone)
        assert str(refused) == "this replica of the generator holds tiny/2, not tiny/1: a version is being rolled out"
    assert held_by(replica).controller.asked == []


async def test_each_request_is_computed_by_the_version_it_names(replica_of, tmp_path):
    replica = replica_of(generated(3, 1))
    (sample, *_) = held_by(replica)._samples()
    store = BundleStore(tmp_path / "tiny")
    for items in (30, 40, 20):
        newer = make_bundle(store.root, items=items)
    replica._models._models[3] = model_of(newer, generated(9))
    answers = [await replica.generate(replace(sample, model_version=version), 1.0) for version in ("tiny/3", "tiny/2")]
    assert [(one.model_version, one.generated.items.tolist()) for one in answers] == [("tiny/3", [9]), ("tiny/2", [3, 1])]


def test_samples_are_what_a_decoder_takes(replica_of, bundle):
    samples = held_by(replica_of())._samples()
    assert [len(sample.user) for sample in samples] == [1, bundle.prompt_length]
    for sample in samples:
        assert np.linalg.norm(sample.user.states, axis=1) == pytest.approx(np.ones(len(sample.user)))
        assert len(sample.user.sequence) == len(sample.user)
        assert sample.deadline is None
        assert generator_rules(50).nonsense(sample, generated(*range(1, sample.k + 1))) == ""


class Board:
    """A switchboard's handle that shows `statuses`; an exception is raised, and None is for never."""

    deployment_name = "switchboard"

    def __init__(self, *statuses):
        self.statuses, self.calls = statuses, 0

    def __getattr__(self, method):
        return SimpleNamespace(remote=self._remote)

    def _remote(self, *args):
        response, self.calls = asyncio.get_running_loop().create_future(), self.calls + 1
        if isinstance(self.statuses[0], Exception):
            response.set_exception(self.statuses[0])
        elif self.statuses != (None,):
            response.set_result(self.statuses)
        return response


ENCODER = StageStatus("encoder", 1, ("encoder=torch",), ())
SERVED_BY_TORCH = StageStatus("generator", 1, ("generator=torch_beam (vllm: is being loaded)",), (), settled=False)
SERVED_BY_VLLM = StageStatus("generator", 1, ("generator=vllm",), ())


def served(decoder=None):
    return SimpleNamespace(version="tiny/1", manifest=SimpleNamespace(decoder=decoder, ranker=None))


async def ready(operation: Operation, *statuses) -> bool:
    operation._switchboard = Board(*statuses)
    return (await operation.readiness()).ready


async def test_it_is_ready_once_the_first_choice_is_loaded_and_stays_so_while_it_is_loaded_anew():
    operation = Operation(Board(), lambda: served(decoder="fake"))
    assert not await ready(operation, ENCODER)
    assert not await ready(operation, ENCODER, SERVED_BY_TORCH)
    assert await ready(operation, ENCODER, SERVED_BY_VLLM)
    assert await ready(operation, ENCODER, SERVED_BY_TORCH)
    assert await ready(operation, ENCODER), "retrieved items are the answer while there is no generator"
    assert await ready(operation, ActorDiedError()), "a lost switchboard stops no request"
    assert not await ready(operation, SERVED_BY_VLLM), "without an encoder there is little to answer with"


async def test_a_model_without_a_decoder_waits_for_no_generator():
    assert await ready(Operation(Board(), served), ENCODER)
    assert await ready(Operation(Board(), served), ENCODER, SERVED_BY_TORCH)


async def test_a_version_that_loads_for_long_holds_no_other_up(replica_of, bundle):
    replica, go_on, refreshed = replica_of(generated(1)), threading.Event(), []
    slow, quick = held_by(replica), model_of(bundle, generated(2))
    slow.controller.refresh, quick.controller.refresh = lambda: go_on.wait(60), lambda: refreshed.append("quick")
    replica._models._models[3] = quick
    refreshing = asyncio.create_task(replica._refresh_forever())
    try:
        await asyncio.to_thread(eventually, lambda: len(refreshed) >= 2, "the other version is refreshed again and again")
    finally:
        go_on.set()
        refreshing.cancel()


async def test_a_refresh_that_breaks_is_heard_of(replica_of, monkeypatch):
    def broken():
        raise ValueError("a bug of ours")

    monkeypatch.setattr(replica_module, "REFRESH_INTERVAL_S", 0.005)
    replica = replica_of(generated(1))
    held_by(replica).controller.refresh = broken
    with pytest.raises(ValueError, match="a bug of ours"):
        await replica._refresh_forever()
