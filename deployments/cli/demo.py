"""`genrec demo`: real films recommended to real people, by the whole system on this machine.

Ray and Serve start -> answers by PyTorch
data -> model ------^
             model -> compiled beside what serves -> answers by the compiled graphs, and by vLLM once it is loaded
"""

import json
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster import ports
from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.config_file import read_document
from cluster.dataset import Dataset
from cluster.errors import BundleError, ConfigError
from cluster.traffic import api_keys
from cluster.values import Action
from deployments.cli.compiling import CompiledBeside
from deployments.cli.dataset_options import open_dataset
from deployments.cli.demo_answers import Asked, best_answer, first_answer
from deployments.cli.local_serve import LocalServe
from deployments.cli.serve import Profile
from deployments.cli.signals import end_in_order
from deployments.shipped import DEMO_MODEL, RAY_CONFIG
from deployments.training.dataset_options import DatasetOptions

SHOWN_HISTORY = 3
console = Console(highlight=False)


def demo(
    *,
    once: Annotated[
        bool, typer.Option("--once", help="stop after the answer by the best engines, printed as JSON in the last line")
    ] = False,
    port: Annotated[int, typer.Option(help="where the API listens", min=1, max=65535)] = 8000,
    users: Annotated[int, typer.Option(help="how many users to ask for", min=1, max=50)] = 3,
    k: Annotated[int, typer.Option(help="recommendations for each", min=1, max=100)] = 5,
    model_dir: Annotated[Path, typer.Option(help="where the model is published, unless it is there already")] = Path("models/ml-100k"),
    profile: Profile = None,
    cache: Annotated[Path | None, typer.Option(help="where MovieLens is kept (default: $GENREC_CACHE or ~/.cache/genrec)")] = None,
) -> None:
    """MovieLens-100K, served: recommend films to real users at once by PyTorch, then by compiled engines and vLLM while it serves."""
    end_in_order()
    ports.require_free(port)
    log, key = Path(f".genrec/serve-{port}.log"), api_keys.new_key()
    changes = {"model_dir": str(model_dir), "gateway": guarded(key), "generator": with_vllm()}
    with closing(LocalServe(RAY_CONFIG, changes, port=port, log=log, profile=profile)) as serving:
        serving.start()
        console.print(f"[bold]serve[/]  Ray and Serve start; their log is {log}")
        asked = DatasetOptions(name="ml-100k", cache=cache)
        dataset = open_dataset(asked)
        console.print(
            f"[bold]data[/]   {len(dataset.interactions):,} ratings, {dataset.interactions.users} users, {len(dataset.catalogue):,} films"
        )
        bundle = published(model_dir, dataset, asked)
        console.print(f"[bold]model[/]  {bundle.version}: {described(bundle)}")
        serving.deploy()
        requests = [request_of(dataset, user, k) for user in typical_users(dataset, users)]
        first = first_answer(serving, requests[0])
        console.print(f"[bold]answer[/] the first, by {engines(first)}\n")
        show(first, dataset)
        for request in requests[1:]:
            show(first_answer(serving, request), dataset)
        if not once:
            tell_where(serving.url, first, key)
            with suppress(KeyboardInterrupt):
                serve_on(serving.url, first, bundle, dataset)
            return
        best = improved(serving.url, first, bundle)
        show(best, dataset)
    print(json.dumps(best.answer, ensure_ascii=False))


def serve_on(url: str, first: Asked, bundle: Bundle, dataset: Dataset) -> None:
    """Show the answer by the best engines, or print that it does not come in time, and wait for a KeyboardInterrupt."""
    try:
        show(improved(url, first, bundle), dataset)
    except ConfigError as error:
        console.print(f"[yellow]better[/] {escape(str(error))}", soft_wrap=True)
    threading.Event().wait()


