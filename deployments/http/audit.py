"""The audit log at the routes: which key asked, for what, and how it ended."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from fastapi import Request

from cluster.audit import AuditLine
from cluster.config import GatewaySettings
from cluster.errors import BackendUnavailable
from deployments.http.callers import Caller

LONGEST_ID = 200
WRITTEN_WITHIN_S = 1.0
"""No switch that may end an outage, and no erasure that is owed, waits for the log's disk any longer."""
DIGEST_WITHIN_S = 1.0
"""A store that is open answers at once; one that is being opened may take longer than a request may."""

_THREAD = ThreadPoolExecutor(1, "audit log")


class Audit:
    """`limits` gives the present settings."""

    def __init__(self, limits: Callable[[], GatewaySettings]) -> None:
        self._limits = limits

    @asynccontextmanager
    async def line(self, http: Request, action: str, thing: str) -> AsyncIterator[AuditLine]:
        """A line before the call in the block, and one as it ends. Where one is lost, a header of the answer says so."""
        caller: Caller = http.state.caller
        key, request_id = caller.key.name if caller.key else None, http.headers.get("x-request-id", "")[:LONGEST_ID] or None
        line, failure = AuditLine.of(self._limits().audit_log, action, thing, key=key, request_id=request_id), None
        try:
            await _in_time(line, line.first(), durable=True)
            yield line
        except BaseException as error:
            failure = error
            raise
        finally:
            await _in_time(line, line.second(failure))
            caller.unaudited = line.lost

    async def user(self, tenant: str, digest: Callable[[], Awaitable[str]]) -> str:
        """The user's name in audit lines, which is a digest; "?" where the digest cannot be read within DIGEST_WITHIN_S: an erasure owes
        its caches the rest of the request's time.
        """
        if self._limits().audit_log is None:
            return ""
        try:
            async with asyncio.timeout(DIGEST_WITHIN_S):
                return f"{tenant}/{await digest()}"
        except (BackendUnavailable, TimeoutError):
            return f"{tenant}/?"


async def _in_time(line: AuditLine, text: str, *, durable: bool = False) -> None:
    """Write in the thread, where the log is on; what is not written within WRITTEN_WITHIN_S counts as lost, though it may come later."""
    if line.file is None:
        return
    writing = asyncio.get_running_loop().run_in_executor(_THREAD, partial(line.write, text, durable=durable))
    _, late = await asyncio.wait([writing], timeout=WRITTEN_WITHIN_S)
    if late:
        line.lose(text, f"not within {WRITTEN_WITHIN_S:g} s")
