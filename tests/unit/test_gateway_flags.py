"""What an operator may change of a gateway while requests are served: a whole gateway without Ray, before stages that are played."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from hashlib import sha256
from math import inf
from pathlib import Path
from time import monotonic, thread_time
from typing import Any

import httpx
import pytest

from cluster import metrics as m
from cluster.background import AHEAD, lane_of
from cluster.bundle_store import BundleStore
from cluster.cache.layout import Layout, ShardsSeen
from cluster.cache.memory import MemoryCache
from cluster.cache.shard import CacheShard
from cluster.cache.shared import ShardedCache, SharedSettings
from cluster.cache.tier_values import TierSettings
from cluster.cache.tiered import TieredCache
from cluster.config import parse
from cluster.errors import ConfigError
from cluster.events.read_turns import ReadTurns
from cluster.events.store import open_event_store
from cluster.fleet.board import READY, Presence
from cluster.fleet.heartbeat import Report
from cluster.fleet.rollout import ROLLOUT, Arm, RolloutStore, Trial
from cluster.ranking import RankingRequest
from cluster.values import Behaviour, Recommendation, RecommendRequest, SkippedBackend
from deployments.fleet.heartbeat import Heartbeat
from deployments.fleet.switchboard import TTL_S, SwitchboardDeployment
from deployments.gateway import Gateway
from deployments.served_model import ServedModel
from deployments.stages import SplitStages
from pipelines.answer_codec import ANSWER_CODEC
from tests.fakes.clock import Clock
from tests.fakes.handles import Handle, ScriptedHandle
from tests.fakes.played_stages import Naming, bundle_with_decoder
from tests.fakes.stages import FakeStages
from tests.noted import Noted
from tests.unit.test_moving_shards import Place, cache_of
from tests.waiting import passed, settled, until

HISTORY = (Behaviour("1", 1000), Behaviour("2", 2000))
TRIAL = Trial(version=1, share=0.5, began=1.0)
RETRIEVAL, GENERATIVE, UNIFIED = ["encode"], ["encode", "generate"], ["encode", "generate", "blend"]
"""The stages of an answer, by its strategy."""
READS = {"read_deadline_ms": 60_000}
"""Of stored histories: a read that is late is answered as an empty one."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> BundleStore:
    """Version 1 has no decoder; version 2, which is stable, has one."""
    root = tmp_path_factory.mktemp("models") / "tiny"
    bundle_with_decoder(root, items=60)
    return BundleStore(root)


class Served:
    """A gateway, its stages, its switchboard, and its door."""

    def __init__(self, gateway: Gateway, stages: FakeStages, board: SwitchboardDeployment, heartbeat: Heartbeat) -> None:
        self.gateway, self.stages, self.board, self.heartbeat = gateway, stages, board, heartbeat
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(gateway.api), base_url="http://genrec")

    async def asked(self, user: str = "ada", **request: Any) -> Recommendation:
        return await self.gateway.recommend(RecommendRequest(user, HISTORY, **request))

    async def status(self, **body: Any) -> int:
        """Of a request over HTTP."""
        return (await self.http.post("/v1/recommend", json={"user_id": "ada", **body})).status_code

    async def status_of_batch(self, size: int) -> int:
        return (await self.http.post("/v1/recommend:batch", json={"requests": [{"user_id": "ada", "k": 5}] * size})).status_code

    @property
    def encoded(self) -> int:
        """How often the stable version's encoder was asked."""
        return len(self.stages.encoders["tiny/2"].asked)


def stages_of(answer: Recommendation) -> list[str]:
    return [report.stage for report in answer.stages]


def source(answer: Recommendation) -> str | None:
    """Where it came from; None where the cache had no part in it."""
    return answer.cache and answer.cache.tier


Make = Callable[..., Awaitable[Served]]


@pytest.fixture
async def gateway(store: BundleStore, tmp_path: Any) -> AsyncIterator[Make]:
    """Makes a gateway of these settings that serves. Its switchboard has heard of every replica."""
    made: list[Served] = []

    async def make(shared: ShardedCache | None = None, **tree: Any) -> Served:
        tree["events"] = {**READS, **tree.get("events", {})}
        settings, clock = parse({"model_dir": str(store.root), **tree}), Clock()
        board = SwitchboardDeployment(settings.model_dump(mode="json"), clock)
        clock.advance(2 * TTL_S)
        stages = FakeStages(store)
        stages.generators["tiny/2"] = Naming(store.open(2), 7, 8, 9)
        cache = TieredCache(MemoryCache("s3fifo", 2**20), shared, TierSettings(), ANSWER_CODEC)
        events = await open_event_store(f"sqlite:///{tmp_path}/{len(made)}.db")
        heartbeat = Heartbeat(settings, handle := Handle(board), "a")
        one = Served(Gateway(settings, handle, heartbeat, stages, cache=cache, events=events), stages, board, heartbeat)
        await one.gateway.start()
        made.append(one)
        return one

    yield make
    for one in made:
        await one.http.aclose()
        await one.gateway.close()


