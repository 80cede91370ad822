"""A cache of next-token logits by the exact prefix: the same model, prompt and tokens give the same logits."""

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from torch import Tensor

ENTRY_BYTES, TOKEN_BYTES = 512, 8  # what an entry takes beside its logits: Python's objects, roughly, and its tokens


class Prefix(NamedTuple):
    """What the next token's logits depend on. A collision of digests would answer one prompt with another's logits: 16 bytes at least."""

    model_hash: str
    prompt_digest: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class CacheStatistics:
    hits: int
    misses: int
    evictions: int
    entries: int
    used_bytes: int
    budget_bytes: int


class LogitsCache:
    """Holds at most `budget_bytes`, and evicts the entry that was asked for longest ago. Logits are copied in and out (on their device), so
    a caller may mask them in place. Safe to share between threads.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes must be 0 (off) or more, not {budget_bytes}")
        self._budget_bytes = budget_bytes
        self._held: OrderedDict[Prefix, Tensor] = OrderedDict()
        self._lock = Lock()
        self._used_bytes = self._hits = self._misses = self._evictions = 0

    def __contains__(self, prefix: Prefix) -> bool:
        """Whether the prefix is held; counts as neither a hit nor a miss."""
        with self._lock:
            return prefix in self._held

    def get(self, prefix: Prefix) -> Tensor | None:
        with self._lock:
            held = self._held.get(prefix)
            if held is None:
                self._misses += 1
                return None
            self._hits += 1
            self._held.move_to_end(prefix)
        return held.clone()  # what is held is never written to, so it can be copied without the lock

    def put(self, prefix: Prefix, logits: Tensor) -> None:
        """Keep the logits, unless they are larger than the whole budget."""
        if size_bytes(prefix, logits) > self._budget_bytes:
            return
        held = logits.detach().clone()
        with self._lock:
            self._drop(prefix)
            self._held[prefix] = held
            self._used_bytes += size_bytes(prefix, held)
            while self._used_bytes > self._budget_bytes:
                self._drop(next(iter(self._held)))
                self._evictions += 1

    def clear(self) -> int:
        """Drop everything; returns how many entries that were. They do not count as evicted."""
        with self._lock:
            held, self._used_bytes = len(self._held), 0
            self._held.clear()
        return held

    def statistics(self) -> CacheStatistics:
        with self._lock:
            return CacheStatistics(self._hits, self._misses, self._evictions, len(self._held), self._used_bytes, self._budget_bytes)

    def _drop(self, prefix: Prefix) -> None:
        if (held := self._held.pop(prefix, None)) is not None:
            self._used_bytes -= size_bytes(prefix, held)


def size_bytes(prefix: Prefix, logits: Tensor) -> int:
    return logits.numel() * logits.element_size() + len(prefix.tokens) * TOKEN_BYTES + ENTRY_BYTES
