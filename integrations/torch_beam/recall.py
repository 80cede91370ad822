"""Logits of prompts seen before are kept, and recalled without a pass through the model.

The logits of a level depend on the prompt and on the paths that are still followed, and on nothing else; both together are the key. A batch
is recalled or computed as a whole at each level: one new prompt costs a pass for all, so known and new prompts do not belong in one batch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cluster.values import Int64Array
from integrations.torch_beam.beam import Continues
from integrations.torch_beam.logits_cache import LogitsCache, Prefix


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt by its digest. `tenant` and `user_id` keep users apart, `model_hash` keeps versions apart."""

    model_hash: str
    digest: bytes

    @classmethod
    def of(cls, model_hash: str, tenant: str, rows_TH: Tensor, user_id: str = "") -> "Prompted":
        rows = np.ascontiguousarray(rows_TH.numpy())
        user = hashlib.sha256(repr((tenant, user_id, rows.shape)).encode()).digest()
        return cls(model_hash, hashlib.sha256(user + rows.tobytes()).digest())

    def prefix(self, tokens_WL: Int64Array) -> Prefix:
        """The key of these paths of L codes each."""
        return Prefix(self.model_hash, self.digest, (tokens_WL.shape[1], *tokens_WL.ravel().tolist()))


class Recalled:
    """A `model` that is asked only for logits that the cache does not hold; None among `prompts`: nothing is kept of that one.

    Logits that are NaN or infinite are not kept: a fault that passes would be recalled.
    """

    def __init__(self, model: Continues, cache: LogitsCache, prompts: Sequence[Prompted | None]) -> None:
        self._model, self._cache, self._prompts = model, cache, prompts
        self._tokens_UWL: Int64Array = np.zeros((len(prompts), 1, 0), np.int64)

    def branch(self, parents_UW: Int64Array, tokens_UW: Int64Array) -> None:
        before = np.take_along_axis(self._tokens_UWL, parents_UW[:, :, None], axis=1)
        self._tokens_UWL = np.concatenate([before, tokens_UW[:, :, None]], axis=2)
        self._model.branch(parents_UW, tokens_UW)

    def logits(self, level: int) -> Tensor:
        followed = [tokens_WL[tokens_WL.all(axis=1)] for tokens_WL in self._tokens_UWL]  # token 0 fills up
        prefixes = [prompt.prefix(tokens_WL) if prompt else None for prompt, tokens_WL in zip(self._prompts, followed, strict=True)]
        known = [held for prefix in prefixes if prefix and (held := self._cache.get(prefix)) is not None]
        if len(known) == len(prefixes):
            return _widened(known, self._tokens_UWL.shape[1])
        logits = self._model.logits(level)
        finite_UW = torch.isfinite(logits).all(dim=2).cpu()
        for prefix, paths, finite_W, tokens_WL in zip(prefixes, logits, finite_UW, followed, strict=True):
            if prefix and bool(finite_W[: len(tokens_WL)].all()):
                self._cache.put(prefix, paths[: len(tokens_WL)])
        return logits


def _widened(logits: Sequence[Tensor], width: int) -> Tensor:
    """(U, W, size), zeros where a user has fewer paths."""
    padded = pad_sequence(list(logits), batch_first=True)
    return torch.nn.functional.pad(padded, (0, 0, 0, width - padded.shape[1]))
