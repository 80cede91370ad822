"""The playground's page in headless Chromium, with canned answers in place of a service: what seldom happens with a real one."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from deployments.http.playground import FILES
from tests.browsers import chromium, expect, patient

ITEMS = [{"item_id": f"{number}", "title": f"film {number}", "attributes": {}} for number in range(1, 6)]

ANSWER = {"items": [], "stages": [], "model_version": "films/1", "degraded": False, "unknown_items": [], "cache": None}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


class Service:
    """What a page hears; `asked` are the bodies of its requests for recommendations, `stored` those of its events. Requests that
    are `waiting`, by method and path, have no answer until they are released. Those that `fails` is true of, as they are asked, are
    answered with 503.
    """

    def __init__(self, **options: int) -> None:
        self.options = {"model_version": "films/1", "strategies": ["retrieval"], "ranker": False, "actions": ["view"], **options}
        self.engines = ["torch", "mean"]
        self.stages = ["encoder"]
        self.items = ITEMS
        self.past: list[dict[str, Any]] = []
        self.users: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.stored: list[dict[str, Any]] = []
        self.waiting: dict[str, list[Any]] = {}
        self.fails: Callable[[Any], bool] = lambda _: False

    def release(self, what: str) -> None:
        for route in self.waiting.pop(what):
            self.answer(route)

    def answer(self, route: Any) -> None:
        path = urlsplit(route.request.url).path
        if (what := f"{route.request.method} {path}") in self.waiting:
            self.waiting[what].append(route)
        elif self.fails(route.request):
            route.fulfill(status=503, json={"detail": "no replica is ready"})
        elif path in FILES:
            route.fulfill(body=FILES[path].body, content_type=FILES[path].media_type)
        elif path == "/v1/recommend":
            self.asked.append(json.loads(route.request.post_data))
            route.fulfill(json=ANSWER)
        elif path == "/v1/events":
            self.stored.append(json.loads(route.request.post_data))
            route.fulfill(json={})
        elif path.startswith("/v1/users/"):
            route.fulfill(json={"events": self.past})
        elif path.startswith("/v1/backends/"):
            route.fulfill(json={})
        else:
            route.fulfill(json=self._told(path))

    def _told(self, path: str) -> dict[str, Any]:
        return {
            "/v1/options": self.options,
            "/v1/items": {"items": self.items},
            "/v1/examples": {"users": self.users, "histories": [{"name": "genres: Drama", "items": self.items}]},
            "/readyz": {"ready": True, "model_version": "films/1"},
            "/v1/backends": {
                "stages": [{"stage": one, "replicas": 1, "explanations": [], "backends": self._backends()} for one in self.stages]
            },
            "/v1/models": {"replicas": {}},
            "/v1/cache": {"tiers": []},
            "/v1/gateway": {"running": 0, "waiting": 0, "places": 1, "refused": {}},
        }[path]

    def _backends(self) -> list[dict[str, Any]]:
        none = {"p50_ms": None, "p95_ms": None, "throughput_per_s": 0, "reasons": [], "last_errors": [], "calls": 0, "failures": 0}
        return [{"name": name, "rank": rank, "enabled": True, "breakers": {}, **none} for rank, name in enumerate(self.engines)]

    def open(self, browser: Any, said: str = "0 recommendations") -> Any:
        page = patient(browser.new_page(viewport={"width": 1280, "height": 2000}))
        page.route("**/*", self.answer)
        page.goto("http://service.test/")
        expect(page.locator("#announcement")).to_contain_text(said)
        return page


def test_a_page_asks_for_no_more_than_the_service_takes(browser):
    service = Service(max_k=4, max_behaviours=3)
    page = service.open(browser)
    assert [(one["k"], [past["item_id"] for past in one["behaviours"]]) for one in service.asked] == [(4, ["3", "4", "5"])]
    assert page.input_value("#k-a") == "4"


def test_an_engine_that_is_there_no_more_leaves_the_page(browser):
    service = Service(max_k=100, max_behaviours=100)
    page = service.open(browser)
    shown = page.locator("#engines-encoder > tr")
    expect(shown).to_have_count(2)
    service.engines.pop()
    expect(shown).to_have_count(1)
    assert shown.get_attribute("data-engine") == "encoder/torch"


def test_a_stage_that_no_replica_reports_leaves_the_page_and_comes_back_with_its_engines(browser):
    service = Service(max_k=100, max_behaviours=100)
    page = service.open(browser)
    shown = page.locator("#engines tr[data-engine]")
    expect(shown).to_have_count(2)
    service.stages.clear()
    expect(page.locator("#engines table")).to_have_count(0)
    service.stages.append("encoder")
    expect(shown).to_have_count(2)


def test_a_proxy_that_answers_in_place_of_a_gateway_is_no_gateway_that_is_not_ready(browser):
    service = Service(max_k=100, max_behaviours=100)
    page = service.open(browser)
    expect(page.locator("#readiness-text")).to_have_text("ready · films/1")
    page.route("**/readyz", lambda route: route.fulfill(status=503, json={"detail": "no gateway takes the request now"}))
    expect(page.locator("#readiness-text")).to_have_text("the service does not answer")


def test_a_service_that_is_silent_is_neither_ready_nor_live(browser):
    service = Service(max_k=100, max_behaviours=100)
    page = service.open(browser)
    expect(page.locator("#readiness-text")).to_have_text("ready · films/1")
    expect(page.locator("#cluster-age")).to_contain_text("live")
    page.evaluate("AbortSignal.timeout = ((timeout) => () => timeout(500))(AbortSignal.timeout.bind(AbortSignal))")
    service.waiting = {"GET /readyz": [], "GET /v1/gateway": []}
    expect(page.locator("#readiness-text")).to_have_text("the service does not answer")
    expect(page.locator("#readiness .dot")).to_have_class("dot bad")
    expect(page.locator("#cluster-age")).to_contain_text("The service does not answer")
    service.waiting = {}
    expect(page.locator("#readiness-text")).to_have_text("ready · films/1")
    expect(page.locator("#cluster-age")).to_contain_text("live")


class Slow(Service):
    """Answers with `k` films, but for the first request for `held` of them, which it never answers."""

    held = 0

    def answer(self, route: Any) -> None:
        if urlsplit(route.request.url).path != "/v1/recommend":
            return super().answer(route)
        self.asked.append(asked := json.loads(route.request.post_data))
        if asked["k"] == self.held:
            self.held = 0
            return None
        scored = {"score": 1.0, "stage": "encode", "explanation": None}
        return route.fulfill(json={**ANSWER, "items": [{**item, **scored} for item in self.items[: asked["k"]]]})


def test_settings_that_are_changed_while_the_other_pane_waits_for_its_answer_take_it_from_none(browser):
    service = Slow(max_k=5, max_behaviours=5)
    page = service.open(browser, "5 recommendations")
    page.get_by_label("Compare two settings").check()
    expect(page.locator("#items-b > li")).to_have_count(5)
    service.held = 3
    with page.expect_request("**/v1/recommend"):
        page.locator("#k-a").fill("3")
        page.locator("#k-a").blur()
    page.locator("#k-b").fill("2")
    page.locator("#k-b").blur()
    expect(page.locator("#items-b > li")).to_have_count(2)
    expect(page.locator("#items-a > li")).to_have_count(3)


class Seeking(Service):
    """Finds all films by `film`, and is still looking for all else."""

    def answer(self, route: Any) -> None:
        asked = urlsplit(route.request.url)
        if asked.path != "/v1/items":
            super().answer(route)
        elif "query=film&" in f"{asked.query}&":
            route.fulfill(json={"items": ITEMS})


def test_a_key_takes_no_title_that_was_found_for_another_text(browser):
    page = Seeking(max_k=100, max_behaviours=100).open(browser)
    finder = page.get_by_role("combobox", name="Add a title")
    finder.press_sequentially("film")
    expect(finder).to_have_attribute("aria-activedescendant", "title-option-0")
    finder.press_sequentially(" 5")
    finder.press("Enter")
    assert finder.input_value() == "film 5"
    expect(page.locator("#history li")).to_have_count(5)


ADA = {"user_id": "ada", "events": 3}


@pytest.mark.parametrize("user", [".", ".."])
def test_a_user_that_no_browser_can_name_is_told_of_and_not_opened_first(browser, user):
    service = Service(max_k=5, max_behaviours=5)
    service.users = [{"user_id": user, "events": 1}, ADA]
    page = service.open(browser)
    expect(page.locator("#history-title")).to_have_text("History of ada")
    expect(page.get_by_role("alert")).to_be_hidden()
    page.get_by_role("button", name=f"{user} · 1 events", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text(f'Browsers cannot ask for the history of the user "{user}"')
    assert [one["user_id"] for one in service.asked] == ["ada", user]


def open_user(page: Any, user: str) -> None:
    page.locator("#user").fill(user)
    page.get_by_role("button", name="Open").click()


def find(page: Any) -> Any:
    """The field of titles, in which the next Enter picks the first film."""
    finder = page.get_by_role("combobox", name="Add a title")
    finder.press_sequentially("film")
    expect(finder).to_have_attribute("aria-activedescendant", "title-option-0")
    return finder


def test_enter_that_confirms_the_text_of_an_input_method_picks_no_title(browser):
    page = Service(max_k=5, max_behaviours=100).open(browser)
    finder = find(page)
    for told in ("isComposing: true", "keyCode: 229"):
        finder.evaluate(f"one => one.dispatchEvent(new KeyboardEvent('keydown', {{key: 'Enter', {told}}}))")
        assert finder.input_value() == "film", told
    expect(page.locator("#history li")).to_have_count(5)
    finder.press("Enter")
    expect(page.locator("#history li")).to_have_count(6)


def test_a_user_that_was_opened_before_the_examples_were_there_stays_open_and_has_the_event(browser):
    service = Service(max_k=5, max_behaviours=5)
    service.users, service.waiting = [ADA], {"GET /v1/examples": []}
    page = service.open(browser, "")
    expect(page.locator("#action option")).to_have_count(1)
    open_user(page, "bob")
    expect(page.locator("#history-title")).to_have_text("History of bob")
    finder = find(page)
    service.release("GET /v1/examples")
    expect(page.get_by_role("button", name="ada")).to_be_visible()
    assert page.input_value("#user") == "bob"
    with page.expect_response("**/v1/events"):
        finder.press("Enter")
    assert [one["user_id"] for one in service.stored] == ["bob"]


def test_a_history_that_was_composed_before_the_examples_were_there_stays(browser):
    service = Service(max_k=5, max_behaviours=5)
    service.users, service.waiting = [ADA], {"GET /v1/examples": []}
    page = service.open(browser, "")
    expect(page.locator("#action option")).to_have_count(1)
    find(page).press("Enter")
    expect(page.locator("#history li")).to_contain_text("film 1")
    service.release("GET /v1/examples")
    expect(page.get_by_role("button", name="ada")).to_be_visible()
    expect(page.locator("#history-title")).to_have_text("Composed history")
    expect(page.locator("#history li")).to_contain_text("film 1")


def test_titles_that_were_found_for_one_user_are_closed_when_another_key_opens_another(browser):
    service = Service(max_k=5, max_behaviours=5)
    page = service.open(browser)
    finder = find(page)
    service.users = [ADA]
    page.evaluate("location.hash = 'key=genrec_other'")
    expect(page.locator("#user")).to_have_value("ada")
    expect(page.get_by_role("listbox")).to_be_hidden()
    finder.press("Enter")
    assert finder.input_value() == "film"


def test_a_user_is_named_and_that_events_are_stored_is_said_before_the_history_is_read(browser):
    service = Service(max_k=5, max_behaviours=5)
    page = service.open(browser)
    expect(page.locator("#history li")).to_have_count(5)
    service.waiting = {"GET /v1/users/bob/history": []}
    with page.expect_request("**/v1/users/bob/history*"):
        open_user(page, "bob")
    expect(page.locator("#history-title")).to_have_text("History of bob")
    expect(page.locator("#title-hint")).to_have_text("Stored as an event of this user.")
    expect(page.locator("#history li")).to_have_count(0)
    service.release("GET /v1/users/bob/history")
    expect(page.locator("#history li")).to_contain_text("Empty")


def test_a_switch_of_an_engine_keeps_the_focus_and_takes_it_from_no_field_that_has_it_meanwhile(browser):
    page = (service := Service(max_k=5, max_behaviours=5)).open(browser)
    first = page.get_by_role("button", name="Ask mean first in the stage encoder")
    for field in (first, page.locator("#title")):
        service.waiting = {"POST /v1/backends/encoder/mean:first": []}
        with page.expect_request("**/mean:first"):
            first.click()
        expect(first).to_be_disabled()
        if field is not first:
            field.focus()
        service.release("POST /v1/backends/encoder/mean:first")
        expect(first).to_be_enabled()
        expect(field).to_be_focused()


def failed(browser: Any) -> tuple[Service, Any]:
    """A service that has answered its first request for options with 503, and its page without options."""
    service = Service(max_k=5, max_behaviours=5)
    service.users = [ADA]
    service.fails = lambda request: request.url.endswith("/v1/options")
    page = service.open(browser, "")
    expect(page.get_by_role("alert")).to_have_text("no replica is ready")
    service.fails = lambda _: False
    return service, page


def test_a_pane_without_an_answer_to_its_settings_is_asked_for_again_and_compared_only_then(browser):
    service = Service(max_k=5, max_behaviours=5)
    page = service.open(browser)
    service.fails = lambda request: "bypass" in (request.post_data or "")
    page.locator("#cache-a").select_option("bypass")
    expect(page.get_by_role("alert")).to_have_text("no replica is ready")
    page.get_by_label("Compare two settings").check()
    expect(page.locator("#announcement")).to_contain_text("B: 0 recommendations")
    expect(page.get_by_role("alert")).to_have_text("no replica is ready")
    expect(page.locator("#comparison")).to_be_empty()
    service.fails = lambda _: False
    page.locator("#k-b").fill("2")
    page.locator("#k-b").blur()
    expect(page.locator("#comparison")).to_contain_text("in both lists")
    expect(page.get_by_role("alert")).to_be_hidden()
    assert [(one["cache"], one["k"]) for one in service.asked] == [("use", 5), ("use", 5), ("bypass", 5), ("use", 2)]


def test_a_history_that_could_not_be_read_is_asked_for_again_and_nothing_of_another_user_stands_below_it(browser):
    service = Slow(max_k=5, max_behaviours=5)
    page = service.open(browser, "5 recommendations")
    service.fails, service.held = lambda request: "/bob/" in request.url, 5
    service.past = [{"item_id": "9", "title": "film 9", "action": "view", "value": None, "timestamp": 0}]
    with page.expect_request("**/v1/recommend"):
        open_user(page, "bob")
    expect(page.locator("#history-title")).to_have_text("History of bob")
    expect(page.locator("#items-a > li")).to_have_count(0)
    expect(page.locator("#announcement")).to_be_empty()
    service.fails = lambda _: False
    page.locator("#k-a").fill("2")
    page.locator("#k-a").blur()
    expect(page.locator("#items-a > li")).to_have_count(2)
    expect(page.locator("#history li")).to_contain_text("film 9")


def test_a_user_is_opened_by_a_page_that_could_not_have_its_options_at_first(browser):
    _, page = failed(browser)
    open_user(page, "bob")
    expect(page.locator("#announcement")).to_contain_text("0 recommendations")
    expect(page.get_by_role("button", name="ada")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#history-title")).to_have_text("History of bob")


@pytest.mark.parametrize("user", ["", "bob"])
def test_a_title_is_added_by_a_page_that_could_not_have_its_options_at_first(browser, user):
    service, page = failed(browser)
    service.waiting = {"GET /v1/options": []}
    if user:
        open_user(page, user)
    find(page).press("Enter")
    service.release("GET /v1/options")
    expect(page.locator("#announcement")).to_contain_text("0 recommendations")
    expect(page.get_by_role("button", name="ada")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()
    if user:
        assert [(one["user_id"], one["action"]) for one in service.stored] == [("bob", "view")]
    else:
        expect(page.locator("#history li")).to_contain_text("film 1")


def test_a_service_that_breaks_off_does_not_answer_and_one_that_answers_something_else_does(browser):
    service = Service(max_k=5, max_behaviours=5)
    page = service.open(browser)
    page.route("**/v1/recommend", lambda route: route.abort())
    page.locator("#cache-a").select_option("bypass")
    expect(page.get_by_role("alert")).to_have_text("The service does not answer (Failed to fetch).")
    page.route("**/v1/recommend", lambda route: route.fulfill(json={}))
    page.locator("#cache-a").select_option("refresh")
    expect(page.get_by_role("alert")).to_contain_text("undefined")
    expect(page.get_by_role("alert")).not_to_contain_text("does not answer")
    page.route("**/v1/recommend", lambda route: route.fulfill(body="<html>", content_type="text/html"))
    page.locator("#cache-a").select_option("use")
    expect(page.get_by_role("alert")).to_contain_text("its answer is not JSON")


def test_examples_take_nothing_from_a_visitor_who_types(browser):
    service = Service(max_k=5, max_behaviours=5)
    service.users, service.waiting = [ADA], {"GET /v1/examples": []}
    page = service.open(browser, "")
    expect(page.locator("#action option")).to_have_count(1)
    page.locator("#user").press_sequentially("bo")
    service.release("GET /v1/examples")
    expect(page.get_by_role("button", name="ada")).to_be_visible()
    expect(page.locator("#user")).to_have_value("bo")


def light(colour: str) -> float:
    """The relative luminance of `rgb(r, g, b)`, as WCAG 2.2 defines it: 0 to 1."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_title_that_enter_picks_is_told_from_the_others_in_both_schemes(browser, scheme):
    """WCAG 2.2 AA asks for 3:1."""
    page = Service(max_k=5, max_behaviours=5).open(browser)
    page.emulate_media(color_scheme=scheme)
    find(page)
    picked, other = (page.locator("#title-options > li").nth(place) for place in (0, 1))
    look = "(one, names) => names.map((name) => getComputedStyle(one)[name])"
    style, line, ground = picked.evaluate(look, ["outlineStyle", "outlineColor", "backgroundColor"])
    assert (style, other.evaluate(look, ["outlineStyle"])) == ("solid", ["none"])
    darker, lighter = sorted((light(line), light(ground)))
    assert (lighter + 0.05) / (darker + 0.05) >= 3


@pytest.mark.parametrize("width", [320, 360, 390])
def test_a_phone_shows_the_whole_form_of_the_key(browser, width):
    page = Service(max_k=5, max_behaviours=5).open(browser)
    page.set_viewport_size({"width": width, "height": 844})
    page.get_by_text("API key", exact=True).click()
    form = page.locator("#key-form").bounding_box()
    assert form["x"] >= 0
    assert form["x"] + form["width"] <= width
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_phone_scrolls_nothing_sideways_however_long_a_title_or_an_id_is_without_a_space(browser):
    service = Slow(max_k=5, max_behaviours=5)
    service.users = [{"user_id": "u" * 200, "events": 3}]
    service.past = [{"item_id": "9" * 100, "title": None, "action": "view", "value": None, "timestamp": 0}]
    service.items = [{"item_id": "1", "title": "t" * 200, "attributes": {"genre": "g" * 100}}]
    page = service.open(browser, "1 recommendations")
    page.set_viewport_size({"width": 390, "height": 844})
    find(page)
    expect(page.locator("#history li")).to_have_count(1)
    for place in ("html", "#history", "#title-options"):
        assert page.locator(place).evaluate("one => one.scrollWidth <= one.clientWidth"), place
