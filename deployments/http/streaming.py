"""Stream an answer over HTTP as server-sent events or as lines of JSON, as the Accept header asks.

    stage, item, item, ..., stage, item, ..., stage, answer

Events that are there at once are sent together, as each message costs far more than its content. `answer` holds what the plain response
does. It alone is final: items before it need not be in it. An error before the first event is a plain response; after it, an `error`
event with a problem as in RFC 9457 ends the stream.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.titled_items import TitledItems
from cluster.values import AnswerPart, Recommendation, ScoredItem, StageReport
from deployments.http import problems
from deployments.http.answer_json import answer_json, beside_the_loop, item_json, stage_json
from deployments.http.callers import Place

SSE, NDJSON = "text/event-stream", "application/x-ndjson"
MOST_RANGES, MOST_PARAMETERS = 32, 8
"""How many media ranges of an Accept header are looked at, and parameters of each: a header may have tens of thousands."""
_JSON = ("application/json", "application/*", "*/*")
_HEADERS = {"X-Accel-Buffering": "no"}  # keeps nginx from collecting events
_ITEM = '{"item_id": "50", "title": "Star Wars (1977)", "attributes": {}, "score": -1.9, "stage": "generate", "explanation": null}'
_LINE_ENDS = {"\x85".encode(): rb"\u0085", "\u2028".encode(): rb"\u2028", "\u2029".encode(): rb"\u2029"}
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `Accept: text/event-stream` or `application/x-ndjson`, events of the types stage, item, answer "
        "and error, of which `answer` holds the same JSON and is the last, unless `error` is. "
        "Only `answer` is final: an item that came before need not be in its list",
        "content": {
            SSE: {"schema": {"type": "string"}, "example": f"event: item\ndata: {_ITEM}\n\n"},
            NDJSON: {"schema": {"type": "string"}, "example": f'{{"type": "item", "data": {_ITEM}}}\n'},
        },
    }
}


def wanted(accept: str) -> str | None:
    """The streaming format that an Accept header prefers to plain JSON, None if it prefers none; the first named wins a tie. Its first
    MOST_RANGES media ranges count.
    """
    if accept in ("", *_JSON):
        return None
    ranges = accept.split(",", MOST_RANGES)[:MOST_RANGES]
    liked = [(quality, name) for quality, name in map(_weighed, ranges) if quality > 0 and name in (SSE, NDJSON, *_JSON)]
    _, best = max(liked, key=lambda one: (one[0], "*" not in one[1]), default=(0.0, ""))
    return best if best in (SSE, NDJSON) else None


async def respond(parts: AsyncGenerator[AnswerPart, None], media_type: str, path: str, place: Place) -> StreamingResponse:
    """A response that sends `parts` as they come, and tells `place` when all are computed, or that they broke off. Raises the error of the
    first part.
    """
    first = await anext(parts)
    return _EventStream(_events(parts, first, media_type, path, place), media_type, place)


class _EventStream(StreamingResponse):
    """Takes `events` as fast as they come, however slowly the client reads: no more than one answer waits to be sent. Closes `events` when
    the client leaves, so that engines stop.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], media_type: str, place: Place) -> None:
        super().__init__(self._chunks(), media_type=media_type, headers=_HEADERS)
        self._events, self._place = events, place
        self._ready, self._news = list[bytes](), asyncio.Event()
        self._taking: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await super().__call__(scope, receive, send)
            finally:
                if self._taking is not None:
                    if not self._taking.done():
                        self._place.broke()
                    self._taking.cancel()
                    await asyncio.wait([self._taking])

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """All events that are there, joined, each time that the client has taken the ones before."""
        self._taking = asyncio.create_task(self._take())
        while self._ready or not self._taking.done():
            await self._news.wait()
            self._news.clear()
            chunk = b"".join(self._ready)
            self._ready.clear()
            if chunk:
                yield chunk
        self._taking.result()

    async def _take(self) -> None:
        size = 0
        try:
            async for event in self._events:
                size += len(event)
                self._ready.append(event)
                self._news.set()
            self._place.computed(size, streamed=True)
        finally:
            self._news.set()


async def _events(
    parts: AsyncGenerator[AnswerPart, None], first: AnswerPart, media_type: str, path: str, place: Place
) -> AsyncGenerator[bytes, None]:
    written = _as_sse if media_type == SSE else _as_line
    async with aclosing(parts):
        try:
            yield await _events_of(first, written)
            async for part in parts:
                yield await _events_of(part, written)
        except Exception as error:  # noqa: BLE001 - the status has been sent: the last event tells the error
            problem = problems.problem_of(path, error)
            place.broke(problem.status)
            yield written("error", problem.model_dump_json().encode())


async def _events_of(part: AnswerPart, written: Callable[..., bytes]) -> bytes:
    """The part's events, joined."""
    items: Sequence[ScoredItem] = part.items if isinstance(part, Recommendation) else part if isinstance(part, Sequence) else ()
    return await beside_the_loop(items, lambda: _joined(part, written))


def _joined(part: AnswerPart, written: Callable[..., bytes]) -> bytes:
    match part:
        case StageReport():
            return written("stage", stage_json(part))
        case ScoredItem():
            return written("item", item_json(part))
        case TitledItems():
            return written("item", *[one.encode() for one in part.each_as_json()])
        case Recommendation():
            return written("answer", answer_json(part))
        case _:
            return written("item", *[item_json(one) for one in part])


def _as_sse(event: str, *data: bytes) -> bytes:
    return _framed(b"event: %s\ndata: " % event.encode(), data, b"\n\n")


def _as_line(event: str, *data: bytes) -> bytes:
    return _framed(b'{"type":"%s","data":' % event.encode(), data, b"}\n")


def _framed(before: bytes, data: Sequence[bytes], after: bytes) -> bytes:
    """An event for each of the data, joined before it is looked for ends of lines: to look takes as long in a few bytes as in many."""
    return before + _on_one_line((after + before).join(data)) + after if data else b""


def _on_one_line(data: bytes) -> bytes:
    """The same JSON for clients that end a line wherever Python's str.splitlines does: JSON itself escapes all of these but three."""
    for character, escaped in _LINE_ENDS.items():
        data = data.replace(character, escaped)
    return data


def _weighed(media_range: str) -> tuple[float, str]:
    """``text/event-stream;q=0.5`` -> (0.5, "text/event-stream"); weight 0 if `q` is not a number."""
    name, *parameters = (part.strip().lower() for part in media_range.split(";", MOST_PARAMETERS + 1)[: MOST_PARAMETERS + 1])
    weight = next((one.removeprefix("q=") for one in parameters if one.startswith("q=")), "1")
    try:
        return float(weight), name
    except ValueError:
        return 0.0, name
