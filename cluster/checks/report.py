"""What came of the checks of one backend."""

from dataclasses import dataclass
from enum import StrEnum


class Result(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class Failed(Exception):
    """Raised by a check; the message says what the backend did, and what it should have done."""


class Skipped(Exception):
    """Raised by a check that does not concern this backend; the message says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one check; `reason` is "" where it passed."""

    check: str
    result: Result
    reason: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """`unavailable`: why the backend cannot run here, in its own words, "" where it can."""

    backend: str
    stage: str
    model_version: str
    unavailable: str
    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> bool:
        return any(outcome.result is Result.FAILED for outcome in self.outcomes)

    def count(self, result: Result) -> int:
        """How many checks had this result."""
        return sum(outcome.result is result for outcome in self.outcomes)
