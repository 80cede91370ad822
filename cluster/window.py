"""Which of a user's events an engine is given: a window whose start moves in steps.

What engines keep of a user is valid only while positions are counted from the same event. A window of exactly the latest events moves
with every event and would invalidate it beyond `longest` events; a stepped one moves once in `step` events. All engines are
given the same window, so that no answer depends on what is kept.
"""


def window_start(events: int, longest: int, step: int) -> int:
    """How many of the oldest `events` are left out: none up to `longest`, else the least multiple of `step` that leaves no more.

    Between `longest` - `step` + 1 and `longest` events are left; with a step of 1 always the latest `longest`.
    Raises ValueError at a step outside of 1..`longest`, which could leave none.
    """
    if not 1 <= step <= longest:
        raise ValueError(f"a window of {longest} events cannot move in steps of {step}; the step must be within 1..{longest}")
    surplus = max(0, events - longest)
    return -(-surplus // step) * step


def default_step(longest: int) -> int:
    """An eighth of the window: at worst that share of the latest events is not seen, and what is kept lasts for as many events."""
    return max(1, longest // 8)
