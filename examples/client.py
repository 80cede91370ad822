"""A client for genrec in one file, to copy: httpx, typed answers, retries that cannot make an overload worse.

    with Client("http://localhost:8000") as genrec:                    async with AsyncClient("http://localhost:8000") as genrec:
        answer = genrec.recommend("ada", [Behaviour("50", 881250949)])     answer = await genrec.recommend("ada", k=3)

    Refused     the service said no (problem+json): which field, which value, what to do
    httpx's own errors, such as ConnectError: nothing was heard in the time and the retries there were

python examples/client.py [URL]      # asks a running genrec, both ways; GENREC_API_KEY where keys are asked for
"""

import asyncio
import json
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, Generic, Self, TypeVar
from urllib.parse import quote

import httpx

T = TypeVar("T")
COME_BACK = frozenset({429, 503})
"""The only statuses that are asked again: any other 4xx would be the same next time."""


@dataclass(frozen=True)
class Behaviour:
    """Something a user did. `timestamp`: whole seconds since 1970."""

    item_id: str
    timestamp: int
    action: str = "view"
    value: float | None = None


@dataclass(frozen=True)
class Event:
    """Something a user did, to be stored. Without a timestamp: as it arrives."""

    user_id: str
    item_id: str
    action: str = "view"
    value: float | None = None
    timestamp: int | None = None


def _each(kind: type[T]) -> Callable[[Sequence[Mapping[str, Any]]], tuple[T, ...]]:
    return lambda several: tuple(read(kind, one) for one in several)


@dataclass(frozen=True)
class Stage:
    """The backend that served a stage; `fallback_from`: the ones passed over, and why."""

    stage: str
    backend: str
    duration_ms: float
    fallback_from: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Item:
    item_id: str
    title: str
    score: float
    stage: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    predictions: Mapping[str, float] = field(default_factory=dict)
    explanation: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """Of recommend and rank: items, best first."""

    user_id: str
    items: tuple[Item, ...] = field(metadata={"read": _each(Item)})
    stages: tuple[Stage, ...] = field(metadata={"read": _each(Stage)})
    degraded: bool
    model_version: str
    unknown_items: Sequence[str] = ()


@dataclass(frozen=True)
class Stored:
    """The events are durable. `duplicates`: of them, those that had been stored before."""

    stored: int
    duplicates: int
    unknown_items: Sequence[str] = ()


@dataclass(frozen=True)
class History:
    """What is stored of a user, oldest first."""

    user_id: str
    version: str
    events: tuple[Behaviour, ...] = field(metadata={"read": _each(Behaviour)})


@dataclass(frozen=True)
class Erased:
    """`everywhere`: every replica and cache has deleted it; those that did not answer are told again."""

    user_id: str
    events: int
    cached_answers: int
    everywhere: bool


def read(kind: type[T], said: Mapping[str, Any]) -> T:
    """A dataclass from JSON; what it has no field for is passed over, so that a newer service may say more."""
    known = {one.name: one.metadata.get("read", _as_it_is) for one in fields(kind) if one.name in said}  # type: ignore[arg-type]
    return kind(**{name: read_it(said[name]) for name, read_it in known.items()})


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Wrong:
    """One thing that is wrong with a request. `cure`: what the rule is, and what to send instead."""

    field: str
    cure: str
    value: str = ""


class Refused(Exception):
    """The service answered with an error: a problem as in RFC 9457. `wrong`: the fields at fault, where it was for fields."""

    def __init__(self, status: int, title: str, detail: str, wrong: tuple[Wrong, ...] = ()) -> None:
        self.status, self.title, self.detail, self.wrong = status, title, detail, wrong
        super().__init__(f"{status} {title}: {detail}")

    @property
    def field(self) -> str | None:
        return self.wrong[0].field if self.wrong else None

    @property
    def value(self) -> str | None:
        return self.wrong[0].value if self.wrong else None

    @property
    def cure(self) -> str:
        return self.wrong[0].cure if self.wrong else self.detail


