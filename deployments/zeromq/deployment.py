"""The ZeroMQ door as Serve runs it: FrontDoor before the gateways of its application."""

from collections.abc import Awaitable
from typing import Any

from ray import serve

from cluster.config import parse
from cluster.errors import ConfigError
from deployments.calls.remote import ask
from deployments.http.exchange import HttpRequest, HttpResponse
from deployments.telemetry.metrics import meter
from deployments.zeromq.door import READ_ONLY, FrontDoor


class ZeroMQDeployment:
    """The front door as a Serve deployment, which asks the gateways of its application."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._door: FrontDoor | None = None
        tree = parse(settings)
        if tree.zeromq is None:
            raise ConfigError("the deployment zeromq needs `zeromq` in the application's `args`")
        self._gateway = serve.get_deployment_handle("gateway", serve.get_replica_context().app_name)
        door = FrontDoor(tree.zeromq, self._exchange, self._check_key, max_body_bytes=tree.gateway.max_body_bytes, meter=meter())
        await door.open()
        self._door = door

    async def check_health(self) -> None:
        if self._door:
            self._door.check_health()

    def __del__(self) -> Awaitable[None] | None:
        """Serve calls it when it stops a replica, and awaits what it returns; afterwards the interpreter calls it once more."""
        door, self._door = self._door, None
        return door.close() if door else None

    async def _exchange(self, asked: HttpRequest, within_s: float) -> HttpResponse:
        """Have a gateway answer. Where it dies, only a request that merely reads is sent to another one."""
        safe = asked.method == "GET" or asked.target in READ_ONLY
        answered: HttpResponse = await ask(self._gateway, "exchange", asked, within_s=within_s, tries=3 if safe else 1)
        return answered

    async def _check_key(self, asked: HttpRequest, within_s: float) -> HttpResponse:
        answered: HttpResponse = await ask(self._gateway, "check_key", asked, within_s=within_s, tries=3)
        return answered
