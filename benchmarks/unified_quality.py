r"""How much better is the blended answer than HSTU alone? Every user's last event, ranked by each strategy of a published model.

    genrec train ml-100k --epochs 60 --batch-users 32 --validate-every 2 --no-seen-as-negatives --decoder-batch 16 --decoder-precision bf16
    python -m benchmarks.unified_quality ml-100k

    genrec train ml-1m --path DIRECTORY --epochs 80 --validate-every 2 --no-seen-as-negatives --compile \
        --decoder-epochs 12 --decoder-batch 16 --decoder-precision bf16
    python -m benchmarks.unified_quality ml-1m --path DIRECTORY

The lists are those that the serving backends make (torch encoder, torch_beam), the blend's weights those in the manifest, fitted on the
second-last events. The interval is a bootstrap over users of the ratio unified / retrieval. Also counts generated items that are no items,
were seen, or stand twice. Writes benchmarks/results/unified_quality_NAME_DATE.md.
"""

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.config import Settings
from cluster.values import StageReport
from deployments.training.dataset_options import DatasetOptions
from pipelines.blend import BlendWeights, blend
from pipelines.candidates import Candidates
from pipelines.generative_run import Lists, serving_lists
from pipelines.splits import TEST, VALIDATION, Example, held_out

RESULTS = Path(__file__).parent / "results"
STRATEGIES = ("retrieval", "generative", "unified")
RESAMPLES = 2000
NOWHERE = 10**9
REPORT = StageReport("benchmark", "benchmark", 0.0)


def main(
    name: Annotated[str, typer.Argument(metavar="DATASET")],
    path: Annotated[Path | None, typer.Option(help="the data set's file or directory")] = None,
    model_dir: Annotated[Path | None, typer.Option(help="default: models/DATASET")] = None,
    label: Annotated[str | None, typer.Option(help="of the results file (default: the data set's name)")] = None,
) -> None:
    """Measure, print and file."""
    dataset = DatasetOptions(name=name, path=path).read()
    bundle = BundleStore(model_dir or Path("models") / dataset.name).open()
    weights, serving = BlendWeights.of(bundle.manifest.blend), Settings()
    lines = [*_head(bundle, dataset.name, dataset.interactions.users, weights), *_columns()]
    wrong = generated = 0
    for split, from_end in (("validation (fitted on)", VALIDATION), ("test", TEST)):
        users = dataset.interactions.users
        lists = serving_lists(
            bundle, dataset.interactions, from_end, beam=serving.generator.beam, pool=serving.gateway.pool, most_users=users
        )
        wrong += _wrong(lists, list(held_out(dataset.interactions, from_end)), len(dataset.catalogue))
        generated += sum(len(one.items) for one in lists.generated)
        lines += _rows(split, _ranks(lists, weights))
    lines += ["", f"{wrong} of {generated:,} generated items are invalid (no item, seen, or twice in a list).", "", _environment()]
    target = RESULTS / f"unified_quality_{label or dataset.name}_{datetime.now(UTC):%Y-%m-%d}.md"
    target.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _ranks(lists: Lists, weights: BlendWeights) -> dict[str, npt.NDArray[np.int64]]:
    """Each user's rank of the target by each strategy."""
    ranks: dict[str, list[int]] = {strategy: [] for strategy in STRATEGIES}
    for retrieved, generated, target in zip(lists.retrieved, lists.generated, lists.targets, strict=True):
        ours = Candidates(retrieved.items, retrieved.scores, REPORT)
        theirs = Candidates(generated.items, generated.log_probs, REPORT)
        for strategy, found in zip(STRATEGIES, (ours, theirs, blend(ours, theirs, weights)), strict=True):
            place = np.flatnonzero(found.items == target)
            ranks[strategy].append(int(place[0]) + 1 if len(place) else NOWHERE)
    return {strategy: np.array(each) for strategy, each in ranks.items()}


def _gains(ranks: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.float64]]:
    hits = (ranks <= 10).astype(np.float64)
    return {"hr@10": hits, "ndcg@10": hits / np.log2(ranks + 1.0)}


def _rows(split: str, ranks: dict[str, npt.NDArray[np.int64]]) -> list[str]:
    alone, unified = _gains(ranks["retrieval"]), _gains(ranks["unified"])
    rows = [
        f"| {split} | {strategy} | " + " | ".join(f"{gain.mean():.4f}" for gain in _gains(each).values()) + " |"
        for strategy, each in ranks.items()
    ]
    lifts = " | ".join(_lift(unified[metric], alone[metric]) for metric in alone)
    return [*rows, f"| {split} | unified over retrieval | {lifts} |"]


def _lift(unified: npt.NDArray[np.float64], alone: npt.NDArray[np.float64]) -> str:
    """The ratio of the means and its 90 % interval over resampled users."""
    drawn = np.random.default_rng(0).integers(0, len(alone), (RESAMPLES, len(alone)))
    low, high = np.quantile(unified[drawn].mean(axis=1) / alone[drawn].mean(axis=1), (0.05, 0.95))
    return f"x {unified.mean() / alone.mean():.3f} ({low:.3f} to {high:.3f})"


def _wrong(lists: Lists, examples: Sequence[Example], items: int) -> int:
    count = 0
    for generated, example in zip(lists.generated, examples, strict=True):
        seen = np.setdiff1d(example.history.items, [example.target])
        count += int(((generated.items < 1) | (generated.items > items) | np.isin(generated.items, seen)).sum())
        count += len(generated.items) - len(np.unique(generated.items))
    return count


def _head(bundle: Bundle, dataset: str, users: int, weights: BlendWeights) -> list[str]:
    options = bundle.manifest.training.get("decoder")
    return [
        f"# Unified against HSTU alone: {dataset}, {users} users, {len(bundle.catalogue):,} items",
        "",
        f"Blend: {weights}, fitted on {bundle.manifest.blend.fitted_on if bundle.manifest.blend else 'nothing'}.",
        f"Decoder: {bundle.manifest.decoder.config if bundle.manifest.decoder else None}.",
        f"Its training: {options}.",
        "",
    ]


def _columns() -> list[str]:
    return ["| split | strategy | HR@10 | NDCG@10 |", "|---|---|---|---|"]


def _environment() -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy"))
    arguments = " ".join("DIRECTORY" if "/" in argument else argument for argument in sys.argv[1:])
    machine = f"Python {platform.python_version()}, {versions}, {os.cpu_count()} cores"
    return f"Command: `python -m benchmarks.unified_quality {arguments}`; {machine}."


if __name__ == "__main__":
    typer.run(main)
