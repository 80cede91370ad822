"""The switchboard as a deployment: one replica, seldom called, whose loss costs nothing but a little delay."""

from time import time

from cluster.controller import StageSnapshot
from cluster.erasures import News, Place
from cluster.switchboard import StageStatus, Switchboard, Switches

REPORT_INTERVAL_S = 0.5
"""How often every replica of a stage reports; a switch is in force everywhere after two reports."""


class SwitchboardDeployment:
    """Adds the time of day to `Switchboard`."""

    def __init__(self) -> None:
        self._board = Switchboard(ttl_s=10 * REPORT_INTERVAL_S, now=time())

    async def report(self, stage: str, replica: str, snapshot: StageSnapshot, version: int, switches: Switches) -> tuple[int, Switches]:
        return self._board.report(stage, replica, snapshot, version, switches, now=time())

    async def switches(self) -> tuple[int, Switches]:
        return self._board.switches()

    async def set(self, stage: str, name: str, enabled: bool) -> int:
        return self._board.set(stage, name, enabled, now=time())

    async def applied(self, version: int) -> bool:
        return self._board.applied(version, now=time())

    async def erase(self, tenant: str | None, user: str | None) -> int:
        return self._board.erase(tenant, user, now=time())

    async def exchange(self, follower: str, place: Place) -> News:
        return self._board.exchange(follower, place, now=time())

    async def erased(self, number: int) -> bool:
        return self._board.erased(number, now=time())

    async def status(self) -> tuple[StageStatus, ...]:
        return self._board.status(now=time())
