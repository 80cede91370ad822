"""Tell a backend to forget a user, by the narrowest of its methods that is wide enough; see cluster.protocols."""

from collections.abc import Mapping
from typing import Any

from cluster.errors import BackendFailed

FORGETTING = ("forget", "forget_tenant", "forget_everything")


def forget(backend: object, tenant: str | None, user: str | None) -> int:
    """Forget this user, all the tenant's users where `user` is None, or all users where `tenant` is None too. Returns how much was
    forgotten, as the backend counts it.

    Raises BackendFailed where the backend keeps something, and has no method that is wide enough; else what the method raises.
    """
    wanted: list[tuple[str, tuple[str, ...]]] = [("forget_everything", ())]
    if tenant is not None:
        wanted.insert(0, ("forget_tenant", (tenant,)))
        if user is not None:
            wanted.insert(0, ("forget", (tenant, user)))
    for name, given in wanted:
        if hasattr(backend, name):
            return int(getattr(backend, name)(*given) or 0)
    if any(hasattr(backend, name) for name in (*FORGETTING, "kept")):
        raise BackendFailed(f"it keeps something of users, and has no {' or '.join(name for name, _ in wanted)}")
    return 0


def kept(backend: object) -> dict[str, float]:
    """The backend's figures of what it keeps of users; empty where it gives none."""
    method = getattr(backend, "kept", None)
    figures: Mapping[str, Any] = (method() if method else None) or {}
    return {name: float(figure) for name, figure in figures.items()}
