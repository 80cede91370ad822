"""The paths that need no key and no place, and how many of their requests are answered."""

from collections import deque
from http import HTTPStatus
from math import ceil
from time import monotonic

from cluster.profile import HAPROXY
from cluster.traffic.rate_limits import Bucket
from deployments.http import api_pages, playground, problems
from deployments.http.pieces import PIECE

OPEN = frozenset({"/healthz", "/readyz", "/openapi.json"}) | playground.PATHS | api_pages.PATHS
"""Every other path is protected, whether there is a route or not."""
PROBED = frozenset({"/healthz", "/readyz"})
"""Open paths that are answered however many others are."""
MOST_OPEN = 64
"""How many requests of the other open paths are answered at a time. A visitor of the playground's page sends a dozen."""
PER_S, BURST = 64.0, 384.0
"""How many pieces of PIECE bytes of their answers are given in a second, and at once after a while without any; a request costs one at
least. The largest file is a megabyte and a half, and takes a gateway and a proxy some milliseconds.
"""
COSTS = {path: ceil(len(file.body) / PIECE) for path, file in {**playground.FILES, **api_pages.FILES}.items()}
"""Pieces of each file; the description of the interface, the only other page, counts as MADE."""
MADE = 2
PASSED_ON_S = float(HAPROXY["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"])
"""HAProxy may hold an answered page this long for a slow client, and counts it as a request meanwhile."""


class OpenPaths:
    """The requests of open paths other than those that are PROBED. `running`: those under way."""

    def __init__(self) -> None:
        self.running = 0
        self._tokens = Bucket(BURST, monotonic())
        self._passed_on = deque[float]()  # when each of the long answers of late was given

    def take(self) -> None:
        """Admit one that runs. Raises HTTPException (503) where there are too many."""
        self._tokens.fill(PER_S, BURST, monotonic())
        if self.running > MOST_OPEN or self._tokens.tokens < 1:
            raise problems.overloaded("too many pages, or descriptions of this interface, are asked for; ask again later", wait_s=1)
        self._tokens.tokens -= 1

    def begun(self, path: str, status: int) -> None:
        """The answer begins: the page where `status` is 200, and nothing where a reader has it already."""
        if status == HTTPStatus.OK:
            self._tokens.tokens -= COSTS.get(path, MADE) - 1

    def answered(self, path: str, status: int) -> None:
        """One was answered; a proxy may still pass the answer on, where that is more than a connection takes at once."""
        if status == HTTPStatus.OK and COSTS.get(path, MADE) > 1:
            self._passed_on.append(monotonic())

    def held(self) -> int:
        """How many a proxy may count as requests now: those that run, and those with an answer that it may still pass on."""
        while self._passed_on and self._passed_on[0] < monotonic() - PASSED_ON_S:
            self._passed_on.popleft()
        return self.running + len(self._passed_on)
