"""How fast event files are read: `python -m benchmarks.data_reading [--rows 1000000]` prints one JSON object.

Seeded synthetic events (20,000 users, 5,000 items) are written to a temporary directory in each format; each case is read in a
process of its own, once to warm up and then `--repeats` times. The baseline is a plain loop over csv.reader that only collects the fields.
"""

import argparse
import csv
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from integrations.datasets.movielens import read_ml_1m
from integrations.datasets.options import BadRows, ReadOptions
from integrations.datasets.table import read_table

BAD_EVERY = 1000


def main() -> None:
    arguments = argparse.ArgumentParser(description="Measure how fast event files are read.")
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--repeats", type=int, default=3)
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = write_cases(Path(folder), asked.rows)
        results = {name: in_own_process(read, path, asked.repeats, asked.rows) for name, (read, path) in cases.items()}
    print(json.dumps({"rows": asked.rows, "repeats": asked.repeats, **machine(), "cases": results}, indent=2))


def write_cases(folder: Path, rows: int) -> dict[str, tuple[Callable[[Path], Any], Path]]:
    """The files, and the reader of each."""
    random = np.random.default_rng(0)
    columns = {
        "user": random.integers(1, 20_001, rows),
        "item": (random.pareto(1.0, rows) * 50).astype(np.int64) % 5_000 + 1,
        "value": random.integers(1, 6, rows),
        "timestamp": 1_600_000_000 + random.integers(0, 10**8, rows),
    }
    lines = [",".join(map(str, row)) for row in zip(*(column.tolist() for column in columns.values()), strict=True)]
    header = ",".join(columns)
    (folder / "ml").mkdir()
    (folder / "ml" / "ratings.dat").write_text("\n".join(line.replace(",", "::") for line in lines))
    (folder / "ml" / "movies.dat").write_text("\n".join(f"{number}::Movie {number} (2000)::Drama" for number in range(1, 5_001)))
    (folder / "good.csv").write_text("\n".join([header, *lines]))
    pq.write_table(pa.table(columns), folder / "good.parquet")
    (folder / "one_bad.csv").write_text("\n".join([header, *lines[: rows // 2], "1,2,3,yesterday", *lines[rows // 2 + 1 :]]))
    lines[::BAD_EVERY] = ["1,2,3,yesterday"] * len(lines[::BAD_EVERY])
    (folder / "bad.csv").write_text("\n".join([header, *lines]))
    return {
        "baseline: csv.reader loop": (baseline, folder / "good.csv"),
        "csv": (read_table, folder / "good.csv"),
        "parquet": (read_table, folder / "good.parquet"),
        "ml-1m ratings.dat": (read_ml_1m, folder / "ml"),
        "csv, one bad row skipped": (read_skipping, folder / "one_bad.csv"),
        f"csv, every {BAD_EVERY}th row bad and skipped": (read_skipping, folder / "bad.csv"),
    }


def read_skipping(path: Path) -> Any:
    return read_table(path, ReadOptions(on_bad_row=BadRows(skip=True)))


def baseline(path: Path) -> Any:
    with path.open(newline="") as file:
        rows = csv.reader(file)
        next(rows)
        return [(user, item, float(value), int(timestamp)) for user, item, value, timestamp in rows]


def in_own_process(read: Callable[[Path], Any], path: Path, repeats: int, rows: int) -> dict[str, float]:
    """Median seconds, rows a second, and the process's peak memory in MB above what it had before reading."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seconds, megabytes = pool.apply(_measure, (read, path, repeats))
    median = statistics.median(seconds)
    return {"seconds": round(median, 3), "rows_per_s": round(rows / median), "peak_extra_mb": round(megabytes)}


def _measure(read: Callable[[Path], Any], path: Path, repeats: int) -> tuple[list[float], float]:
    before = _peak_mb()
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        read(path)
        seconds.append(time.perf_counter() - start)
    return seconds[1:], _peak_mb() - before


def _peak_mb() -> float:
    """Peak resident memory of this process: unlike getrusage's figure, this one is not handed down by the parent."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "numpy": np.__version__,
    }


if __name__ == "__main__":
    main()
