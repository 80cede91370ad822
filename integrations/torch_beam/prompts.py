"""Keys and values of users' prompts, kept in a prefix tree: a prompt whose first rows were seen before is computed from there on only.

    prompt -> rows' keys -> tree: how many rows are kept -> read into the memory -> compute the rows behind them -> keep those, too

A row's key and value depend on the prompt's rows up to it, counted from the first one. So a beginning is valid exactly where what is
projected to its rows is the same, bit for bit. The last row changes with the time of the request (the state and the pause after it do),
so it is always computed and never kept. Any error here costs time and no answer: the prompts are computed whole, and
one that cannot be kept is answered all the same.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from cluster.errors import ConfigError
from cluster.semantic_ids import SemanticIds
from cluster.values import GenerateRequest, Int64Array, UserState
from integrations.decoder.soft_prompt import pause_codes, rating_codes
from integrations.hstu.state.eviction import PolicyName
from integrations.hstu.state.keeper import StateKeeper
from integrations.hstu.state.pool import PagePool, Plane
from integrations.hstu.state.radix import RadixStates
from integrations.hstu.state.store import Held, Owner, Rows
from integrations.torch_beam.continuations import Continuations, prefill
from integrations.torch_beam.llama import Llama, Memory

PAGE_ROWS = 16  # at a quarter of the usual prompt, little of a page is empty, and a few pages are read quickly
_STORED = {torch.float32: np.float32, torch.bfloat16: np.int16}  # numpy has no bfloat16: its bits
COMPLAINT = "kept prompts could not be used; such prompts are computed whole"


class KeptPrompts(StateKeeper):
    """The kept prompts of one decoder. `model_hash`: of all that turns a prompt into keys and values. `prefill` is for one thread, the rest
    for any.

    `policy`: which leaf of the tree is evicted, lru, lfu or fifo. `share_users`: users of a tenant share whole pages of equal rows. Raises
    ConfigError at a budget that holds no row.
    """

    def __init__(self, llama: Llama, model_hash: str, budget_bytes: int, policy: PolicyName, *, share_users: bool = False) -> None:
        self._llama = llama
        sizes, dtype = llama.sizes, _STORED[llama.dtype]
        planes = {str(layer): Plane((2, sizes.heads, sizes.head_dim), 0, dtype) for layer in range(sizes.layers)}
        row_bytes = sum(plane.row_bytes for plane in planes.values())
        if budget_bytes < row_bytes:
            raise ConfigError(
                f"prompt_bytes ({budget_bytes}) holds no row of a prompt ({row_bytes} bytes); raise it, or set 0: nothing is kept"
            )
        pool = PagePool(planes, budget_bytes=budget_bytes, page_rows=min(PAGE_ROWS, budget_bytes // row_bytes))
        super().__init__(RadixStates(pool, policy=policy, share_users=share_users), model_hash, COMPLAINT)

    def prefill(self, requests: Sequence[GenerateRequest], prompts: Sequence[Tensor], spare: int) -> tuple[Tensor, Memory]:
        """The output of each prompt's last row, normalised (U, H), and a memory of all rows with room for `spare` more; only rows that are
        not kept are computed. `prompts`: of the requests, each (T, H) with a T of its own.
        """
        owners, keys = [self._owner_of(one) for one in requests], [row_keys(one.state)[:-1] for one in requests]
        try:
            with self._matched(owners, keys) as held:
                said, memory = self._prefilled(held, prompts, spare)
                self._keep(held, keys, memory)
        except Exception as error:  # noqa: BLE001 - what is kept must not cost the answer that needs none of it
            self._give_up(filter(None, owners), error)
            return prefill(self._llama, prompts, spare)
        return said, memory

    @contextmanager
    def _matched(self, owners: Sequence[Owner | None], keys: Sequence[Int64Array]) -> Iterator[list[Held | None]]:
        """What is kept of each prompt; None where it has no user, so that nothing may be kept."""
        with ExitStack() as stack:
            pairs = zip(owners, keys, strict=True)
            yield [stack.enter_context(self.store.matched(owner, rows)) if owner else None for owner, rows in pairs]

    def _prefilled(self, held: Sequence[Held | None], prompts: Sequence[Tensor], spare: int) -> tuple[Tensor, Memory]:
        kept = [one.rows if one else 0 for one in held]
        if not any(kept):
            return prefill(self._llama, prompts, spare)
        memory = self._llama.memory([len(rows) for rows in prompts], spare)
        for user, one in enumerate(held):
            if one and one.rows:
                self._read(one, memory, user)
        new_NH = torch.cat([rows[count:] for rows, count in zip(prompts, kept, strict=True)]).to(self._llama.device)
        said = self._llama.prefill_behind(memory, torch.tensor(kept, device=self._llama.device), new_NH)
        if not said.isfinite().all():
            raise ValueError("what follows kept rows of a prompt is NaN or infinite")
        return said, memory

    def _read(self, held: Held, memory: Memory, user: int) -> None:
        rows = [layer[user, : held.rows] for layer in memory.layers]
        if self._llama.device.type == "cpu":
            held.read(_arrays(rows))
            return
        copies = [torch.empty_like(one, device="cpu") for one in rows]
        held.read(_arrays(copies))
        for one, copied in zip(rows, copies, strict=True):
            one.copy_(copied)

    def _keep(self, held: Sequence[Held | None], keys: Sequence[Int64Array], memory: Memory) -> None:
        for user, (one, rows) in enumerate(zip(held, keys, strict=True)):
            if one and one.rows < len(rows):
                try:
                    new = [layer[user, one.rows : len(rows)].cpu() for layer in memory.layers]
                    self.store.commit(one, rows, one.rows, _arrays(new))
                except Exception as error:  # noqa: BLE001 - the prompt is computed, and other users' rows are sound
                    self._give_up([one.owner], error)

    def _owner_of(self, request: GenerateRequest) -> Owner | None:
        return self._owner(request.tenant, request.user_id) if request.user_id else None


class KeptContinuations(Continuations):
    """`Continuations` of the requests' prompts; their first rows are read from `kept` as far as it holds them."""

    def __init__(  # noqa: PLR0917 - its parent's, and two more
        self, llama: Llama, ids: SemanticIds, prompts: Sequence[Tensor], widest: int, kept: KeptPrompts, requests: Sequence[GenerateRequest]
    ) -> None:
        super().__init__(llama, ids, prompts, widest)
        self._kept, self._requests = kept, requests

    def _prompted(self) -> Tensor:
        said_UH, self._memory = self._kept.prefill(self._requests, self._prompts, self._widest * (self._ids.levels - 1))
        self._used = self._memory.prompt_rows
        return said_UH.unsqueeze(1)


def row_keys(user: UserState) -> Int64Array:
    """The inputs of each row of the soft prompt, bit for bit: item, rating, pause until the next event or the request, and state.

    (T, K), K being how many int64 these take.
    """
    count, dim = user.states.shape
    keys = np.zeros((count, 3 + (dim + 1) // 2), np.int64)
    keys[:, :3] = np.stack([user.sequence.items, rating_codes(user.sequence), pause_codes(user.sequence)], axis=1)
    keys[:, 3:].view(np.float32)[:, :dim] = user.states
    return keys


def _arrays(layers: Sequence[Tensor]) -> Rows:
    """Arrays over the tensors' own memory, by plane."""
    bits = [layer.view(torch.int16) if layer.dtype == torch.bfloat16 else layer for layer in layers]
    return cast(Rows, {str(index): cast("np.ndarray[Any, np.dtype[Any]]", layer.numpy()) for index, layer in enumerate(bits)})
