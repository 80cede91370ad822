"""The frames of the ZeroMQ front door: an HTTP exchange without HTTP.

    request   request id | call | headers | body        call: `POST /v1/recommend`, or `statistics`
    answer    request id | status | headers | body      status: `200`

A REQ socket's messages begin with an empty frame, which is sent back with the answer. Headers are a JSON object; the frames of headers and
body may be empty, and left out at the end.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import InvalidRequest
from deployments.http import for_haproxy
from deployments.http.exchange import HttpRequest, HttpResponse

STATISTICS = "statistics"
MOST_ID_BYTES = 256
HEADERS = ("authorization", "idempotency-key", "priority")
_CALL = re.compile(r"(GET|POST|DELETE) (/[!-~]{0,4095})")


@dataclass(frozen=True, slots=True)
class Envelope:
    """The frames before the call: a REQ socket's empty one, if any, and the call's id; `cut`: whether only the id's beginning is kept."""

    before: tuple[bytes, ...]
    request_id: bytes
    cut: bool = False

    def require_id(self) -> None:
        """Raises InvalidRequest where the id is cut, so that an answer could not carry it."""
        if self.cut:
            raise InvalidRequest(
                "request_id", f"has more than {MOST_ID_BYTES} bytes, of which an answer has the first alone; send a shorter one"
            )

    def frames(self, answered: HttpResponse) -> list[bytes]:
        told = {name: value for name, value in answered.headers.items() if name not in for_haproxy.IN_ANSWERS}
        return [*self.before, self.request_id, str(answered.status).encode(), json.dumps(told).encode(), answered.body]


def opened(frames: Sequence[bytes]) -> tuple[Envelope, Sequence[bytes]]:
    """The envelope of a message, and the frames in it. A message without a request id is answered with an empty one."""
    enveloped = 1 if frames and not frames[0] else 0
    rest = frames[enveloped:]
    request_id = rest[0] if rest else b""
    return Envelope(tuple(frames[:enveloped]), request_id[:MOST_ID_BYTES], len(request_id) > MOST_ID_BYTES), rest[1:]


def understood(frames: Sequence[bytes]) -> HttpRequest:
    """The request in the frames after the request id. Raises InvalidRequest that names the frame."""
    if not 1 <= len(frames) <= 3:
        cure = "send: request id, call, headers, body; the last two may be left out"
        raise InvalidRequest("frames", f"are {len(frames) + 1} (without an envelope); {cure}")
    call, headers, body = [*frames, b"", b""][:3]
    if call == STATISTICS.encode():
        return HttpRequest(STATISTICS, "", _headers(headers), body)
    said = _CALL.fullmatch(call.decode("ascii", "replace"))
    if said is None:
        shown = call[:100].decode("ascii", "backslashreplace")
        raise InvalidRequest("call", f"is {shown!r}; send a method and a path, as `POST /v1/recommend`, or `{STATISTICS}`")
    return HttpRequest(said[1], said[2], _headers(headers), body)


def _headers(frame: bytes) -> dict[str, str]:
    try:
        headers = json.loads(frame or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("headers", f'are no JSON ({error}); send an object, as {{"priority": "u=1"}}') from None
    if not isinstance(headers, dict):
        raise InvalidRequest("headers", 'are no JSON object; send one, as {"priority": "u=1"}, or an empty frame')
    for name, value in headers.items():
        field = f"headers.{name[:100]}".encode("utf-8", "backslashreplace").decode()  # JSON cannot carry half a surrogate pair back
        if name not in HEADERS:
            raise InvalidRequest(field, f"is no header of this door; it takes {', '.join(HEADERS)}, in lower case")
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise InvalidRequest(field, "must be a text of printable ASCII characters")
    return headers