async def test_a_stored_history_is_read_whole_however_short_a_request_has_to_be(gateway: Make) -> None:
    one = await gateway(gateway={"max_behaviours": 1})
    events = [{"user_id": "ada", "item_id": str(item), "timestamp": item} for item in range(1, 4)]
    assert (await one.http.post("/v1/events", json={"events": events})).status_code == 201
    answer = (await one.http.post("/v1/recommend", json={"user_id": "ada", "k": 57, "strategy": "retrieval"})).json()
    assert {item["item_id"] for item in answer["items"]} == {str(item) for item in range(4, 61)}
    assert await one.status(behaviours=[{"item_id": str(item), "timestamp": item} for item in (1, 2)]) == 422


async def test_all_that_a_gateway_reads_of_its_event_store_takes_turns_by_caller(gateway: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[tuple[ReadTurns, str]] = []

    def note(read: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        def noted(turns: ReadTurns, tenant: str, *more: Any) -> Awaitable[Any]:
            lanes.append((turns, lane_of(tenant) + " ahead" * AHEAD.get()))
            return read(turns, tenant, *more)

        return noted

    def told() -> list[str]:
        told = [lane for _, lane in lanes]
        lanes.clear()
        return told

    for name in ("read", "read_for_answer"):
        monkeypatch.setattr(ReadTurns, name, note(getattr(ReadTurns, name)))
    one = await gateway()
    assert (await one.http.get("/v1/users/ada/history?tenant=a")).status_code == 200
    assert (await one.http.get("/v1/examples")).status_code == 200
    assert await one.status(tenant="c", cache="bypass") == 200
    assert len({turns for turns, _ in lanes}) == 1
    assert told() == ["a", "default", "c"]

    rights = ["read", "events"]
    keys = [
        {"name": name, "sha256": sha256(f"genrec_{name}".encode()).hexdigest(), "tenant": tenant, "rights": rights}
        for name, tenant in (("any", None), ("own", "c"))
    ]
    one = await gateway(gateway={"api_keys": keys}, events={"anticipate_after_s": 0.0})
    for name, lane in (("any", "key any"), ("own", "c")):
        one.http.headers["authorization"] = f"Bearer genrec_{name}"
        assert (await one.http.get("/v1/users/ada/history?tenant=c")).status_code == 200
        assert (await one.http.get("/v1/examples")).status_code == 200
        assert await one.status(tenant="c", user_id=name) == 200
        assert told() == [lane] * 4, "of an answer, the history's version and the history, which all that ask for it share"
        assert (await one.http.post("/v1/events", json={"user_id": name, "item_id": "1", "tenant": "c"})).status_code == 201
        await until(lambda: len(lanes) == 2, "the user's next answer is computed")
        assert told() == [f"{lane} ahead"] * 2


async def test_a_gateway_tells_how_many_cache_shards_it_sees_and_follows_the_switchboards_order(gateway: Make) -> None:
    shared = await cache_of(Place())
    one = await gateway(shared)
    elsewhere = ShardsSeen(Layout(1, 2), moving=False)
    assert (await one.board.beat("b", Report(), -1, 0.0)).layout == Layout(0, 1)
    await one.board.beat("b", Report({"gateway/b": Presence("gateway", {}, shards=elsewhere)}), -1, 0.0)
    await until(lambda: shared.seen == ShardsSeen(Layout(1, 2), busy=0.5, moving=False))


async def test_a_gateway_begins_no_more_refreshes_than_it_has_places_that_no_request_has(
    gateway: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Callable[[], float]] = []
    monkeypatch.setattr(TieredCache, "give_way", lambda _, free: told.append(free))
    one = await gateway()
    assert [free() for free in told] == [128], "as many as there may be"
    assert one.gateway.api.edge.free_places() == 16, "as many as a gateway begins with"


@pytest.mark.virtual_time
async def test_what_is_hot_is_reckoned_by_the_lookups_of_as_many_gateways_as_live(gateway: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(TieredCache, "divide", lambda _, gateways: told.append(gateways))
    one = await gateway()
    await one.board.beat("b", Report({f"gateway/{number}": Presence("gateway", {1: READY}) for number in range(2)}), -1, 0.0)
    await until(lambda: told and told[-1] == 3)


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("shared", "anticipate", "gateways", "warned"), [(False, True, 2, 1), (False, True, 1, 0), (False, False, 2, 0), (True, True, 2, 0)]
)
async def test_several_gateways_that_share_no_cache_are_warned_of_once_where_answers_are_computed_ahead(
    gateway: Make, caplog: pytest.LogCaptureFixture, shared: bool, anticipate: bool, gateways: int, warned: int
) -> None:
    one = await gateway(await cache_of(Place()) if shared else None, gateway={"flags": {"anticipate": anticipate}})
    for beat in range(3):
        others = {f"gateway/{number}": Presence("gateway", {1: READY, 2: f"beat {beat}"}) for number in range(1, gateways)}
        await one.board.beat("b", Report(others), -1, 0.0)
        await until(lambda: one.heartbeat.gateways == gateways)
    assert sum("gateways with cache.l2: off" in record.getMessage() for record in caplog.records) == warned


@pytest.mark.virtual_time
async def test_a_gateway_tells_which_version_is_to_serve_beside_the_one_that_serves_until_every_replica_can_load_it(
    three_versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, clock, rollouts = Noted(), Clock(), RolloutStore(BundleStore(three_versions))
    monkeypatch.setattr("deployments.gateway.meter", lambda: noted)
    rollouts.promote(2)
    settings = parse({"model_dir": str(three_versions)})
    board = SwitchboardDeployment(settings.model_dump(mode="json"), clock)
    clock.advance(2 * TTL_S)

    async def encoder_holds(name: str, holds: dict[int, str]) -> None:
        await board.beat(name, Report({f"encoder/{name}": Presence("encoder", holds)}), -1, 0.0)

    def told() -> tuple[float | None, float | None]:
        """The version that is to serve, and the one that does."""
        return noted.values.get((m.MODEL_WANTED.name, ())), noted.values.get((m.MODEL_VERSION.name, ()))

    stages = SplitStages(ScriptedHandle(), ScriptedHandle(), ScriptedHandle())
    gateway = Gateway(settings, handle := Handle(board), Heartbeat(settings, handle, "a"), stages)
    await encoder_holds("e", {2: READY})
    await encoder_holds("f", {2: READY})
    await gateway.start()
    try:
        await until(lambda: told() == (2, 2))
        rollouts.promote(3)
        await encoder_holds("e", {2: READY, 3: READY})
        await encoder_holds("f", {2: READY, 3: "a damaged file"})
        await until(lambda: gateway.model_cache.holds.get(3) == READY)
        await until(lambda: told() == (3, 2))
        await encoder_holds("f", {2: READY, 3: READY})
        await until(lambda: told() == (3, 3))
        (three_versions / ROLLOUT).write_text("{")
        await until(lambda: told() == (0, 3), "it is not known which is to serve")
        (three_versions / ROLLOUT).unlink()
        await until(lambda: told() == (3, 3))
    finally:
        await gateway.close()


@pytest.mark.virtual_time
async def test_the_stages_of_each_computed_answer_count_once_whether_or_not_a_caller_is_given_it(
    gateway: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted()
    monkeypatch.setattr("deployments.gateway.meter", lambda: noted)
    one = await gateway(events={"anticipate_after_s": 0})
    encoder = one.stages.encoders["tiny/2"]
    encoder.skipped = (SkippedBackend("tensorrt", "no GPU"),)

    async def counted(answers: int) -> None:
        """So many answers were computed, and each is counted."""
        await until(lambda: noted.total(m.FALLBACKS, stage="encode", backend="tensorrt") >= answers)
        spans = [took for (name, labels), took in noted.seen.items() if name == m.STAGE_DURATION.name and ("stage", "encode") in labels]
        assert (one.encoded, sum(map(len, spans)), noted.total(m.FALLBACKS, backend="tensorrt")) == (answers, answers, answers)

    assert [source(await one.asked(cache=use)) for use in ("use", "use", "bypass")] == ["computed", "l1", None]
    await counted(2)
    assert [part async for part in one.gateway.stream(RecommendRequest("ada", HISTORY, k=7))]
    await counted(3)

    encoder.delay = 0.2
    leaves = asyncio.create_task(one.asked(k=8))
    await until(lambda: one.encoded == 4)
    joins = asyncio.create_task(one.asked(k=8))
    await settled()
    leaves.cancel()
    assert source(await joins) == "joined"
    await counted(4)

    await one.gateway.recommend(RecommendRequest("eve"))
    assert (await one.http.post("/v1/events", json={"user_id": "eve", "item_id": "1"})).status_code == 201
    await until(lambda: one.encoded == 5, "the next answer is anticipated")
    await counted(5)


async def test_items_count_once_a_request_wherever_it_names_them_and_of_events_as_they_are_stored(
    gateway: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted()
    monkeypatch.setattr("deployments.gateway.meter", lambda: noted)
    one = await gateway()

    async def counted(path: str, key: str = "", **body: Any) -> tuple[float, float]:
        """The items that were named so far, and those of them that are not known."""
        assert (await one.http.post(path, json=body, headers={"idempotency-key": key} if key else {})).is_success
        return noted.total(m.ITEMS_NAMED), noted.total(m.ITEMS_UNKNOWN)

    events = [{"user_id": "ada", "item_id": item} for item in ("1", "1", "x")]
    assert await counted("/v1/events", key="k", events=events) == (2, 1)
    assert await counted("/v1/events", key="k", events=events) == (2, 1), "they were stored before"
    assert await counted("/v1/recommend", user_id="ada") == (2, 1)
    assert await counted("/v1/rank", user_id="ada", candidates=["3"]) == (3, 1)
    behaviours = [{"item_id": item, "timestamp": 1000} for item in ("2", "z")]
    assert await counted("/v1/rank", user_id="ada", candidates=["2", "y", "y"], behaviours=behaviours) == (6, 3)
    assert await counted("/v1/recommend", user_id="ada", behaviours=behaviours, blocked=["y", "z"]) == (9, 5)


@pytest.mark.virtual_time
async def test_kept_answers_hold_no_version_that_is_given_up_in_memory(gateway: Make, store: BundleStore) -> None:
    one = await gateway()

    async def kept() -> int:
        return int((await one.http.get("/v1/cache")).json()["tiers"][0]["entries"])

    await one.asked()
    assert await kept() == 1
    RolloutStore(store).promote(1)
    try:
        await until(lambda: 2 not in one.gateway.model_cache.holds, within_s=3600)
        await settled()
        assert await kept() == 0
        await one.asked()
        assert await kept() == 1
    finally:
        RolloutStore(store).promote(2)


async def test_the_start_of_a_gateway_and_a_version_that_it_opens_are_no_load(
    gateway: Make, store: BundleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, spent = Clock(), Clock()

    class Burns(ServedModel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            began = thread_time()
            super().__init__(*args, **kwargs)
            while thread_time() < began + 0.05:
                pass
            spent.advance(thread_time() - began)

    monkeypatch.setattr("deployments.gateway.monotonic", clock)
    monkeypatch.setattr("deployments.gateway.process_time", spent)
    monkeypatch.setattr("deployments.gateway.ServedModel", Burns)
    one = await gateway()
    clock.advance(1)
    assert await one.gateway.record_autoscaling_stats() == {"utilisation": 0.0}
    RolloutStore(store).promote(1)
    try:
        await until(lambda: one.gateway.model_cache.holds.get(1) == READY)
        clock.advance(1)
        assert await one.gateway.record_autoscaling_stats() == {"utilisation": 0.0}
    finally:
        RolloutStore(store).promote(2)
    spent.advance(0.5)
    clock.advance(1)
    assert 0 < (await one.gateway.record_autoscaling_stats())["utilisation"] < 0.5, "what else it computes is load"


@pytest.mark.virtual_time
async def test_streams_and_rankings_that_take_long_are_logged_and_a_reader_that_does_is_not(
    gateway: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one = await gateway(gateway={"deadline_s": 10, "slow_ms": 1000})

    async def streamed(held_s: float = 0.0) -> None:
        async for _ in one.gateway.stream(RecommendRequest("ada", HISTORY, cache="bypass")):
            await passed(held_s)

    def told() -> set[str]:
        return {line.partition(" by ")[0] for record in caplog.records if "an answer took" in (line := record.getMessage())}

    ranking = RankingRequest("ada", ("1", "2"), HISTORY)
    await streamed(held_s=2.0)
    await one.gateway.rank(ranking)
    assert not told()
    one.stages.encoders["tiny/2"].delay = 1.5
    await streamed(held_s=2.0)
    await one.gateway.rank(ranking)
    assert told() == {"an answer took 1500 ms: encode", "an answer took 1500 ms: rank"}


class TestFlags:
    async def test_with_the_cache_switched_off_no_answer_is_taken_from_it_or_kept(self, gateway: Make) -> None:
        one = await gateway()
        assert [source(await one.asked(cache=use)) for use in ("use", "use", "refresh", "bypass")] == ["computed", "l1", "computed", None]
        off = await gateway(gateway={"flags": {"cache": False}})
        assert [source(await off.asked(cache=use)) for use in ("use", "use", "refresh", "bypass")] == [None] * 4
        assert off.encoded == 4
        await off.gateway.reconfigure({"flags": {"cache": True}})
        assert source(await off.asked()) == "computed"

    async def test_the_strategy_is_that_of_the_requests_that_name_none(self, gateway: Make) -> None:
        one = await gateway(gateway={"flags": {"strategy": "retrieval"}})
        assert stages_of(await one.asked()) == RETRIEVAL
        assert stages_of(await one.asked(strategy="generative")) == GENERATIVE
        assert stages_of(await (await gateway()).asked()) == UNIFIED

    async def test_a_version_without_a_decoder_is_not_refused_for_a_flag(self, gateway: Make, store: BundleStore) -> None:
        trial = RolloutStore(store).promote(1, TRIAL).trial
        assert trial
        try:
            one = await gateway(gateway={"flags": {"strategy": "generative"}})
        finally:
            (store.root / ROLLOUT).unlink()
        without, with_decoder = one_of_each(trial)
        answers = [await one.asked(user) for user in (with_decoder, without)]
        assert [(answer.model_version, stages_of(answer)) for answer in answers] == [("tiny/2", GENERATIVE), ("tiny/1", RETRIEVAL)]

    async def test_streams_are_under_the_same_flags(self, gateway: Make) -> None:
        one = await gateway(gateway={"flags": {"cache": False, "strategy": "retrieval"}})
        for _ in range(2):
            *_, answer = [part async for part in one.gateway.stream(RecommendRequest("ada", HISTORY))]
            assert isinstance(answer, Recommendation)
            assert (source(answer), stages_of(answer)) == (None, RETRIEVAL)
        assert one.encoded == 2

    async def test_nothing_else_of_a_request_changes(self, gateway: Make) -> None:
        request = {"k": 3, "tenant": "shop", "blocked": frozenset({"7"}), "deadline_ms": 60_000, "cache": "bypass", "strategy": "unified"}
        flagged = await (await gateway(gateway={"flags": {"cache": False, "strategy": "retrieval"}})).asked(**request)
        plain = await (await gateway()).asked(**request)
        assert (flagged.items, stages_of(flagged), flagged.cache) == (plain.items, UNIFIED, None)


@pytest.fixture(params=[{"cache": False, "strategy": "retrieval"}], ids=["flags"])
def trial_of_flags(store: BundleStore, request: pytest.FixtureRequest) -> Iterator[Trial]:
    """It is going on. Other flags are an indirect parameter."""
    flags = request.param
    trial = RolloutStore(store).promote(2, Trial(version=2, kind="ab", share=0.5, flags=flags)).trial
    assert trial
    yield trial
    (store.root / ROLLOUT).unlink()


class TestTrialOfFlags:
    async def test_the_users_of_the_share_are_served_with_its_flags_and_the_others_with_the_configured_ones(
        self, gateway: Make, store: BundleStore, trial_of_flags: Trial
    ) -> None:
        one = await gateway()
        tried, other = one_of_each(trial_of_flags)
        for _ in range(2):
            answer = await one.asked(tried)
            assert (source(answer), stages_of(answer), answer.model_version) == (None, RETRIEVAL, "tiny/2")
        for tier in ("computed", "l1"):
            answer = await one.asked(other)
            assert (source(answer), stages_of(answer), answer.model_version) == (tier, UNIFIED, "tiny/2")
        assert stages_of(await one.asked(tried, strategy="generative")) == GENERATIVE, "a request's own choice holds"
        told = one.gateway.presence(RolloutStore(store).read())
        assert {arm: figures.requests for arm, figures in told.figures.items()} == {Arm(2): 2, trial_of_flags.arm: 3}

    async def test_the_metrics_name_the_flags_of_an_answer(
        self, gateway: Make, trial_of_flags: Trial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, named = await gateway(), list[str]()
        monkeypatch.setattr(one.gateway._recorder, "answered", lambda *_, flags, **__: named.append(flags))  # noqa: SLF001 - Ray's beyond it
        for user in one_of_each(trial_of_flags):
            await one.asked(user)
            assert [part async for part in one.gateway.stream(RecommendRequest(user, HISTORY))]
        assert named == ["cache=false, strategy=retrieval"] * 2 + [""] * 2

    async def test_the_operator_sees_it_beside_the_stable_version(self, gateway: Make, trial_of_flags: Trial) -> None:
        one = await gateway()
        versions = (await one.http.get("/v1/models")).json()["versions"]
        rows = [(row["role"], row["share"], row["flags"]) for row in versions if row["version"] == 2]
        assert rows == [("stable", None, {}), ("ab", 0.5, {"cache": False, "strategy": "retrieval"})]

    async def test_the_configured_flags_hold_for_what_the_trial_leaves_open_and_for_all_after_it(
        self, gateway: Make, store: BundleStore, trial_of_flags: Trial
    ) -> None:
        one = await gateway(gateway={"flags": {"strategy": "generative"}})
        tried, other = one_of_each(trial_of_flags)
        assert [stages_of(await one.asked(user)) for user in (tried, other)] == [RETRIEVAL, GENERATIVE]
        RolloutStore(store).rollback("enough was seen")

        async def served_as_the_others() -> bool:
            return stages_of(await one.asked(tried)) == GENERATIVE

        await until(served_as_the_others)
        assert source(await one.asked(tried)) == "l1"

    @pytest.mark.parametrize("trial_of_flags", [{"anticipate": False}], indirect=True)
    async def test_no_answer_is_computed_ahead_for_users_that_have_it_switched_off(self, gateway: Make, trial_of_flags: Trial) -> None:
        """Each user asks once, and an event follows."""
        one = await gateway(events={"anticipate_after_s": 0})
        for user in one_of_each(trial_of_flags):
            assert (await one.http.post("/v1/events", json={"user_id": user, "item_id": "1"})).status_code == 201
            assert await one.status(user_id=user) == 200
            assert (await one.http.post("/v1/events", json={"user_id": user, "item_id": "2"})).status_code == 201
        tried, other = one_of_each(trial_of_flags)
        encoded = one.stages.encoders["tiny/2"].asked
        await until(lambda: [request.user_id for request in encoded].count(other) == 2)
        assert [request.user_id for request in encoded] == [tried, other, other], "what would be computed for the first one would be by now"


def one_of_each(trial: Trial) -> tuple[str, str]:
    """A user on trial, and another."""
    tried, other = (next(f"user {n}" for n in range(99) if trial.includes("default", f"user {n}") is on) for on in (True, False))
    return tried, other


class TestReconfigure:
    async def test_flags_hold_from_the_next_request_on_and_end_with_the_next_change(self, gateway: Make) -> None:
        one = await gateway()
        await one.gateway.reconfigure({"flags": {"cache": False, "strategy": "retrieval"}})
        answer = await one.asked()
        assert (source(answer), stages_of(answer)) == (None, RETRIEVAL)
        await one.gateway.reconfigure({})
        answer = await one.asked()
        assert (source(answer), stages_of(answer)) == ("computed", UNIFIED)

    async def test_the_edge_and_the_stages_are_told(self, gateway: Make) -> None:
        one = await gateway(placement="colocated")
        assert await one.status(k=8) == 200
        await one.gateway.reconfigure({"max_k": 7, "flags": {"hedge": True}, "encoder": {"order": ["torch"]}})
        assert [await one.status(k=k) for k in (7, 8)] == [200, 422]
        ((of_stages, flags),) = one.stages.told
        assert (of_stages, flags.hedge) == ({"encoder": {"order": ["torch"]}}, True)

    async def test_l1_takes_another_size_and_keeps_its_answers_and_counts(self, gateway: Make) -> None:
        one = await gateway(cache={"l1_bytes": 2**20})

        async def kept() -> tuple[int, int]:
            l1 = (await one.http.get("/v1/cache")).json()["tiers"][0]
            return l1["capacity_bytes"], l1["hits"]

        assert [source(await one.asked()) for _ in range(2)] == ["computed", "l1"]
        await one.gateway.reconfigure({"cache": {"l1_bytes": 2**21}})
        assert await kept() == (2**21, 1)
        assert source(await one.asked()) == "l1"
        with pytest.raises(ConfigError, match=r"put it under args\.cache"):
            await one.gateway.reconfigure({"cache": {"l1_bytes": 2**22, "enabled": False}})
        assert await kept() == (2**21, 2)
        await one.gateway.reconfigure({})
        assert await kept() == (2**20, 2)
        assert source(await one.asked()) == "l1"

    async def test_what_is_not_given_is_as_in_the_arguments(self, gateway: Make) -> None:
        one = await gateway(gateway={"max_k": 50, "max_batch": 5})
        await one.gateway.reconfigure({"max_k": 7})
        assert [await one.status(k=8), await one.status_of_batch(5), await one.status_of_batch(6)] == [422, 200, 422]
        await one.gateway.reconfigure({"max_batch": 6})
        assert [await one.status(k=50), await one.status(k=51)] == [200, 422]
        assert [await one.status_of_batch(6), await one.status_of_batch(7)] == [200, 422]

    async def test_nor_do_the_flags_change_that_are_not_given(self, gateway: Make) -> None:
        one = await gateway(gateway={"flags": {"strategy": "retrieval"}})
        await one.gateway.reconfigure({"flags": {"cache": False}})
        answer = await one.asked()
        assert (source(answer), stages_of(answer)) == (None, RETRIEVAL)

    @pytest.mark.parametrize(("flags", "anticipates"), [({}, True), ({"anticipate": False}, False), ({"cache": False}, False)])
    async def test_answers_are_anticipated_where_the_flags_have_it(self, gateway: Make, flags: dict[str, bool], anticipates: bool) -> None:
        """Each user asks once, and an event follows; where answers are anticipated, each of the users is encoded once more."""
        one = await gateway(events={"anticipate_after_s": 0})
        await one.gateway.reconfigure({"flags": flags})
        for user in ("ada", "bob"):
            assert (await one.http.post("/v1/events", json={"user_id": user, "item_id": "1"})).status_code == 201
            assert await one.status(user_id=user) == 200
            assert (await one.http.post("/v1/events", json={"user_id": user, "item_id": "2"})).status_code == 201
        expected = 4 if anticipates else 2
        while one.encoded < expected:  # the test's own time limit ends it
            await a_read_of_the_store(one)
        for _ in range(3):
            await a_read_of_the_store(one)
        assert one.encoded == expected

    async def test_answers_are_computed_ahead_under_the_flags_of_that_time(self, gateway: Make) -> None:
        one = await gateway(events={"anticipate_after_s": 0})
        await one.gateway.recommend(RecommendRequest("ada"))
        for times, (strategy, stages) in enumerate([("retrieval", RETRIEVAL), ("generative", GENERATIVE), (None, UNIFIED)], start=1):
            await one.gateway.reconfigure({"flags": {"strategy": strategy}})
            assert (await one.http.post("/v1/events", json={"user_id": "ada", "item_id": str(times)})).status_code == 201
            await until(lambda expected=times: one.encoded == expected)
            answer = await one.gateway.recommend(RecommendRequest("ada"))
            assert (stages_of(answer), one.encoded) == (["history", *stages], times)
            assert source(answer) in {"l1", "joined"}

    @pytest.mark.parametrize("wrong", [{"max_k": 0}, {"max_k": 7, "encoder": {"order": ["torch"]}, "generator": {"order": ["no such"]}}])
    async def test_a_change_that_makes_no_sense_is_refused_and_changes_nothing(self, gateway: Make, wrong: dict[str, Any]) -> None:
        one = await gateway(placement="colocated")
        with pytest.raises(ConfigError, match="user_config of the gateway"):
            await one.gateway.reconfigure({**wrong, "flags": {"cache": False}})
        assert [source(await one.asked()) for _ in range(2)] == ["computed", "l1"]
        assert await one.status(k=8) == 200
        assert one.stages.told == []


async def test_after_a_promotion_the_hottest_answers_are_there_before_they_are_asked_for(
    gateway: Make, store: BundleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the users that ask most: with an event before each request too, and not where the behaviours come with the request."""
    monkeypatch.setattr("deployments.anticipation.READY_USERS", 2)
    one = await gateway()
    for user, times, events in (("ada", 1, 1), ("bob", 3, 3), ("cyd", 2, 1)):
        for number in range(1, times + 1):
            if number <= events:
                assert (await one.http.post("/v1/events", json={"user_id": user, "item_id": str(number)})).status_code == 201
            assert await one.status(user_id=user) == 200
    for _ in range(4):
        await one.asked("dee")
    promoted = one.stages.encoders["tiny/1"]
    RolloutStore(store).promote(1)
    try:
        await until(lambda: len(promoted.asked) == 2)
        assert [request.user_id for request in promoted.asked] == ["bob", "cyd"]
        answer = await one.gateway.recommend(RecommendRequest("bob"))
        assert (answer.model_version, source(answer)) in {("tiny/1", "l1"), ("tiny/1", "joined")}
        assert len(promoted.asked) == 2
    finally:
        RolloutStore(store).promote(2)
        (store.root / ROLLOUT).unlink()


async def test_one_call_of_events_for_many_users_has_the_next_answers_of_all_of_them_computed(gateway: Make) -> None:
    """More than are computed at a time."""
    one = await gateway(events={"anticipate_after_s": 0})
    users = [f"user {number}" for number in range(200)]
    for user in users:
        await one.gateway.recommend(RecommendRequest(user))
    events = [{"user_id": user, "item_id": "1"} for user in users]
    assert (await one.http.post("/v1/events", json={"events": events})).status_code == 201
    await until(lambda: one.encoded == len(users))
    assert {source(await one.gateway.recommend(RecommendRequest(user))) for user in users} <= {"l1", "joined"}
    assert one.encoded == len(users)


async def test_no_more_answers_are_computed_ahead_than_a_tenants_rate_allows_and_its_requests_have_all_of_it(gateway: Make) -> None:
    one = await gateway(events={"anticipate_after_s": 0}, gateway={"rate_limits": {"default": {"per_s": 0.001, "burst": 20}}})
    users = [f"user {number}" for number in range(50)]
    for user in users:
        await one.gateway.recommend(RecommendRequest(user))
    events = [{"user_id": user, "item_id": "1"} for user in users]
    assert (await one.http.post("/v1/events", json={"events": events})).status_code == 201
    await until(lambda: one.encoded >= 20)
    assert [await one.status() for _ in range(20)] == 19 * [200] + [429], "the call of events was one"
    sources = [source(await one.gateway.recommend(RecommendRequest(user))) for user in users]
    assert sum(one in ("l1", "joined") for one in sources) == 20


async def _drop_answers(one: Served) -> None:
    one.gateway.drop_answers("default", "ada")


ERASURES = {
    "the call": lambda one: one.http.delete("/v1/users/ada/history"),
    "the order": lambda one: one.gateway.forget([("default", "ada")], ()),
    "the call for answers": lambda one: one.http.post("/v1/cache:invalidate", json={"tenant": "default", "user_id": "ada"}),
    "the order for answers": _drop_answers,
}


@pytest.mark.parametrize("erased_by", ERASURES)
async def test_a_user_that_is_erased_while_the_next_answer_waits_to_be_computed_waits_no_more(gateway: Make, erased_by: str) -> None:
    one = await gateway(events={"anticipate_after_s": 60})
    for user in ("ada", "bob"):
        await one.gateway.recommend(RecommendRequest(user))
        assert (await one.http.post("/v1/events", json={"user_id": user, "item_id": "1"})).status_code == 201
    waiting = one.gateway._anticipation._waiting  # type: ignore[union-attr]  # noqa: SLF001 - what no answer tells
    assert len(waiting) == 2
    await ERASURES[erased_by](one)
    assert (lane := waiting.due(inf)) == "default"
    assert waiting.take(lane)[0].group == "bob"
    assert not len(waiting)


async def a_read_of_the_store(one: Served) -> None:
    """The event store is read once more, behind all that was asked of it before."""
    assert (await one.http.get("/v1/users/ada/history")).status_code == 200


async def test_a_slow_reader_has_its_answer_and_nothing_is_kept_of_a_user_erased_meanwhile(gateway: Make) -> None:
    one = await gateway()
    usual, shown = one.gateway._usual, one.gateway._recorder._shown  # noqa: SLF001 - what no answer tells
    parts = one.gateway.stream(RecommendRequest("ada"))
    await anext(parts)
    await one.gateway.forget([("default", "ada")], [])
    await one.gateway.forget([], [("default", "ada")])  # after the longest that a request computes, and a reader may take longer
    *_, answer = [part async for part in parts]
    assert isinstance(answer, Recommendation)
    assert (usual.of("default", "ada"), len(shown)) == (None, 0)
    assert [part async for part in one.gateway.stream(RecommendRequest("ada"))]
    assert usual.of("default", "ada"), "a later request is remembered"
    assert len(shown) == 1, "and its answer"


async def test_answers_that_are_dropped_are_computed_anew_and_what_users_were_shown_is_still_known(gateway: Make) -> None:
    one = await gateway()
    assert [source(await one.asked()) for _ in range(2)] == ["computed", "l1"]
    number = await one.board.drop_answers("default", None)
    await until(lambda: one.heartbeat.place.number >= number)
    assert len(one.gateway._recorder._shown) == 1  # noqa: SLF001 - what no answer tells
    assert [source(await one.asked()) for _ in range(2)] == ["computed", "l1"]


@pytest.mark.virtual_time
async def test_nothing_is_kept_of_a_user_erased_while_the_users_entry_of_a_batch_waited_for_its_turn(gateway: Make) -> None:
    one = await gateway(gateway={"admission": {"max_concurrent_entries": 1}})
    encoder, began = one.stages.encoders["tiny/2"], monotonic()
    encoder.delay = 4.0
    asked = [
        {"user_id": user, "strategy": "retrieval", "behaviours": [{"item_id": "1", "timestamp": 1000}]}
        for user in ("bob", "cyd", "dan", "eve", "fay", "ada")
    ]
    batch = asyncio.create_task(one.http.post("/v1/recommend:batch", json={"requests": asked}))
    await asyncio.sleep(2)
    await one.board.erase("default", "ada")
    assert (await batch).status_code == 200
    assert [request.user_id for request in encoder.asked][-1] == "ada"
    assert 20 < monotonic() - began < 30, "the entry is computed long after the erasure, within the time of its request"

    async def again(user: str) -> str:
        answer = await one.http.post("/v1/recommend", json=next(entry for entry in asked if entry["user_id"] == user))
        return answer.json()["cache"]["tier"]

    assert await again("ada") == "l1"
    await asyncio.sleep(parse({"events": READS}).longest_request_s)
    assert [await again(user) for user in ("fay", "ada")] == ["l1", "computed"]


@pytest.mark.virtual_time
async def test_a_gateway_that_ends_soon_after_an_erasure_clears_the_shared_cache_of_the_user_once_more(gateway: Make) -> None:
    """The request, with its behaviours, had arrived before the erasure, and no other gateway need have heard of that."""
    shard = CacheShard(MemoryCache())
    one = await gateway(ShardedCache({"only": shard}, SharedSettings(deadline_s=60, operator_s=60)))

    def kept() -> set[str]:
        return {key.group for key, _ in shard.memory.entries()}

    number = await one.board.erase("default", "ada")
    await until(lambda: one.heartbeat.place.number >= number)
    for user in ("ada", "bob"):
        await one.asked(user)
    await until(lambda: kept() == {"ada", "bob"})
    await one.gateway.close()
    assert kept() == {"bob"}
