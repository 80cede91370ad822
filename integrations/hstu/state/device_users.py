"""The users with rows on the accelerator, one tensor for each plane, within a byte budget."""

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.values import Int64Array
from integrations.hstu.state.lru_list import Link, LruList
from integrations.hstu.state.pool import PagePool, Plane
from integrations.hstu.state.rows import NO_ROWS
from integrations.hstu.state.store import Owner

if TYPE_CHECKING:
    import torch


class DeviceUser(Link):
    """One user's rows: their identities, and for each plane a tensor with room for `capacity` rows. In the LRU list while no request holds
    it.

    `ready`: the event at the end of the copies that fill the tensors; None where they are filled.
    """

    __slots__ = ("capacity", "holders", "identities", "kept", "owner", "planes", "ready", "size", "tensors")

    def __init__(self, owner: Owner, planes: Mapping[str, Plane], tensors: dict[str, "torch.Tensor"], capacity: int) -> None:
        super().__init__()
        self.owner, self.planes, self.tensors, self.capacity = owner, planes, tensors, capacity
        self.size = sum(tensor.nbytes for tensor in tensors.values())
        self.identities = NO_ROWS
        self.holders = 0
        self.kept = False
        self.ready: Any = None

    def rows_from(self, start: int, stop: int) -> dict[str, "torch.Tensor"]:
        return {name: tensor.narrow(self.planes[name].axis, start, stop - start) for name, tensor in self.tensors.items()}

    def write(self, start: int, rows: Mapping[str, "torch.Tensor"]) -> None:
        for name, part in rows.items():
            axis = self.planes[name].axis
            self.tensors[name].narrow(axis, start, part.shape[axis]).copy_(part)


class DeviceUsers:
    """Users by owner, the least recently used first to go; their rows are always fp32. Not for two threads at a time.

    `counts`: how often what happened, as in StateStatistics.
    """

    def __init__(self, pool: PagePool, device: "torch.device", budget_bytes: int) -> None:
        self.pool, self.planes, self.device, self.budget_bytes = pool, pool.planes, device, budget_bytes
        self._users: dict[Owner, DeviceUser] = {}
        self._idle: LruList[DeviceUser] = LruList()
        self.used_bytes = 0
        self.counts: Counter[str] = Counter()

    def get(self, owner: Owner) -> DeviceUser | None:
        return self._users.get(owner)

    def owners(self) -> list[Owner]:
        return list(self._users)

    def make(self, owner: Owner, identities: Int64Array, rows: int) -> DeviceUser:
        """A user with room for so many rows, in place of the owner's present one; kept if there is room after evicting idle users."""
        import torch  # noqa: PLC0415

        self.drop(owner)
        capacity = self.pool.pages_for(rows) * self.pool.page_rows
        shapes = {name: plane.stacked(capacity) for name, plane in self.planes.items()}
        self._make_room(sum(map(prod, shapes.values())) * torch.float32.itemsize)  # first: the device may have no more than the budget
        tensors = {name: torch.empty(shape, dtype=torch.float32, device=self.device) for name, shape in shapes.items()}
        user = DeviceUser(owner, self.planes, tensors, capacity)
        user.identities = identities.copy()
        if self.used_bytes + user.size > self.budget_bytes:
            self.counts["rejected"] += 1
            return user
        user.kept = True
        self._users[owner] = user
        self.used_bytes += user.size
        return user

    def _make_room(self, size: int) -> None:
        while self.used_bytes + size > self.budget_bytes and (oldest := self._idle.pop()) is not None:
            del self._users[oldest.owner]
            self.used_bytes -= oldest.size
            self.counts["evictions"] += 1

    def replace(self, old: DeviceUser, common: int, rows: int) -> DeviceUser:
        """A new user with the first `common` rows of the old one and room for `rows`; the holder holds it in place of the old one."""
        user = self.make(old.owner, old.identities[:common], rows)
        user.write(0, old.rows_from(0, common))
        self.hold(user)
        self.let_go(old)
        return user

    def hold(self, user: DeviceUser) -> None:
        user.holders += 1
        if user.linked:
            self._idle.remove(user)

    def let_go(self, user: DeviceUser) -> None:
        """Release a holder's user. A user without rows is dropped, and a dropped one gives its memory back with its last holder."""
        user.holders -= 1
        if user.holders or not user.kept:
            return
        if self._users.get(user.owner) is not user:
            self.used_bytes -= user.size
        elif len(user.identities):
            self._idle.push(user)
        else:
            self.drop(user.owner)

    def drop(self, owner: Owner) -> int:
        """Take the owner's user out; returns how many rows it had. Its memory is free once its last holder releases it."""
        user = self._users.pop(owner, None)
        if user is None:
            return 0
        if user.linked:
            self._idle.remove(user)
        if not user.holders:
            self.used_bytes -= user.size
        return len(user.identities)

    def clear(self) -> None:
        for owner in self.owners():
            self.drop(owner)

    def load(self, user: DeviceUser, name: str, pages: list[int], rows: int) -> None:
        """Copy the first rows of the host's pages into the user's tensor: pages whole, and put side by side on the device."""
        import torch  # noqa: PLC0415

        plane = self.planes[name]
        if not pages:
            return
        staged = torch.empty((len(pages), *plane.stacked(self.pool.page_rows)), dtype=self.host_dtype(name), device=self.device)
        for at, page in enumerate(pages):
            staged[at].copy_(torch.from_numpy(self.pool.view(name, page)), non_blocking=True)
        joined = staged.movedim(0, plane.axis).flatten(plane.axis, plane.axis + 1)
        user.tensors[name].narrow(plane.axis, 0, rows).copy_(joined.narrow(plane.axis, 0, rows))

    def host_dtype(self, name: str) -> "torch.dtype":
        import torch  # noqa: PLC0415

        return torch.from_numpy(np.empty(0, self.planes[name].dtype)).dtype

    def tensors(self, new: Mapping[str, Any]) -> dict[str, "torch.Tensor"]:
        import torch  # noqa: PLC0415

        return {name: torch.as_tensor(array, device=self.device) for name, array in new.items()}

    def rows_of(self, new: Mapping[str, "torch.Tensor"]) -> int:
        """How many rows these tensors have, by their shapes. Raises ValueError unless they are the planes, all with equally many."""
        return self.pool.rows_in({name: tuple(tensor.shape) for name, tensor in new.items()})

    def narrow(self, name: str, tensor: "torch.Tensor", start: int) -> "torch.Tensor":
        axis = self.planes[name].axis
        return tensor.narrow(axis, start, tensor.shape[axis] - start)

    def count(self, rows: int, asked: int) -> None:
        self.counts.update({"hits" if rows else "misses": 1, "hit_rows": rows, "asked_rows": asked})

    def rows(self) -> dict[Owner, int]:
        """The owners that have rows here, and how many."""
        return {owner: rows for owner, user in self._users.items() if (rows := len(user.identities))}
