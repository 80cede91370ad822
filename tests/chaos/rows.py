"""What a row of the fault table demands and what came of it: claims with their bounds, figures, the load second by second."""

import json
import math
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.load import Results


@dataclass(frozen=True)
class Claim:
    """`value` must be within `least` and `most`. `timing`: it says how long something takes, which a busy machine may alter."""

    what: str
    value: float
    least: float = -math.inf
    most: float = math.inf
    timing: bool = False

    @property
    def held(self) -> bool:
        return self.least <= self.value <= self.most  # never so of nan

    def __str__(self) -> str:
        bounds = [f">= {self.least:g}" for _ in "_" if self.least > -math.inf] + [f"<= {self.most:g}" for _ in "_" if self.most < math.inf]
        return f"{self.what}: {self.value:.4g}, wanted {' and '.join(bounds)}"


@dataclass
class Row:
    """One run of one row. `fault` is the row's name in the report, `must` its demand in words."""

    fault: str
    must: str
    run: int = 0
    claims: list[Claim] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    marks: list[tuple[float, str]] = field(default_factory=list)
    windows: list[dict[str, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def claim(self, what: str, value: float, *, least: float = -math.inf, most: float = math.inf, timing: bool = False) -> None:
        self.claims.append(Claim(what, float(value), least, most, timing))

    def mark(self, at_s: float, what: str) -> None:
        """Something happened, so many seconds after the load began."""
        self.marks.append((round(at_s, 3), what))

    def took(self, results: Results, **figures: Any) -> None:
        """Keep what the load saw."""
        self.windows = results.windows()
        self.figures |= {"load": results.summary(), **figures}

    def refuted(self, *, timings: bool) -> list[str]:
        """The claims that do not hold; those about time only where `timings` count."""
        return [str(claim) for claim in self.claims if not claim.held and (timings or not claim.timing)]

    def write(self, directory: Path) -> None:
        """Add this run to the file of all runs."""
        directory.mkdir(parents=True, exist_ok=True)
        line = {
            **asdict(self),
            "claims": [{**asdict(claim), "held": claim.held} for claim in self.claims],
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB",
            "python": platform.python_version(),
        }
        with (directory / "rows.jsonl").open("a") as file:
            file.write(json.dumps(_plain(line)) + "\n")


@contextmanager
def recorded(row: Row, directory: Path, *, timings: bool) -> Iterator[Row]:
    """Write the row however the block ends, and then say which claims do not hold."""
    began = time.monotonic()
    try:
        yield row
    except BaseException as error:
        row.notes.append(f"the run broke off: {type(error).__name__}: {error}"[:500])
        raise
    finally:
        row.figures["seconds"] = round(time.monotonic() - began, 1)
        row.write(directory)
    assert row.claims, f"{row.fault}: nothing was claimed"
    assert not (refuted := row.refuted(timings=timings)), "\n  ".join([f"{row.fault}:", *refuted, f"the load: {row.figures.get('load')}"])


def _plain(value: Any) -> Any:
    """Without what JSON has no word for: nan and infinities as text."""
    match value:
        case dict():
            return {key: _plain(one) for key, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value
