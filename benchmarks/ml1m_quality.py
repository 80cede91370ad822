"""Quality of HSTU against SASRec on MovieLens-1M: same data, trainer, loss and budget; the whole catalogue is ranked.

    python benchmarks/ml1m_quality.py --path DIRECTORY            # every configuration, seed 42
    python benchmarks/ml1m_quality.py --path DIRECTORY --config hstu --seed 42 --seed 43

DIRECTORY holds ratings.dat (or .gz) and movies.dat. The epoch is chosen by each user's second-last event. A configuration marked "refit"
is then trained anew for that many epochs with the second-last events learnt as well, as the published figures were. "windows" means that
long histories give random windows besides the latest; "unseen" that, and that the softmax leaves out what the user has seen, as the
ranking does. Runs are added to benchmarks/results/quality_NAME_DEVICE_DATE.json, and the table
beside it is written from all runs in that file.
"""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, cast

import torch
import typer

from cluster.bundle import ModelRecord
from cluster.dataset import Dataset
from cluster.errors import UnknownChoice
from cluster.registry import DATASETS, choose
from integrations.hstu.sequence_model import SequenceModel
from integrations.hstu.weights import save_weights
from pipelines.epochs import EpochReport, chosen_device
from pipelines.evaluate import evaluate
from pipelines.train import TrainOptions
from pipelines.training_run import RunOptions, TrainingRun, train_model

RESULTS = Path(__file__).parent / "results"
METRICS = ("hr@10", "hr@50", "hr@200", "ndcg@10", "ndcg@50", "mrr")


