"""Whether a backend can run here, asked in a thread of its own: the question may take for ever, and is asked once at a time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from cluster.engines.room import apart
from cluster.values import Availability

PROBE_WITHIN_S = 30.0
"""How long a probe is waited for. One that takes longer, as where a file server hangs, says nothing certain, and goes on alone."""


class Probing:
    """The probes of one backend. `ask` never raises, and may never return."""

    def __init__(self, ask: Callable[[], Availability]) -> None:
        self._ask = ask
        self._asking: Future[Availability] | None = None
        self._is_late = False

    async def found(self) -> Availability:
        """What the probe says. While one that was late goes on, it is not waited for again, and no other begins."""
        if self._asking is None:
            self._asking, self._is_late = apart(self._ask), False
        asking = self._asking
        if not self._is_late:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(asking), PROBE_WITHIN_S)
        if not asking.done():
            self._is_late = True
            return Availability(ok=False, reason=f"its probe did not end in {PROBE_WITHIN_S:g} s", certain=False)
        if self._asking is asking:
            self._asking = None
        return asking.result()

    @property
    def late(self) -> Future[Availability] | None:
        """The probe that took too long, and goes on or has ended since, until its result is taken."""
        return self._asking if self._is_late else None
