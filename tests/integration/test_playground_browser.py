"""The playground in headless Chromium, on a real Ray Serve: the story it is there to tell, played with the keyboard and the mouse.

GENREC_SCREENSHOTS=docs/images keeps the pictures that the README shows; otherwise they go to pytest's own directory.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cluster.bundle import CATALOGUE
from cluster.bundle_store import BundleStore
from cluster.catalogue_file import write_catalogue
from cluster.dataset import Catalogue
from cluster.traffic import api_keys
from cluster.values import Item
from tests.browsers import chromium, expect, patient
from tests.bundles import make_generative_bundle
from tests.clusters import SharedCluster, fixed
from tests.integration.conftest import PATIENT, PATIENT_READS
from tests.waiting import eventually

pytestmark = pytest.mark.cluster

SETTINGS = {
    # tensorrt is absent without a GPU and "mean" stands behind torch: there is something to fall back from and to
    "encoder": {"order": ["tensorrt", "torch", "mean"], "backends": {"mean": "own_backend:MeanEncoder"}},
    "generator": {"order": ["torch_beam"], "options": {"torch_beam": {"threads": 1}}},
}
KEY, OPERATES = api_keys.new_key(), api_keys.new_key()
"""May do everything, as the key of `make demo`, and operate alone. A caller without one reads and stores events."""
GUARDED = {
    "allow_anonymous": True,
    "api_keys": [
        {"name": name, "sha256": api_keys.digest(key.encode()), "rights": rights}
        for name, key, rights in (("demo", KEY, ["read", "events", "erase", "operate"]), ("engineer", OPERATES, ["operate"]))
    ],
}
FIRST = ["Quiet", "Silver", "Last", "Northern", "Hidden", "Paper", "Golden", "Second", "Winter", "Distant"]
THEN = ["Harbour", "Garden", "Letter", "Station", "Orchard", "Mirror", "Voyage", "Island", "Summer", "Lantern"]
REFUSED = "Failed to load resource"
"""How Chromium logs an answer that is a problem; the page tells of it itself."""
GENRES = ["Drama", "Comedy", "Thriller", "Adventure"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("playground")


@pytest.fixture(scope="module")
def url(models: Path, fast: SharedCluster) -> Iterator[str]:
    """A small generative model of 200 invented films, one of whose users has events."""
    root = models / "films"
    store, bundle = BundleStore(root), make_generative_bundle(root)
    with store.recompile(bundle) as draft:
        (draft.path / CATALOGUE).unlink(missing_ok=True)  # it may be the older version's own file
        write_catalogue(Catalogue([film(number) for number in range(1, 201)]), draft.path / CATALOGUE)
        draft.compiled_from = None
    document = fixed({"ranker": 0})
    args = document["applications"][0]["args"]
    patient = {"gateway": {**args["gateway"], **PATIENT, **GUARDED}, "events": {**args["events"], **PATIENT_READS}}
    with fast.application(document, {"model_dir": str(root), **patient, **SETTINGS}) as serving:
        events = [{"user_id": "ada", "item_id": str(item), "action": "like"} for item in (3, 14, 15, 92, 65)]
        httpx.post(f"{serving.url}/v1/events", json={"events": events}, timeout=120).raise_for_status()
        yield serving.url


def film(number: int) -> Item:
    first, then = FIRST[number % 10], THEN[number // 10 % 10]
    genres = {GENRES[number % 4], GENRES[number // 7 % 4]}
    return Item(str(number), f"{first} {then}{' II' if number > 100 else ''} ({1960 + number % 60})", {"genres": "|".join(sorted(genres))})


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@contextmanager
def opened(browser, url, key=KEY, recommends=True, **context):
    """The page at an address with the key, once it recommends; whatever it logged as an error fails the test: a refusal by its security
    policy is one.
    """
    options = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **context}
    with browser.new_context(**options) as context:
        page, errors = patient(context.new_page()), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and REFUSED not in message.text and errors.append(message.text))
        page.goto(f"{url}/#key={key}" if key else f"{url}/")
        if recommends:
            expect(page.locator("#items-a > li[data-item]")).to_have_count(10)
        yield page
        assert errors == []


@pytest.fixture
def page(browser, url):
    with opened(browser, url) as page:
        yield page


@pytest.fixture
def engines(url):
    """The encoder's, for a test to switch: afterwards they stand as they are configured, whatever the test has come to."""
    yield
    for name in ("torch", "mean", "onnxruntime"):
        switch(url, f"{name}:enable")


