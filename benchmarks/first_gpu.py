"""What holds on the first GPU, and how fast: every kernel and engine against float64 and eager PyTorch, with a table as the last output.

    python -m benchmarks.first_gpu [--quick] [--only PATTERN] [--limit-s 300] [--out first_gpu]

Where there is no GPU it runs on the CPU, the Triton kernels in Triton's interpreter; what needs a GPU is a row that says so. A case that
crashes, hangs or leaves the device unusable is a row, too, and costs the other cases nothing (guarded.py). The exit status is 1 where a
case has failed. It needs torch, triton, transformers, pydantic and msgspec, but no Ray; ONNX Runtime and vLLM are tried where they are
installed. Where compute-sanitizer is on the PATH, two kernels run once more and it watches them.
`--quick`: small sizes, for a CPU. `--only`: the cases with this text in their row. `--out`: also writes OUT.md and OUT.json.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.guarded import Group, Row, run
from benchmarks.reporting import Machine, table

COLUMNS = ("case", "sizes", "type", "error", "limit", "ms", "eager ms", "times as fast", "", "note")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    load, began = os.getloadavg()[0], time.perf_counter()
    rows = []
    for row in run(groups(options), options.limit_s):
        rows.append(row)
        print(f"{time.perf_counter() - began:6.1f} s  {row.verdict:8} {row.label}  {row.note}", file=sys.stderr)
    text = "\n".join(report(rows, load))
    if options.out:
        options.out.with_suffix(".md").write_text(text)
        options.out.with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(text)
    return int(not rows or any(row.verdict == "failed" for row in rows))


def groups(options: argparse.Namespace) -> list[Group]:
    quick = {"quick": options.quick}
    return [
        Group("kernels", "benchmarks.first_gpu_kernels:cases", quick, options.only),
        Group("models", "benchmarks.first_gpu_models:cases", quick, options.only),
        Group("generators", "benchmarks.first_gpu_generators:cases", quick, options.only),
        Group("sanitizer", "benchmarks.first_gpu_sanitizer:cases", {"limit_s": options.limit_s}, options.only),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--only", default="", help="the cases with this text in their row")
    parser.add_argument("--limit-s", type=float, default=300.0, help="what one case may take")
    parser.add_argument("--out", type=Path, help="also write OUT.md and OUT.json")
    return parser


def report(rows: Sequence[Row], load: float) -> Iterator[str]:
    """Markdown: where it ran, how the cases ended, the table."""
    yield from ("# A first run on a GPU", "", *Machine.now("benchmarks.first_gpu", (), load).lines())
    counted = Counter(row.verdict for row in rows)
    yield f"{len(rows)} cases: {', '.join(f'{counted[verdict]} {verdict}' for verdict in ('ok', 'failed', 'not run'))}."
    yield ""
    yield from table(COLUMNS, map(_cells, rows))


def _cells(row: Row) -> list[str]:
    found = row.finding
    speedup = found.eager_ms / found.ms if found.ms and found.eager_ms else None
    figures = ((found.error, ".1e"), (found.limit, ".0e"), (found.ms, ".3f"), (found.eager_ms, ".3f"), (speedup, ".2f"))
    note = " ".join((row.note or found.note).split())[:300].replace("|", "/")
    return [
        row.label.what,
        row.label.sizes,
        row.label.dtype,
        *("" if figure is None else format(figure, form) for figure, form in figures),
        row.verdict,
        note,
    ]


if __name__ == "__main__":
    sys.exit(main())
