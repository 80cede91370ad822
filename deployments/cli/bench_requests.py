"""The requests of `genrec bench serve`, and how many are sent at a time: users with seeded histories, the same in every run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

ScenarioName: TypeAlias = Literal["short", "medium", "long"]
ShapeName: TypeAlias = Literal["single", "concurrent", "long", "peak"]
FIRST_EVENT, HOUR_S = 1_700_000_000, 3600


@dataclass(frozen=True, slots=True)
class Shape:
    """A number of callers, each of which asks again as soon as it is answered. `iterations`: requests of all callers together."""

    callers: int
    iterations: int


LENGTHS: Mapping[ScenarioName, tuple[int, int]] = {"short": (5, 20), "medium": (50, 100), "long": (200, 400)}
"""Scenario -> the fewest and the most events of a history."""
SHAPES: Mapping[ShapeName, Shape] = {
    "single": Shape(1, 200),
    "concurrent": Shape(8, 800),
    "long": Shape(1, 2000),
    "peak": Shape(32, 3200),
}


@dataclass(frozen=True)
class Workload:
    """The requests' parameters. Measurements of different workloads do not compare. `strategy` None leaves the choice to the server."""

    scenario: ScenarioName = "short"
    users: int = 64
    k: int = 10
    cache: str = "use"
    strategy: str | None = None

    def bodies(self, items: Sequence[str], seed: int = 0) -> tuple[bytes, ...]:
        """One request for each user, over these items; always the same for the same items and seed."""
        rng = np.random.default_rng(seed)
        return tuple(json.dumps(self._request(rng, number, items)).encode() for number in range(self.users))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def _request(self, rng: np.random.Generator, number: int, items: Sequence[str]) -> dict[str, Any]:
        fewest, most = LENGTHS[self.scenario]
        length = int(rng.integers(fewest, most, endpoint=True))
        chosen = rng.choice(len(items), length, replace=length > len(items)).tolist()
        behaviours = [{"item_id": items[item], "timestamp": FIRST_EVENT + HOUR_S * step} for step, item in enumerate(chosen)]
        request = {"user_id": f"bench-{self.scenario}-{number}", "behaviours": behaviours, "k": self.k, "cache": self.cache}
        request["request_time"] = FIRST_EVENT + HOUR_S * length
        return {**request, "strategy": self.strategy} if self.strategy else request
