"""Host memory that is used again, call after call: large fresh memory may cost page faults, more than the copy that fills it.

    pool = BufferPool()
    items = pool.array("items", (32, 200), np.int64)      # not cleared; valid until "items" is asked for again

Sizes come in tiers, powers of two, so that batches of all sizes soon find their memory there.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Allocate: TypeAlias = Callable[[int, Any], Any]
"""Makes memory for so many numbers of a type: an array, or a tensor where the engine's memory is not the host's."""
SMALLEST = 64


@dataclass(slots=True)
class BufferStatistics:
    """`hits`: arrays for which memory was there; `misses`: for which it had to be made or grown; `held_bytes`: now; `peak_bytes`: the most
    since the start.
    """

    hits: int = 0
    misses: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0


class BufferPool:
    """A buffer for each name, which grows to the largest tier that was asked for. Not for two threads."""

    def __init__(self, allocate: Allocate = np.empty) -> None:
        self._allocate = allocate
        self._held: dict[str, Any] = {}
        self._statistics = BufferStatistics()

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Any:
        """An array of this shape at the start of the buffer of that name, which always is of this type."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is not None and len(held) >= size:
            self._statistics.hits += 1
        else:
            held = self._grown(name, size, dtype)
        return held[:size].reshape(shape)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Any:
        """As `array`, filled with 0."""
        out = self.array(name, shape, dtype)
        out[...] = 0
        return out

    def copied(self, name: str, source: Any) -> Any:
        """As `array`, holding the numbers of `source` in one piece."""
        out = self.array(name, source.shape, source.dtype)
        out[...] = source
        return out

    def clear(self) -> None:
        """Free all memory, and with it what was last put there."""
        self._held = {}
        self._statistics.held_bytes = 0

    def statistics(self) -> dict[str, float]:
        """The statistics as plain numbers, by ``buffer_hits`` and so on."""
        return {f"buffer_{name}": float(value) for name, value in asdict(self._statistics).items()}

    def _grown(self, name: str, size: int, dtype: npt.DTypeLike) -> Any:
        self._held.pop(name, None)
        held = self._held[name] = self._allocate(tier(size), dtype)
        figures = self._statistics
        figures.misses += 1
        figures.held_bytes = sum(int(one.nbytes) for one in self._held.values())
        figures.peak_bytes = max(figures.peak_bytes, figures.held_bytes)
        return held


def tier(size: int) -> int:
    """The least power of two that is not below `size`, `SMALLEST` at least."""
    return int(max(SMALLEST, 1 << max(0, size - 1).bit_length()))