def refusal(status: int, body: bytes) -> Refused:
    """From an answer's status and body; a proxy on the way may have sent something other than a problem."""
    try:
        said = json.loads(body)
        wrong = tuple(Wrong(one["field"], one["problem"], one.get("value", "")) for one in said.get("errors", ()))
        return Refused(int(said.get("status", status)), said["title"], said["detail"], wrong)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Refused(status, "no problem+json", body[:200].decode(errors="replace"))


# --- when to ask again: pure, and the same for both clients ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Retries:
    """`tries` at most, within `deadline_s` from the first to the last answer; a try is given up after `try_s`.

    Between tries it waits a time drawn from 0 to `base_s` * 2^tries, at most `longest_s` (full jitter: clients that failed together do not
    come back together), and no less than what Retry-After says.
    """

    tries: int = 4
    deadline_s: float = 15.0
    try_s: float = 6.0
    base_s: float = 0.1
    longest_s: float = 3.0


@dataclass(frozen=True)
class Failure:
    """Why a try brought no answer. `status` None: the connection could not be made, broke, or stayed silent."""

    status: int | None = None
    retry_after_s: float = 0.0


def pause_s(policy: Retries, failure: Failure, *, tried: int, left_s: float, granted: Callable[[], bool], draw: float) -> float | None:
    """Seconds to wait before try `tried` + 1, or None to give up. `left_s`: until the deadline; `draw`: a random number from 0 to 1.

    `granted` takes from the retry budget; it is asked last, so that nothing is taken for a retry that will not be.
    """
    if failure.status is not None and failure.status not in COME_BACK:
        return None
    pause = failure.retry_after_s + draw * min(policy.longest_s, policy.base_s * 2**tried)
    return pause if tried < policy.tries and pause < left_s and granted() else None


class RetryBudget:
    """Retries that one client may send: `reserve` at first, and a share of one more for each call. When a service is down, callers that
    all retry would multiply its load just then.
    """

    def __init__(self, share: float = 0.1, reserve: float = 10.0) -> None:
        self._share, self._reserve, self._left, self._lock = share, reserve, reserve, threading.Lock()

    def called(self) -> None:
        with self._lock:
            self._left = min(self._reserve, self._left + self._share)

    def take(self) -> bool:
        with self._lock:
            granted = self._left >= 1
            self._left -= granted
            return granted


class _Tries:
    """The tries of one call."""

    def __init__(self, policy: Retries, budget: RetryBudget) -> None:
        self._policy, self._budget, self._tried = policy, budget, 0
        self._until = time.monotonic() + policy.deadline_s
        budget.called()

    def timeout_s(self) -> float:
        """Of the next try."""
        self._tried += 1
        return max(0.001, min(self._policy.try_s, self._until - time.monotonic()))

    def pause_s(self, failure: Failure) -> float | None:
        left_s = self._until - time.monotonic()
        return pause_s(self._policy, failure, tried=self._tried, left_s=left_s, granted=self._budget.take, draw=random.random())


def failure_of(response: httpx.Response) -> Failure:
    after = response.headers.get("retry-after", "")
    return Failure(response.status_code, float(after) if after.isdigit() else 0.0)


