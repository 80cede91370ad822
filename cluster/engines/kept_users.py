"""The states that an engine keeps of users, on their way to an engine of the same kind in another process; see `hand_over` in
cluster.protocols.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

CHUNK_BYTES = 4 << 20
"""The bytes in one call, unless a single user's state is larger: the receiver's event loop is busy with them for a few milliseconds."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptUser:
    """A user's state. `data`: in the engine's own format. `kind`: names model version, engine and options; states of another kind are not
    used.
    """

    kind: str
    tenant: str
    user: str
    data: bytes = field(repr=False)
    digest: bytes = field(repr=False)

    @classmethod
    def sealed(cls, kind: str, tenant: str, user: str, data: bytes) -> "KeptUser":
        return cls(kind, tenant, user, data, _digest(kind, tenant, user, data))

    @property
    def intact(self) -> bool:
        return self.digest == _digest(self.kind, self.tenant, self.user, self.data)

    @property
    def erased_by(self) -> tuple[tuple[str | None, str | None], ...]:
        """The (tenant, user) of all erasures that erase this state: of the user, of all the tenant's users, of all users."""
        return (self.tenant, self.user), (self.tenant, None), (None, None)


def kind_of_engine(version: str, import_string: str, options: Mapping[str, Any]) -> str:
    """The kind of an engine's states, as a digest: options may hold what no other process should know."""
    said = json.dumps([version, import_string, options], sort_keys=True, default=str)
    return blake2b(said.encode(), digest_size=16).hexdigest()


def hands_over(backend: object) -> bool:
    return hasattr(backend, "hand_over") and hasattr(backend, "take_over")


def sealed(backend: Any, kind: str) -> Iterator[KeptUser]:
    """The states that a backend keeps, the hottest first. Where it raises, the error is logged, and there are no more."""
    try:
        for tenant, user, data in backend.hand_over():
            yield KeptUser.sealed(kind, tenant, user, data)
    except Exception:  # a foreign engine may raise anything, and what it keeps can be computed anew
        logger.warning("an engine's states could not all be handed over", exc_info=True)


def chunk_of(states: Iterator[KeptUser]) -> list[KeptUser]:
    """The next states, until they have CHUNK_BYTES or more; empty where there are no more."""
    chunk, size = list[KeptUser](), 0
    while size < CHUNK_BYTES and (one := next(states, None)):
        chunk.append(one)
        size += len(one.data)
    return chunk


class StateCapacity(NamedTuple):
    """The bytes that an engine has left for states that it takes over, and those that it keeps of a user on average."""

    left: int
    each: int = 0

    def less(self, state: KeptUser) -> "StateCapacity":
        """The room after one more state. A short history may take as much memory as a longer one, so a state counts as an average user."""
        return self._replace(left=self.left - max(self.each, len(state.data)))


def capacity_for(kept: Mapping[str, float]) -> StateCapacity:
    """The room of an engine with these figures for states that it takes over: its free memory, or half of all, at the cost of the least
    recently used users; not more, as states that are handed over are no hotter than its own.
    """
    budget, used = kept.get("budget_bytes", float(1 << 62)), kept.get("used_bytes", 0.0)
    return StateCapacity(int(max(budget / 2, budget - used)), int(used / max(1.0, kept.get("users", 0.0))))


def take_over(backend: Any, kind: str, states: Iterable[KeptUser]) -> int:
    """Have the engine keep these states; returns how many it took. A state that is damaged, or of another kind, is refused and logged; that
    user's next request then takes the time of a whole encoding.
    """
    taken, refused, why = 0, 0, ""
    for one in states:
        try:
            taken += bool(_taken(backend, kind, one))
        except Exception as error:  # noqa: BLE001 - a foreign engine may raise anything, and the user's state can be computed anew
            refused, why = refused + 1, why or f"{error}"
    if refused:
        logger.warning("%d states that were handed over are not used: %s", refused, why)
    return taken


def _taken(backend: Any, kind: str, one: KeptUser) -> Any:
    if one.kind != kind:
        raise ValueError("it is of another version, engine or configuration")
    if not one.intact:
        raise ValueError("it is damaged: its digest is another one")
    return backend.take_over(one.tenant, one.user, one.data)


def _digest(kind: str, tenant: str, user: str, data: bytes) -> bytes:
    digest = blake2b(json.dumps([kind, tenant, user]).encode(), digest_size=16)
    digest.update(data)
    return digest.digest()
