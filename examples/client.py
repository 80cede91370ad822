"""A client for genrec in one file, to copy, with retries that cannot make an overload worse. pip install httpx stamina

    with Client("http://localhost:8000") as genrec:                    async with AsyncClient("http://localhost:8000") as genrec:
        answer = genrec.ask(recommend("ada", seen, k=3))                   answer = await genrec.ask(recommend("ada", seen, k=3))
        for kind, part in genrec.stream(recommend("ada", seen)): ...       async for kind, part in genrec.stream(...): ...

Behaviours, events and answers are the JSON of docs/api.md. Instead of an answer there is
    Refused     the service said no (problem+json): which field, which value, what to do
    httpx's own errors, such as ConnectError: nothing was heard in the time and the retries there were

python examples/client.py [URL]      # asks a running genrec, both ways; GENREC_API_KEY where keys are asked for, as by `make demo`
"""

import asyncio
import json
import os
import random
import sys
import threading
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, Self
from urllib.parse import quote

import httpx
import stamina

Json = Mapping[str, Any]
Call = dict[str, Any]
"""What httpx's `build_request` takes. Every call may be repeated: it only reads, or does the same once done twice."""
TRY_S = 17.0
"""Longer than a gateway works on a request by its default deadlines, 16 s: what is given up before is computed again, and in vain again."""
COME_BACK = frozenset({429, 503})
"""The only statuses that are asked again: any other 4xx would be the same next time, and what took too long (504) would again."""


def recommend(user_id: str, behaviours: Sequence[Json] | None = None, **options: Any) -> Call:
    """`options`: k, strategy, deadline_ms, explain, tenant and the like. Without behaviours those stored of the user count."""
    return {"method": "POST", "url": "/v1/recommend", "json": _about(user_id, behaviours, options)}


def rank(user_id: str, candidates: Sequence[str], behaviours: Sequence[Json] | None = None, **options: Any) -> Call:
    return {"method": "POST", "url": "/v1/rank", "json": _about(user_id, behaviours, {"candidates": candidates, **options})}


def send_events(events: Sequence[Json], *, idempotency_key: str | None = None) -> Call:
    """The key is made here, once: however often the call is sent, its events are stored once."""
    headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
    return {"method": "POST", "url": "/v1/events", "json": {"events": events}, "headers": headers}


def history(user_id: str, *, tenant: str | None = None) -> Call:
    """Without `tenant` the user is one of the API key's tenant or, where the key has none, of `default`."""
    part = quote(user_id, safe="").replace(".", "%2E")  # `..` by itself would be the folder above
    return {"method": "GET", "url": f"/v1/users/{part}/history", "params": {} if tenant is None else {"tenant": tenant}}


def erase(user_id: str, *, tenant: str | None = None) -> Call:
    """`tenant` as in `history`: an erasure that acts for another one succeeds, and erases nothing of the user meant."""
    return {**history(user_id, tenant=tenant), "method": "DELETE"}


def _about(user_id: str, behaviours: Sequence[Json] | None, options: Json) -> Json:
    return {"user_id": user_id, **({} if behaviours is None else {"behaviours": behaviours}), **options}


class Refused(Exception):
    """A problem as in RFC 9457. `wrong`: of each field at fault `field`, `problem` (the rule, and what to send instead), `value`."""

    def __init__(self, problem: Json, retry_after_s: float = 0.0) -> None:
        self.status, self.wrong, self.retry_after_s = problem["status"], problem.get("errors", []), retry_after_s
        super().__init__(f"{problem['status']} {problem['title']}: {problem['detail']}")


class Retries:
    """stamina's options, and a budget of retries: `reserve` at first, and a share of one more for each call. When a service is down,
    callers that all retry would multiply its load just then. A pause that Retry-After makes longer than `timeout` is not begun.
    """

    def __init__(self, share: float = 0.1, reserve: float = 10.0, **options: Any) -> None:
        self.options = {"attempts": 4, "timeout": 15.0, "wait_max": 3.0, **options}
        self._share, self._reserve, self._left, self._lock = share, reserve, reserve, threading.Lock()

    def of_a_call(self) -> Any:
        """For `for` and `async for`."""
        with self._lock:
            self._left = min(self._reserve, self._left + self._share)
        return stamina.retry_context(self._again, **self.options)

    def _again(self, error: Exception) -> bool | float:
        """Whether to ask again after this, or after how many seconds."""
        after_s = error.retry_after_s if isinstance(error, Refused) else 0.0
        may_pass = error.status in COME_BACK if isinstance(error, Refused) else isinstance(error, httpx.TransportError)
        if not may_pass or after_s >= self.options["timeout"]:
            return False
        with self._lock:
            granted = self._left >= 1
            self._left -= granted
        return after_s + random.random() if granted and after_s else granted  # those told the same do not come back together