def guarded(key: str) -> dict[str, Any]:
    """The gateway's settings with this key, which may do everything; without a key, recommendations may be asked for, events stored and
    histories read.
    """
    shipped = _shipped()["gateway"]
    entry = {"name": "demo", "sha256": api_keys.digest(key.encode()), "rights": list(get_args(api_keys.Right))}
    return {**shipped, "allow_anonymous": True, "api_keys": [entry]}


def with_vllm() -> dict[str, Any]:
    """The generator's settings with vLLM first, which is to be seen at work, though torch_beam is the faster on a CPU."""
    return {**_shipped()["generator"], "order": ["vllm", "torch_beam"]}


@cache
def _shipped() -> Mapping[str, Any]:
    """The settings that are shipped, read once."""
    settings: Mapping[str, Any] = read_document(RAY_CONFIG)["applications"][0]["args"]
    return settings


def improved(url: str, first: Asked, bundle: Bundle) -> Asked:
    """The same user's answer by the compiled model and the preferred engines; prints each engine that takes over meanwhile."""
    if bundle.manifest.compiled_from is not None:
        return best_answer(url, first, lambda: bundle.version, tell_change)
    console.print("[bold]better[/] the model is compiled, and vLLM loaded, while PyTorch answers")
    with CompiledBeside(model_dir := bundle.path.parent) as compiling:
        return best_answer(url, first, lambda: None if compiling.under_way else BundleStore(model_dir).open().version, tell_change)


def engines(asked: Asked) -> str:
    return ", ".join(f"{stage}={backend}" for stage, backend in asked.served_by.items())


def tell_change(before: Asked, now: Asked) -> None:
    changes = [
        f"{stage} by [bold green]{backend}[/] instead of {before.served_by.get(stage, 'nothing')}"
        for stage, backend in now.served_by.items()
        if backend != before.served_by.get(stage)
    ]
    console.print(f"[bold]better[/] {', '.join(changes)} ({now.answer['model_version']})", soft_wrap=True)


def published(model_dir: Path, dataset: Dataset, asked: DatasetOptions) -> Bundle:
    """The model in `model_dir`; where there is none that verifies, genrec's own is published there, with the data it was trained on, which
    `asked` has read.
    """
    try:
        return BundleStore(model_dir).open_last_good()[0]
    except BundleError as error:
        if BundleStore(model_dir).versions():
            console.print(f"[yellow]model[/]  {escape(str(error))}; the demo's own is published beside it")
        from deployments.training.pretrained import publish_pretrained  # noqa: PLC0415 - it imports torch, while Ray and Serve start already

        return publish_pretrained(DEMO_MODEL, dataset, model_dir, asked.described())


def described(bundle: Bundle) -> str:
    """What the model is and how good, on every user's last event."""
    family, blend = bundle.manifest.model.family, bundle.manifest.blend
    if blend is None or not blend.quality:
        return f"{family}, hr@10 {bundle.manifest.quality['hr@10']:.3f} on held-out events"
    alone, unified = blend.quality["retrieval"]["hr@10"], blend.quality["unified"]["hr@10"]
    return f"{family} and a decoder of semantic IDs, hr@10 {unified:.3f} on held-out events ({family} alone {alone:.3f})"


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


def show(asked: Asked, dataset: Dataset) -> None:
    """The answer as a table, and under it each stage's backend and the ones that were passed over."""
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


def tell_where(url: str, asked: Asked, key: str) -> None:
    """Print where page, API and docs are, and how to call them. The page takes the key out of its address; browsers never send what follows
    the `#`.
    """
    small = {**asked.request, "behaviours": asked.request["behaviours"][-2:], "k": 3}
    print(f"page   {url}/#key={key}\nAPI    {url}/v1/recommend\ndocs   {url}/docs\n")
    print(f"curl -s {url}/v1/recommend -H 'content-type: application/json' -d '{json.dumps(small)}'")
    print(f"curl -s {url}/v1/backends -H 'authorization: Bearer {key}'\n")
    print("The key operates this service, and ends with it. Ctrl-C stops it\n", flush=True)
