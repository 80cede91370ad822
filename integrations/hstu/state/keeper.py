"""The common part of engines that keep users' rows: the rows' owners, how users are forgotten, and the treatment of errors."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from integrations.hstu.state.packed import Layout, layout_of, packed, unpacked
from integrations.hstu.state.store import Owner, StateStore

_LOG = logging.getLogger(__name__)


class StateKeeper:
    """The rows of one model's users, in `store`. `model`: a name that no other model with rows in the store has.

    `complaint`: the log's message, once for each kind of error, where rows could not be used. `not_looked_up`: how many requests named no
    user, or had a history too short to be kept.
    """

    def __init__(self, store: StateStore, model: str, complaint: str) -> None:
        self.store, self._model, self._complaint = store, model, complaint
        self._failures, self._said = 0, set[str]()
        self.not_looked_up = 0

    def close(self) -> None:
        """Give back the store's resources other than memory."""

    def forget(self, tenant: str, user: str) -> int:
        """Drop all rows that are kept of the user; returns how many."""
        return self.store.forget(self._owner(tenant, user))

    def forget_tenant(self, tenant: str) -> int:
        """As `forget`, for all users of a tenant."""
        return self.store.forget_namespace(self._namespace(tenant))

    def clear(self) -> int:
        """As `forget`, for all users."""
        return self.store.clear()

    def new_rows(self, tenant: str, user: str, length: int) -> int:
        """How many of so many rows are not kept, if the history goes on from what is kept of the user; all of them where more is kept, as
        its window has moved.
        """
        kept = self.store.kept_rows(self._owner(tenant, user))
        return length - kept if kept <= length else length

    def hand_over(self) -> Iterator[tuple[str, str, bytes]]:
        """(tenant, user, rows) of all users that can be copied, the most recently used first."""
        layout, model = self._layout(), self._namespace("")
        for owner in self.store.hottest():
            rows, planes = self.store.copy(owner)
            if len(rows) and owner.namespace.startswith(model):
                yield owner.namespace.removeprefix(model), owner.user, packed(layout, rows, planes)

    def take_over(self, tenant: str, user: str, data: bytes) -> int:
        """Keep rows that `hand_over` gave in another process, where they go on from those kept here; returns the bytes that they take.
        Raises ValueError at rows of another model or layout, and at damaged ones.
        """
        return self.store.adopt(self._owner(tenant, user), *unpacked(data, self._layout()))

    def statistics(self) -> dict[str, float]:
        """The store's statistics, how often its rows could not be used (`failures`), and `not_looked_up`."""
        own = {"failures": self._failures, "not_looked_up": self.not_looked_up}
        return {name: float(value) for name, value in (asdict(self.store.statistics()) | own).items()}

    def _layout(self) -> Layout:
        return layout_of(self._model, self.store.planes)

    def _give_up(self, owners: Iterable[Owner], error: Exception) -> None:
        """Forget the users, as their rows may have caused the error; log it once for each kind of error, not at every request."""
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
