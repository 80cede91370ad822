"""`genrec bench serve`: how fast a running genrec answers, and whether that is fast enough."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster.errors import ConfigError
from deployments.cli.bench_figures import Figures, Run, Target, check_targets, figures_of, parse_targets, samples_of
from deployments.cli.bench_files import Measurement, Scenario, require_writable, these_versions, this_machine
from deployments.cli.bench_processes import ServerProcesses
from deployments.cli.bench_requests import LENGTHS, SHAPES, ScenarioName, ShapeName, Workload

LENGTHS_TOLD = ", ".join(f"{name} {fewest}-{most}" for name, (fewest, most) in LENGTHS.items())
SHAPES_TOLD = ", ".join(f"{name} {shape.callers}" for name, shape in SHAPES.items())


@dataclass(frozen=True)
class Plan:
    """The server, and the numbers of callers and requests. `items`: ids of the catalogue; None: the server is asked for some."""

    url: str
    workload: Workload
    callers: int
    warm_up: int
    iterations: int
    items: Sequence[str] | None = None
    key: str | None = field(default=None, repr=False)
    timeout_s: float = 30.0


@dataclass(frozen=True)
class Measured:
    """A run, and which version of the model answered. `unseen`: why it is not known what the server's processes used, or empty."""

    run: Run
    model_version: str
    unseen: str


def serve(
    *,
    url: Annotated[str, typer.Option(help="a genrec that serves")] = "http://127.0.0.1:8000",
    json_: Annotated[Path, typer.Option("--json", help="where the samples and figures are written")],
    scenario: Annotated[ScenarioName, typer.Option(help=f"events of a history: {LENGTHS_TOLD}")] = "short",
    shape: Annotated[ShapeName, typer.Option(help=f"callers at a time: {SHAPES_TOLD}; long is one for longer")] = "single",
    model_dir: Annotated[Path | None, typer.Option(help="the model's directory, for items (default: items the server names)")] = None,
    warm_up: Annotated[int, typer.Option(help="requests that do not count", min=0)] = 50,
    iterations: Annotated[int | None, typer.Option(help="requests that count (default: the shape's)", min=1)] = None,
    target: Annotated[list[str], typer.Option(help="p99_ms=50,errors=0: limits, with commas; status 1 where one is missed")] = [],  # noqa: B006 - typer copies it
    users: Annotated[int, typer.Option(help="different users, asked for in turns", min=1)] = Workload.users,
    k: Annotated[int, typer.Option(help="items asked for", min=1)] = Workload.k,
    cache: Annotated[str, typer.Option(help="use kept answers, refresh them, or bypass them")] = Workload.cache,
    strategy: Annotated[str | None, typer.Option(help="unified, retrieval or generative (default: the server's)")] = None,
    timeout_s: Annotated[float, typer.Option(help="an answer that takes longer is an error", min=0.001)] = 30.0,
    key: Annotated[str | None, typer.Option(envvar="GENREC_API_KEY", help="API key, where the gateway wants one")] = None,
) -> None:
    """Measure a running genrec: latency, time to the first item, throughput, hits, stages, processor time and memory."""
    targets = parse_targets(target)
    require_writable(json_)
    workload = Workload(scenario, users, k, cache, strategy)
    items = None if model_dir is None else catalogue_items(model_dir)
    callers, usual = SHAPES[shape].callers, SHAPES[shape].iterations
    plan = Plan(url, workload, callers, warm_up, iterations or usual, items, key, timeout_s)
    with Console(stderr=True).status(f"{plan.warm_up} + {plan.iterations} requests by {plan.callers} callers at a time"):
        measured = measure(plan)
    figures = figures_of(measured.run)
    checked = check_targets(figures, targets)
    written(plan, f"serve/{scenario}/{shape}", measured, figures, checked).write(json_)
    Console().print(figures_table(figures, checked, f"{measured.model_version}, {scenario} histories, {shape}"))
    tell(figures, measured.unseen)
    if not all(one.met for one in checked.values()):
        raise typer.Exit(1)


def measure(plan: Plan) -> Measured:
    """Carry out the plan. Raises ConfigError where no server answers, or one that is no genrec."""
    return asyncio.run(_measured(plan))


async def _measured(plan: Plan) -> Measured:
    from deployments.cli import bench_driver as driver  # noqa: PLC0415 - only asking a server needs httpx

    async with driver.connect(plan.url, callers=plan.callers, key=plan.key, timeout_s=plan.timeout_s) as client:
        endpoint = driver.Endpoint(client)
        bodies = plan.workload.bodies(plan.items or await endpoint.item_ids())
        answer = await endpoint.check(bodies[0])
        server = ServerProcesses(plan.url)
        run = await driver.measure(
            endpoint, bodies, callers=plan.callers, warm_up=plan.warm_up, iterations=plan.iterations, look=server.look
        )
    if not any(seen.answer for seen in run.plain):
        problems = _counted(figures_of(run).problems)
        raise ConfigError(f"{plan.url} answered none of {len(run.plain)} requests: {problems}; see the server's log")
    return Measured(run, answer.model_version, server.reason)


def catalogue_items(model_dir: Path) -> list[str]:
    """The item ids of the model's catalogue. Raises BundleError where no version of the model is whole."""
    from cluster.bundle_store import BundleStore  # noqa: PLC0415 - only reading a catalogue needs pyarrow

    bundle, _ = BundleStore(model_dir).open_last_good()
    return [item.item_id for item in bundle.catalogue.items]


def written(plan: Plan, name: str, measured: Measured, figures: Figures, targets: Mapping[str, Target]) -> Measurement:
    """The measurement to write into a file."""
    workload = {**plan.workload.as_json(), "callers": plan.callers}
    return Measurement(
        machine=this_machine(),
        versions={**these_versions(), "model": measured.model_version},
        scenario=Scenario(name=name, workload=workload, source=plan.url, warm_up=plan.warm_up, iterations=plan.iterations),
        samples=samples_of(measured.run),
        figures=asdict(figures),
        targets={name: asdict(target) for name, target in targets.items()},
    )


def figures_table(figures: Figures, targets: Mapping[str, Target], title: str) -> Table:
    """A table with a row for each figure, and its target beside it."""
    table = Table("", title=title)
    table.add_column("measured", justify="right")
    table.add_column("target", justify="right")
    for name, value in asdict(figures).items():
        if isinstance(value, dict):
            continue
        found = targets.get(name)
        wanted = "" if found is None else f"{found.limit:g}" if found.met else f"[red]{found.limit:g}: missed[/]"
        table.add_row(name, "-" if value is None else f"{value:g}", wanted)
    for stage, mean in figures.stage_ms.items():
        table.add_row(f"mean of {stage}, ms", f"{mean:g}", "")
    for tier, share in figures.hits.items():
        table.add_row(f"answers: {tier}", f"{share:.1%}", "")
    return table


def tell(figures: Figures, unseen: str) -> None:
    """Print what has no place in the table: requests without an answer, and why memory and processor time are missing."""
    if unseen:
        typer.echo(f"memory and processor time were left out: {unseen}", err=True)
    if figures.problems:
        typer.echo(f"requests without an answer: {_counted(figures.problems)}", err=True)


def _counted(problems: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {problem}" for problem, count in problems.items())
