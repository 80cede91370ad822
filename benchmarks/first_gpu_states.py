"""Cases of first_gpu.py: what DeviceTier gives back of users' states, bit by bit, and how fast, beside a copy from the host, in turns."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.devices import wall_ms
from benchmarks.guarded import Case, Finding, Label, NotHere
from benchmarks.models import MODELS
from cluster.values import Int64Array
from integrations.hstu.config import HSTUConfig
from integrations.hstu.state.copies import pinned
from integrations.hstu.state.device import DeviceHeld, DeviceTier
from integrations.hstu.state.pool import Plane
from integrations.hstu.state.pooled import PooledStates
from integrations.hstu.state.rows import identities
from integrations.hstu.state.store import Owner
from integrations.hstu.state_options import StateOptions, StoreName, make_store

SMALL = HSTUConfig(items=50, dim=16, heads=2, attention_dim=12, linear_dim=8)
USERS, LONGEST, ON_DEVICE = 8, 200, 3
"""Users, the events of the longest history, and for how many such users there is room on the device; the host has room for all."""
STORES: tuple[StoreName, ...] = ("paged", "radix")
MODEL = "c1"


def cases(device: str, *, quick: bool) -> Iterator[Case]:
    requests = 100 if quick else 1000
    for store in STORES:
        label = Label(f"DeviceTier over {store} states", f"{requests} random histories of {USERS} users", "fp32")
        yield Case(label, partial(_requests, device, store, requests))
    yield Case(Label("DeviceTier, read, time", f"model {MODEL}, 1 user", "fp32"), partial(_read_speed, device))


def _store(config: HSTUConfig, name: StoreName, device: str, rows: int) -> PooledStates:
    options = StateOptions(2 * rows * _row_bytes(config), store=name)
    return make_store(config, options, with_states=True, allocate=np.empty if device == "cpu" else pinned)


def _row_bytes(config: HSTUConfig) -> int:
    return 4 * (config.layers * config.heads * (config.attention_dim + config.linear_dim) + config.dim)


@dataclass
class _Users:
    """Histories that grow, and lose their end by chance."""

    rng: np.random.Generator
    events: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def next(self, step: int) -> tuple[Owner, Int64Array]:
        """The user of this step, and the rows of their history."""
        user = f"user {self.rng.integers(USERS)}"
        events = self.events.setdefault(user, [])
        if self.rng.random() < 0.15:
            del events[self.rng.integers(len(events) + 1) :]
        events.extend((int(self.rng.integers(1, 50)), 100 * step + more) for more in range(self.rng.integers(1, 40)))
        self.events[user] = events[-LONGEST:]
        return Owner("model/shop", user), identities(*zip(*self.events[user], strict=True))


def _requests(device: str, store: StoreName, requests: int) -> Finding:
    """Each asks for the rows that are kept, which are compared with what was committed, and commits the new ones."""
    host = _store(SMALL, store, device, USERS * LONGEST)
    tier = DeviceTier(host, device, ON_DEVICE * 2 * LONGEST * _row_bytes(SMALL))
    users, errors = _Users(np.random.default_rng(0)), [0.0]
    for step in range(requests):
        owner, rows = users.next(step)
        with tier.matched(owner, rows) as held:
            expected = _contents(rows, host.pool.planes, device)
            kept = held.planes() if isinstance(held, DeviceHeld) else {}
            parts = {name: one.narrow(host.pool.planes[name].axis, 0, held.rows) for name, one in expected.items()}
            errors += [float((kept[name] - part).abs().amax()) for name, part in parts.items() if part.numel()]
            new = {name: one.narrow(host.pool.planes[name].axis, held.rows, len(rows) - held.rows) for name, one in expected.items()}
            tier.commit(held, rows, held.rows, new)
        if step % 50 == 7:
            tier.forget(owner)
    tier.flush()
    found, there = tier.statistics(), host.statistics()
    tier.clear()
    tier.close()
    if left := tier.statistics().used_bytes + tier.statistics().device_bytes:
        raise RuntimeError(f"{left} bytes are still in use after everything was forgotten")
    note = (
        f"{found.hit_rows} of {found.asked_rows} rows were kept; {found.evictions} users evicted, {there.hit_rows} rows found on the host"
    )
    return Finding(float(np.max(errors)), 0.0, note=note)


def _contents(rows: Int64Array, planes: dict[str, Plane], device: str) -> dict[str, Any]:
    """Tensors of what an encoder would make of these rows, computed on the device: whole numbers that depend on all rows up to each."""
    sums = torch.from_numpy(np.cumsum(rows @ np.array([1, 3, 7])) % 97).to(device)
    made = {}
    for name, plane in planes.items():
        one = torch.arange(int(np.prod(plane.shape)), device=device).view(plane.shape)
        made[name] = (one + sums.view(-1, *[1] * one.dim())).movedim(0, plane.axis).float()
    return made


def _read_speed(device: str) -> Finding:
    if device == "cpu":
        raise NotHere("on a CPU the states are in the memory that is computed with")
    sizes = MODELS[MODEL]
    length = sizes["max_history"]
    config = HSTUConfig.model_validate({**sizes, "max_length": length + 11})
    host = _store(config, "paged", device, length)
    tier = DeviceTier(host, device, 2 * length * _row_bytes(config))
    owner, rows = Owner("model/shop", "ann"), identities(np.arange(length), np.arange(length))
    with tier.matched(owner, rows) as held:
        tier.commit(held, rows, 0, _contents(rows, host.pool.planes, device))
    tier.flush()
    staging = {name: pinned(plane.stacked(len(rows)), np.float32) for name, plane in host.pool.planes.items()}

    def from_device() -> object:
        with tier.matched(owner, rows) as held:
            return {name: tensor.clone() for name, tensor in held.planes().items()} if isinstance(held, DeviceHeld) else None

    def from_host() -> object:
        with host.matched(owner, rows) as held:
            held.read(staging)
        return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in staging.items()}

    ms, eager_ms = wall_ms(from_device, from_host, rounds=31)
    tier.close()
    return Finding(ms=ms, eager_ms=eager_ms, note=f"a copy of {len(rows)} rows; eager: from the host's pages")
