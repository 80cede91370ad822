"""The URL of a server, as a command is given it."""

import httpx

from cluster.errors import ConfigError


def server_url(url: str) -> httpx.URL:
    """Raises ConfigError where it is none that a server can have."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url!r} is no URL: {error}; give one as http://127.0.0.1:8000") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 0) > 65535:
        raise ConfigError(f"{url!r} is no URL of a server; give one as http://127.0.0.1:8000")
    return parsed
