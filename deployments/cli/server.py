"""A server as the commands of its operator ask it: its URL as an option, and calls with errors that say what to do."""

from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from cluster.errors import ConfigError

MessageT = TypeVar("MessageT", bound=BaseModel)
ASK_WITHIN_S = 10.0
GONE = (502, 503, 504)
"""How a proxy says that what it stands before does not answer."""
NO_GENREC = "is not a genrec of this version; give the address of a gateway: --url"


def server_url(url: str) -> httpx.URL:
    """The URL of a server. Raises ConfigError where no server can have it."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url!r} is no URL: {error}; give one as http://127.0.0.1:8000") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > 65535:
        raise ConfigError(f"{url!r} is no URL of a server; give one as http://127.0.0.1:8000")
    return parsed


def operated(url: str, key: str | None) -> httpx.Client:
    """A client of the server at `url` with an operator's key, where there is one. Raises ConfigError where `url` is none."""
    return httpx.Client(base_url=server_url(url), headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=ASK_WITHIN_S)


def ask(client: httpx.Client, path: str, kind: type[MessageT]) -> MessageT:
    """The server's answer to GET `path`. Raises ConfigError where there is none of that kind."""
    url = str(client.base_url).rstrip("/")
    try:
        response = client.get(path)
        response.raise_for_status()
        return kind.model_validate(response.json())
    except httpx.HTTPStatusError as error:
        raise ConfigError(f"{url}{path} answered {error.response.status_code}{_told(error.response)}") from error
    except httpx.HTTPError as error:
        raise ConfigError(f"no server answers at {url} ({error}); give the service's --url") from error
    except (ValueError, ValidationError) as error:
        raise ConfigError(f"{url}{path} {NO_GENREC}") from error


def _told(refused: httpx.Response) -> str:
    """What follows a refusal's status: the cure, or what genrec or Serve's proxy says; pages of other servers tell nothing else."""
    kind = refused.headers.get("content-type", "")
    if refused.status_code in (401, 403):
        return "; give an operator's key as GENREC_API_KEY"
    if "problem+json" in kind or (refused.is_server_error and "text/plain" in kind):
        return f"; {refused.text[:200]}"
    if refused.status_code in GONE:
        return ": the server behind this address does not answer now; try again later, or see its log"
    return f" and {NO_GENREC}"
