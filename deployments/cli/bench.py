"""`genrec bench`: measure a service or a part of it, and compare measurements."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.cache.policy import POLICIES
from cluster.cache.replay import Result, read_trace, replay
from cluster.errors import UnknownChoice
from deployments.cli.bench_compare import compare
from deployments.cli.bench_interleave import interleave
from deployments.cli.bench_serve import serve

app = typer.Typer(no_args_is_help=True, help="Measure a genrec that serves, or its cache's policies; compare measurements.")
app.command()(serve)
app.command()(compare)
app.command()(interleave)


@app.command()
def cache(
    *,
    trace: Annotated[Path, typer.Option(help="one key a line, or JSON lines with hash_ids (Mooncake); may be gzipped")],
    sizes: Annotated[str, typer.Option(help="shares of the distinct keys or numbers of keys, with commas")] = "1%,10%",
    policies: Annotated[str, typer.Option(help="with commas")] = ",".join(POLICIES),
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Replay a trace of accesses: the hit rate of every policy at every size of cache."""
    names = _separated(policies)
    for name in names:
        if name not in POLICIES:  # before a long trace is read
            raise UnknownChoice("cache policy", name, POLICIES)
    results = replay(read_trace(trace), _separated(sizes), names)
    if as_json:
        typer.echo(json.dumps({"results": [{"policy": one.policy, "size": one.size, "hit_rate": one.hit_rate} for one in results]}))
    else:
        Console().print(_table(results, escape(f"hit rates, {trace.name}")))


def _separated(text: str) -> list[str]:
    return [part for part in (part.strip() for part in text.split(",")) if part]


def _table(results: Sequence[Result], title: str) -> Table:
    """A table with a row for each policy and a column for each size."""
    capacities = {one.size: one.capacity for one in results}
    table = Table("policy", title=title)
    for size, capacity in capacities.items():
        table.add_column(f"{size} ({capacity:,} keys)" if "%" in size else f"{capacity:,} keys", justify="right")
    for policy in dict.fromkeys(one.policy for one in results):
        table.add_row(policy, *(f"{one.hit_rate:.2%}" for one in results if one.policy == policy))
    return table
