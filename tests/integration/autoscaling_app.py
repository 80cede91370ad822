"""A Serve application that only sleeps: GET /?seconds=S -> the replica that slept."""

import asyncio
from typing import Any

from ray import serve
from starlette.requests import Request


class Sleeper:
    async def __call__(self, http: Request) -> str:
        await asyncio.sleep(float(http.query_params.get("seconds", 0)))
        return serve.get_replica_context().replica_id.unique_id


def build(_: dict[str, Any]) -> serve.Application:
    return serve.deployment(name="sleeper")(Sleeper).bind()
