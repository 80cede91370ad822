"""A circuit breaker as a value: closed -> open after some failures in a row -> half-open after a pause -> closed, or open for longer.

Time is passed in (seconds on any clock that only moves forward), so every transition can be tested without waiting.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass


class BreakerState(StrEnum):
    """CLOSED lets every call through, OPEN none, HALF_OPEN the one that decides which of the two comes next."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@pydantic_dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class BreakerSettings:
    """Open after `failures_to_open` failures in a row; try again after `pause_s`, then `growth` times as long, up to `longest_pause_s`.

    Raises pydantic's ValidationError, a ValueError.
    """

    failures_to_open: Annotated[int, Field(ge=1, description="broken calls in a row that take a backend out")] = 3
    pause_s: Annotated[float, Field(gt=0, description="until it is tried again")] = 1.0
    growth: Annotated[float, Field(ge=1, description="each failed trial makes the next pause so many times as long")] = 2.0
    longest_pause_s: Annotated[float, Field(gt=0, description="no pause is longer")] = 20.0

    def __post_init__(self) -> None:
        if self.longest_pause_s < self.pause_s:
            raise ValueError(f"longest_pause_s ({self.longest_pause_s}) must not be less than pause_s ({self.pause_s})")


@dataclass(frozen=True, slots=True)
class Breaker:
    """A breaker's value: ask its `state` before a call, and keep the breaker that `succeeded` or `failed` returns after it."""

    settings: BreakerSettings = field(default_factory=BreakerSettings)
    failures: int = 0
    last_pause_s: float = 0.0
    trial_at: float | None = None

    def state(self, now: float) -> BreakerState:
        if self.trial_at is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now >= self.trial_at else BreakerState.OPEN

    def wait_s(self, now: float) -> float:
        """Seconds until the next trial; 0 where a call may be made now."""
        return 0.0 if self.trial_at is None else max(0.0, self.trial_at - now)

    def succeeded(self) -> "Breaker":
        return Breaker(self.settings)

    def failed(self, now: float, *, calls: int = 1, at_once: bool = False) -> "Breaker":
        """The breaker after `calls` broken calls in a row, the last at `now`; `at_once` opens it at any count, as after a failed load,
        which need not be seen thrice.
        """
        counted = replace(self, failures=self.failures + calls)
        state = self.state(now)
        if state is BreakerState.OPEN or (
            state is BreakerState.CLOSED and counted.failures < self.settings.failures_to_open and not at_once
        ):
            return counted
        pause_s = min(self.settings.longest_pause_s, max(self.settings.pause_s, self.last_pause_s * self.settings.growth))
        return replace(counted, last_pause_s=pause_s, trial_at=now + pause_s)
