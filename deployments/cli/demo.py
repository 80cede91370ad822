"""`genrec demo`: real films recommended to real people, by the whole system on this machine.

data -> model -> compiled graphs and engines -> Serve -> answers
"""

import json
import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.bundle import Bundle, BundleStore
from cluster.compilation import CompileOptions
from cluster.dataset import Dataset
from cluster.errors import BundleError
from cluster.values import Action
from deployments.cli.dataset_options import DatasetOptions, open_dataset
from deployments.cli.local_serve import LocalServe, require_free
from deployments.cli.pretrained import publish_pretrained
from deployments.cli.serve import Profile
from pipelines.compile import StepResult, compile_bundle

ROOT = Path(__file__).resolve().parents[2]
PRETRAINED = ROOT / "examples" / "ml-100k"
CONFIG_FILE = ROOT / "ray_config.yaml"
SHOWN_HISTORY = 3
console = Console(highlight=False)


@dataclass(frozen=True)
class Asked:
    """A user's request and what came back."""

    request: dict[str, Any]
    answer: dict[str, Any]


def demo(
    *,
    once: Annotated[bool, typer.Option("--once", help="stop after the answers; the last line printed is one answer as JSON")] = False,
    port: Annotated[int, typer.Option(help="where the API listens", min=1, max=65535)] = 8000,
    users: Annotated[int, typer.Option(help="how many users to ask for", min=1, max=50)] = 3,
    k: Annotated[int, typer.Option(help="recommendations for each", min=1, max=100)] = 5,
    model_dir: Annotated[Path, typer.Option(help="where the model is published, unless it is there already")] = Path("models/ml-100k"),
    profile: Profile = None,
    cache: Annotated[Path | None, typer.Option(help="where MovieLens is kept (default: $GENREC_CACHE or ~/.cache/genrec)")] = None,
) -> None:
    """MovieLens-100K, served: fetch it, publish the demo model, compile it, start Ray Serve, and recommend films to real users."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's `genrec demo &` starts with SIGINT ignored
    signal.signal(signal.SIGTERM, _interrupt)
    require_free(port)
    with console.status("reading MovieLens-100K"):
        dataset = open_dataset(DatasetOptions(name="ml-100k", cache=cache))
    console.print(
        f"[bold]data[/]   {len(dataset.interactions):,} ratings, {dataset.interactions.users} users, {len(dataset.catalogue):,} films"
    )
    bundle = compiled(published(model_dir, dataset))
    console.print(f"[bold]model[/]  {bundle.version}: {described(bundle)}")

    log = Path(".genrec/serve.log")
    console.print(f"[bold]serve[/]  starting Ray and Serve; the log is {log}\n")
    with LocalServe(CONFIG_FILE, {"model_dir": str(model_dir)}, port=port, log=log, profile=profile) as url:
        asked = [ask(url, request_of(dataset, user, k)) for user in typical_users(dataset, users)]
        for one in asked:
            show(one, dataset)
        if not once:
            stay(url, asked[0])
    if once:
        print(json.dumps(asked[0].answer, ensure_ascii=False))


def published(model_dir: Path, dataset: Dataset) -> Bundle:
    """The model that is there, or the one that comes with genrec, published with the data it was trained on."""
    try:
        return BundleStore(model_dir).open_last_good()[0]
    except BundleError as error:
        if BundleStore(model_dir).versions():
            console.print(f"[yellow]model[/]  {escape(str(error))}; the demo's own is published beside it")
        return publish_pretrained(PRETRAINED, dataset, model_dir)


def described(bundle: Bundle) -> str:
    """What the model is and how good, on every user's last event."""
    family, blend = bundle.manifest.model.family, bundle.manifest.blend
    if blend is None or not blend.quality:
        return f"{family}, hr@10 {bundle.manifest.quality['hr@10']:.3f} on held-out events"
    alone, unified = blend.quality["retrieval"]["hr@10"], blend.quality["unified"]["hr@10"]
    return f"{family} and a decoder of semantic IDs, hr@10 {unified:.3f} on held-out events ({family} alone {alone:.3f})"


