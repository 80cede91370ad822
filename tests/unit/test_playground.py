"""The playground: its files as they are served, whether they fit together, and the look-ups it makes, over a service in this process."""

import asyncio
import gc
import hashlib
import re
import threading
from html.parser import HTMLParser
from weakref import ref

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import GatewaySettings
from cluster.dataset import Catalogue
from cluster.errors import BackendError
from cluster.values import Item
from deployments.http.api import create_api
from deployments.http.playground import FILES, StoredUser, _Made, composed_histories
from deployments.http.titles import TitleIndex, folded
from tests.fakes.in_process import InProcess
from tests.fakes.played_stages import bundle_with_ranker
from tests.waiting import settled, until

KEYS = [
    {"name": "admin", "sha256": hashlib.sha256(b"genrec_admin").hexdigest(), "rights": ["read", "events", "erase", "operate"]},
    {"name": "shop", "sha256": hashlib.sha256(b"genrec_shop").hexdigest(), "tenant": "shop"},
]
FILMS = Catalogue(
    [
        Item("1", "Toy Story (1995)", {"genres": "Animation|Comedy"}),
        Item("50", "Star Wars (1977)", {"genres": "Action|Sci-Fi"}),
        Item("172", "Empire Strikes Back, The (1980)", {"genres": "Action|Sci-Fi"}),
        Item("271", "Starship Troopers (1997)", {"genres": "Action|Sci-Fi"}),
        Item("300", "Amélie  (2001)", {"genres": "Comedy"}),
        Item("301", "Batman vs. Starfish\n(1966)", {}),
        Item("302", "War, The (1994)", {"genres": "Drama"}),
    ]
)
SCRIPTS = {path: file.body.decode() for path, file in FILES.items() if path.endswith(".js")}
PAGE = FILES["/"].body.decode()


class Playable(InProcess):
    """With films in its catalogue."""

    def catalogue(self):
        return FILMS


