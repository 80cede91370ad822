"""A body that msgspec decodes is understood as FastAPI and pydantic understand it."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.config import GatewaySettings
from cluster.values import Action, Behaviour, Recommendation
from deployments.http.api import create_api
from deployments.http.edge import BATCH_PATH
from tests.repetitions import times
from tests.unit.test_http_api import json_values

DIRECT, USUAL = "application/json; charset=utf-8", "application/any+json"


class Echo:
    """Remembers how it understood the latest request."""

    request = None

    async def recommend(self, request):
        self.request = request
        return Recommendation(request.user_id, (), (), "m/1", degraded=False)


ECHO = Echo()
API = create_api(ECHO, None, GatewaySettings(max_k=50))


async def understood(body, media_type, path="/v1/recommend"):
    """The response, and the request that the service was asked, None where it was not."""
    ECHO.request = None
    transport = httpx.ASGITransport(API)
    async with httpx.AsyncClient(transport=transport, base_url="http://genrec") as client:
        response = await client.post(path, content=body, headers={"content-type": media_type})
    return response.status_code, response.json(), ECHO.request and fields_of(ECHO.request)


behaviours = st.lists(
    st.fixed_dictionaries(
        {"item_id": st.text(max_size=3) | st.integers(), "timestamp": st.integers(-1, 10**11) | st.floats() | st.booleans() | st.text()},
        optional={"action": st.sampled_from(["view", "rating", "none"]), "value": json_values},
    ),
    max_size=3,
)
more = st.dictionaries(st.sampled_from(["k", "tenant", "diversity", "explain", "allowed", "deadline_ms", "x"]), json_values, max_size=2)


@settings(max_examples=times(150, 30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(user=st.text(max_size=4) | st.integers() | json_values, behaviours=behaviours | json_values, more=more)
async def test_the_same_is_understood_and_the_same_refused(user, behaviours, more):
    body = json.dumps({"user_id": user, "behaviours": behaviours, **more})
    *direct, asked = await understood(body, DIRECT)
    *usual, asked_usually = await understood(body, USUAL)
    assert direct == usual
    assert asked == asked_usually
    batch = json.dumps({"requests": [{"user_id": "first"}, {"user_id": user, "behaviours": behaviours, **more}]})
    *direct, asked = await understood(batch, DIRECT, BATCH_PATH)
    *usual, asked_usually = await understood(batch, USUAL, BATCH_PATH)
    assert direct == usual
    assert direct[0] != 200 or asked == asked_usually, "an entry of a batch that is refused may have been asked"


def fields_of(request):
    """All but the moment when its time is over, which differs by when it was sent."""
    return {name: getattr(request, name) for name in request.__struct_fields__ if name != "deadline"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"user_id": "u", "k": 3, "k": 4}',
        b'\xef\xbb\xbf{"user_id": "u"}',
        '{"user_id": "u"}'.encode("utf-16"),
        b'{"user_id": "\\ud83d\\ude00"}',
        b'{"user_id": "u", "behaviours": [{"item_id": 7, "timestamp": 1, "value": 1e400}]}',
        b'{"user_id": "u", "diversity": 0.1000000000000000055511151231257827}',
        b' {"user_id": "u"} \n',
        b'{"user_id": "u"} {}',
        b"",
    ],
    ids=range(9),
)
async def test_odd_bodies_are_understood_alike(body):
    *direct, asked = await understood(body, DIRECT)
    *usual, asked_usually = await understood(body, USUAL)
    assert direct == usual
    assert asked == asked_usually


ENTRY = {"user_id": "u", "behaviours": [{"item_id": "7", "timestamp": 1, "action": "rating", "value": 4}]}


@pytest.mark.parametrize(
    "batch",
    [
        {"requests": [{"user_id": "first", "k": 3}, {**ENTRY, "tenant": "shop"}]},
        {"requests": [ENTRY, {**ENTRY, "k": 51}]},
        {"requests": [ENTRY, {**ENTRY, "k": 0}]},
        {"requests": [ENTRY] * 257},
        {"requests": [ENTRY] * 4097},
        {"requests": []},
        {"requests": None},
        {"requests": [ENTRY], "x": 1},
        {"requests": [{**ENTRY, "x": 1}]},
        ENTRY,
    ],
    ids=range(10),
)
async def test_batches_are_understood_alike(batch):
    body = json.dumps(batch)
    *direct, asked = await understood(body, DIRECT, BATCH_PATH)
    *usual, asked_usually = await understood(body, USUAL, BATCH_PATH)
    assert direct == usual
    assert asked == asked_usually


async def test_a_batch_that_needs_no_conversion_is_answered_without_pydantic(monkeypatch):
    body = json.dumps({"requests": [ENTRY, ENTRY]})
    monkeypatch.setattr("deployments.http.messages.few_fields", None)
    status, told, asked = await understood(body, DIRECT, BATCH_PATH)
    assert (status, [one["user_id"] for one in told["answers"]]) == (200, ["u", "u"])
    assert asked["behaviours"] == (Behaviour("7", 1, Action.RATING, 4.0),)


async def test_a_body_without_a_media_type_is_refused_as_before():
    status, problem, asked = await understood(b'{"user_id": "u"}', "text/plain")
    assert (status, asked) == (422, None)
    assert problem["errors"]
