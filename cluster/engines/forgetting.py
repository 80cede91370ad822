"""Tell a backend to forget users, by the narrowest of its methods that are wide enough; see cluster.protocols."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from cluster.errors import BackendFailed

FORGETTING = ("forget", "forget_tenant", "forget_everything")
Scope: TypeAlias = tuple[str | None, str | None]
"""What an erasure erases: (tenant, user); all of the tenant's users where the user is None, all users where the tenant is None too."""
_Call: TypeAlias = tuple[str, tuple[str, ...]]
_EVERYTHING: _Call = ("forget_everything", ())


def forget(backend: object, users: Iterable[Scope]) -> int:
    """Forget these users, each method called once for what is the same to it: one that forgets everything is called once for all of them.
    Returns how much was forgotten, as the backend counts it.

    Raises BackendFailed where the backend keeps something, and has no method that is wide enough; else what the method raises.
    """
    calls = dict.fromkeys(call for tenant, user in users if (call := _narrowest(backend, tenant, user)))
    if _EVERYTHING in calls:
        calls = {_EVERYTHING: None}
    return sum(int(getattr(backend, name)(*given) or 0) for name, given in calls)


def _narrowest(backend: object, tenant: str | None, user: str | None) -> _Call | None:
    """The method to call, and with what; None where the backend keeps nothing. Raises BackendFailed."""
    wanted = [_EVERYTHING]
    if tenant is not None:
        wanted.insert(0, ("forget_tenant", (tenant,)))
        if user is not None:
            wanted.insert(0, ("forget", (tenant, user)))
    for name, given in wanted:
        if hasattr(backend, name):
            return name, given
    if any(hasattr(backend, name) for name in (*FORGETTING, "kept")):
        raise BackendFailed(f"it keeps something of users, and has no {' or '.join(name for name, _ in wanted)}")
    return None


def kept(backend: object) -> dict[str, float]:
    """The backend's figures of what it keeps of users; empty where it gives none."""
    method = getattr(backend, "kept", None)
    figures: Mapping[str, Any] = (method() if method else None) or {}
    return {name: float(figure) for name, figure in figures.items()}
