"""Files that come with a package, as routes give them, under a policy by which their pages load nothing from elsewhere."""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources.abc import Traversable

from fastapi import Request, Response

HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked for by its ETag: modules import each other, so they must be of one version
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
"""The end of a file's name -> its type."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    media_type: str
    etag: str


def static_file(file: Traversable) -> StaticFile:
    """A file of a package, by the type that its name ends in. Raises KeyError where that is none of TYPES."""
    body = file.read_bytes()
    return StaticFile(body, TYPES[file.name.rpartition(".")[2]], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def giver_of(file: StaticFile) -> Callable[[Request], Awaitable[Response]]:
    """A route that answers with the file."""

    async def give(http: Request) -> Response:
        headers = {**HEADERS, "ETag": file.etag}
        if file.etag in http.headers.get("if-none-match", ""):  # proxies that compress make W/"..." of it
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media_type)

    return give
