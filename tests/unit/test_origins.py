"""Which calls may come from a web page of another site, decided and over the routes."""

import hashlib

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import GatewaySettings
from deployments.http.api import create_api
from deployments.http.origins import foreign_host, foreign_page
from tests.fakes.service import Service

KEY = {"name": "boss", "sha256": hashlib.sha256(b"genrec_boss").hexdigest(), "rights": ["operate"]}
OWN = [
    {"host": "127.0.0.1:8000"},
    {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"},
    {"host": "localhost:8000", "origin": "http://localhost:8000"},
    {"host": "[::1]:8000", "origin": "http://[::1]:8000"},
    {"host": "192.168.1.7", "origin": "http://192.168.1.7"},
    {"host": "genrec-serve-svc:8000"},
    {"host": "Rec.Example.org", "origin": "https://rec.example.org"},
    {"host": "upstream:8000", "origin": "https://rec.example.org"},
    {},
]
FOREIGN_PAGES = [
    {"host": "127.0.0.1:8000", "origin": "https://evil.example"},
    {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:3000"},
    {"host": "127.0.0.1:8000", "origin": "null"},
    {"host": "127.0.0.1:8000", "origin": ""},
    {"host": "rec.example.org", "origin": "https://rec.example.org.evil.example"},
]
REBOUND = [
    {"host": "evil.example:8000", "origin": "http://evil.example:8000"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "evil.example."},
]


@pytest.mark.parametrize("headers", OWN, ids=str)
@pytest.mark.parametrize("name", ["rec.example.org", "Rec.Example.org"])
def test_a_call_of_the_services_own_page_or_of_a_program_is_none(headers, name):
    assert foreign_page(headers, [name]) is None
    assert foreign_host(headers.get("host", ""), (name,)) is None


@pytest.mark.parametrize("headers", FOREIGN_PAGES, ids=str)
def test_a_page_of_another_origin_is_told_so_with_the_cure(headers):
    assert "name its host in gateway.hosts" in foreign_page(headers, ["rec.example.org"])


@pytest.mark.parametrize("headers", REBOUND, ids=str)
def test_a_name_that_is_not_ours_is_a_foreign_page_where_no_key_is_asked_for(headers):
    assert "is not known as" in foreign_host(headers["host"], ("rec.example.org",))
    assert foreign_page(headers, ["rec.example.org"]) is None


@given(st.dictionaries(st.sampled_from(["host", "origin"]), st.text()))
def test_any_headers_are_decided(headers):
    foreign_page(headers, [])
    foreign_host(headers.get("host", ""), ())


@pytest.mark.parametrize("headers", FOREIGN_PAGES + REBOUND, ids=str)
@pytest.mark.parametrize("path", ["/v1/backends/encoder/torch:disable", "/v1/cache:invalidate"])
async def test_no_foreign_page_operates_a_service_without_keys(headers, path):
    service = Service()
    api = create_api(service, None, GatewaySettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://127.0.0.1:8000") as client:
        answered = await client.post(f"http://127.0.0.1:8000{path}", headers=headers)
    assert (answered.status_code, answered.json()["title"], service.switched) == (403, "Forbidden", [])


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/users/ada/history"), ("DELETE", "/v1/users/ada/history"), ("GET", "/v1/examples")]
)
async def test_a_name_that_was_made_to_resolve_to_a_service_without_keys_reads_and_erases_no_user_by_it(method, path):
    api = create_api(None, None, GatewaySettings.model_validate({"hosts": ["rec.example.org"]}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://evil.example:8000") as client:
        answered = await client.request(method, path)
        known = await client.get("/v1/nothing", headers={"host": "Rec.example.org:8000"})
    assert (answered.status_code, answered.json()["title"], known.status_code) == (403, "Forbidden", 404)


@pytest.mark.parametrize(
    ("local", "hosts", "host", "refused"),
    [
        (True, [], "evil.example:8000", True),
        (True, [], "localhost:8000", False),
        (False, ["rec.example.org"], "evil.example", True),
        (False, ["rec.example.org"], "Rec.example.org", False),
        (False, [], "a.name.it.has.not.been.told", False),
    ],
)
async def test_a_name_that_was_made_to_resolve_to_a_service_is_no_passport_for_a_caller_without_a_key(local, hosts, host, refused):
    settings = GatewaySettings.model_validate({"api_keys": [{**KEY, "rights": ["read"]}], "allow_anonymous": True, "hosts": hosts})
    api = create_api(None, None, settings, local=local)
    calls = [("GET", "/v1/users/ada/history"), ("POST", "/v1/events"), ("GET", "/v1/examples"), ("POST", "/v1/recommend")]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api, raise_app_exceptions=False), base_url=f"http://{host}") as client:
        statuses = [(await client.request(*call, headers={"origin": f"http://{host}"})).status_code for call in calls]
        assert [status == 403 for status in statuses] == [refused] * len(calls)
        assert (await client.get("/v1/nothing", headers={"authorization": "Bearer genrec_boss"})).status_code == 404, "a key rules it out"


async def test_an_operators_key_is_no_passport_for_a_foreign_page():
    api = create_api(Service(), None, GatewaySettings.model_validate({"api_keys": [KEY]}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://rec.example.org") as client:
        key = {"authorization": "Bearer genrec_boss"}
        assert (await client.get("/v1/gateway", headers=key)).status_code == 200
        assert (await client.get("/v1/gateway", headers={**key, "origin": "https://evil.example"})).status_code == 403
