"""What backends that may keep their users' rows have in common: options, forgetting, figures."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from cluster.engines.buffers import BufferPool
from integrations.hstu.state.eviction import PolicyName
from integrations.hstu.state.keeper import StateKeeper
from integrations.hstu.state_options import DEFAULT_BYTES, StateDtype, StateOptions, StoreName, pays_from

KeptT = TypeVar("KeptT", bound=StateKeeper)


class StatefulBackend(Generic[KeptT]):
    """Takes the options of StateOptions. `_kept` is None while nothing is kept; `_pool`: the memory in which batches are put together."""

    _kept: KeptT | None = None
    _pool: BufferPool

    def __init__(
        self,
        *,
        state_bytes: int = DEFAULT_BYTES,
        state_dtype: StateDtype = "fp32",
        state_store: StoreName = "paged",
        state_policy: PolicyName = "lru",
        keep_from: int | None = None,
    ) -> None:
        """`keep_from`: by default from where keeping pays, on the device on which rows are kept. Raises UnknownChoice or ConfigError at an
        option that means nothing.
        """
        self._keep_from = keep_from
        least = pays_from(on_gpu=False) if keep_from is None else keep_from
        self._state_options = StateOptions(state_bytes, state_dtype, state_store, state_policy, least)
        self._pool = BufferPool()

    def _keeps_on_gpu(self) -> None:
        """For `load`, where the engine has its users' rows on a GPU."""
        if self._keep_from is None:
            self._state_options = replace(self._state_options, keep_from=pays_from(on_gpu=True))

    def close(self) -> None:
        if kept := self.__dict__.pop("_kept", None):
            kept.close()

    def forget(self, tenant: str, user: str) -> int:
        """Erase what is kept of the user; returns how many rows that was, one for each event."""
        self._clear()
        return self._kept.forget(tenant, user) if self._kept else 0

    def forget_tenant(self, tenant: str) -> int:
        """As `forget`, for all users of a tenant."""
        self._clear()
        return self._kept.forget_tenant(tenant) if self._kept else 0

    def forget_everything(self) -> int:
        """As `forget`, for all users."""
        self._clear()
        return self._kept.clear() if self._kept else 0

    def _clear(self) -> None:
        """Free the memory in which batches are put together: the last batch may be a forgotten user's."""
        self._pool.clear()

    def hand_over(self) -> Iterator[tuple[str, str, bytes]]:
        """(tenant, user, rows) of all users that can be copied, the most recently used first; nothing while nothing is kept."""
        return self._kept.hand_over() if self._kept else iter(())

    def take_over(self, tenant: str, user: str, data: bytes) -> int:
        """Keep rows that `hand_over` gave in another process; returns the bytes that they take. Raises ValueError at rows of another model
        or layout, and at damaged ones.
        """
        return self._kept.take_over(tenant, user, data) if self._kept else 0

    def kept(self) -> dict[str, float]:
        """Figures of what is kept, how often it served, and how often batches and their kept rows found memory to use again; empty while
        nothing is kept. May be called from any thread.
        """
        if (kept := self._kept) is None:
            return {}
        figures = kept.statistics()
        return figures | {name: figure + figures.get(name, 0.0) for name, figure in self._pool.statistics().items()}