@pytest.fixture
def shoot(tmp_path, models):
    """Keep a picture of the page; where tests keep a model says nothing to who looks at it."""
    kept = Path(os.environ.get("GENREC_SCREENSHOTS", tmp_path))

    def shoot(page, name):
        kept.mkdir(parents=True, exist_ok=True)
        page.evaluate(RENAMED, [str(models), "models"])
        page.screenshot(path=kept / f"{name}.png", full_page=True, animations="disabled")

    return shoot


def titles(page, pane="a"):
    return page.locator(f"#items-{pane} .title").all_text_contents()


def stages(page, pane="a"):
    """Stage -> the engine that served it."""
    rows = page.locator(f"#waterfall-{pane} .stage").all()
    return {row.get_attribute("data-stage"): row.get_attribute("data-backend") for row in rows}


def test_a_stored_user_is_there_at_once_with_titles_attributes_and_a_waterfall(page, shoot):
    expect(page.locator("#history-title")).to_have_text("History of ada")
    expect(page.locator("#history li")).to_have_count(5)
    expect(page.locator("#items-a small").first).to_contain_text("genres")
    expect(page.locator("#readiness-text")).to_contain_text("ready · films/")
    assert stages(page).items() >= {"encode": "torch", "generate": "torch_beam"}.items()
    expect(page.locator("#waterfall-a [data-stage=encode]")).to_contain_text("not tensorrt")
    shoot(page, "playground")


def test_a_history_is_composed_by_searching_titles_with_the_keyboard_alone(page):
    page.locator("#clear").click()
    expect(page.locator("#history-title")).to_have_text("Composed history")
    popular = titles(page)
    finder = page.get_by_role("combobox", name="Add a title")
    finder.press_sequentially("lant")
    expect(page.get_by_role("option").first).to_contain_text("Lantern")
    expect(finder).to_have_attribute("aria-activedescendant", "title-option-0")
    finder.press("ArrowDown")
    chosen = page.locator("#title-option-1").inner_text()
    finder.press("Enter")
    expect(page.locator("#history li")).to_have_count(1)
    assert page.locator("#history li").inner_text().splitlines()[0] in chosen
    expect(page.get_by_role("listbox")).to_be_hidden()
    expect(page.locator("#announcement")).to_contain_text("new")
    assert titles(page) != popular
    page.get_by_role("button", name=re.compile("^Remove")).click()
    expect(page.locator("#history li")).to_contain_text("Empty")


def test_an_explanation_tells_of_each_item_what_the_stages_gave_it(page):
    page.locator("#items-a summary").first.click()
    why = page.locator("#items-a details[open]")
    expect(why).to_contain_text("blended")
    expect(why).to_contain_text("Most like:")


def test_another_strategy_is_another_list_by_other_stages(page):
    before = titles(page)
    page.locator("#strategy-a").select_option("retrieval")
    expect(page.locator("#waterfall-a [data-stage=generate]")).to_have_count(0)
    assert titles(page) != before


def test_two_settings_stand_side_by_side_with_what_they_share(page, shoot):
    page.get_by_label("Compare two settings").check()
    expect(page.locator("#items-b > li[data-item]")).to_have_count(10)
    expect(page.locator("#comparison")).to_contain_text("10 of 10 items are in both lists")
    page.locator("#strategy-b").select_option("retrieval")
    expect(page.locator("#items-b .tag.only").first).to_be_visible()
    a, b = titles(page), titles(page, "b")
    expect(page.locator("#comparison")).to_contain_text(f"{len({*a} & {*b})} of 10 items")
    shoot(page, "compare")
    page.get_by_label("Compare two settings").uncheck()
    expect(page.locator("#pane-b")).to_be_hidden()
    expect(page.locator(".tag.only")).to_have_count(0)


