"""Which of a user's events are encoded: a window whose start moves in steps.

A kept state is valid only while positions are counted from the same event. A window of exactly the latest events moves with every event
and would invalidate the state of whoever has more than `max_history`; a stepped one moves once in `step` events. All engines encode the
same window, so that no answer depends on what is kept.
"""


def window_start(events: int, max_history: int, step: int) -> int:
    """How many of the oldest `events` are left out: none up to `max_history`, else the least multiple of `step` that leaves no more.

    Between `max_history` - `step` + 1 and `max_history` events are left; with a step of 1 always the latest `max_history`.
    Raises ValueError at a step outside of 1..`max_history`, which could leave none.
    """
    if not 1 <= step <= max_history:
        raise ValueError(f"a window of {max_history} events cannot move in steps of {step}; the step must be within 1..{max_history}")
    surplus = max(0, events - max_history)
    return -(-surplus // step) * step


def default_step(max_history: int) -> int:
    """An eighth of the window: at worst that share of the latest events is not seen, and a state lasts for as many events."""
    return max(1, max_history // 8)
