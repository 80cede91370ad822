"""The gateway without Ray: what an operator may change while requests are served."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config import GatewaySettings, parse
from cluster.errors import ConfigError
from cluster.values import RecommendRequest
from deployments.gateway import Gateway
from deployments.logs import SlowAnswers


class Recorder:
    """Stands for the stages and for the edge: remembers what it was reconfigured to."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def reconfigure(self, limits: GatewaySettings) -> None:
        self.given.append(limits)


class StagesRecorder(Recorder):
    async def reconfigure(self, user_config: dict[str, Any], flags: Any) -> None:
        self.given.append((user_config, flags))


class Models:
    """Stands for the versions that serve: remembers what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[RecommendRequest] = []

    def model_for(self, tenant: str, user_id: str) -> SimpleNamespace:
        return SimpleNamespace(generates=user_id != "canary")

    async def recommend(self, request: RecommendRequest) -> RecommendRequest:
        self.asked.append(request)
        return request

    async def stream(self, request: RecommendRequest):
        self.asked.append(request)
        yield request


@pytest.fixture
def gateway() -> Callable[..., Any]:
    """Makes a gateway of these settings that has been constructed, but for what it serves."""

    def make(**tree: Any) -> Any:
        one: Any = object.__new__(Gateway)
        one._settings = parse({"model_dir": "models/tiny", **tree})
        one._limits = one._settings.gateway
        one._data = SimpleNamespace(anticipates=one._settings.events.anticipate)
        one._api = SimpleNamespace(state=SimpleNamespace(edge=Recorder()))
        one._stages, one._versions = StagesRecorder(), Models()
        one._recorder, one._slow = SimpleNamespace(answered=lambda *_: None), SlowAnswers()
        return one

    return make


async def asked(gateway: Any, **request: Any) -> RecommendRequest:
    """A request as the model sees it."""
    await gateway.recommend(RecommendRequest("ada", **request))
    return gateway._versions.asked[-1]


class TestFlags:
    @pytest.mark.parametrize("cache", ["use", "refresh", "bypass"])
    async def test_with_the_cache_switched_off_no_answer_is_taken_from_it_or_kept(self, gateway, cache):
        assert (await asked(gateway(), cache=cache)).cache == cache
        assert (await asked(gateway(gateway={"flags": {"cache": False}}), cache=cache)).cache == "bypass"

    async def test_the_strategy_is_that_of_the_requests_that_name_none(self, gateway):
        one = gateway(gateway={"flags": {"strategy": "retrieval"}})
        assert (await asked(one)).strategy == "retrieval"
        assert (await asked(one, strategy="generative")).strategy == "generative"
        assert (await asked(gateway())).strategy is None

    async def test_whose_version_has_no_decoder_is_not_refused_for_a_flag(self, gateway):
        one = gateway(gateway={"flags": {"strategy": "generative"}})
        assert (await asked(one)).strategy == "generative"
        await one.recommend(RecommendRequest("canary"))
        assert one._versions.asked[-1].strategy is None

    async def test_streams_are_under_the_same_flags(self, gateway):
        one = gateway(gateway={"flags": {"cache": False, "strategy": "retrieval"}})
        assert [(part.cache, part.strategy) async for part in one.stream(RecommendRequest("ada"))] == [("bypass", "retrieval")]

    async def test_nothing_else_of_a_request_changes(self, gateway):
        request = RecommendRequest("ada", k=3, tenant="shop", blocked=frozenset({"7"}), deadline_ms=250, cache="bypass", strategy="unified")
        await (one := gateway(gateway={"flags": {"cache": False, "strategy": "retrieval"}})).recommend(request)
        assert one._versions.asked == [request]


class TestReconfigure:
    async def test_flags_hold_from_the_next_request_on_and_end_with_the_next_change(self, gateway):
        one = gateway()
        await one.reconfigure({"flags": {"cache": False, "strategy": "retrieval"}})
        request = await asked(one)
        assert (request.cache, request.strategy) == ("bypass", "retrieval")
        await one.reconfigure({})
        request = await asked(one)
        assert (request.cache, request.strategy) == ("use", None)

    async def test_the_edge_and_the_stages_are_told(self, gateway):
        one = gateway()
        await one.reconfigure({"max_k": 7, "flags": {"hedge": True}, "encoder": {"order": ["torch"]}})
        (limits,) = one._api.state.edge.given
        assert limits.max_k == 7
        ((of_stages, flags),) = one._stages.given
        assert (of_stages, flags.hedge) == ({"encoder": {"order": ["torch"]}}, True)

    async def test_what_is_not_given_is_as_in_the_arguments(self, gateway):
        one = gateway(gateway={"max_k": 50, "max_batch": 5})
        await one.reconfigure({"max_k": 7})
        await one.reconfigure({"max_batch": 6})
        assert (one._limits.max_k, one._limits.max_batch) == (50, 6)

    async def test_nor_do_the_flags_change_that_are_not_given(self, gateway):
        one = gateway(gateway={"flags": {"strategy": "retrieval"}})
        await one.reconfigure({"flags": {"cache": False}})
        request = await asked(one)
        assert (request.cache, request.strategy) == ("bypass", "retrieval")

    @pytest.mark.parametrize(("events", "flag", "anticipates"), [(True, True, True), (True, False, False), (False, True, False)])
    async def test_answers_are_anticipated_where_the_events_and_the_flags_have_it(self, gateway, events, flag, anticipates):
        one = gateway(events={"anticipate": events})
        await one.reconfigure({"flags": {"anticipate": flag}})
        assert one._data.anticipates is anticipates

    async def test_a_change_that_makes_no_sense_is_refused_and_changes_nothing(self, gateway):
        one = gateway()
        with pytest.raises(ConfigError, match="user_config of the gateway"):
            await one.reconfigure({"max_k": 0, "flags": {"cache": False}})
        assert (await asked(one)).cache == "use"
        assert (one._api.state.edge.given, one._stages.given) == ([], [])