class Client:
    """May be shared by threads."""

    def __init__(self, url: str, *, api_key: str | None = None, try_s: float = TRY_S, retries: Retries | None = None) -> None:
        self._http, self._retries = httpx.Client(base_url=url, headers=_key(api_key), timeout=try_s), retries or Retries()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, call: Call) -> Any:
        return self._send(call).json()

    def stream(self, call: Call) -> Iterator[tuple[str, Json]]:
        """Stages and items as they are found, lastly the answer, which alone is final. It is asked again only until the first is there."""
        with closing(self._send(_streamed(call), stream=True)) as response:
            for line in response.iter_lines():
                yield _part(line)

    def _send(self, call: Call, *, stream: bool = False) -> httpx.Response:
        for attempt in self._retries.of_a_call():
            with attempt:
                response = self._http.send(self._http.build_request(**call), stream=stream)
                if not response.is_success:
                    raise refusal(response, response.read())
                return response
        raise AssertionError("stamina raises the last error")


class AsyncClient:
    """As `Client`, for one event loop."""

    def __init__(self, url: str, *, api_key: str | None = None, try_s: float = TRY_S, retries: Retries | None = None) -> None:
        self._http, self._retries = httpx.AsyncClient(base_url=url, headers=_key(api_key), timeout=try_s), retries or Retries()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, call: Call) -> Any:
        return (await self._send(call)).json()

    async def stream(self, call: Call) -> AsyncGenerator[tuple[str, Json], None]:
        """As `Client.stream`; close it where you leave it early (contextlib.aclosing), so that the cluster stops computing."""
        async with aclosing(await self._send(_streamed(call), stream=True)) as response:
            async for line in response.aiter_lines():
                yield _part(line)

    async def _send(self, call: Call, *, stream: bool = False) -> httpx.Response:
        async for attempt in self._retries.of_a_call():
            with attempt:
                response = await self._http.send(self._http.build_request(**call), stream=stream)
                if not response.is_success:
                    raise refusal(response, await response.aread())
                return response
        raise AssertionError("stamina raises the last error")


def _key(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def _streamed(call: Call) -> Call:
    return {**call, "headers": {"accept": "application/x-ndjson"}}


def _part(line: str) -> tuple[str, Json]:
    """What a line of a stream says. Raises Refused where it says what went wrong after the stream had begun."""
    told = json.loads(line)
    if told["type"] == "error":
        raise Refused(told["data"])
    return told["type"], told["data"]


def refusal(response: httpx.Response, body: bytes) -> Refused:
    """A proxy on the way may have sent something other than a problem."""
    told = response.headers.get("retry-after", "")
    after_s = float(told) if told.isdigit() else 0.0
    try:
        return Refused(json.loads(body), after_s)
    except (ValueError, KeyError, TypeError, AttributeError):
        detail = body[:200].decode(errors="replace")
        return Refused({"status": response.status_code, "title": "no problem+json", "detail": detail}, after_s)


def main(url: str = "http://127.0.0.1:8000") -> None:
    key = os.environ.get("GENREC_API_KEY")
    with Client(url, api_key=key) as genrec:
        popular = [item["item_id"] for item in genrec.ask(recommend("new-user", [], k=4))["items"]]
        seen = [{"item_id": item_id, "timestamp": 1_700_000_000 + hour * 3600} for hour, item_id in enumerate(popular[:2])]
        _show("recommend", genrec.ask(recommend("ada", seen, k=3)))
        for kind, _ in genrec.stream(recommend("ada", seen, k=3)):
            print(f"stream: {kind}")
        _show("rank", genrec.ask(rank("ada", popular, seen)))
        user = f"client-{uuid.uuid4().hex[:8]}"
        print("send_events:", genrec.ask(send_events([{"user_id": user, "item_id": item_id} for item_id in popular[:2]])))
        print("history:", [event["item_id"] for event in genrec.ask(history(user))["events"]])
        print("erase:", genrec.ask(erase(user)))
        try:
            genrec.ask(recommend("ada", seen, k=0))
        except Refused as refused:
            print("refused: {field} = {value}: {problem}".format(**refused.wrong[0]))
    asyncio.run(_at_once(url, key, seen))


async def _at_once(url: str, key: str | None, seen: Sequence[Json]) -> None:
    async with AsyncClient(url, api_key=key) as genrec:
        answers = await asyncio.gather(*(genrec.ask(recommend(f"user-{number}", seen, k=3)) for number in range(8)))
        print(f"at once: {len(answers)} answers")
        async with aclosing(genrec.stream(recommend("ada", seen, k=3))) as parts:
            print("stream:", [kind async for kind, _ in parts][-1])


def _show(call: str, answer: Json) -> None:
    print(f"{call}: {', '.join('{title} {score:.3f}'.format(**item) for item in answer['items'])}")


if __name__ == "__main__":
    main(*sys.argv[1:])
