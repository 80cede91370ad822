"""What is kept of users between requests: the state after their history, and which history that was."""

from collections import OrderedDict
from dataclasses import dataclass

from cluster.values import FloatArray, Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """The state (layers, 4, 1, C) and the logits (1, S) after these items."""

    items: Int32Array
    state: FloatArray
    logits: FloatArray


class KeptStates:
    """Of the `most` users that were asked for last; 0 keeps none. `statistics` may be called from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._read: OrderedDict[tuple[str, str], Read] = OrderedDict()
        self._hits = self._misses = self._bytes_each = 0

    def find(self, tenant: str, user: str, items: Int32Array) -> Read | None:
        """The state after a beginning of `items`; None where there is none, as when the window has moved on."""
        read = self._read.get((tenant, user)) if user else None
        if read is not None and len(read.items) <= len(items) and (read.items == items[: len(read.items)]).all():
            self._hits += 1
            self._read.move_to_end((tenant, user))
            return read
        self._misses += 1
        return None

    def keep(self, tenant: str, user: str, read: Read) -> None:
        if not user or not self._most:
            return
        self._read[tenant, user] = read
        self._read.move_to_end((tenant, user))
        self._bytes_each = read.state.nbytes + read.logits.nbytes
        while len(self._read) > self._most:
            self._read.popitem(last=False)

    def forget(self, tenant: str | None = None, user: str | None = None) -> int:
        """Of the user, of all the tenant's without one, of all users without either: how many states."""
        gone = [key for key in self._read if tenant in (None, key[0]) and user in (None, key[1])]
        for key in gone:
            del self._read[key]
        return len(gone)

    def statistics(self) -> dict[str, float]:
        figures = {"users": len(self._read), "used_bytes": len(self._read) * self._bytes_each, "hits": self._hits, "misses": self._misses}
        return {name: float(figure) for name, figure in figures.items()}