# --- what to say: one description of each call, for both clients ----------------------------------------------------------------------


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and how its answer is read. Every call may be repeated: it only reads, or does the same once done twice."""

    method: str
    path: str
    read: Callable[[Any], T]
    body: Mapping[str, Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, timeout_s: float) -> dict[str, Any]:
        given = {"method": self.method, "url": self.path, "params": dict(self.params), "headers": dict(self.headers), "timeout": timeout_s}
        return given if self.body is None else {**given, "json": self.body}


def recommend(user_id: str, behaviours: Sequence[Behaviour] | None = None, **options: Any) -> Call[Answer]:
    return Call("POST", "/v1/recommend", partial(read, Answer), _about(user_id, behaviours, options))


def stream(user_id: str, behaviours: Sequence[Behaviour] | None = None, **options: Any) -> Call["Stage | Item | Answer"]:
    accept = {"accept": "application/x-ndjson"}
    return Call("POST", "/v1/recommend", _streamed, _about(user_id, behaviours, options), headers=accept)


def rank(user_id: str, candidates: Sequence[str], behaviours: Sequence[Behaviour] | None = None, **options: Any) -> Call[Answer]:
    return Call("POST", "/v1/rank", partial(read, Answer), _about(user_id, behaviours, {"candidates": list(candidates), **options}))


def send_events(events: Sequence[Event], *, idempotency_key: str | None = None) -> Call[Stored]:
    """The key is made here, once: however often the call is sent, its events are stored once."""
    headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
    return Call("POST", "/v1/events", partial(read, Stored), {"events": [asdict(one) for one in events]}, headers=headers)


def history(user_id: str, limit: int | None = None) -> Call[History]:
    params = {} if limit is None else {"limit": limit}
    return Call("GET", f"/v1/users/{quote(user_id, safe='')}/history", partial(read, History), params=params)


def erase(user_id: str) -> Call[Erased]:
    return Call("DELETE", f"/v1/users/{quote(user_id, safe='')}/history", partial(read, Erased))


def _about(user_id: str, behaviours: Sequence[Behaviour] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Without behaviours the service takes what it has stored of the user."""
    done = {} if behaviours is None else {"behaviours": [asdict(one) for one in behaviours]}
    return {"user_id": user_id, **done, **options}


def _streamed(line: str) -> Stage | Item | Answer:
    """What a line of a stream says. Raises Refused where it says what went wrong after the stream had begun."""
    match json.loads(line):
        case {"type": "stage", "data": data}:
            return read(Stage, data)
        case {"type": "item", "data": data}:
            return read(Item, data)
        case {"type": "answer", "data": data}:
            return read(Answer, data)
        case {"type": "error", "data": data}:
            raise refusal(500, json.dumps(data).encode())
    raise Refused(500, "unknown event", f"the stream has a line that this client does not know: {line[:200]}")


# --- the clients ----------------------------------------------------------------------------------------------------------------------


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


class Client:
    """May be shared by threads. `options` are further fields of a request: k, strategy, deadline_ms, explain, tenant (see /docs)."""

    def __init__(self, url: str, *, api_key: str | None = None, retries: Retries | None = None, budget: RetryBudget | None = None) -> None:
        self._http = httpx.Client(base_url=url, headers=_headers(api_key))
        self._retries, self._budget = retries or Retries(), budget or RetryBudget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def recommend(self, user_id: str, behaviours: Sequence[Behaviour] | None = None, **options: Any) -> Answer:
        return self._answer(recommend(user_id, behaviours, **options))

    def stream(self, user_id: str, behaviours: Sequence[Behaviour] | None = None, **options: Any) -> Iterator[Stage | Item | Answer]:
        """Stages and items as they are found, lastly the answer, which alone is final. It is asked again only until the first is there."""
        call = stream(user_id, behaviours, **options)
        with closing(self._send(call, stream=True)) as response:
            for line in response.iter_lines():
                yield call.read(line)

    def rank(self, user_id: str, candidates: Sequence[str], behaviours: Sequence[Behaviour] | None = None, **options: Any) -> Answer:
        return self._answer(rank(user_id, candidates, behaviours, **options))

    def send_events(self, events: Sequence[Event], *, idempotency_key: str | None = None) -> Stored:
        return self._answer(send_events(events, idempotency_key=idempotency_key))

    def history(self, user_id: str, limit: int | None = None) -> History:
        return self._answer(history(user_id, limit))

    def erase(self, user_id: str) -> Erased:
        return self._answer(erase(user_id))

    def _answer(self, call: Call[T]) -> T:
        return call.read(self._send(call).json())

    def _send(self, call: Call[Any], *, stream: bool = False) -> httpx.Response:
        """The response, once there is one that is no error. Raises Refused or httpx.TransportError."""
        tries = _Tries(self._retries, self._budget)
        while True:
            error: Exception
            try:
                response = self._http.send(self._http.build_request(**call.arguments(tries.timeout_s())), stream=stream)
                if response.is_success:
                    return response
                error, failure = refusal(response.status_code, response.read()), failure_of(response)
            except httpx.TransportError as broke:
                error, failure = broke, Failure()
            pause = tries.pause_s(failure)
            if pause is None:
                raise error
            time.sleep(pause)