def test_an_event_is_stored_and_the_list_changes(page, url, shoot):
    first = titles(page)[0]
    before = len(httpx.get(f"{url}/v1/users/ada/history", timeout=120).json()["events"])
    page.get_by_role("button", name=f"Like: {first}").click()
    expect(page.locator("#history li").first).to_contain_text(first)
    expect(page.locator("#announcement")).to_contain_text("gone")
    assert first not in titles(page)
    expect(page.locator("#results-title")).to_be_focused()
    assert len(httpx.get(f"{url}/v1/users/ada/history", timeout=120).json()["events"]) == before + 1
    shoot(page, "event")


@pytest.mark.usefixtures("engines")
def test_the_cluster_is_seen_live_and_an_engine_switched_off_is_passed_over(page, shoot):
    page.locator("#cluster-title").scroll_into_view_if_needed()
    page.locator("#engines").scroll_into_view_if_needed()
    for name in ("encoder replicas", "Queue", "Hit rate", "Open breakers"):
        expect(page.locator(f"#figures [data-name='{name}'] dd")).to_contain_text(re.compile(r"\S"))
    engine = page.get_by_label("Ask torch in the stage encoder")
    engine.uncheck()
    expect(page.locator("#waterfall-a [data-stage=encode][data-backend=mean]")).to_be_visible()
    expect(page.locator("#waterfall-a [data-stage=encode]")).to_contain_text("not torch")
    expect(page.locator("[data-engine='encoder/torch'] .reason")).to_contain_text(re.compile("off|disabled"))
    shoot(page, "cluster")
    engine.check()
    expect(page.locator("#waterfall-a [data-stage=encode][data-backend=torch]")).to_be_visible()


@pytest.mark.usefixtures("engines")
def test_an_engine_that_is_asked_first_serves_without_any_other_having_failed(page):
    page.locator("#engines").scroll_into_view_if_needed()
    page.get_by_role("button", name="Ask mean first in the stage encoder").click()
    expect(page.locator("#waterfall-a [data-stage=encode][data-backend=mean]")).to_be_visible()
    expect(page.locator("#waterfall-a [data-stage=encode]")).not_to_contain_text("not torch")
    expect(page.locator("[data-engine='encoder/mean'] .place")).to_have_text("1.")
    page.get_by_role("button", name="Ask torch first in the stage encoder").click()
    expect(page.locator("#waterfall-a [data-stage=encode][data-backend=torch]")).to_be_visible()


@pytest.mark.usefixtures("engines")
def test_a_click_counts_though_the_order_of_the_engines_changes_while_the_mouse_button_is_down(page, url):
    page.locator("#engines").scroll_into_view_if_needed()
    button = page.get_by_role("button", name="Ask mean first in the stage encoder")
    eventually(lambda: held(page, button), "the mouse button is down over the button")
    switch(url, "onnxruntime:first")  # which has no artifact here, and is passed over
    for _ in range(2):  # looks, of which one at least was begun after the switch
        with page.expect_response("**/v1/backends"):
            pass
    with page.expect_request("**/v1/backends/encoder/mean:first"):
        page.mouse.up()
    expect(page.locator("#waterfall-a [data-stage=encode][data-backend=mean]")).to_be_visible()


def test_nothing_is_polled_while_nobody_looks(page):
    page.evaluate(KEPT_LOOKS)
    eventually(lambda: page.evaluate("window.next !== null"), "a look is over, and the next one planned")
    assert page.evaluate(LOOKED_UNSEEN) == {"asked": [], "planned": False}
    with page.expect_request("**/readyz"):
        page.evaluate("delete document.visibilityState; document.dispatchEvent(new Event('visibilitychange'))")


