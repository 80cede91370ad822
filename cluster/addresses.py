"""Which addresses this machine alone can reach."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether what listens at `host` is reached from this machine only: a name or an address, IPv6 with brackets or without."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
