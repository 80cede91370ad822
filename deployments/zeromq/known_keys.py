"""Which callers' keys the door knows: a gateway checks each one, for all connections that send it."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from http import HTTPStatus
from time import monotonic

from starlette.exceptions import HTTPException

from deployments.http import problems
from deployments.http.callers import KEYLESS
from deployments.http.exchange import HttpRequest, HttpResponse

Exchange = Callable[[HttpRequest, float], Awaitable[HttpResponse]]
KNOWN_FOR_S, MOST_ASKING, MOST_KNOWN = 30.0, 16, 10_000
"""After how long a known key is checked again, how many keys may be checked at a time, and how many are remembered. The gateway checks the
key of every request besides.
"""
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class KnownKeys:
    """`check_key(request, within_s)` has a gateway check the key of a request, within `timeout_s`, and answers 204 where it is known.

    A key that is known is checked again once KNOWN_FOR_S have passed, though only while fewer than MOST_ASKING keys are being checked. Its
    requests go on meanwhile: it is known until a gateway refuses it.
    """

    def __init__(self, check_key: Exchange, timeout_s: float) -> None:
        self._check_key, self._timeout_s = check_key, timeout_s
        self._known: dict[bytes, float] = {}
        self._asking: dict[bytes, asyncio.Task[None]] = {}
        self._keyless_are_one = False

    async def caller(self, headers: Mapping[str, str]) -> bytes:
        """A digest of the caller's key, or of none where others have keys; b"" where no keys are asked for and there is none. Raises the
        error with which a gateway refuses the key.
        """
        key = _one_spelling(headers.get("authorization", ""))
        digest, now = sha256(key.encode()).digest(), monotonic()
        until = self._known.get(digest)
        if until is None:
            await self._asked_after(key, digest)
        elif until < now and len(self._asking) < MOST_ASKING:
            self._asking_after(key, digest)
        return digest if key or self._keyless_are_one else b""

    def close(self) -> None:
        """End the checks that are under way, and with a CancelledError the wait of those that wait for one."""
        for asking in self._asking.values():
            asking.cancel()

    async def _asked_after(self, key: str, digest: bytes) -> None:
        """Have the key checked. Only `close` cancels callers that wait here, and then all of them."""
        if digest not in self._asking and len(self._asking) >= MOST_ASKING:
            raise problems.overloaded(f"{len(self._asking)} keys are being checked at this door", wait_s=1)
        await self._asking_after(key, digest)

    def _asking_after(self, key: str, digest: bytes) -> asyncio.Task[None]:
        """The check of the key, one for all connections that send it meanwhile: after a restart they come at once."""

        def ended(task: asyncio.Task[None]) -> None:
            del self._asking[digest]
            if not task.cancelled():
                task.exception()  # of a key that is known, which no caller waits for

        if (asking := self._asking.get(digest)) is None:
            asking = self._asking[digest] = asyncio.create_task(self._ask_after(key, digest))
            asking.add_done_callback(ended)
        return asking

    async def _ask_after(self, key: str, digest: bytes) -> None:
        """Have a gateway check the key, as gateways know the current ones. Raises the HTTPException with which it refuses the key."""
        now = monotonic()
        told = await self._check_key(HttpRequest("GET", "/", {"authorization": key} if key else {}), self._timeout_s)
        if told.status in _REFUSED:
            self._known.pop(digest, None)
        if told.status != HTTPStatus.NO_CONTENT:
            headers = {name: value for name, value in told.headers.items() if name == "www-authenticate"}
            raise HTTPException(told.status, json.loads(told.body)["detail"], headers)
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[digest] = now + KNOWN_FOR_S
        if not key:
            self._keyless_are_one = KEYLESS in told.headers


def _one_spelling(authorization: str) -> str:
    """One spelling for all that a gateway takes for the same: a caller that writes `bearer`, or more spaces, is the same caller."""
    scheme, _, key = authorization.partition(" ")
    return f"{scheme.lower()} {key.strip(' ')}".strip()
