"""Which of a user's events an engine is given: a window whose start moves in steps.

The rows that engines keep of a user are valid only while positions are counted from the same event. Beyond `longest` events, a window of
exactly the latest events would move, and invalidate them, with every event; a stepped window moves once in `step` events. All engines are
given the same window, so that no answer depends on what is kept.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """At most `longest` events, left out `step` at a time. Raises ValueError at a step outside of 1..`longest`, which could leave none."""

    longest: int
    step: int

    def __post_init__(self) -> None:
        if not 1 <= self.step <= self.longest:
            raise ValueError(
                f"a window of {self.longest} events cannot move in steps of {self.step}; the step must be within 1..{self.longest}"
            )

    @classmethod
    def of(cls, longest: int, step: int | None = None) -> "Window":
        """The window; `step` is an eighth of it by default: at worst that share of the latest events is left out, and kept rows stay valid
        for as many events.
        """
        return cls(longest, max(1, longest // 8) if step is None else step)

    def start(self, events: int) -> int:
        """How many of the oldest `events` are left out: none up to `longest`, else the least multiple of `step` that leaves no more.

        Between `longest` - `step` + 1 and `longest` events are left; with a step of 1 always the latest `longest`.
        """
        surplus = max(0, events - self.longest)
        return -(-surplus // self.step) * self.step
