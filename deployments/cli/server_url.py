"""The URL of a server as an option of a command."""

import httpx

from cluster.errors import ConfigError


def server_url(url: str) -> httpx.URL:
    """The URL of a server. Raises ConfigError where no server can have it."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url!r} is no URL: {error}; give one as http://127.0.0.1:8000") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > 65535:
        raise ConfigError(f"{url!r} is no URL of a server; give one as http://127.0.0.1:8000")
    return parsed
