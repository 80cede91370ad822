"""`genrec bench interleave`: two commands in turns, as whole processes, so that what else the machine does troubles both alike."""

import resource
import shlex
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from cluster.errors import ConfigError
from deployments.cli.bench_files import Measurement, Scenario, require_writable, these_versions, this_machine

Side: TypeAlias = Literal["baseline", "candidate"]
SIDES: tuple[Side, Side] = ("baseline", "candidate")
WALL_CLOCK, PROCESSOR = "wall_clock_s", "processor_s"
TAIL_CHARACTERS = 500


def interleave(
    *,
    baseline: Annotated[str, typer.Option(help="a command; its words are split as by a shell, but no shell runs it")],
    candidate: Annotated[str, typer.Option(help="the command that may be slower")],
    json_baseline: Annotated[Path, typer.Option(help="where the baseline's samples are written")],
    json_candidate: Annotated[Path, typer.Option(help="where the candidate's samples are written")],
    rounds: Annotated[int, typer.Option(help="measured runs of each; an even number, so that each goes first as often", min=1)] = 10,
    warm_up: Annotated[int, typer.Option(help="runs of each before those, not measured", min=0)] = 1,
    name: Annotated[str, typer.Option(help="what is measured; measurements of different names do not compare")] = "interleave",
) -> None:
    """Run two commands in turns (A B, B A, ...) and write how long each run took, for `genrec bench compare`."""
    commands: dict[Side, list[str]] = {"baseline": split("baseline", baseline), "candidate": split("candidate", candidate)}
    if json_baseline.resolve() == json_candidate.resolve():
        raise ConfigError(f"--json-baseline and --json-candidate both name {json_candidate}; give each side a file of its own")
    require_writable(json_baseline, json_candidate)
    samples = {side: {WALL_CLOCK: list[float](), PROCESSOR: list[float]()} for side in SIDES}
    for side in order(warm_up):
        timed(commands[side])
    for side in order(rounds):
        for metric, seconds in timed(commands[side]).items():
            samples[side][metric].append(seconds)
    for side, path in zip(SIDES, (json_baseline, json_candidate), strict=True):
        scenario = Scenario(name=name, source=shlex.join(commands[side]), warm_up=warm_up, iterations=rounds)
        Measurement(machine=this_machine(), versions=these_versions(), scenario=scenario, samples=samples[side]).write(path)
    Console().print(_table(samples))
    typer.echo(f"genrec bench compare {json_baseline} {json_candidate} says whether that differs")


def order(rounds: int) -> Iterator[Side]:
    """A B, B A, A B, ...: a machine that drifts meanwhile slows both sides alike."""
    for number in range(rounds):
        yield from SIDES if number % 2 == 0 else SIDES[::-1]


def timed(command: Sequence[str]) -> dict[str, float]:
    """Seconds of one run: wall clock, and processor time of all its processes. Raises ConfigError where it cannot start or fails."""
    used, began = _processor_s(), perf_counter()
    try:
        finished = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    except OSError as error:
        cure = "no shell runs it: write sh -c '...' for what needs one"
        raise ConfigError(f"{shlex.join(command)} cannot be run: {error}; {cure}") from error
    took = {WALL_CLOCK: perf_counter() - began, PROCESSOR: _processor_s() - used}
    if finished.returncode:
        said = finished.stderr.decode(errors="replace")[-TAIL_CHARACTERS:].strip()
        raise ConfigError(f"{shlex.join(command)} ended with status {finished.returncode}: {said or 'it said nothing'}")
    return {metric: round(seconds, 6) for metric, seconds in took.items()}


def split(side: str, command: str) -> list[str]:
    """The words of a command. Raises ConfigError where it has none, or a shell could not split it."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--{side} {command!r} is no command: {error}") from error
    if not words:
        raise ConfigError(f"--{side} is empty; give a command, such as 'python -m mine'")
    return words


def _processor_s() -> float:
    """Processor seconds of all child processes that have ended, and of their own."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _table(samples: Mapping[Side, Mapping[str, Sequence[float]]]) -> Table:
    """For each metric and side the median, the least and the most."""
    table = Table("", *SIDES)
    for metric in (WALL_CLOCK, PROCESSOR):
        rows = [samples[side][metric] for side in SIDES]
        table.add_row(metric, *(f"{statistics.median(row):.3f} ({min(row):.3f} to {max(row):.3f})" for row in rows))
    return table
