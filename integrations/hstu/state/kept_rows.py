"""What engines that keep their users' rows have in common: the rows' owners, how users are forgotten, what happens where that fails."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from integrations.hstu.state.packed import Layout, layout_of, packed, unpacked
from integrations.hstu.state.store import Owner, StateStore

_LOG = logging.getLogger(__name__)


class KeptRows:
    """The rows of one model's users, in `store`. `model` tells it from every other whose rows the store may hold.

    `complaint`: what the log says, once for each kind of error, where they could not be used.
    """

    def __init__(self, store: StateStore, model: str, complaint: str) -> None:
        self.store, self._model, self._complaint = store, model, complaint
        self._failures, self._said = 0, set[str]()

    def close(self) -> None:
        """Give back what is held beside memory."""

    def forget(self, tenant: str, user: str) -> int:
        """Drop all that is kept of the user: how many rows."""
        return self._forgotten(lambda: self.store.forget(self._owner(tenant, user)))

    def forget_tenant(self, tenant: str) -> int:
        """The same of all users of a tenant."""
        return self._forgotten(lambda: self.store.forget_namespace(self._namespace(tenant)))

    def clear(self) -> int:
        """The same of all users."""
        return self._forgotten(self.store.clear)

    def hand_over(self) -> Iterator[tuple[str, str, bytes]]:
        """(tenant, user, rows) of all users that can be copied, the most recently used first."""
        layout, model = self._layout(), self._namespace("")
        for owner in self.store.hottest():
            rows, planes = self.store.copy(owner)
            if len(rows) and owner.namespace.startswith(model):
                yield owner.namespace.removeprefix(model), owner.user, packed(layout, rows, planes)

    def take_over(self, tenant: str, user: str, data: bytes) -> int:
        """Keep what `hand_over` gave in another process, where it goes on from what is kept here: the bytes that takes. Raises ValueError
        at rows of another model or layout, and at what is damaged.
        """
        return self.store.adopt(self._owner(tenant, user), *unpacked(data, self._layout()))

    def statistics(self) -> dict[str, float]:
        """The store's statistics, and how often what it holds could not be used (`failures`)."""
        return {name: float(value) for name, value in (asdict(self.store.statistics()) | {"failures": self._failures}).items()}

    def _layout(self) -> Layout:
        return layout_of(self._model, self.store.planes)

    def _forgotten(self, drop: Callable[[], int]) -> int:
        before = self.store.statistics().rows
        drop()
        return before - self.store.statistics().rows

    def _give_up(self, owners: Iterable[Owner], error: Exception) -> None:
        """Forget the users, since what is kept of them may be the cause; say so once for each kind of error, not with every request."""
        kind = type(error).__name__
        self._failures += 1
        if kind not in self._said:
            self._said.add(kind)
            _LOG.error("%s (said once for %s)", self._complaint, kind, exc_info=error)
        for owner in owners:
            self.store.forget(owner)

    def _owner(self, tenant: str, user: str) -> Owner:
        return Owner(self._namespace(tenant), user)

    def _namespace(self, tenant: str) -> str:
        return f"{self._model}/{tenant}"