@dataclass(frozen=True)
class Configuration:
    """A named run: model sizes and how it departs from the common options."""

    family: str
    sizes: Mapping[str, int | float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    refit: bool = False


DEEP = {"dim": 64, "layers": 4, "heads": 2, "attention_dim": 32, "linear_dim": 32}
WIDE = {"dim": 128, "layers": 4, "heads": 2, "attention_dim": 64, "linear_dim": 64, "dropout": 0.3}
LARGE = {"layers": 8, "heads": 2, "attention_dim": 25, "linear_dim": 25}
COMMON = {"epochs": 80, "validate_every": 2, "patience": 10, "window": "latest"}
WINDOWS = {"window": "random"}
UNSEEN = {**WINDOWS, "seen_as_negatives": False}
CONFIGURATIONS = {
    "sasrec": Configuration("sasrec"),
    "hstu": Configuration("hstu"),
    "sasrec-windows": Configuration("sasrec", {}, WINDOWS),
    "hstu-windows": Configuration("hstu", {}, WINDOWS, refit=True),
    "hstu-deep-windows": Configuration("hstu", DEEP, {**WINDOWS, "epochs": 50}),
    "hstu-large-windows": Configuration("hstu", LARGE, {**WINDOWS, "epochs": 60}),
    "sasrec-unseen": Configuration("sasrec", {}, UNSEEN),
    "hstu-unseen": Configuration("hstu", {}, UNSEEN),
    "hstu-deep-unseen": Configuration("hstu", DEEP, {**UNSEEN, "epochs": 50}, refit=True),
    "hstu-wide-unseen": Configuration("hstu", WIDE, {**UNSEEN, "epochs": 40}),
}


class EpochLog:
    """An Observer that prints a line an epoch and keeps their seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def note(self, line: str) -> None:
        print(line, flush=True)

    def phase(self, name: str, epochs: int, done: int) -> None:
        print(f"{name}: {epochs - done} epochs at most", flush=True)

    def batch(self, share: float) -> None:
        pass

    def epoch(self, report: EpochReport) -> None:
        self.seconds.append(report.seconds)
        figures = "  ".join(f"{name} {value:.4f}" for name, value in report.validation.items())
        print(f"epoch {report.epoch}  loss {report.loss:.4f}  {report.seconds:.1f} s  {figures}", flush=True)


def run(name: str, seed: int, dataset: Dataset, *, compiled: bool, weights: Path | None) -> dict[str, Any]:
    """Train and measure one configuration with one seed; its record for the results file."""
    configuration = CONFIGURATIONS[name]
    record = ModelRecord(family=configuration.family, config={**configuration.sizes, "items": len(dataset.catalogue)})
    options = TrainOptions.model_validate({**COMMON, **configuration.options, "seed": seed, "compile": compiled})
    log = EpochLog()
    checkpoint = weights / f"{name}-{seed}.ckpt" if weights else None
    around = RunOptions(refit=configuration.refit, checkpoint=checkpoint)
    trained = train_model(TrainingRun(record, dataset, around, log), options)
    model = cast(SequenceModel, trained.model)
    if weights:
        save_weights(model.state_dict(), weights / f"{name}-{seed}.safetensors")
    return {
        "configuration": name,
        "family": configuration.family,
        "model": model.config.model_dump(mode="json"),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "options": options.model_dump(mode="json"),
        "seed": seed,
        "epochs": trained.epochs,
        "best_epoch": trained.best.epoch,
        "validation": trained.best.validation,
        "test": dict(evaluate(trained.validated, dataset.interactions)) if configuration.refit else trained.quality,
        "test_after_refit": trained.quality if configuration.refit else None,
        "seconds_an_epoch": round(median(log.seconds), 1),
        "seconds": round(trained.seconds, 1),
    }


def table(results: Mapping[str, Any]) -> str:
    """The results as Markdown: a line a run, then the lift of HSTU over SASRec."""
    lines = [f"# {results['title']}", "", results["protocol"], ""]
    columns = ["configuration", "parameters", "seed", "trained on", "epochs (best)", *METRICS, "s an epoch"]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for entry in results["runs"]:
        for trained_on, quality in (("all but 2", entry["test"]), ("all but 1 (refit)", entry["test_after_refit"])):
            if quality:
                figures = " | ".join(f"{quality[metric]:.4f}" for metric in METRICS)
                epochs = f"{entry['epochs']} ({entry['best_epoch']})"
                head = f"{entry['configuration']} | {entry['parameters']:,} | {entry['seed']} | {trained_on} | {epochs}"
                lines.append(f"| {head} | {figures} | {entry['seconds_an_epoch']} |")
    lines += ["", *_lift(results["runs"]), "", *results["remarks"], "", f"Environment: {json.dumps(results['environment'])}", ""]
    return "\n".join([*lines, f"Command: `{results['command']}`", ""])


def _lift(runs: list[dict[str, Any]]) -> list[str]:
    """What base HSTU gains over base SASRec with the same options, in the mean over their seeds."""
    return [line for suffix in ("", "-windows", "-unseen") for line in _lift_of(runs, f"hstu{suffix}", f"sasrec{suffix}")]


def _lift_of(runs: list[dict[str, Any]], better: str, baseline: str) -> list[str]:
    ours, theirs = ([entry["test"] for entry in runs if entry["configuration"] == name] for name in (better, baseline))
    if not ours or not theirs:
        return []
    ratios = {metric: mean(q[metric] for q in ours) / mean(q[metric] for q in theirs) for metric in ("hr@10", "ndcg@10")}
    shown = ", ".join(f"{metric} x {ratio:.3f}" for metric, ratio in ratios.items())
    return [f"{better} over {baseline} ({len(ours)} and {len(theirs)} seeds): {shown}."]


def add(path: Path, entry: Mapping[str, Any], dataset: Dataset, command: str) -> None:
    """Add a run to the results file, in place of one of the same configuration and seed, and rewrite the table."""
    old = json.loads(path.read_text()) if path.is_file() else {"runs": []}
    runs = [other for other in old["runs"] if (other["configuration"], other["seed"]) != (entry["configuration"], entry["seed"])]
    results = {
        "title": f"Quality on {dataset.name}, {dataset.interactions.users} users, {len(dataset.interactions):,} events",
        "protocol": f"Leave-last-out: all {len(dataset.catalogue):,} items are ranked but those in the window. "
        "The epoch is chosen by the second-last event; then the model may be trained anew with that event learnt as well (refit).",
        "remarks": old.get("remarks", []),
        "environment": environment(),
        "command": command,
        "runs": sorted([*runs, entry], key=lambda one: (one["configuration"], one["seed"])),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(results))


def environment() -> dict[str, Any]:
    """Hardware and versions."""
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    processor = names[0] if names else platform.processor()
    threads = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "device": chosen_device("auto")}
    return {"processor": processor, **threads, "python": platform.python_version(), "torch": torch.__version__}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


def main(
    *,
    path: Annotated[Path, typer.Option(help="directory with ratings.dat and movies.dat")],
    config: Annotated[list[str] | None, typer.Option(help=f"out of {', '.join(CONFIGURATIONS)}; repeatable")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="repeatable")] = None,
    name: Annotated[str, typer.Option(help="of the data set in the results file")] = "ml-1m",
    threads: Annotated[int, typer.Option(help="of torch")] = 1,
    weights: Annotated[Path | None, typer.Option(help="keep weights and checkpoints here")] = None,
    compiled: Annotated[bool, typer.Option("--compile/--eager")] = True,
) -> None:
    """Run the configurations and file their results."""
    torch.set_num_threads(threads)
    if strangers := set(config or []) - set(CONFIGURATIONS):
        raise UnknownChoice("configuration", min(strangers), CONFIGURATIONS)
    dataset = choose("dataset", DATASETS, "ml-1m")(path)
    results = RESULTS / f"quality_{name}_{chosen_device('auto')}_{datetime.now(UTC):%Y-%m-%d}.json"
    command = f"python benchmarks/ml1m_quality.py --path DIRECTORY --name {name} --config CONFIGURATION --seed SEED"
    for one in config or CONFIGURATIONS:
        for number in seed or [42]:
            add(results, run(one, number, dataset, compiled=compiled, weights=weights), dataset, command)
    print(results.with_suffix(".md").read_text())


if __name__ == "__main__":
    typer.run(main)
