"""How fast kept K and V are read, by page size, at a small and a large model: `python -m benchmarks.state_reads`."""

from collections.abc import Iterator
from statistics import median
from time import perf_counter

import numpy as np
import numpy.typing as npt

from integrations.hstu.state.pool import PagePool, Plane

SHAPES = {"2 layers, 1 head, dim 50, 200 rows": (2, 1, 50, 200), "8 layers, 8 heads, dim 64, 2048 rows": (8, 8, 64, 2048)}
REPEATS = 15


def read_seconds(shape: tuple[int, int, int, int], page_rows: int, dtype: npt.DTypeLike) -> tuple[float, int]:
    """Median seconds to read a user's K and V from pages scattered in a pool three times as large, and how many bytes that makes."""
    layers, heads, dim, rows = shape
    planes = {"kt": Plane((layers, heads, dim), 3, dtype), "v": Plane((layers, heads, dim), 2, dtype)}
    count = -(-rows // page_rows)
    page_bytes = page_rows * sum(plane.row_bytes for plane in planes.values())
    pool = PagePool(planes, budget_bytes=3 * count * page_bytes, page_rows=page_rows)
    pages = [int(page) for page in np.random.default_rng(0).permutation(pool.alloc(pool.pages) or [])]
    for page in pages:
        pool.write(page, 0, {name: np.ones(plane.stacked(page_rows), dtype) for name, plane in planes.items()})
    out = {name: np.zeros(plane.stacked(rows), np.float32) for name, plane in planes.items()}
    return median(_seconds(pool, pages[:count], rows, out)), sum(array.nbytes for array in out.values())


def _seconds(pool: PagePool, pages: list[int], rows: int, out: dict[str, npt.NDArray[np.float32]]) -> Iterator[float]:
    for _ in range(REPEATS):
        start = perf_counter()
        pool.gather(pages, rows, out)
        yield perf_counter() - start


def main() -> None:
    for name, shape in SHAPES.items():
        for dtype in (np.float32, np.float16):
            for page_rows in (16, 64, 128):
                seconds, size = read_seconds(shape, page_rows, dtype)
                print(f"{name}, {dtype.__name__}, pages of {page_rows}: {seconds * 1e3:.3f} ms, {size / seconds / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
