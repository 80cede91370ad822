"""How much of users' states an encoder keeps, and in which store."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from cluster.errors import ConfigError, UnknownChoice
from cluster.options import whole
from integrations.hstu.config import HSTUConfig
from integrations.hstu.state.eviction import PolicyName
from integrations.hstu.state.paged import PagedStates
from integrations.hstu.state.pool import Allocate, PagePool, Plane
from integrations.hstu.state.pooled import PooledStates
from integrations.hstu.state.radix import RadixStates

StateDtype = Literal["fp32", "fp16"]
StoreName = Literal["paged", "radix"]
DEFAULT_BYTES = 256 << 20
KEEP_FROM = 32
"""From so many events on, histories are kept. With 8 layers of 512 that pays from 8 events on, and halves the time at 32; with 2 layers of
50 it pays from 128 on, and costs 0.2 ms at 32.
"""
KEEP_FROM_ON_GPU = 1024
"""The same of an engine that has its users' rows on a GPU, which encodes a short history as fast as a long one. With `triton` on an H200,
8 layers of 512 answer users with one new event each in 0.5 to 0.7 of the time where they have 2,048 events, and in 0.9 to 1.1 of it with
1,024; smaller models with 200 or 512 events take 1.6 to 10 times as long as without. With `torch` on an H100, 1 to 32 users take 0.4 to
1.0 of the time with 8 layers of 512 and 1,024 events, 0.8 to 1.3 with 4 of 256 and 512, 1.2 to 1.8 with 2 of 50 and 200. TensorRT's was
not measured.
"""
_DTYPES = {"fp32": "float32", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class StateOptions:
    """What an encoder keeps of its users. Raises UnknownChoice or ConfigError at an invalid value.

    `bytes`: the budget, 0 keeps nothing. `dtype`: fp16 holds twice as many users and moves a state by up to 1e-3. `store`: a page table for
    each user (paged), or a prefix tree (radix); `policy` evicts its leaves. `keep_from`: shorter histories are encoded whole.
    """

    bytes: int = DEFAULT_BYTES
    dtype: StateDtype = "fp32"
    store: StoreName = "paged"
    policy: PolicyName = "lru"
    keep_from: int = KEEP_FROM

    def __post_init__(self) -> None:
        for what, name, choices in (
            ("state_dtype", self.dtype, StateDtype),
            ("state_store", self.store, StoreName),
            ("state_policy", self.policy, PolicyName),
        ):
            if name not in get_args(choices):
                raise UnknownChoice(what, name, get_args(choices))
        if self.store == "paged" and self.policy != "lru":
            raise ConfigError(
                f"state_store 'paged' evicts the least recently used user, not by {self.policy!r}; set state_store to 'radix'"
            )
        if whole("state_bytes", self.bytes) < 0 or whole("keep_from", self.keep_from) < 1:
            raise ConfigError(f"state_bytes ({self.bytes}) must be at least 0 and keep_from ({self.keep_from}) at least 1")

    def keeps_of(self, max_history: int) -> bool:
        """Whether anything can be kept for a model that sees so many events of a history."""
        return bool(self.bytes) and max_history >= self.keep_from


def pays_from(*, on_gpu: bool) -> int:
    """From how many events on keeping a history pays. `on_gpu`: whether the engine has its users' rows on a GPU."""
    return KEEP_FROM_ON_GPU if on_gpu else KEEP_FROM


def make_store(config: HSTUConfig, options: StateOptions, *, with_states: bool, allocate: Allocate = np.empty) -> PooledStates:
    """An empty store for users of this model. Raises ConfigError where the budget is smaller than a page.

    `with_states`: also each row's final state, for a decoder that is prompted with them. `allocate` as in PagePool.
    """
    planes = state_planes(config, np.dtype(_DTYPES[options.dtype]), with_states=with_states)
    try:
        pool = PagePool(planes, budget_bytes=options.bytes, allocate=allocate)
    except ValueError as error:
        raise ConfigError(f"state_bytes ({options.bytes}) is too small for this model: {error}; 0 keeps nothing") from error
    return PagedStates(pool) if options.store == "paged" else RadixStates(pool, policy=options.policy, copies=True)


def state_planes(config: HSTUConfig, dtype: "np.dtype[Any]", *, with_states: bool) -> dict[str, Plane]:
    """A row's K (stored transposed) and V in every layer, and the user's state after it."""
    planes = {
        "kt": Plane((config.layers, config.heads, config.attention_dim), axis=3, dtype=dtype),
        "v": Plane((config.layers, config.heads, config.linear_dim), axis=2, dtype=dtype),
    }
    return {**planes, "states": Plane((config.dim,), axis=0, dtype=dtype)} if with_states else planes
