"""The documentation at /docs, as it is served."""

import hashlib
from html.parser import HTMLParser

import httpx
import pytest

from cluster.config import GatewaySettings
from deployments.http.api import create_api
from deployments.http.api_pages import FILES
from deployments.http.static_files import HEADERS

KEY = {"name": "shop", "sha256": hashlib.sha256(b"genrec_shop").hexdigest()}


class Loads(HTMLParser):
    """What a page has its browser fetch, and the text of scripts and styles within it."""

    def __init__(self, page):
        super().__init__()
        self.fetched, self.within, self._in = [], [], None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self._in = tag
        self.fetched += [value for name, value in attributes if name in ("src", "href") and not value.startswith("data:")]

    def handle_data(self, text):
        if self._in in ("script", "style") and text.strip():
            self.within.append(text)


@pytest.fixture
async def client():
    api = create_api(None, None, GatewaySettings.model_validate({"api_keys": [KEY]}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://genrec") as client:
        yield client


@pytest.mark.parametrize("path", FILES)
async def test_every_file_is_open_and_stands_under_the_playgrounds_policy(client, path):
    response = await client.get(path)
    assert (response.status_code, response.content) == (200, FILES[path].body)
    assert {name: response.headers[name] for name in HEADERS} == HEADERS
    assert (await client.get(path, headers={"if-none-match": response.headers["etag"]})).status_code == 304


async def test_the_page_loads_what_is_served_here_and_nothing_else(client):
    page = Loads((await client.get("/docs")).text)
    assert [f"/{path}" for path in page.fetched] == ["/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js", "/docs/start.js"]
    assert page.within == []


async def test_no_other_page_of_the_interface_is_served(client):
    assert [(await client.get(path)).status_code for path in ("/redoc", "/docs/oauth2-redirect")] == [
        401,
        401,
    ]  # as any path without a route
