"""Users and their homes on a real Ray cluster: who goes where, when a replica dies, when one is slow; and who is forgotten everywhere.

Beside them, a deployment for each of the other routers: the least loaded, and the one that is soonest done.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from cluster.traffic.user_router import in_order_of
from deployments.fleet.switchboard import TTL_S
from tests.clusters import SharedCluster
from tests.waiting import eventually, until_right

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
        # one is made slow, and passes on only what is too much for it
        "request_router_kwargs": {"bound": 1.25, "slack": 8, "slow_times": 0},
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
        found: dict[str, list[str]] = response.json()
        assert [one for replicas in found.values() for one in replicas if one.startswith("failed")] == []
        return found

    def settled(self, users: list[str], calls: int = 1, **order: Any) -> dict[str, str]:
        """The home of each user, once it serves all their calls: a replica that says too late how busy it is is passed over."""
        served = until_right(lambda: self.served(users, calls, **order), lambda found: all(len(set(one)) == 1 for one in found.values()))
        return {user: one for user, (one, *_) in served.items()}

    def of_parties(self, parties: list[list[str]], replicas: list[str], seconds: float) -> list[list[str]]:
        """Which replicas answered each party: users of one home, that go together in one call while that home takes so long."""
        return httpx.post(self.url, json={"parties": parties, "replicas": replicas, "seconds": seconds}, timeout=120).json()

    def remembered(self, users: list[str]) -> list[str]:
        return httpx.post(self.url, json={"remember": users}, timeout=120).json()

    def taken(self, by: str, calls: int, seconds: float = 1.0) -> Counter[str]:
        """How many of so many calls at once each replica of the deployment `by` took."""
        return Counter(httpx.post(self.url, json={"take": calls, "by": by, "seconds": seconds}, timeout=120).json())

    def weigh(self, replica: str, weight: float) -> None:
        assert httpx.post(self.url, json={"weigh": replica, "weight": weight}, timeout=120).json() is True

    def erased(self, user: str, within_s: float = 60) -> bool:
        """Whether that is so everywhere, within that time."""
        answer: bool = httpx.post(self.url, json={"erase": user, "within_s": within_s}, timeout=120).json()
        return answer

    def silence(self, home: str, user: str) -> None:
        assert httpx.post(self.url, json={"silence": user, "home": home}, timeout=120).json() is True

    def kill(self, home: str, user: str) -> None:
        assert httpx.post(self.url, json={"die": user, "home": home}, timeout=120).json() is True


@pytest.fixture(scope="module")
def homes(default: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Homes]:
    users = [f"early-{number}" for number in range(50)]
    with default.application({"applications": [APPLICATION]}, {"model_dir": str(tmp_path_factory.mktemp("served"))}) as served:
        homes = Homes(served.url)
        eventually(lambda: len({replica for (replica,) in homes.served(users).values()}) == REPLICAS, "all replicas take requests")
        yield homes


def test_requests_go_to_the_least_loaded_or_by_weights_that_replicas_report(homes):
    until_right(lambda: homes.taken("least", 30), lambda found: len(found) == 2)
    # 15 each, but for what a replica has not heard of yet when it says how many it has
    until_right(lambda: sorted(max(homes.taken("least", 30).values()) for _ in range(5)), lambda most: most[2] <= 17)

    # none has reported a weight: both have the same
    unweighted = until_right(lambda: homes.taken("heavy", 30), lambda found: len(found) == 2 and max(found.values()) <= 20)
    one, other = sorted(unweighted)
    homes.weigh(one, 4.0)
    homes.weigh(other, 1.0)
    until_right(lambda: homes.taken("heavy", 30), lambda found: 3 <= found[other] <= 9)  # 24 and 6, or nearly


def test_requests_that_go_together_leave_a_home_that_has_many_already(homes):
    users = [f"user-{number}" for number in range(200)]
    replicas = sorted(set(homes.settled(users).values()))
    assert len(replicas) == REPLICAS
    first, second, _ = in_order_of(f"default/{users[0]}", replicas)
    crowd = [user for user in users if in_order_of(f"default/{user}", replicas)[:2] == [first, second]]
    few, many = [crowd[:2], crowd[2:]], [crowd[2:], crowd[:2]]
    until_right(lambda: homes.of_parties(few, replicas, seconds=2), lambda found: found == [[first], [first]])
    until_right(lambda: homes.of_parties(many, replicas, seconds=2), lambda found: found == [[first], [second]])


def test_every_user_has_a_home_of_bounded_load_is_erased_there_and_moves_when_it_dies(homes):
    users = [f"user-{number}" for number in range(200)]
    replicas = sorted(set(homes.settled(users).values()))
    assert len(replicas) == REPLICAS
    home = {user: in_order_of(f"default/{user}", replicas)[0] for user in users}
    until_right(lambda: homes.settled(users, calls=5), lambda found: found == home)
    until_right(lambda: homes.settled(users, by="request"), lambda found: found == home)

    slow = home[users[0]]
    crowd = [user for user in users if home[user] == slow]
    second = {user: in_order_of(f"default/{user}", replicas)[1] for user in crowd}

    def passed_on() -> dict[str, str]:
        served = homes.served(crowd, at_once=len(crowd), slow=slow, seconds=2)
        return {user: replica for user, (replica,) in served.items() if replica != slow}

    # some wait for their busy home, the others go to the next of their own order
    until_right(passed_on, lambda found: 0 < len(found) < len(crowd) and found.items() <= second.items())
    until_right(lambda: homes.settled(crowd), lambda found: set(found.values()) == {slow})

    erased = [next(user for user in users if home[user] == replica) for replica in replicas]
    until_right(lambda: homes.remembered(users), lambda found: found == users)
    for user in erased:
        until_right(lambda user=user: homes.erased(user), bool)
    assert not set(erased) & set(homes.remembered(users)), "in every replica"
    until_right(lambda: homes.remembered(users), lambda found: found == [user for user in users if user not in erased])

    homes.silence(slow, users[0])
    assert not homes.erased(users[5], within_s=2 * TTL_S), "it still keeps what it kept, however long it is silent"

    homes.kill(slow, users[0])
    left = [replica for replica in replicas if replica != slow]
    moved = {user: in_order_of(f"default/{user}", left)[0] for user in users}
    until_right(lambda: homes.settled(users, calls=2), lambda found: found == moved)
    until_right(lambda: homes.erased(users[5]), bool)
    assert users[5] not in homes.remembered(users), "a replica that has ended is not waited for"
