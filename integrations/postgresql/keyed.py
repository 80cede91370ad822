"""Digests of all rows of a table at once, made by the server, which has the key in its memory until the transaction ends."""

from hashlib import sha256
from typing import Any

from cluster.events.digests import Digests

_BLOCK = 64
# HMAC-SHA-256 of SHA-256, as `Digests` has it.
_FUNCTIONS = (
    """CREATE OR REPLACE FUNCTION pg_temp.keyed_digest(plain BYTEA) RETURNS BYTEA STABLE LANGUAGE sql AS
    $$ SELECT sha256(decode(current_setting('genrec.outer_key'), 'hex') ||
                     sha256(decode(current_setting('genrec.inner_key'), 'hex') || sha256(plain))) $$""",
    r"""CREATE OR REPLACE FUNCTION pg_temp.user_digest(tenant TEXT, user_id TEXT) RETURNS BYTEA STABLE LANGUAGE sql AS
    $$ SELECT pg_temp.keyed_digest(convert_to(tenant, 'UTF8') || '\x00'::bytea || convert_to(user_id, 'UTF8')) $$""",
    r"""CREATE OR REPLACE FUNCTION pg_temp.event_digest(tenant TEXT, key TEXT) RETURNS BYTEA STABLE LANGUAGE sql AS
    $$ SELECT pg_temp.keyed_digest('\x00'::bytea || convert_to(tenant, 'UTF8') || '\x00'::bytea || convert_to(key, 'UTF8')) $$""",
)


async def make_functions(connection: Any, digests: Digests) -> None:
    """Make pg_temp.user_digest and pg_temp.event_digest for the session's statements; both know the key until the transaction ends."""
    key = digests.key if len(digests.key) <= _BLOCK else sha256(digests.key).digest()
    block = key.ljust(_BLOCK, b"\0")
    for name, pad in (("genrec.inner_key", 0x36), ("genrec.outer_key", 0x5C)):
        await connection.execute("SELECT set_config($1, $2, true)", name, bytes(byte ^ pad for byte in block).hex())
    for function in _FUNCTIONS:
        await connection.execute(function)
