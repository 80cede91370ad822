"""What the reports of benchmarks have in common: tables, where and how it was measured, where they are filed."""

import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from cluster.distributions import version_of

RESULTS = Path(__file__).parent / "results"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables that belong to a command, as they decide how fast it is."""


def dated(name: str, ending: str) -> Path:
    """Where results of today are filed: benchmarks/results/NAME_DATE.ENDING."""
    return RESULTS / f"{name}_{datetime.now(UTC):%Y-%m-%d}.{ending}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and with what it was measured; load averages are of one minute."""

    date: str
    processor: str
    cpus: int
    load_before: float
    load_after: float
    packages: Mapping[str, str]
    command: str

    @classmethod
    def now(cls, module: str, packages: Sequence[str], load_before: float) -> Self:
        """As it is at the end of the run. `packages`: distributions, named with their versions as far as they are installed. The command
        names no path: a machine's paths tell nothing.
        """
        asked = ["PATH" if os.sep in one else one for one in sys.argv[1:]]
        variables = [f"{name}={os.environ[name]}" for name in THREADS if name in os.environ]
        return cls(
            date=f"{datetime.now(UTC):%Y-%m-%d}",
            processor=processor(),
            cpus=os.cpu_count() or 0,
            load_before=round(load_before, 1),
            load_after=round(os.getloadavg()[0], 1),
            packages={"Python": platform.python_version(), **{one: told for one in packages if (told := version_of(one))}},
            command=shlex.join([*variables, "python", "-m", module, *asked]),
        )

    def lines(self) -> list[str]:
        load = f"load average before the run {self.load_before}, after it {self.load_after}"
        return [
            f"{self.processor}, {self.cpus} virtual CPUs, {load}.",
            f"{self.date}; {', '.join(' '.join(one) for one in self.packages.items())}.",
            f"Command: `{self.command}`",
            "",
        ]


def processor() -> str:
    """By name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
