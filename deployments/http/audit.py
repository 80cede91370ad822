"""The audit log at the routes: which key asked, for what, and how it ended."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from fastapi import Request

from cluster.audit import AuditLine, audited
from cluster.config import GatewaySettings
from cluster.errors import BackendUnavailable
from deployments.http.callers import Caller

LONGEST_ID = 200
DIGEST_WITHIN_S = 1.0
"""A store that is open answers at once; one that is being opened may take longer than a request may."""


class Audit:
    """`limits` gives the present settings."""

    def __init__(self, limits: Callable[[], GatewaySettings]) -> None:
        self._limits = limits

    @contextmanager
    def line(self, http: Request, action: str, thing: str) -> Iterator[AuditLine]:
        """A line for the call in the block. Where it is lost, a header of the answer says so."""
        caller: Caller = http.state.caller
        key, request_id = caller.key.name if caller.key else None, http.headers.get("x-request-id", "")[:LONGEST_ID] or None
        line = AuditLine()
        try:
            with audited(self._limits().audit_log, action, thing, key=key, request_id=request_id) as line:
                yield line
        finally:
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