class AsyncClient:
    """As `Client`, for one event loop."""

    def __init__(self, url: str, *, api_key: str | None = None, retries: Retries | None = None, budget: RetryBudget | None = None) -> None:
        self._http = httpx.AsyncClient(base_url=url, headers=_headers(api_key))
        self._retries, self._budget = retries or Retries(), budget or RetryBudget()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def recommend(self, user_id: str, behaviours: Sequence[Behaviour] | None = None, **options: Any) -> Answer:
        return await self._answer(recommend(user_id, behaviours, **options))

    async def stream(
        self, user_id: str, behaviours: Sequence[Behaviour] | None = None, **options: Any
    ) -> AsyncGenerator[Stage | Item | Answer, None]:
        """As `Client.stream`; close it where you leave it early (contextlib.aclosing), so that the cluster stops computing."""
        call = stream(user_id, behaviours, **options)
        response = await self._send(call, stream=True)
        try:
            async for line in response.aiter_lines():
                yield call.read(line)
        finally:
            await response.aclose()

    async def rank(self, user_id: str, candidates: Sequence[str], behaviours: Sequence[Behaviour] | None = None, **options: Any) -> Answer:
        return await self._answer(rank(user_id, candidates, behaviours, **options))

    async def send_events(self, events: Sequence[Event], *, idempotency_key: str | None = None) -> Stored:
        return await self._answer(send_events(events, idempotency_key=idempotency_key))

    async def history(self, user_id: str, limit: int | None = None) -> History:
        return await self._answer(history(user_id, limit))

    async def erase(self, user_id: str) -> Erased:
        return await self._answer(erase(user_id))

    async def _answer(self, call: Call[T]) -> T:
        return call.read((await self._send(call)).json())

    async def _send(self, call: Call[Any], *, stream: bool = False) -> httpx.Response:
        """As `Client._send`."""
        tries = _Tries(self._retries, self._budget)
        while True:
            error: Exception
            try:
                response = await self._http.send(self._http.build_request(**call.arguments(tries.timeout_s())), stream=stream)
                if response.is_success:
                    return response
                error, failure = refusal(response.status_code, await response.aread()), failure_of(response)
            except httpx.TransportError as broke:
                error, failure = broke, Failure()
            pause = tries.pause_s(failure)
            if pause is None:
                raise error
            await asyncio.sleep(pause)


def main(url: str = "http://127.0.0.1:8000") -> None:
    key = os.environ.get("GENREC_API_KEY")
    with Client(url, api_key=key) as genrec:
        popular = [item.item_id for item in genrec.recommend("nobody", [], k=4).items]
        seen = [Behaviour(item_id, 1_700_000_000 + hour * 3600) for hour, item_id in enumerate(popular[:2])]
        _show("recommend", genrec.recommend("ada", seen, k=3))
        for part in genrec.stream("ada", seen, k=3):
            print(f"stream: {type(part).__name__}")
        _show("rank", genrec.rank("ada", popular, seen))
        user = f"client-{uuid.uuid4().hex[:8]}"
        print("send_events:", genrec.send_events([Event(user, item_id) for item_id in popular[:2]]))
        print("history:", [event.item_id for event in genrec.history(user).events])
        print("erase:", genrec.erase(user))
        try:
            genrec.recommend("ada", seen, k=0)
        except Refused as refused:
            print(f"refused: {refused.field} = {refused.value}: {refused.cure}")
    asyncio.run(_at_once(url, key, seen))


async def _at_once(url: str, key: str | None, seen: Sequence[Behaviour]) -> None:
    async with AsyncClient(url, api_key=key) as genrec:
        answers = await asyncio.gather(*(genrec.recommend(f"user-{number}", seen, k=3) for number in range(8)))
        print(f"at once: {len(answers)} answers")
        async with aclosing(genrec.stream("ada", seen, k=3)) as parts:
            print("stream:", [type(part).__name__ async for part in parts][-1])


def _show(call: str, answer: Answer) -> None:
    print(f"{call}: {', '.join(f'{item.title} {item.score:.3f}' for item in answer.items)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
