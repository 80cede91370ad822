"""Whether a web page of another site may have made a call. A browser sends any page's POST to any address that it reaches, also to a
service on its own machine, and tells where the page comes from: `Origin`. A page with a name that was made to resolve to this service (DNS
rebinding) has an origin like the service's own; the name in `Host` gives it away.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

_SHOWN = 100


def foreign_page(headers: Mapping[str, str], hosts: Sequence[str]) -> str | None:
    """Why the call is taken for a foreign page's by its `Origin`, and the cure; None where it is not. `hosts`: names of this service."""
    host, origin = headers.get("host", ""), headers.get("origin")
    page = None if origin is None else origin.partition("://")[2].lower()
    if page is None or (page and page == host.lower()) or _is_ours(_name(page), hosts):
        return None
    return f"a page of {origin!r} may not operate this service at {host!r}; if it is its own page, name its host in gateway.hosts"


@lru_cache(maxsize=100)
def foreign_host(host: str, hosts: tuple[str, ...]) -> str | None:
    """Why a call to this host, as `Host` has it, may be that of a page with a name which was made to resolve to this service, and the cure;
    None where it is not. A key rules such a page out: this is for callers that need none.
    """
    name = _name(host)
    if _is_local(name) or _is_ours(name, hosts):
        return None
    shown = host[:_SHOWN]
    cure = "call it by an address or localhost, name it in gateway.hosts, or call with a key of gateway.api_keys"
    return f"this service is not known as {shown!r}; {cure}"


def _is_ours(name: str, hosts: Sequence[str]) -> bool:
    return name in (one.lower() for one in hosts)


def _name(netloc: str) -> str:
    """The host's name without the port, in lower case."""
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return netloc


def _is_local(name: str) -> bool:
    """Whether no foreign site can have this name: an address, or a name without a dot, as localhost; or "", which no browser sends."""
    try:
        return bool(ip_address(name))
    except ValueError:
        return "." not in name
