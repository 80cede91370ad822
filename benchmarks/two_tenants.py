"""One tenant floods the service: what another one notices of it.

    python -m benchmarks.two_tenants                        # with the demo's model (run `make demo ONCE=1` before)

Each tenant has a key. One asks for a tenth of what 32 callers that never wait get, as Poisson arrivals; in the middle phase of each round
the other asks for several times as much as they get. The settings are those that ship. The system has the machine's first cores, the two
drivers share the last one. Writes benchmarks/results/two_tenants_cpu_DATE.md.
"""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.load import Load, Phase, Plan, Results
from benchmarks.load_bodies import bodies
from benchmarks.overload import CLIENTS, closed
from benchmarks.reporting import Machine, dated, table
from benchmarks.serving import SHIPPED, served
from cluster.traffic.api_keys import digest, new_key

KEYS = {name: new_key() for name in ("calm", "floods", "operator")}
SHARE, SETTLING_S = 0.1, 3.0
NICENESS = 10
"""Of the driver that floods: it shares a core with the other, which must not be late for it."""


def main(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    times: Annotated[list[float], typer.Option(help="of what the closed loop is answered, by the tenant that floods")] = [2.0, 5.0],  # noqa: B006
    rounds: Annotated[int, typer.Option()] = 2,
    seconds: Annotated[float, typer.Option(help="of each phase")] = 10.0,
    port: Annotated[int, typer.Option()] = 8024,
    out: Annotated[Path | None, typer.Option(help="default: benchmarks/results/two_tenants_cpu_DATE.md")] = None,
) -> None:
    """Measure, print and file."""
    load, cores = os.getloadavg()[0], sorted(os.sched_getaffinity(0))
    asked = bodies(model_dir, strategy="retrieval", cache="bypass")
    os.sched_setaffinity(0, cores[:-1] or cores)  # what is started from here on inherits it
    changes = {"model_dir": str(model_dir), "gateway": {"api_keys": [_entry(name) for name in KEYS]}}
    found = list[list[str]]()
    log = Path(".genrec/two-tenants.log")
    with served(SHIPPED["colocated"], changes, port, profile="fast", log=log, key=KEYS["operator"]) as serve:
        os.sched_setaffinity(0, cores[-1:])
        capacity = closed(serve.url, asked, _headers("calm"))
        for _ in range(rounds):
            found += [_row(factor, *flooded(serve.url, asked, capacity, factor, seconds)) for factor in times]
    columns = [
        "the other asks for",
        "p50 alone (ms)",
        "beside it",
        "p99 alone (ms)",
        "beside it",
        "refused, of",
        "the other: answered/s",
        "refused/s",
    ]
    told = f"{SHARE * capacity:.0f}/s of one tenant, a tenth of what {CLIENTS} callers that never wait get; HAProxy before one gateway."
    lines = ["# A tenant beside one that floods", "", f"Retrievals, none out of a cache; {told}", "", *table(columns, found), ""]
    page = "\n".join([*lines, *Machine.now("benchmarks.two_tenants", ("ray", "onnxruntime"), load).lines()])
    (out or dated("two_tenants_cpu", "md")).write_text(page)
    print(page)


def flooded(url: str, asked: tuple[str, ...], capacity: float, factor: float, seconds: float) -> tuple[Results, Results, Results]:
    """The calm tenant alone and beside the other, and the other."""
    rate = SHARE * capacity
    phases = (Phase("alone", rate, seconds), Phase("beside", rate, seconds), Phase("settling", rate, SETTLING_S))
    with Load(Plan(url, phases, asked, headers=_headers("calm"), arrivals="poisson")) as calm:
        time.sleep(calm.until("beside"))
        flood = (Phase("flood", factor * capacity, seconds),)
        with Load(Plan(url, flood, asked, headers=_headers("floods"), arrivals="poisson"), NICENESS) as flooding:
            other = flooding.results()
        results = calm.results()
    return results.phase("alone"), results.phase("beside"), other


def _row(factor: float, alone: Results, beside: Results, other: Results) -> list[str]:
    times = [f"{one.percentile(q):.1f}" for q in (50, 99) for one in (alone, beside)]
    refused = f"{int((~beside.ok).sum())}, {len(beside)}"
    return [f"{factor:g} x", *times, refused, f"{other.ok.sum() / other.span:.0f}", f"{other.rejected.sum() / other.span:.0f}"]


def _entry(name: str) -> dict[str, object]:
    entry: dict[str, object] = {"name": name, "sha256": digest(KEYS[name].encode())}
    return entry | ({"rights": ["operate", "read"]} if name == "operator" else {"tenant": name})


def _headers(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


if __name__ == "__main__":
    typer.run(main)
