"""The HTTP interface over the real pipeline and a real torch encoder, in this process."""

import gzip
import json
import re
import tracemalloc
from hashlib import sha256
from math import ceil
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import PARAM_FORMAT_REGEX

from cluster.config import MOST_ENTRIES, GatewaySettings
from cluster.errors import BackendFailed, BundleError, DeadlineExceeded, UnknownChoice
from cluster.few_lines import FewLines
from deployments.http import problems
from deployments.http.api import create_api
from deployments.http.exchange import HttpRequest, exchange
from deployments.http.open_paths import MADE
from deployments.http.pieces import PIECE
from deployments.http.playground import FILES
from tests.fakes.data import Data
from tests.fakes.in_process import InProcess
from tests.fakes.played_stages import bundle_with_ranker
from tests.repetitions import times

LIMITS = GatewaySettings(max_k=100, max_behaviours=50, max_listed_items=20, max_batch=4, max_body_bytes=20_000)
STRANGE = {f"f{number}": 0 for number in range(1000)}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    return InProcess(bundle_with_ranker(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
async def client(service):
    transport = httpx.ASGITransport(create_api(service, None, LIMITS))
    async with httpx.AsyncClient(transport=transport, base_url="http://genrec") as client:
        yield client


def behaviour(item_id="1", timestamp=1000, **more):
    return {"item_id": item_id, "timestamp": timestamp, **more}


async def test_recommends_titled_items_with_their_provenance(client):
    response = await client.post("/v1/recommend", json={"user_id": "u", "behaviours": [behaviour(), behaviour("2", 1001)], "k": 5})
    answer = response.json()
    assert response.status_code == 200
    assert len(answer["items"]) == 5
    assert answer["items"][0]["title"].startswith("Item ")
    assert {item["item_id"] for item in answer["items"]}.isdisjoint({"1", "2"})
    assert answer["stages"][0]["backend"] == "torch"
    assert answer["model_version"] == "tiny/2"


async def test_item_ids_may_be_numbers(client):
    as_number, as_text = [
        (await client.post("/v1/recommend", json={"user_id": 7, "behaviours": [behaviour(item_id)], "request_time": 2000})).json()
        for item_id in (3, "3")
    ]
    assert [i["item_id"] for i in as_number["items"]] == [i["item_id"] for i in as_text["items"]]


async def test_a_batch_is_answered_in_order(client):
    requests = [{"user_id": str(i), "behaviours": [behaviour(str(i))], "k": 3} for i in range(1, 5)]
    response = await client.post("/v1/recommend:batch", json={"requests": requests})
    assert [answer["user_id"] for answer in response.json()["answers"]] == ["1", "2", "3", "4"]


BAD = {
    "no body": (None, "body"),
    "empty object": ({}, "user_id"),
    "not an object": ([1, 2], "body"),
    "unknown field": ({"user_id": "u", "limit": 3}, "limit"),
    "unknown field in a behaviour": ({"user_id": "u", "behaviours": [behaviour(rating=5)]}, "behaviours[0].rating"),
    "k is zero": ({"user_id": "u", "k": 0}, "k"),
    "k is huge": ({"user_id": "u", "k": 10**30}, "k"),
    "k is text": ({"user_id": "u", "k": "many"}, "k"),
    "k is a fraction": ({"user_id": "u", "k": 2.5}, "k"),
    "negative time": ({"user_id": "u", "behaviours": [behaviour(timestamp=-1)]}, "behaviours[0].timestamp"),
    "milliseconds": ({"user_id": "u", "behaviours": [behaviour(timestamp=1_700_000_000_000)]}, "behaviours[0].timestamp"),
    "milliseconds as text": ({"user_id": "u", "behaviours": [behaviour(timestamp="1700000000000")]}, "behaviours[0].timestamp"),
    "endless time as text": ({"user_id": "u", "behaviours": [behaviour(timestamp="9" * 30)]}, "behaviours[0].timestamp"),
    "endless request time as text": ({"user_id": "u", "behaviours": [behaviour()], "request_time": "9" * 30}, "request_time"),
    "time is text": ({"user_id": "u", "behaviours": [behaviour(timestamp="yesterday")]}, "behaviours[0].timestamp"),
    "no time": ({"user_id": "u", "behaviours": [{"item_id": "1"}]}, "behaviours[0].timestamp"),
    "empty item id": ({"user_id": "u", "behaviours": [behaviour("")]}, "behaviours[0].item_id"),
    "null item id": ({"user_id": "u", "behaviours": [behaviour(None)]}, "behaviours[0].item_id"),
    "unknown action": ({"user_id": "u", "behaviours": [behaviour(action="ponder")]}, "behaviours[0].action"),
    "value beyond floats": ({"user_id": "u", "behaviours": [behaviour(value=1e300)]}, "behaviours[0].value"),
    "behaviours is text": ({"user_id": "u", "behaviours": "all"}, "behaviours"),
    "too many behaviours": ({"user_id": "u", "behaviours": [behaviour()] * 51}, "behaviours"),
    "too many blocked": ({"user_id": "u", "blocked": ["1"] * 21}, "blocked"),
    "too many allowed": ({"user_id": "u", "allowed": ["1"] * 21}, "allowed"),
    "behaviour after the request": ({"user_id": "u", "behaviours": [behaviour()], "request_time": 5}, "behaviours[0].timestamp"),
    "empty user": ({"user_id": ""}, "user_id"),
    "strange tenant": ({"user_id": "u", "tenant": "a b"}, "tenant"),
}


UNKNOWN_PARAMETERS = [
    ("POST", "/v1/recommend?k=5", "k"),
    ("POST", "/v1/rank?candidates=1", "candidates"),
    ("DELETE", "/v1/users/u/history?tennant=shop", "tennant"),
    ("GET", "/v1/users/u/history?limit=2&before=3", "before"),
    ("GET", "/v1/items?search=film", "search"),
    ("GET", "/v1/backends?stage=encoder", "stage"),
]


@pytest.mark.parametrize(("method", "path", "name"), UNKNOWN_PARAMETERS, ids=[path for _, path, _ in UNKNOWN_PARAMETERS])
async def test_a_parameter_that_a_route_does_not_take_is_refused_by_name(client, method, path, name):
    response = await client.request(method, path, json={"user_id": "u", "candidates": ["1"]} if method == "POST" else None)
    assert (response.status_code, [error["field"] for error in response.json()["errors"]]) == (422, [name])
    assert "there is no such field; remove it" in response.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/healthz"), ("GET", "/v1/items/1"), ("POST", "/v1/recommend"), ("GET", "/v1/nothing")]
)
async def test_a_query_string_that_is_too_long_is_refused_before_its_parameters_are_read(client, method, path):
    query = "&".join(["a"] * 2049)
    response = await client.request(method, f"{path}?{query}", json={"user_id": "u"} if method == "POST" else None)
    problem = response.json()
    assert (response.status_code, problem["instance"], [error["field"] for error in problem["errors"]]) == (422, path, ["query string"])
    assert "has more than the 4096 bytes this service takes; send a shorter one" in problem["detail"]


async def test_a_query_string_as_long_as_is_taken_is_read(client):
    assert (await client.get("/healthz?" + "a=" * 2048)).status_code == 200


def test_between_two_parts_of_a_path_stands_what_one_of_them_cannot_hold():
    """Else a path that does not match would be tried with all its splits, which takes the square of its length."""
    seen = []
    for route in create_api(None, None, LIMITS).fastapi.routes:
        pieces, parts = PARAM_FORMAT_REGEX.split(route.path_format), route.param_convertors
        for before, literal, behind in zip(pieces[1::2], pieces[2::2], pieces[3::2], strict=False):
            seen.append((before, literal, behind))
            assert not all(re.fullmatch(parts[part].regex, character) for part in (before, behind) for character in literal), seen[-1]
    assert {("stage", "/", "name"), ("name", ":", "switch")} <= {*seen}


@pytest.mark.parametrize("path", ["/v1/backends/a/" + ":" * 60_000 + "/x", "/v1/users/" + "%F0%9F%8D%93" * 1020 + "/history"])
async def test_a_path_that_is_too_long_is_refused_before_it_is_looked_up(service, path):
    for method in ("GET", "POST", "DELETE"):
        answer = await exchange(create_api(service, None, LIMITS), HttpRequest(method, path, {"host": "localhost"}))
        assert (answer.status, [error["field"] for error in json.loads(answer.body)["errors"]]) == (422, ["path"])


async def test_an_id_as_long_as_any_is_looked_up_however_it_is_quoted(client):
    assert (await client.get("/v1/items/" + "%F0%9F%8D%93" * 256)).status_code == 404


@pytest.mark.parametrize(("body", "field"), BAD.values(), ids=BAD.keys())
async def test_bad_input_is_refused_with_the_field_and_the_cure(client, body, field):
    response = await client.post("/v1/recommend", json=body)
    problem = response.json()
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert problem["errors"][0]["field"] == field
    assert problem["detail"]


async def test_what_is_missing_is_named_with_the_cure(client):
    response = await client.post("/v1/recommend", json={"user_id": "u", "behaviours": [{"item_id": "1"}]})
    assert response.json()["detail"] == "behaviours[0].timestamp: is required; add it, or see /docs for what it holds"


HARDLY_JSON = [
    b"{",
    b"",
    b"\xff\xfe",
    b'{"user_id": NaN}',
    b'{"user_id":"u","k":NaN}',
    b'{"user_id":"u","behaviours":[{"item_id":"1","timestamp":NaN}]}',
    b'{"user_id":"\xff"}',
    b'{"user_id":"u","behaviours":[{"item_id":"1","timestamp":1,"value":Infinity}]}',
    b'{"user_id":"u","\\ud800":1}',
    b'{"user_id":"\\ud800"}',
    b'{"user_id":"u","k":' + b"9" * 5000 + b"}",
    b"[" * 9000,
    gzip.compress(b'{"user_id":"u"}', mtime=0),  # nothing is unpacked
]


@pytest.mark.parametrize("raw", HARDLY_JSON, ids=range(13))
async def test_what_is_hardly_json_is_refused_and_never_a_server_error(client, raw):
    response = await client.post("/v1/recommend", content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 422, response.text
    assert response.json()["errors"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/recommend", {"user_id": "a", "behaviours": [0] * 49_000}, "behaviours[0]"),
        ("/v1/recommend", {"user_id": "a", "blocked": [{}] * 49_000}, "blocked[0]"),
        ("/v1/recommend", {"user_id": "a", "blocked": [1] * 49_000}, "blocked"),
        ("/v1/recommend:batch", {"requests": [{}] * 49_000}, "requests[0].user_id"),
        ("/v1/rank", {"user_id": "a", "candidates": [[]] * 49_000}, "candidates[0]"),
        ("/v1/events", {"events": [0] * 49_000}, "events[0]"),
    ],
)
async def test_a_large_body_that_is_wrong_throughout_is_refused_by_its_first_wrong_entry(service, path, body, field):
    """Each further wrong entry would cost a message, and the event loop its time."""
    transport = httpx.ASGITransport(create_api(service, None, GatewaySettings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://genrec") as client:
        tracemalloc.start()
        response = await client.post(path, json=body)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert response.status_code == 422
    assert [error["field"] for error in response.json()["errors"]] == [field]
    assert peak < 64 * 2**20


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/recommend", {"user_id": "a", **STRANGE}, "body"),
        ("/v1/recommend", {"user_id": "a", "behaviours": [{"item_id": "1", "timestamp": 1, **STRANGE}]}, "behaviours[0]"),
        ("/v1/recommend", {"user_id": "a", "sampling": STRANGE}, "sampling"),
        ("/v1/recommend:batch", {"requests": [{"user_id": "a", **STRANGE}]}, "requests[0]"),
        ("/v1/rank", {"user_id": "a", "candidates": ["1"], "weights": STRANGE}, "weights"),
        ("/v1/events", {"user_id": "a", "item_id": "1", **STRANGE}, "body"),
    ],
)
async def test_thousands_of_unknown_fields_are_told_as_one(client, path, body, field):
    response = await client.post(path, json=body)
    (problem,) = response.json()["errors"]
    assert (response.status_code, problem["field"]) == (422, field)
    assert re.match(r"has 100\d fields; see /docs for the fields there are, and remove the others", problem["problem"])


@pytest.mark.parametrize(
    "body",
    [b'{"user_id": "u", "%b": 1}' % (b"k" * 10_000), b'{"user_id": "u", "request_time": %b}' % (b"9" * 4000)],
    ids=["a field's name", "a number"],
)
async def test_a_refusal_is_short_however_long_what_it_refuses(client, body):
    answer = await client.post("/v1/recommend", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, len(answer.content) < 2000) == (422, True)


def test_no_more_of_a_wrong_value_is_written_out_than_is_shown():
    class Entry:
        written = 0

        def __repr__(self):
            Entry.written += 1
            return "{}"

    assert problems.shown([Entry()] * 100_000) == f"[{'{}, ' * 25}"[:100]
    assert problems.shown(dict.fromkeys(range(100_000), Entry())).startswith("{0: {}, 1: {}, ")
    assert Entry.written <= 200
    assert problems.shown([[[Entry()] * 50] * 50] * 50) == f"[[[{'{}, ' * 25}"[:100]
    assert Entry.written <= 300
    assert (problems.shown("x" * 1000)[:3], len(problems.shown("x" * 1000))) == ("'xx", 100)


MANY = {
    "numbers": b"1,",
    "lists in lists": b"[" * 900 + b"]" * 900 + b",",
    "objects with a list in a list": b'{"a":[[]]},',
    "behaviours to be converted": b'{"item_id":1,"timestamp":1},',
}


@pytest.mark.parametrize("size", [2**20, 2**24], ids=["1 MiB", "16 MiB"])
@pytest.mark.parametrize("many", MANY.values(), ids=MANY.keys())
@pytest.mark.parametrize("path", ["/v1/recommend", "/v1/recommend:batch", "/v1/rank", "/v1/events"])
async def test_a_body_of_more_values_than_any_request_needs_is_refused_before_they_become_objects(service, path, many, size):
    transport = httpx.ASGITransport(create_api(service, None, GatewaySettings(max_body_bytes=size, max_held_bytes=2**28)))
    before, after = b'{"user_id": "a", "behaviours": [', b"1]}"
    content = before + many * ((size - len(before + after)) // len(many)) + after
    async with httpx.AsyncClient(transport=transport, base_url="http://genrec") as client:
        tracemalloc.start()
        response = await client.post(path, content=content, headers={"content-type": "application/json"})
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (response.status_code, response.json()["errors"][0]["field"]) == (413, "body")
    assert "or events, requests and candidates in several calls" in response.json()["detail"]
    assert re.search("the 100000 values|the 6291456 bytes", response.json()["detail"])
    assert peak - len(content) < 2**18, "the client has another copy of the body"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/recommend", {"behaviours": [{"item_id": "1", "timestamp": 1}] * MOST_ENTRIES, "blocked": ["1"] * MOST_ENTRIES}),
        ("/v1/recommend", {"behaviours": [{"item_id": 1, "timestamp": 1}] * 33_000}),
        ("/v1/recommend:batch", {"requests": [{"user_id": "a", "behaviours": [{"item_id": 1, "timestamp": 1}] * 129}] * 256}),
    ],
    ids=["the longest lists", "100,000 values to convert", "100,000 values of a batch"],
)
async def test_a_body_of_as_many_values_as_are_taken_is_answered(service, path, body):
    limits = GatewaySettings(max_behaviours=MOST_ENTRIES, max_listed_items=MOST_ENTRIES, max_body_bytes=2**24)
    body = body if "requests" in body else {"user_id": "a", **body}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_api(service, None, limits)), base_url="http://genrec") as client:
        assert (await client.post(path, json=body, timeout=120)).status_code == 200


