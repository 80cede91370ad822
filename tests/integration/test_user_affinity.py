"""Users and their homes on a real Ray cluster: who goes where, when a replica dies, when one is slow; and who is forgotten everywhere.

Beside them, a deployment for each of the other routers: the least loaded, and the one that is soonest done.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from cluster.traffic.user_router import in_order_of
from tests.integration.own_application import serving
from tests.waiting import until_right

pytestmark = pytest.mark.cluster
REPLICAS = 3
HOME = {
    "name": "home",
    "num_replicas": REPLICAS,
    "max_ongoing_requests": 100,
    "health_check_period_s": 600,  # a dead replica is not replaced while the test looks
    "ray_actor_options": {"num_cpus": 0.1},
    "request_router_config": {
        "request_router_class": "deployments.user_router:UserAffinityRouter",
        "request_router_kwargs": {"bound": 1.25, "slack": 8},
    },
}
LEAST, HEAVY = (
    {
        "name": name,
        "num_replicas": 2,
        "max_ongoing_requests": 100,
        "ray_actor_options": {"num_cpus": 0.1},
        "request_router_config": {"request_router_class": f"deployments.routers:{router}", "request_routing_stats_period_s": 0.5},
    }
    for name, router in (("least", "LeastLoadedRouter"), ("heavy", "WeightedRouter"))
)
DOOR = {"name": "door", "max_ongoing_requests": 100, "ray_actor_options": {"num_cpus": 0.1}}
APPLICATION = {
    "name": "affinity",
    "route_prefix": "/",
    "import_path": "tests.integration.user_affinity_app:build",
    "deployments": [HOME, LEAST, HEAVY, DOOR],
}


@dataclass(frozen=True)
class Homes:
    url: str

    def served(self, users: list[str], calls: int = 1, at_once: int = 8, by: str = "session", **order: Any) -> dict[str, list[str]]:
        given = {"users": users, "calls": calls, "at_once": at_once, "by": by, **order}
        response = httpx.post(self.url, json=given, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()

    def remembered(self, users: list[str]) -> list[str]:
        return httpx.post(self.url, json={"remember": users}, timeout=120).json()

    def taken(self, by: str, calls: int, seconds: float = 1.0) -> Counter[str]:
        """How many of so many calls at once each replica of the deployment `by` took."""
        return Counter(httpx.post(self.url, json={"take": calls, "by": by, "seconds": seconds}, timeout=120).json())

    def weigh(self, replica: str, weight: float) -> None:
        assert httpx.post(self.url, json={"weigh": replica, "weight": weight}, timeout=120).json() is True

    def erase(self, user: str) -> None:
        assert httpx.post(self.url, json={"erase": user}, timeout=120).json() is True

    def kill_the_home_of(self, user: str) -> None:
        assert "could be reached" in httpx.post(self.url, json={"die": user}, timeout=120).text


@pytest.fixture(scope="module")
def homes(tmp_path_factory) -> Iterator[Homes]:
    directory = tmp_path_factory.mktemp("served")
    application = {**APPLICATION, "args": {"model_dir": str(directory)}}
    with pytest.MonkeyPatch.context() as patch, serving(application, patch, directory / "serve.log") as local:
        homes, deadline = Homes(local.url), time.monotonic() + 60
        while len({replica for (replica,) in homes.served([f"early-{number}" for number in range(50)]).values()}) < REPLICAS:
            assert time.monotonic() < deadline, "not all replicas take requests"
        yield homes


def test_requests_go_to_the_least_loaded_or_by_weights_that_replicas_report(homes):
    until_right(lambda: homes.taken("least", 30), lambda found: len(found) == 2)
    most = sorted(max(homes.taken("least", 30).values()) for _ in range(5))
    assert most[2] <= 17, f"{most}: 15 each, but for what a replica has not heard of yet when it says how many it has"

    unweighted = until_right(lambda: homes.taken("heavy", 30), lambda found: len(found) == 2)
    assert max(unweighted.values()) <= 20, "none has reported a weight: both have the same"
    one, other = sorted(unweighted)
    homes.weigh(one, 4.0)
    homes.weigh(other, 1.0)
    found = until_right(lambda: homes.taken("heavy", 30), lambda found: found[one] >= 21)
    assert 3 <= found[other] <= 9, "24 and 6, or nearly"


def test_every_user_has_a_home_of_bounded_load_is_erased_there_and_moves_when_it_dies(homes):
    users = [f"user-{number}" for number in range(200)]
    served = homes.served(users, calls=5)
    assert {user: replicas for user, replicas in served.items() if len(set(replicas)) > 1} == {}, "one replica serves all calls of a user"
    home = {user: replicas[0] for user, replicas in served.items()}
    replicas = sorted(set(home.values()))
    assert len(replicas) == REPLICAS
    assert home == {user: in_order_of(f"default/{user}", replicas)[0] for user in users}
    assert homes.served(users, by="request") == {user: [home[user]] for user in users}, "the request says it too"

    slow = home[users[0]]
    crowd = [user for user in users if home[user] == slow]
    overflow = homes.served(crowd, at_once=len(crowd), slow=slow, seconds=2)
    passed_on = {user: replica for user, (replica,) in overflow.items() if replica != slow}
    assert 0 < len(passed_on) < len(crowd), "some wait for their busy home, the others go elsewhere"
    assert passed_on == {user: in_order_of(f"default/{user}", replicas)[1] for user in passed_on}, "to the next of their own order"
    assert homes.served(crowd) == {user: [slow] for user in crowd}, "and come back when it is free"

    erased = [next(user for user in users if home[user] == replica) for replica in replicas]
    assert homes.remembered(users) == users
    for user in erased:
        homes.erase(user)
    assert homes.remembered(users) == [user for user in users if user not in erased], "in every replica, and nobody else"

    homes.kill_the_home_of(users[0])
    left = [replica for replica in replicas if replica != slow]
    assert homes.served(users, calls=2) == {user: [in_order_of(f"default/{user}", left)[0]] * 2 for user in users}, "no call fails"
    homes.erase(users[5])
    assert users[5] not in homes.remembered(users), "a replica that is gone is waited for, but not for ever"