def compiled(bundle: Bundle) -> Bundle:
    """The same with an ONNX graph, and an engine where TensorRT's builder is installed; what fails is said and does not matter."""
    if bundle.manifest.compiled_from is not None:
        return bundle
    with console.status("compiling: PyTorch -> ONNX -> TensorRT"):
        return compile_bundle(BundleStore(bundle.path.parent), CompileOptions(targets=("sm_89",), precisions=("fp32",)), on_step=_tell)


def _tell(result: StepResult) -> None:
    outcome = f"{result.size / 1e6:.1f} MB" if result.artifact else f"[yellow]left out[/]: {escape(result.failure)}"
    console.print(f"[bold]built[/]  {escape(result.step)}: {outcome} ({result.seconds:.1f} s)")


def typical_users(dataset: Dataset, count: int) -> list[int]:
    """Users with a history of middling length, spread over the data set."""
    lengths = dataset.interactions.lengths
    near_median = np.argsort(np.abs(lengths - np.median(lengths)), kind="stable")[: 10 * count]
    return [int(user) for user in np.sort(near_median)[:: max(1, len(near_median) // count)][:count]]


def request_of(dataset: Dataset, user: int, k: int) -> dict[str, Any]:
    """What an application would send for this user of the data set, an hour after the last rating."""
    history, actions = dataset.interactions.sequence(user), [str(action) for action in Action]
    rows = zip(history.items.tolist(), history.timestamps.tolist(), history.actions.tolist(), history.values.tolist(), strict=True)
    behaviours = [
        {"item_id": dataset.catalogue[item].item_id, "timestamp": timestamp, "action": actions[action], "value": value}
        for item, timestamp, action, value in rows
    ]
    return {
        "user_id": dataset.interactions.user_ids[user],
        "behaviours": behaviours,
        "k": k,
        "request_time": behaviours[-1]["timestamp"] + 3600,
    }


def ask(url: str, request: dict[str, Any]) -> Asked:
    response = httpx.post(f"{url}/v1/recommend", json=request, timeout=30)
    response.raise_for_status()
    return Asked(request, response.json())


def show(asked: Asked, dataset: Dataset) -> None:
    """The answer as a table, and under it who served each stage and who was passed over."""
    answer, watched = asked.answer, asked.request["behaviours"]
    titles = [_title(dataset, behaviour["item_id"]) for behaviour in watched[-SHOWN_HISTORY:]]
    table = Table(title=f"user {answer['user_id']}, {len(watched)} films rated", title_justify="left", caption_justify="left")
    table.add_column("last rated")
    table.add_column("recommended")
    table.add_column("score", justify="right")
    for row in range(max(len(titles), len(answer["items"]))):
        item = answer["items"][row] if row < len(answer["items"]) else None
        past = titles[-1 - row] if row < len(titles) else ""
        table.add_row(escape(past), escape(item["title"]) if item else "", f"{item['score']:.3f}" if item else "")
    console.print(table)
    for stage in answer["stages"]:
        console.print(f"  {stage['stage']}: [bold green]{stage['backend']}[/] in {stage['duration_ms']:.1f} ms")
        for skipped in stage["fallback_from"]:
            console.print(f"    [dim]not {skipped['backend']}: {escape(skipped['reason'])}[/]")
    console.print()


def _title(dataset: Dataset, item_id: str) -> str:
    index = dataset.catalogue.index_of(item_id)
    return item_id if index is None else dataset.catalogue[index].title


def stay(url: str, asked: Asked) -> None:
    """Say where everything is, and wait for Ctrl-C."""
    small = {**asked.request, "behaviours": asked.request["behaviours"][-2:], "k": 3}
    console.print(f"page   {url}/\nAPI    {url}/v1/recommend\ndocs   {url}/docs\nstate  {url}/v1/backends\n")
    print(f"curl -s {url}/v1/recommend -H 'content-type: application/json' -d '{json.dumps(small)}'\n")
    console.print("Ctrl-C stops it")
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGINT)