def test_a_key_is_kept_for_the_tab_and_nowhere_else(page):
    with page.expect_request("**/v1/options") as asked:
        give_key(page, "genrec_secret")
    assert asked.value.headers["authorization"] == "Bearer genrec_secret"
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]


def test_a_key_in_the_address_is_kept_for_the_tab_goes_from_the_address_and_is_logged_nowhere(browser, url, fast):
    with opened(browser, url) as page:
        assert page.url == f"{url}/"
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        assert [page.evaluate("sessionStorage.key(0)"), page.evaluate("Object.values(sessionStorage)")] == ["genrec-api-key", [KEY]]
        page.locator("#cluster-title").scroll_into_view_if_needed()
        with page.expect_request("**/v1/backends") as asked:
            expect(page.get_by_label("Ask torch in the stage encoder")).to_be_checked()
        assert (asked.value.headers["authorization"], "key" in asked.value.url) == (f"Bearer {KEY}", False)
        page.reload()
        page.locator("#cluster-title").scroll_into_view_if_needed()
        expect(page.get_by_label("Ask torch in the stage encoder")).to_be_checked()
    assert KEY not in fast.logs()


def test_without_a_key_it_recommends_and_where_engines_are_switched_it_says_what_is_missing_and_where_to_get_it(browser, url):
    with opened(browser, url, key=None) as page:
        asked = []
        page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
        page.locator("#cluster-title").scroll_into_view_if_needed()
        missing = page.locator("#cluster-panel .missing")
        expect(missing).to_contain_text("a caller without a key has not the right 'operate'")
        expect(missing).to_contain_text("open the address that make demo printed")
        expect(page.locator("#engines")).to_be_hidden()
        for _ in range(2):
            page.wait_for_event("requestfinished", lambda request: request.url.endswith("/readyz"))
        assert asked.count("backends") == 1, "it asks no more for what it may not see"
        page.evaluate("key => (location.hash = `key=${key}`)", KEY)
        expect(page.get_by_label("Ask torch in the stage encoder")).to_be_checked()
        expect(missing).to_be_hidden()
        assert page.url == f"{url}/"
        expect(page.locator("#items-a > li[data-item]")).to_have_count(10)


@pytest.mark.usefixtures("engines")
def test_with_a_key_that_may_only_operate_engines_are_switched_and_the_other_panels_say_what_is_missing(browser, url):
    with opened(browser, url, key=OPERATES, recommends=False) as page:
        for panel in ("who", "results"):
            expect(page.locator(f"#{panel}-panel .missing")).to_have_text(
                "the key 'engineer' has not the right 'read' (it has operate); use a key that has it"
            )
        for hidden in ("#user-form", "#history", "#settings-a", "#compare"):
            expect(page.locator(hidden)).to_be_hidden()
        page.locator("#cluster-title").scroll_into_view_if_needed()
        engine = page.get_by_label("Ask torch in the stage encoder")
        engine.uncheck()
        expect(page.locator("[data-engine='encoder/torch'] .reason")).to_contain_text(re.compile("off|disabled"))
        engine.check()
        expect(page.locator("[data-engine='encoder/torch'] .reason")).not_to_contain_text(re.compile("off|disabled"))
        expect(page.get_by_role("alert")).to_be_hidden()
        give_key(page, KEY)
        expect(page.locator("#items-a > li[data-item]")).to_have_count(10)
        expect(page.locator("#who-panel .missing")).to_be_hidden()


def test_a_key_that_is_not_known_any_more_is_told_and_without_it_the_page_recommends_again(page):
    give_key(page, api_keys.new_key())
    expect(page.get_by_role("alert")).to_contain_text("this API key is not known here")
    expect(page.get_by_role("alert")).to_contain_text("open the address that make demo printed")
    expect(page.locator("#key")).to_be_focused()
    page.get_by_role("button", name="Use", exact=True).click()
    expect(page.locator("#items-a > li[data-item]")).to_have_count(10)
    expect(page.get_by_role("alert")).to_be_hidden()