@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        *(("/v1/recommend", {}, json.dumps(body).encode()) for body, _ in BAD.values()),
        *(("/v1/recommend", {}, raw) for raw in HARDLY_JSON[3:]),
        ("/v1/events", {}, b'{"events":[{"user_id":"a","item_id":1},{}]}'),
        ("/v1/events", {"idempotency-key": "x" * 300}, b"{}"),
        ("/v1/recommend", {"content-type": "text/plain"}, b"{}"),
        ("/v1/rank", {}, b'{"user_id":"a","candidates":[]}'),
    ],
)
async def test_what_is_wrong_with_a_large_body_is_told_as_of_a_small_one(service, path, headers, body):
    limits = LIMITS.model_copy(update={"max_body_bytes": 2**20})
    headers = {"content-type": "application/json", **headers}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_api(service, None, limits)), base_url="http://genrec") as client:
        small, large = [await client.post(path, content=body + more, headers=headers) for more in (b" ", b" " * 2**16)]
    assert (small.status_code, small.json()["errors"] != []) == (422, True)
    told = [[(error["field"], error["problem"]) for error in response.json()["errors"]] for response in (small, large)]
    assert told[0] == told[1]


async def test_a_bad_request_in_a_batch_is_named_by_its_place(client):
    bad = {"user_id": "u", "behaviours": [behaviour()], "request_time": 5}
    response = await client.post("/v1/recommend:batch", json={"requests": [{"user_id": "fine"}, bad]})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "requests[1].behaviours[0].timestamp"
    response = await client.post("/v1/recommend:batch", json={"requests": [{"user_id": "u"}] * 5})
    assert response.json()["errors"][0]["field"] == "requests"


