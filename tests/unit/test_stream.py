"""The streamed answer: what comes when, and that it ends as the whole answer would."""

import asyncio
import re

import pytest
from msgspec.structs import replace

from cluster.errors import BackendFailed, InvalidRequest
from cluster.titled_items import TitledItems
from cluster.values import Behaviour, Generated, Recommendation, RecommendRequest, SamplingOptions, ScoredItem, StageReport
from pipelines.recommend import Recommender
from tests.fakes.played_stages import Descending, Naming, bundle_with_decoder

pytestmark = pytest.mark.virtual_time


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundle_with_decoder(tmp_path_factory.mktemp("models") / "tiny")


def request(*item_ids, **more):
    return RecommendRequest(
        "u", tuple(Behaviour(item, 1000 + i) for i, item in enumerate(item_ids or ("1", "2"))), request_time=2000, **more
    )


def recommender(bundle, generator, **more):
    return Recommender(bundle, Descending(bundle), generator, generator.stream, **more)


def shown(parts):
    """Items as stage:id, reports as +stage, the answer as =; of items that were found together the first."""
    names = {
        ScoredItem: lambda one: f"{one.stage}:{one.item.item_id}",
        TitledItems: lambda items: f"{items.stage}:{items[0].item.item_id}",
        StageReport: lambda one: f"+{one.stage}",
        Recommendation: lambda _: "=",
    }
    return [names[type(part)](part) for part in parts]


def without_durations(answer):
    """Neither those of the stages nor those that their reasons name."""
    timeless = [
        replace(
            stage,
            duration_ms=0.0,
            fallback_from=tuple(replace(one, reason=re.sub(r"\d+ ms", "", one.reason)) for one in stage.fallback_from),
        )
        for stage in answer.stages
    ]
    return replace(answer, stages=tuple(timeless))


async def streamed(recommender, request):
    """All parts, items one by one."""
    return [one async for part in recommender.stream(request) for one in (part if isinstance(part, TitledItems) else [part])]


async def test_retrieved_items_come_first_then_generated_ones_as_they_are_found_then_the_answer(bundle):
    parts = await streamed(recommender(bundle, Naming(bundle, 7, 49, 8)), request(k=2))
    assert shown(parts) == [
        "+encode", "encode:50", "encode:49", "generate:7", "generate:49", "generate:8", "+generate", "+blend", "=",
    ]  # fmt: skip
    assert parts[1].item.title == "Item 50"


STRATEGIES = [None, "unified", "retrieval", "generative"]
GENERATORS = {
    "works": {},
    "breaks": {"error": BackendFailed("it broke")},
    "is of another version": {"version": "tiny/9"},
    "is late": {"delay": 60},
}


@pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_last_part_is_what_recommend_answers(bundle, strategy, generator):
    asked = request(k=5, strategy=strategy, diversity=0.3, freshness=0.2, explain=True, deadline_ms=30)
    parts = await streamed(recommender(bundle, Naming(bundle, 7, 49, 8, **generator)), asked)
    whole = await recommender(bundle, Naming(bundle, 7, 49, 8, **generator)).recommend(asked)
    assert without_durations(parts[-1]) == without_durations(whole)
    assert [part for part in parts if isinstance(part, StageReport)] == list(parts[-1].stages)
    assert not any(isinstance(part, Recommendation) for part in parts[:-1])


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_no_item_comes_twice_from_a_stage_and_none_that_was_seen_or_blocked(bundle, strategy):
    class Careless(Naming):
        def generated(self, request):
            return super().generated(replace(request, blocked=request.blocked[:0]))

    asked = request("50", "7", k=5, blocked=frozenset({"49"}), strategy=strategy)
    items = [
        part for part in await streamed(recommender(bundle, Careless(bundle, 7, 49, 8, 50, 9, 10)), asked) if isinstance(part, ScoredItem)
    ]
    found = [(one.stage, one.item.item_id) for one in items]
    assert len(set(found)) == len(found) > 0
    assert {item for _, item in found}.isdisjoint({"50", "7", "49"})


async def test_retrieved_items_are_not_streamed_where_only_generated_ones_were_asked_for(bundle):
    parts = await streamed(recommender(bundle, Naming(bundle, 7, 8)), request(k=2, strategy="generative"))
    assert shown(parts) == ["+encode", "generate:7", "generate:8", "+generate", "="]


async def test_an_item_that_came_early_need_not_be_in_the_answer(bundle):
    parts = await streamed(recommender(bundle, Naming(bundle, 7, 8)), request(k=1, strategy="generative"))
    assert [one.item.item_id for one in parts if isinstance(one, ScoredItem)] == ["7", "8"]
    assert [one.item.item_id for one in parts[-1].items] == ["7"]


async def test_without_a_streaming_generator_its_items_come_at_the_end(bundle):
    parts = await streamed(Recommender(bundle, Descending(bundle), Naming(bundle, 7, 8)), request(k=1))
    assert shown(parts) == ["+encode", "encode:50", "generate:7", "generate:8", "+generate", "+blend", "="]


async def test_what_was_found_in_time_was_streamed_though_the_answer_came_too_late(bundle):
    generator = Naming(bundle, 7, 8, delay=60)
    parts = await streamed(recommender(bundle, generator), request(k=1, deadline_ms=30))
    assert shown(parts) == ["+encode", "encode:50", "generate:7", "generate:8", "+generate", "="]
    assert parts[-1].degraded
    assert [one.item.item_id for one in parts[-1].items] == ["50"]
    assert generator.closed


async def test_a_stream_that_stops_without_an_answer_is_a_failure(bundle):
    async def stream(request, within_s):
        yield Generated(Naming(bundle, 7).generated(request).items, Naming(bundle, 7).generated(request).log_probs)

    answer = (await streamed(Recommender(bundle, Descending(bundle), Naming(bundle), stream), request(k=1)))[-1]
    assert answer.stages[1].fallback_from[0].reason == "the generator stopped before its answer was complete"
    assert answer.degraded


async def test_whoever_stops_listening_stops_the_generator(bundle):
    generator = Naming(bundle, 7, 8, 9, 10)
    stream = recommender(bundle, generator).stream(request(k=1))
    while shown([await anext(stream)]) != ["generate:7"]:
        assert not generator.closed
    await stream.aclose()
    assert generator.closed
    assert generator.asked == []  # it was stopped before its answer


async def test_a_listener_who_takes_longer_than_the_generators_time_is_not_cancelled(bundle):
    parts = []
    async for part in recommender(bundle, Naming(bundle, 7, 8)).stream(request(k=1, deadline_ms=5)):
        await asyncio.sleep(0.01)
        parts.append(part)
    assert isinstance(parts[-1], Recommendation)


async def test_a_bad_request_is_refused_before_the_first_part(bundle):
    bad = replace(request("1"), request_time=5)
    with pytest.raises(InvalidRequest):
        await anext(recommender(bundle, Naming(bundle)).stream(bad))


@pytest.mark.parametrize("wrong", [{"rank": True}, {"strategy": "retrieval", "sampling": SamplingOptions()}])
async def test_what_the_model_cannot_do_is_refused_before_the_first_part(bundle, wrong):
    with pytest.raises(InvalidRequest):
        await anext(recommender(bundle, Naming(bundle)).stream(request(**wrong)))
