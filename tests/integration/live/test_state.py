"""What is kept of users, on a real cluster: answers, events, K/V rows; and that it is gone once it is erased."""

from itertools import count

import httpx
import pytest

from tests.integration.conftest import Live, behaviours, everywhere
from tests.waiting import json_of, until_right

pytestmark = pytest.mark.cluster
NUMBERS = count()
LONG = list(range(20, 35))  # fewer events than the model's window


@pytest.fixture
def user():
    """A user nobody else has."""
    return f"state-{next(NUMBERS)}"


def post(live: Live, path: str, **body):
    return httpx.post(f"{live.url}{path}", json=body, timeout=120)


def ask(live: Live, user: str, **more):
    response = post(live, "/v1/recommend", user_id=user, k=5, **more)
    assert response.status_code == 200, response.text
    return response.json()


def tell(live: Live, user: str, *items: int, **more):
    events = [{"user_id": user, "item_id": str(item), "timestamp": 1_700_000_000 + step, **more} for step, item in enumerate(items)]
    response = post(live, "/v1/events", events=events)
    assert response.status_code == 201, response.text
    return response.json()


def states(live: Live) -> dict[str, float]:
    """What the encoders' engines say they keep, added up."""
    total: dict[str, float] = {}
    for kept in json_of(f"{live.url}/v1/cache")["user_states"].get("encoder", {}).values():
        for name, figure in kept.items():
            total[name] = total.get(name, 0) + figure
    return total


def until(live: Live, holds) -> None:
    until_right(lambda: states(live), holds)


def test_a_returning_user_is_answered_by_their_stored_history_and_from_the_cache(live, user):
    tell(live, user, 3, 4, 5)
    first, second = ask(live, user), ask(live, user)
    assert [stage["stage"] for stage in first["stages"]][:2] == ["history", "encode"]
    assert (first["cache"]["tier"], second["cache"]["tier"]) == ("computed", "l1")
    assert first["items"] == second["items"]
    assert {"3", "4", "5"}.isdisjoint(item["item_id"] for item in first["items"])


def test_an_event_changes_the_very_next_answer(live, user):
    tell(live, user, 3)
    best = ask(live, user)["items"][0]["item_id"]
    post(live, "/v1/events", user_id=user, item_id=best)
    assert best not in [item["item_id"] for item in ask(live, user)["items"]]


def test_a_stored_history_and_the_same_history_sent_give_the_same_items(live, user):
    tell(live, user, *LONG)
    sent = [{"item_id": str(item), "timestamp": 1_700_000_000 + step} for step, item in enumerate(LONG)]
    moment = 1_700_001_000
    stored = ask(live, user, request_time=moment)["items"]
    given = ask(live, f"{user}-other", behaviours=sent, request_time=moment)["items"]
    assert [item["item_id"] for item in stored] == [item["item_id"] for item in given]
    assert [item["score"] for item in stored] == pytest.approx([item["score"] for item in given], abs=1e-5)


def test_the_engine_keeps_a_users_rows_and_encodes_only_what_is_new(live, user):
    before = states(live)
    ask(live, user, behaviours=behaviours(*LONG), cache="bypass")
    ask(live, user, behaviours=behaviours(*LONG, 7), cache="bypass")
    until(live, lambda now: now.get("hit_rows", 0) - before.get("hit_rows", 0) >= len(LONG) - 1)


def test_an_erased_user_is_gone_from_the_store_from_the_cache_and_from_the_engines(live, user):
    def kept_and_erased() -> httpx.Response:
        tell(live, user, *LONG)
        ask(live, user, cache="refresh")
        return httpx.delete(f"{live.url}/v1/users/{user}/history", timeout=120)

    forgotten = states(live).get("forgotten", 0)
    erased = everywhere(kept_and_erased)
    assert erased["events"] == len(LONG)
    assert erased["cached_answers"] >= 1
    until(live, lambda now: now.get("forgotten", 0) > forgotten)
    answer = ask(live, user)
    assert (answer["cache"]["tier"], answer["stages"][1]["stage"]) == ("computed", "popularity")
    assert httpx.get(f"{live.url}/v1/users/{user}/history", timeout=120).json()["events"] == []


def test_users_of_the_same_id_in_two_tenants_never_meet(live, user):
    tell(live, user, *LONG, tenant="red")
    tell(live, user, *reversed(LONG), tenant="blue")
    red, blue = (ask(live, user, tenant=tenant) for tenant in ("red", "blue"))
    assert ask(live, user, tenant="green")["stages"][1]["stage"] == "popularity"
    assert red["items"] != blue["items"]


def test_cached_answers_are_told_by_tier_and_tenant_and_can_be_dropped(live, user):
    ask(live, user, behaviours=behaviours(1), tenant="shop")
    ask(live, user, behaviours=behaviours(1), tenant="shop")
    caches = json_of(f"{live.url}/v1/cache")
    assert [tier["tier"] for tier in caches["tiers"]] == ["l1", "l2"]
    assert caches["tiers"][0]["tenants"]["shop"]["hits"] >= 1

    def kept_and_dropped() -> httpx.Response:
        ask(live, user, behaviours=behaviours(1), tenant="shop")
        return post(live, "/v1/cache:invalidate", tenant="shop")

    assert everywhere(kept_and_dropped)["dropped"] >= 1
    assert ask(live, user, behaviours=behaviours(1), tenant="shop")["cache"]["tier"] == "computed"