@pytest.mark.parametrize(
    "sensible",
    [
        {"behaviours": [behaviour("no such item")]},
        {"behaviours": []},
        {"allowed": []},
        {"allowed": ["no such item"]},
        {"behaviours": [behaviour()], "allowed": []},
        {"behaviours": [behaviour()], "allowed": ["no such item"]},
        {"behaviours": [behaviour()], "allowed": ["1"]},
        {"behaviours": [behaviour(str(i), 1000) for i in range(1, 51)]},
        {"blocked": [str(i) for i in range(1, 21)], "k": 100},
        {"behaviours": [behaviour(timestamp=0)], "request_time": 4_000_000_000},
    ],
    ids=repr,
)
async def test_odd_but_honest_requests_get_an_answer(client, sensible):
    response = await client.post("/v1/recommend", json={"user_id": "u", **sensible})
    assert response.status_code == 200, response.text
    if sensible.get("allowed") is not None:
        assert response.json()["items"] == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["1", "2", "u"]),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from(["item_id", "timestamp", "action", "value", "x"]), children, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = ["user_id", "behaviours", "k", "request_time", "exclude_seen", "blocked", "allowed", "tenant"]


@settings(max_examples=times(200, 40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6))
async def test_no_input_whatever_is_a_server_error(service, body):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_api(service, None, LIMITS)), base_url="http://genrec") as client:
        response = await client.post("/v1/recommend", content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code in (200, 422), (body, response.text)


async def test_items_are_looked_up_by_id(client):
    assert (await client.get("/v1/items/7")).json() == {"item_id": "7", "title": "Item 7", "attributes": {}}
    missing = await client.get("/v1/items/a%2Fb")
    assert missing.status_code == 404
    assert "'a/b'" in missing.json()["detail"]


async def test_a_path_or_a_method_that_there_is_not_is_told_with_where_to_look(client):
    nothing, other = await client.get("/v1/reccomend"), await client.get("/v1/recommend")
    assert (nothing.status_code, nothing.json()["detail"]) == (404, "there is nothing at this path; see /docs for the paths there are")
    assert (other.status_code, other.headers["allow"]) == (405, "POST")
    assert other.json()["detail"] == "this path does not take GET; see /docs for the methods it takes"


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/v1/users/ada/history"), ("POST", "/v1/recommend"), ("GET", "/openapi.json")])
async def test_a_path_with_a_line_break_behind_it_is_no_other_path(client, method, path):
    response = await client.request(method, f"{path}%0A", json={"user_id": "ada"})
    assert (response.status_code, response.json()["instance"]) == (404, f"{path}\n")


@pytest.mark.parametrize(
    ("path", "allowed"), [("/v1/users/ada/history", "DELETE, GET"), ("/healthz", "GET, HEAD"), ("/openapi.json", "GET, HEAD")]
)
async def test_a_path_of_several_methods_tells_all_of_them_to_what_it_does_not_take(client, path, allowed):
    refused = await client.put(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, allowed)


async def test_a_problem_names_the_path_that_was_asked_for_whatever_is_in_it(client):
    for path, instance in (("/v1/items/a%0Ab", "/v1/items/a\nb"), ("/v1/items/a%3Fb%23c", "/v1/items/a?b#c")):
        assert (await client.get(path)).json()["instance"] == instance
    refused = await client.post("/v1/backends/encoder/a%3Fb:toggle")
    assert (refused.status_code, refused.json()["instance"]) == (422, "/v1/backends/encoder/a?b:toggle")


async def test_a_path_with_a_slash_too_many_is_no_other_path(client):
    """Starlette would answer with the path unquoted once more: another user's."""
    for method, path in (("DELETE", "/v1/users/100%2541/history/"), ("POST", "/v1/recommend/"), ("GET", "/v1/options/")):
        assert (await client.request(method, path)).status_code == 404


@pytest.mark.parametrize("path", ["/v1/recommend", "/v1/recommend:batch", "/v1/rank", "/v1/events"])
@pytest.mark.parametrize("sent", [{}, {"content-type": "application/x-www-form-urlencoded"}], ids=["none", "form"])
async def test_a_body_that_is_not_said_to_be_json_is_refused_with_the_header_that_says_so(client, path, sent):
    response = await client.post(path, content=b'{"user_id": "u"}', headers=sent)
    (problem,) = response.json()["errors"]
    assert (response.status_code, problem["field"]) == (422, "body")
    assert problem["problem"] == "is not read as JSON; send it with the header Content-Type: application/json"


async def test_switches_name_the_choices_where_the_name_is_unknown(client):
    assert (await client.post("/v1/backends/encoder/torch:disable")).json()["enabled"] is False
    first = (await client.post("/v1/backends/encoder/torch:first")).json()
    assert (first["enabled"], first["first"]) == (True, True)
    unknown = await client.post("/v1/backends/encoder/trt:enable")
    assert (unknown.status_code, unknown.json()["detail"]) == (404, "unknown encoder 'trt'; choose from torch")
    assert (await client.post("/v1/backends/encoder/torch:toggle")).status_code == 422


async def test_readiness_is_503_until_the_stages_are_there(client, service, monkeypatch):
    assert (await client.get("/readyz")).status_code == 200
    monkeypatch.setattr(service, "ready", False)
    assert (await client.get("/readyz")).status_code == 503
    backends = await client.get("/v1/backends")
    assert (backends.status_code, backends.headers["retry-after"]) == (503, "2")
    assert (await client.get("/healthz")).json() == {"status": "ok"}
    assert [(await client.head(path)).status_code for path in ("/healthz", "/readyz")] == [200, 503], "as some balancers ask"


@pytest.mark.parametrize("error", [BackendFailed("every engine failed"), DeadlineExceeded("too late"), BundleError("half-written")])
async def test_whatever_does_not_answer_now_says_when_to_ask_again(client, service, monkeypatch, error):
    async def failing(*_, **__):
        raise error

    monkeypatch.setattr(service, "models", failing, raising=False)
    monkeypatch.setattr(service, "recommend", failing)
    for response in (await client.get("/v1/models"), await client.post("/v1/recommend", json={"user_id": "ada"})):
        assert (response.status_code, response.headers["retry-after"], response.json()["detail"]) == (503, "2", str(error))


async def test_a_damaged_file_of_the_model_is_named_to_operators_alone_and_in_the_log(service, monkeypatch, caplog):
    async def damaged(_):
        raise BundleError("/srv/models/tiny/3/manifest.json is missing")

    monkeypatch.setattr(service, "recommend", damaged)
    monkeypatch.setattr(problems, "_damaged", FewLines(most=1, within_s=1e9))
    key = {"name": "shop", "sha256": sha256(b"genrec_shop").hexdigest()}
    api = create_api(service, service, GatewaySettings.model_validate({"api_keys": [key]}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://genrec") as client:
        client.headers["authorization"] = "Bearer genrec_shop"
        told = [await client.post("/v1/recommend", json={"user_id": "ada", "k": k}) for k in (5, "5")]  # without FastAPI, and by it
    assert [(one.status_code, one.json()["detail"]) for one in told] == [(503, BundleError.told)] * 2
    assert caplog.text.count("/srv/models/tiny/3/manifest.json is missing") == 1, "not for each call"


async def test_a_damaged_file_of_the_model_is_named_with_its_cure(client, service, monkeypatch):
    async def damaged():
        raise BundleError("models/tiny/rollout.json cannot be understood; delete it to serve the current version alone")

    monkeypatch.setattr(service, "models", damaged)
    response = await client.get("/v1/models")
    assert (response.status_code, "delete it" in response.json()["detail"]) == (503, True)


@pytest.mark.parametrize("error", [RuntimeError("secret detail"), UnknownChoice("index", "secret", [])], ids=["any", "of a configuration"])
async def test_an_error_of_ours_is_a_problem_without_a_trace_whichever_way_it_goes(service, monkeypatch, error):
    async def broken(request):
        raise error

    monkeypatch.setattr(service, "recommend", broken)
    transport = httpx.ASGITransport(create_api(service, None, LIMITS), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://genrec") as client:
        told = [await client.post("/v1/recommend", json={"user_id": "u", "k": k}) for k in (5, "5")]  # without FastAPI, and by it
    assert [(one.status_code, one.headers["content-type"]) for one in told] == [(500, "application/problem+json")] * 2
    assert "secret" not in told[0].text + told[1].text


@pytest.mark.parametrize(
    ("path", "route"), [("/v1/users/ada/history", "/v1/users/{user_id:id}/history"), ("/v1/items/ada", "/v1/items/{item_id:id}")]
)
async def test_an_error_of_ours_is_logged_by_its_route_and_names_no_user_and_no_item(service, monkeypatch, caplog, path, route):
    async def broken(*_):
        raise RuntimeError("of ours")

    def item(_):
        raise RuntimeError("of ours")

    monkeypatch.setattr(service, "item", item)
    transport = httpx.ASGITransport(create_api(service, SimpleNamespace(history=broken), LIMITS), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get(path)).status_code == 500
    [line] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert line.getMessage() == f"unexpected error while answering {route}"
    assert "ada" not in "".join(record.getMessage() for record in caplog.records if record.name.startswith("deployments"))


def test_no_request_has_a_tenant_by_default_which_a_client_made_of_the_document_would_send():
    """A key that is bound to another tenant would be refused with it."""
    schemas = create_api(None, None, LIMITS).fastapi.openapi()["components"]["schemas"]
    tenants = {name: schema["properties"]["tenant"] for name, schema in schemas.items() if "tenant" in schema.get("properties", {})}
    assert {"RecommendIn", "RankIn", "EventIn"} < tenants.keys()
    assert [name for name, tenant in tenants.items() if tenant.get("default") is not None] == []


async def test_a_cache_on_the_way_keeps_no_answer_and_asks_for_files_again(service):
    transport = httpx.ASGITransport(create_api(service, Data(), LIMITS))
    async with httpx.AsyncClient(transport=transport, base_url="http://genrec") as client:
        routes = (await client.get("/openapi.json")).json()["paths"].items()
        paths = [path.format(item_id="1", user_id="ada") for path, methods in routes if "get" in methods]
        assert {"/v1/users/ada/history", "/v1/items/1", "/v1/cache", "/healthz", "/readyz"} <= {*paths}
        told = [await client.get(path) for path in paths]
        told += [await client.post("/v1/recommend", json={"user_id": "ada", "k": k}) for k in (5, "5")]  # without FastAPI, and by it
        assert {(one.url.path, one.status_code, one.headers.get("cache-control")) for one in told} == {
            (path, 200, "no-store") for path in (*paths, "/v1/recommend")
        }
        for path in ("/v1/items/none", "/nothing", "/v1/items?limit=0"):
            assert (await client.get(path)).headers.get("cache-control") == "no-store"
        for path in (*FILES, "/docs"):
            assert (await client.get(path)).headers.get("cache-control") == "no-cache"


def test_the_openapi_document_describes_every_route_with_an_example():
    document = create_api(None, None, LIMITS).fastapi.openapi()
    assert set(document["paths"]) == {
        "/v1/recommend", "/v1/recommend:batch", "/v1/rank", "/v1/items/{item_id}", "/v1/backends",
        "/v1/backends/{stage}/{name}:{switch}", "/healthz", "/readyz",
        "/v1/events", "/v1/users/{user_id}/history", "/v1/cache", "/v1/cache:invalidate", "/v1/models",
        "/v1/items", "/v1/examples", "/v1/options", "/v1/gateway",
    }  # fmt: skip
    assert document["components"]["schemas"]["RecommendIn"]["examples"]
    assert "application/problem+json" in document["paths"]["/v1/recommend"]["post"]["responses"]["422"]["content"]


def test_the_interface_describes_problems_once():
    """Generators of clients make a class of each description, and refuse the second of the same name."""
    document = create_api(None, None, LIMITS).fastapi.openapi()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    contents = [answer.get("content", {}) for operation in operations for answer in operation["responses"].values()]
    told = [content[problems.MEDIA_TYPE]["schema"] for content in contents if problems.MEDIA_TYPE in content]
    assert told == [{"$ref": "#/components/schemas/Problem"}] * len(told) != []
    schemas = document["components"]["schemas"]
    assert schemas["Problem"]["properties"]["errors"]["items"] == {"$ref": "#/components/schemas/FieldProblem"}
    assert schemas["FieldProblem"]["required"] == ["field", "problem"]


async def test_the_description_of_the_interface_counts_as_what_it_takes(client):
    assert ceil(len((await client.get("/openapi.json")).content) / PIECE) == MADE


def integers(part):
    """The descriptions of integers within a part of the document."""
    if isinstance(part, dict) and part.get("type") == "integer":
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from integers(inner)


def test_the_interface_tells_which_integers_may_have_64_bits():
    """Generators of clients take 32 for others. No float is 2**63 - 1: the next one is refused."""
    document = create_api(None, None, LIMITS).fastapi.openapi()
    told = list(integers(document))
    assert [one for one in told if (one.get("format") == "int64") != (one.get("maximum", 2**63) >= 2**31)] == []
    assert {type(one[bound]) for one in told for bound in ("minimum", "maximum") if bound in one} == {int}
    schemas = {name: schema.get("properties") for name, schema in document["components"]["schemas"].items()}
    assert schemas["SamplingIn"]["seed"]["anyOf"][0]["maximum"] == 2**63 - 1
    assert schemas["StoredEventOut"]["sequence"]["format"] == "int64"
    assert "format" not in schemas["RecommendIn"]["k"]


async def test_the_interface_tells_the_limits_that_are_configured_just_now():
    api = create_api(None, None, GatewaySettings(max_k=100, max_listed_items=7))
    told = {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://genrec") as client:
        for settings in (
            None,
            GatewaySettings(max_k=50, max_behaviours=40, max_listed_items=30, max_batch=20, max_candidates=10, max_events=5),
        ):
            if settings is not None:
                api.edge.reconfigure(settings)
            for message, schema in (await client.get("/openapi.json")).json()["components"]["schemas"].items():
                for name, field in schema.get("properties", {}).items() if message.endswith("In") else ():
                    bounds = {**field, **next(iter(field.get("anyOf", ())), {})}
                    told.setdefault(f"{message}.{name}", []).append(bounds.get("maxItems", bounds.get("maximum")))
        assert {field: bounds for field, bounds in told.items() if bounds[0] != bounds[1]} == {
            "RecommendIn.k": [100, 50], "RecommendIn.behaviours": [10_000, 40], "RecommendIn.blocked": [7, 30],
            "RecommendIn.allowed": [7, 30], "RecommendBatchIn.requests": [256, 20], "RankIn.candidates": [2048, 10],
            "RankIn.behaviours": [10_000, 40], "EventsIn.events": [1000, 5],
        }  # fmt: skip
        beyond = {"behaviours": [{"item_id": "1", "timestamp": 1}] * 41, "blocked": ["1"] * 31, "allowed": ["1"] * 31, "k": 51}
        for name, value in beyond.items():
            assert (await client.post("/v1/recommend", json={"user_id": "u", name: value})).status_code == 422


async def test_candidates_are_ranked_with_a_prediction_for_each_task(client):
    message = {"user_id": "u", "behaviours": [], "candidates": ["30", 8, "7", "nonsense"], "weights": {"click": 1, "rating": 2}}
    answer = (await client.post("/v1/rank", json=message)).json()
    assert [item["item_id"] for item in answer["items"]] == ["8", "30", "7"]
    assert answer["items"][0] | {"score": 0} == {
        "item_id": "8", "title": "Item 8", "attributes": {}, "score": 0,
        "predictions": {"click": pytest.approx(0.84), "rating": 5.0, "purchase": pytest.approx(0.16)},
    }  # fmt: skip
    assert [stage["backend"] for stage in answer["stages"]] == ["ascending"]
    assert answer["unknown_items"] == ["nonsense"]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"user_id": "u"}, "candidates"),
        ({"user_id": "u", "candidates": []}, "candidates"),
        ({"user_id": "u", "candidates": ["1"], "weights": {"sneeze": 1}}, "weights.sneeze"),
        ({"user_id": "u", "candidates": ["1"], "weights": {"cart": 1}}, "weights.cart"),
        ({"user_id": "u", "candidates": ["1"], "weights": {"click": -1}}, "weights.click"),
        ({"user_id": "u", "candidates": ["1"], "weights": {"click": 2e6}}, "weights.click"),
        ({"user_id": "u", "candidates": ["1"], "weights": {"click": 0}}, "weights"),
        ({"user_id": "u", "candidates": ["1"], "weights": {}}, "weights"),
        ({"user_id": "u", "candidates": ["1"] * 2049}, "candidates"),
        ({"user_id": "u", "candidates": ["1"], "colour": "blue"}, "colour"),
    ],
)
async def test_a_ranking_that_cannot_be_asked_for_is_refused_with_the_field(client, message, field):
    response = await client.post("/v1/rank", json=message)
    assert response.status_code == 422
    assert any(error["field"].startswith(field) for error in response.json()["errors"]), response.text


async def test_the_interface_tells_what_weights_may_be(client):
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    weights = schemas["RankIn"]["properties"]["weights"]["anyOf"][0]
    told = weights["minProperties"], *(weights["additionalProperties"][limit] for limit in ("minimum", "maximum"))
    assert told == (1, 0, 1_000_000)