def held(page, button):
    """Hold the mouse button down over this one, unless it moves away meanwhile."""
    button.hover()
    page.mouse.down()
    if button.evaluate("one => one.matches(':active')"):
        return True
    page.mouse.up()
    return False


def switch(url, change):
    """Switch an engine of the encoder, as another operator does, until it is so: the switchboard or a replica may be late."""

    def applied():
        switched = httpx.post(f"{url}/v1/backends/encoder/{change}", headers={"Authorization": f"Bearer {OPERATES}"}, timeout=300)
        return switched.status_code != 503 and switched.raise_for_status().json()["applied"]

    eventually(applied, change)


def give_key(page, key):
    page.get_by_text("API key", exact=True).click()
    page.get_by_label("Kept in this tab only").fill(key)
    page.get_by_role("button", name="Use", exact=True).click()


def test_what_is_wrong_is_said(page):
    page.route("**/v1/recommend", lambda route: route.fulfill(status=429, json={"detail": "tenant 'shop' has used up its rate limit"}))
    with page.expect_response("**/v1/recommend"):
        page.locator("#cache-a").select_option("bypass")
    expect(page.get_by_role("alert")).to_contain_text("has used up its rate limit")


def test_every_control_is_reached_by_the_keyboard_in_the_order_it_stands_in(page):
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert seen[:6] == ["A", "SUMMARY", "user", "BUTTON", "BUTTON", "BUTTON"]
    assert "title" in seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_told_from_its_ground_in_both_schemes(browser, url, scheme, shoot):
    """WCAG 2.2 AA asks for 4.5:1."""
    with opened(browser, url, color_scheme=scheme) as page:
        if scheme == "dark":
            shoot(page, "dark")
        ratios = page.evaluate(CONTRAST)
    assert min(ratios.values()) >= 4.5, ratios


def test_a_phone_shows_it_in_one_column_without_scrolling_sideways(browser, url, shoot):
    with opened(browser, url, viewport={"width": 390, "height": 844}) as page:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        shoot(page, "phone")


KEPT_LOOKS = """() => {
  const [fetched, later] = [window.fetch, window.setTimeout];
  [window.asked, window.next] = [[], null];
  window.fetch = (...what) => (window.asked.push(String(what[0])), fetched(...what));
  window.setTimeout = (what, ms, ...rest) => (ms < 1000 ? later(what, ms, ...rest) : ((window.next = what), -1));
}"""
"""From now on the page's next look is kept rather than done when it is due, and the addresses that are asked are noted."""
LOOKED_UNSEEN = """async () => {
  const look = window.next;
  [window.asked, window.next] = [[], null];
  Object.defineProperty(document, 'visibilityState', {value: 'hidden', configurable: true});
  await look();
  return {asked: window.asked, planned: window.next !== null};
}"""
RENAMED = """([from, to]) => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(from, to);
}"""
CONTRAST = """() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (element) => {
    const colour = parts(getComputedStyle(element).backgroundColor);
    return colour[3] === 0 && element.parentElement ? ground(element.parentElement) : colour;
  };
  const found = {};
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!own || !element.checkVisibility() || element.matches("option, noscript *")) continue;
    const [one, other] = [light(parts(getComputedStyle(element).color)), light(ground(element))].sort((a, b) => b - a);
    found[`${element.tagName}.${element.className}`] = (one + 0.05) / (other + 0.05);
  }
  return found;
}"""


def test_the_documentation_is_read_and_tried_with_nothing_from_elsewhere(browser, url):
    page, said, fetched = patient(browser.new_page()), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(f"{url}/docs")
    page.locator("#operations-operation-healthz_healthz_get .opblock-summary-control").click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    expect(page.locator(".live-responses-table").get_by_text('"status": "ok"')).to_be_visible()
    page.close()
    assert (said, [one for one in fetched if not one.startswith(url)]) == ([], [])
