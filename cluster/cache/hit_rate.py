"""How many of the latest lookups were hits."""


class HitRateWindow:
    """The hit rate of the last `size` lookups; None before there were `enough` of them (default: a quarter of the window)."""

    def __init__(self, size: int = 1000, *, enough: int | None = None) -> None:
        if size < 1:
            raise ValueError(f"a window of lookups needs a size of 1 or more, not {size}")
        self.size = size
        self.enough = min(size, max(1, size // 4) if enough is None else enough)
        self._latest = bytearray(size)  # a ring: 1 for a hit
        self._recorded = 0
        self._hits = 0

    def record(self, hit: bool) -> None:
        place = self._recorded % self.size
        self._hits += hit - self._latest[place]
        self._latest[place] = hit
        self._recorded += 1

    @property
    def rate(self) -> float | None:
        counted = min(self._recorded, self.size)
        return self._hits / counted if counted >= self.enough else None
