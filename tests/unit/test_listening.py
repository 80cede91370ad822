"""A server of Serve's on uvloop, where many connections come at once."""

import asyncio
import socket
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import uvicorn
import uvloop

from deployments.http.listening import DESCRIPTORS, take_many_connections
from tests.waiting import until

CONNECTIONS = min(20 * DESCRIPTORS, int(Path("/proc/sys/net/core/somaxconn").read_text()))
"""No more than the kernel has wait for the server, which here takes none before all are there."""


async def nothing(scope, receive, send):
    raise AssertionError


@pytest.mark.parametrize("many", [False, True])
def test_new_connections_are_taken_many_in_a_turn_of_the_loop(monkeypatch, many):
    """uvloop by itself takes one."""
    monkeypatch.setattr(uvicorn.Server, "startup", uvicorn.Server.startup)  # as it is afterwards
    if many:
        take_many_connections()
        take_many_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        turns, port = runner.run(turns_to_take_all())
    assert turns > CONNECTIONS / 2 if not many else turns < CONNECTIONS / 4
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


async def turns_to_take_all():
    listening = socket.create_server(("127.0.0.1", 0), backlog=2 * CONNECTIONS)
    server = uvicorn.Server(uvicorn.Config(nothing, lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await until(lambda: server.started)
    address, turns = listening.getsockname(), 0
    with ExitStack() as clients:
        for _ in range(CONNECTIONS):
            clients.enter_context(closing(socket.create_connection(address, timeout=300)))
        while len(server.server_state.connections) < CONNECTIONS:
            await asyncio.sleep(0)
            turns += 1
    server.should_exit = True
    await serving
    return turns, address[1]