class Users:
    """An event store that may be away; remembers who was asked about."""

    def __init__(self, *stored):
        self.stored, self.asked, self.away = stored, [], False

    async def example_users(self, tenant, limit):
        self.asked.append(tenant)
        if self.away:
            raise BackendError("the event store does not answer")
        return self.stored[:limit]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    return Playable(bundle_with_ranker(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def users():
    return Users(StoredUser("ada", 12), StoredUser("ben", 3))


def client_of(service, users, **settings):
    transport = httpx.ASGITransport(create_api(service, users, GatewaySettings(**settings)))
    return httpx.AsyncClient(transport=transport, base_url="http://genrec")


@pytest.fixture
async def client(service, users):
    async with client_of(service, users) as client:
        yield client


@pytest.mark.parametrize("path", FILES)
async def test_every_file_is_served_as_what_it_is(client, path):
    response = await client.get(path)
    kind = {"/": "text/html"}.get(path) or {"js": "text/javascript", "css": "text/css"}[path.rpartition(".")[2]]
    assert (response.status_code, response.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
    assert response.content == FILES[path].body
    assert "script-src 'self'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_a_file_that_has_not_changed_is_not_sent_again(client):
    first = await client.get("/")
    etag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for known in (etag, f"W/{etag}", f'"other", {etag}'):
        again = await client.get("/", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert (await client.get("/", headers={"If-None-Match": '"other"'})).status_code == 200


async def test_only_the_files_of_the_playground_are_there(client):
    for path in ("/playground/", "/playground/nothing.js", "/playground/../api.py", "/playground/%2e%2e/api.py", "/playground/index.html"):
        assert (await client.get(path)).status_code == 404


async def test_the_page_is_for_everybody_and_what_it_asks_is_not(service, users):
    async with client_of(service, users, api_keys=KEYS) as client:
        assert {(await client.get(path)).status_code for path in FILES} == {200}
        assert {(await client.get(path)).status_code for path in ("/v1/items", "/v1/examples", "/v1/options", "/v1/gateway")} == {401}
        client.headers["Authorization"] = "Bearer genrec_shop"
        assert {(await client.get(path)).status_code for path in ("/v1/items", "/v1/examples", "/v1/options")} == {200}
        assert (await client.get("/v1/gateway")).status_code == 403
        assert users.asked == ["shop"]


class Elements(HTMLParser):
    """Every start tag of a page with its attributes."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


ELEMENTS = Elements(PAGE).found
IDS = [attributes["id"] for _, attributes in ELEMENTS if "id" in attributes]


def test_the_page_keeps_to_its_own_security_policy():
    for tag, attributes in ELEMENTS:
        assert not {name for name in attributes if name.startswith("on") or name == "style"}, (tag, attributes)
        assert tag != "style"
        if tag == "script":
            assert attributes["type"] == "module"
            assert attributes["src"].startswith("playground/")
    assert not re.search(
        r"https?://|innerHTML|insertAdjacentHTML|document\.write|\beval\b|setAttribute\(\"style", PAGE + "".join(SCRIPTS.values())
    )
    assert "@import" not in FILES["/playground/style.css"].body.decode()


def test_every_module_that_is_imported_is_there_and_exports_what_is_asked_of_it():
    for path, script in SCRIPTS.items():
        for names, module in re.findall(r'^import (.+) from "\./([a-z]+\.js)";$', script, re.MULTILINE):
            other = SCRIPTS[f"/playground/{module}"]
            asked = re.findall(r"\w+", names) if names.startswith("{") else re.findall(r"\bapi\.(?!js\b)(\w+)", script)
            for name in asked:
                assert re.search(rf"^export (?:async )?(?:function|const|class) {name}\b", other, re.MULTILINE), (
                    f"{path}: {module} has no {name}"
                )
    imported = set(re.findall(r'from "\./([a-z]+\.js)"', "".join(SCRIPTS.values())))
    assert {path.removeprefix("/playground/") for path in SCRIPTS} == imported | {"app.js"}


def test_the_page_has_what_its_modules_look_for_and_no_id_twice():
    assert len(set(IDS)) == len(IDS)
    looked_for = set(re.findall(r'byId\("([\w-]+)"\)', "".join(SCRIPTS.values())))
    for name in ("settings", "meta", "items", "waterfall"):
        looked_for |= {f"{name}-a", f"{name}-b"}
    assert looked_for <= set(IDS)


def test_every_field_has_a_label_and_every_reference_leads_somewhere():
    labelled = {attributes.get("for") for tag, attributes in ELEMENTS if tag == "label"}
    wrapped = {"compare"}  # its label stands around it
    for tag, attributes in ELEMENTS:
        if tag in {"input", "select"}:
            assert attributes["id"] in labelled | wrapped, attributes
        for name in ("aria-labelledby", "aria-controls", "aria-describedby", "for"):
            assert attributes.get(name, IDS[0]) in IDS, (tag, attributes)
    assert ("html", {"lang": "en"}) in ELEMENTS


def test_no_control_keeps_over_a_reload_what_the_modules_do_not_know_of():
    """Firefox restores what stood in a control, unless it is told not to."""
    controls = {attributes["id"]: attributes.get("autocomplete") for tag, attributes in ELEMENTS if tag in {"input", "select"}}
    assert controls == dict.fromkeys(controls, "off")
    assert "compare" in controls


@pytest.mark.parametrize(
    ("query", "titles"),
    [
        ("star", ["Star Wars (1977)", "Starship Troopers (1997)", "Batman vs. Starfish\n(1966)"]),
        ("STAR w", ["Star Wars (1977)"]),
        ("war", ["War, The (1994)", "Star Wars (1977)"]),
        ("trikes", ["Empire Strikes Back, The (1980)"]),
        ("amelie", ["Amélie  (2001)"]),
        ("Amélie (2001", ["Amélie  (2001)"]),
        ("starfish (1966)", ["Batman vs. Starfish\n(1966)"]),
        ("nothing like it", []),
    ],
)
async def test_titles_are_found_by_a_part_of_them_the_nearest_first(client, query, titles):
    found = (await client.get("/v1/items", params={"query": query})).json()["items"]
    assert [item["title"] for item in found] == titles


async def test_without_a_query_the_catalogues_first_items_are_found(client):
    found = (await client.get("/v1/items?limit=2")).json()["items"]
    assert found == [
        {"item_id": "1", "title": "Toy Story (1995)", "attributes": {"genres": "Animation|Comedy"}},
        {"item_id": "50", "title": "Star Wars (1977)", "attributes": {"genres": "Action|Sci-Fi"}},
    ]


async def test_another_catalogue_is_searched_once_it_serves(service, client, monkeypatch):
    assert not (await client.get("/v1/items?query=alien")).json()["items"]
    monkeypatch.setattr(service, "catalogue", lambda: Catalogue([Item("9", "Alien")]), raising=False)
    assert [item["item_id"] for item in (await client.get("/v1/items?query=alien")).json()["items"]] == ["9"]


async def test_nothing_is_kept_of_a_catalogue_that_serves_no_more_without_another_call(service, users, monkeypatch):
    serving, made = Catalogue(list(FILMS.items)), []

    def noted(catalogue):
        index = TitleIndex(catalogue)
        made.append(ref(index))
        return index

    def forgotten():
        gc.collect()
        return [one() for one in made] == [None, None]

    monkeypatch.setattr(service, "catalogue", lambda: serving, raising=False)
    monkeypatch.setattr("deployments.http.playground.TitleIndex", noted)
    async with client_of(service, users) as client:
        assert len((await client.get("/v1/items?query=star")).json()["items"]) == 3
        assert (await client.get("/v1/examples")).json()["histories"]
        made.append(ref(serving))
        serving = Catalogue([Item("9", "Alien")])
        await until(forgotten, "neither the titles nor the catalogue are there any more", within_s=20)


async def test_a_search_that_is_given_up_is_no_reason_to_read_the_titles_again():
    made, go_on = [], threading.Event()

    def make(catalogue):
        made.append(catalogue)
        assert go_on.wait(60)
        return len(catalogue.items)

    index = _Made(make)
    given_up = asyncio.create_task(index.of(FILMS))
    await until(lambda: made)
    given_up.cancel()
    await asyncio.wait([given_up])
    again = asyncio.create_task(index.of(FILMS))
    await settled()
    go_on.set()
    assert await again == len(FILMS.items)
    assert len(made) == 1


@pytest.mark.parametrize("path", ["/v1/items?limit=0", "/v1/items?limit=51", "/v1/examples?limit=0", f"/v1/items?query={'a' * 201}"])
async def test_a_search_beyond_the_limits_is_refused_with_the_field(client, path):
    response = await client.get(path)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] in {"limit", "query"}


words = st.text(alphabet="abAÀ \nß", max_size=6)


@given(titles=st.lists(words, max_size=8), query=words, limit=st.integers(1, 9), at_once=st.sampled_from([1, 3, 2**20]))
def test_a_search_finds_what_a_look_at_every_title_finds(titles, query, limit, at_once):
    catalogue = Catalogue([Item(str(number), title) for number, title in enumerate(titles)])
    wanted = folded(query)

    def rank(item):
        title = folded(item.title)
        return 0 if title.startswith(wanted) else 1 if f" {wanted}" in f" {title}" else 2

    expected = sorted((item for item in catalogue.items if wanted in folded(item.title)), key=rank)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("deployments.http.titles.AT_ONCE", at_once)
        assert [catalogue.items[place] for place in TitleIndex(catalogue).find(query, limit)] == expected[:limit]


async def test_examples_are_stored_users_and_histories_of_items_that_have_something_in_common(client):
    answer = (await client.get("/v1/examples?limit=1")).json()
    assert answer["users"] == [{"user_id": "ada", "events": 12}]
    assert [one["name"] for one in answer["histories"]] == ["the catalogue's first"], "no five of the films share anything"


async def test_a_caller_that_was_let_in_without_a_key_is_told_of_no_stored_user(service, users):
    async with client_of(service, users, api_keys=KEYS, allow_anonymous=True) as client:
        answer = (await client.get("/v1/examples")).json()
        assert (answer["users"], len(answer["histories"]), users.asked) == ([], 1, [])
        with_a_key = (await client.get("/v1/examples", headers={"authorization": "Bearer genrec_shop"})).json()
        assert [one["user_id"] for one in with_a_key["users"]] == ["ada", "ben"]


async def test_there_are_examples_where_the_event_store_is_away(client, users):
    users.away = True
    answer = (await client.get("/v1/examples")).json()
    assert (answer["users"], len(answer["histories"])) == ([], 1)


async def test_histories_are_composed_once_for_each_catalogue_and_for_every_caller(service, client, monkeypatch):
    class Read(Item):
        looks = 0

        def __getattribute__(self, name):
            Read.looks += name == "attributes"
            return super().__getattribute__(name)

    catalogue = Catalogue([Read(str(number), f"film {number}", {"genres": f"{'AB'[number % 2]}|C"}) for number in range(100)])
    monkeypatch.setattr(service, "catalogue", lambda: catalogue, raising=False)
    names = [one["name"] for one in (await client.get("/v1/examples?limit=20")).json()["histories"]]
    assert names == ["genres: A", "genres: B"]
    Read.looks = 0
    assert [one["name"] for one in (await client.get("/v1/examples?limit=1")).json()["histories"]] == names[:1]
    assert Read.looks == 5, "those of the answer alone"


def test_composed_histories_share_the_most_common_values():
    composed = composed_histories(FILMS, count=2, length=2)
    assert {name: [item.item_id for item in items] for name, items in composed.items()} == {
        "genres: Action": ["50", "172"],
        "genres: Sci-Fi": ["50", "172"],
    }
    assert composed_histories(Catalogue([]), count=2) == {}


async def test_the_options_are_the_models_and_the_gateways(client):
    options = (await client.get("/v1/options")).json()
    assert (options["model_version"], options["strategies"], options["ranker"]) == ("tiny/2", ["retrieval"], True)
    assert options["actions"][0] == "view"
    assert options["max_k"] == GatewaySettings().max_k


async def test_the_gateway_tells_what_it_has_under_way(client):
    figures = (await client.get("/v1/gateway")).json()
    assert (figures["running"], figures["waiting"]) == (0, 0), "an operator's call takes no place"
    assert figures["places"] > 0
