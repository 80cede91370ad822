"""Ask genrec over its ZeroMQ front door: many requests under way on one socket, answers as they are ready. pip install pyzmq

    python examples/zeromq_client.py [tcp://127.0.0.1:5555]      # GENREC_API_KEY, where keys are asked for

The service needs `zeromq: {address: "tcp://127.0.0.1:5555"}` in its configuration; the frames are described in docs/api.md.
"""

import asyncio
import itertools
import json
import os
import sys
from typing import Any, Self

import zmq
import zmq.asyncio


class Door:
    """For one event loop. An answer that does not come within `timeout_s` raises TimeoutError; ZeroMQ itself reconnects for ever."""

    def __init__(self, address: str, *, api_key: str | None = None, timeout_s: float = 30.0) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._numbers, self._asked = itertools.count(), dict[bytes, asyncio.Future[tuple[int, bytes]]]()

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a door that is away: it would be carried out later
        self._socket.connect(self._address)
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.cancel()
        self._context.destroy(linger=0)

    async def ask(self, call: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """The status and the answer, or the problem, of `POST /v1/recommend`, `statistics`, ... Raises ValueError at a page of HTML."""
        request_id = str(next(self._numbers)).encode()
        answer = self._asked[request_id] = asyncio.get_running_loop().create_future()
        said = json.dumps({**self._headers, **{name.replace("_", "-"): value for name, value in headers.items()}}).encode()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_multipart([request_id, call.encode(), said, b"" if body is None else json.dumps(body).encode()])
                status, told = await answer
        finally:
            del self._asked[request_id]
        return status, json.loads(told)

    async def _listen(self) -> None:
        while True:
            request_id, status, _headers, body = await self._socket.recv_multipart()
            answer = self._asked.get(request_id)
            if answer is not None and not answer.done():
                answer.set_result((int(status), body))


async def main(address: str = "tcp://127.0.0.1:5555") -> None:
    async with Door(address, api_key=os.environ.get("GENREC_API_KEY")) as door:
        _, popular = await door.ask("POST /v1/recommend", {"user_id": "nobody", "behaviours": [], "k": 4})
        items = [item["item_id"] for item in popular["items"]]
        seen = [{"item_id": item, "timestamp": 1_700_000_000 + hour * 3600} for hour, item in enumerate(items[:2])]
        requests = [{"user_id": f"user-{number}", "behaviours": seen, "k": 3} for number in range(8)]
        answers = await asyncio.gather(*(door.ask("POST /v1/recommend", request, priority="u=1") for request in requests))
        print("recommend:", [status for status, _ in answers], [item["title"] for item in answers[0][1]["items"]])
        status, ranked = await door.ask("POST /v1/rank", {"user_id": "ada", "behaviours": seen, "candidates": items})
        print("rank:", status, [item["title"] for item in ranked["items"]])
        status, problem = await door.ask("POST /v1/recommend", {"user_id": "ada", "k": 0})
        print("refused:", status, problem["detail"])
        print("statistics:", *await door.ask("statistics"))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
