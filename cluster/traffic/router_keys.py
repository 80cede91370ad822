"""The keys of `request_router_kwargs` that our request routers take, checked before anything is deployed.

Serve makes a router in the process that calls the deployment. One that refuses its keys there leaves every call waiting for ever.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any

from cluster.errors import ConfigError
from cluster.traffic.paces import TIMES
from cluster.traffic.user_router import BOUND, SLACK


@dataclass(frozen=True, slots=True)
class UserAffinityKeys:
    """Raises ConfigError."""

    bound: float = BOUND
    slack: int = SLACK
    slow_times: float = TIMES

    def __post_init__(self) -> None:
        if not (_is_number(self.bound) and 1 <= self.bound < inf) or not isinstance(self.slack, int) or self.slack < 0:
            raise ConfigError(f"bound is {self.bound} and slack {self.slack}; give a finite bound of 1 or more and a slack of 0 or more")
        if not (_is_number(self.slow_times) and (self.slow_times > 1 or self.slow_times == 0)):
            raise ConfigError(f"slow_times is {self.slow_times}; give more than 1, or 0 to leave no slow replica out")


@dataclass(frozen=True, slots=True)
class LeastLoadedKeys:
    """It takes none."""


@dataclass(frozen=True, slots=True)
class WeightedKeys:
    """Raises ConfigError."""

    figure: str = "weight"
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping):
            raise ConfigError(f"weights is {self.weights}; give a weight by node id or availability zone, as in {{zone-a: 2, zone-b: 1}}")
        if wrong := {name: weight for name, weight in self.weights.items() if not (_is_number(weight) and weight > 0)}:
            raise ConfigError(f"the weights of WeightedRouter are numbers greater than 0, not {wrong}")


ROUTERS: Mapping[str, type[UserAffinityKeys | LeastLoadedKeys | WeightedKeys]] = {
    "deployments.user_router:UserAffinityRouter": UserAffinityKeys,
    "deployments.routers:LeastLoadedRouter": LeastLoadedKeys,
    "deployments.routers:WeightedRouter": WeightedKeys,
}
"""Our routers, as `request_router_class` names them -> the keys of each."""


def taken(router: str, given: Mapping[str, Any]) -> Any:
    """The keys of one of ROUTERS as given, the others by default. Raises ConfigError at a key that is not known, and at a wrong value."""
    keys = ROUTERS[router]
    known = [one.name for one in fields(keys)]
    if unknown := sorted(map(str, given.keys() - set(known))):
        raise ConfigError(f"{router.partition(':')[2]} takes {', '.join(known) or 'no options'}, not {', '.join(unknown)}")
    return keys(**given)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
