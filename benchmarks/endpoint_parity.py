"""Do all encoders recommend the same through the endpoint? Each in turn serves every user's history but the last event.

    python benchmarks/endpoint_parity.py ml-100k                              # with the demo's model (run `make demo ONCE=1` before)
    python benchmarks/endpoint_parity.py ml-1m --path DIRECTORY --model-dir models/ml-1m

Starts Serve on this machine, switches all encoders but one off, asks POST /v1/recommend:batch for the ten best items of every user,
and compares hr@10 and the lists with those of eager PyTorch. Writes benchmarks/results/endpoint_parity_NAME_DATE.md.
"""

import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from cluster.bundle_store import BundleStore
from cluster.dataset import Dataset
from cluster.values import Action
from deployments.cli.local_serve import LocalServe
from deployments.training.dataset_options import DatasetOptions
from pipelines.splits import TEST, Example, held_out

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "torch"
ENCODERS = ("tensorrt", "onnxruntime", REFERENCE, "torch_compiled", "openvino")
COMPUTED = {"strategy": "retrieval", "cache": "bypass"}
USERS_A_CALL = 32  # as many as one replica is meant for, so that none is added
SAME_HR_WITHIN = 0.001
LOADED_WITHIN_S = 600


@dataclass(frozen=True)
class Measured:
    """What one encoder answered: item ids and scores of each user, and the seconds it all took."""

    items: list[list[str]]
    scores: list[list[float]]
    seconds: float

    def hit_rate(self, wanted: Sequence[str]) -> float:
        return float(np.mean([target in items for target, items in zip(wanted, self.items, strict=True)]))


def main(
    name: Annotated[str, typer.Argument(metavar="DATASET")],
    path: Annotated[Path | None, typer.Option(help="the data set's file or directory")] = None,
    model_dir: Annotated[Path | None, typer.Option(help="default: models/DATASET")] = None,
    port: Annotated[int, typer.Option()] = 8012,
) -> None:
    """Measure, print and file."""
    dataset = DatasetOptions(name=name, path=path).read()
    directory = model_dir or Path("models") / dataset.name
    bundle = BundleStore(directory).open()
    examples = list(held_out(dataset.interactions, TEST))
    most = int(str(bundle.manifest.model.config.get("max_history", 200)))
    requests = [request(dataset, example, most) for example in examples]
    with tempfile.TemporaryDirectory() as folder:
        settings = {"model_dir": str(directory), "encoder": {"order": list(ENCODERS)}}
        with LocalServe(ROOT / "ray_config.yaml", settings, port=port, log=Path(folder) / "serve.log") as url:
            measured, absent = measure_all(url, requests)
    wanted = [dataset.catalogue[example.target].item_id for example in examples]
    text = report(bundle.version, len(dataset.catalogue), wanted, measured, absent)
    target = ROOT / "benchmarks" / "results" / f"endpoint_parity_{dataset.name}_{datetime.now(UTC):%Y-%m-%d}.md"
    target.write_text(text)
    print(text)
    if apart(measured, wanted) > SAME_HR_WITHIN:
        raise typer.Exit(1)


def apart(measured: dict[str, Measured], wanted: list[str]) -> float:
    """The largest difference of an encoder's hr@10 from the reference's."""
    return max(abs(one.hit_rate(wanted) - measured[REFERENCE].hit_rate(wanted)) for one in measured.values())


def request(dataset: Dataset, example: Example, most: int) -> dict[str, Any]:
    """The history as the model sees it, asked about at the moment of the held-out event."""
    history, actions = example.history, [str(action) for action in Action]
    rows = zip(history.items[-most:].tolist(), history.timestamps[-most:].tolist(), history.actions[-most:].tolist(), strict=True)
    behaviours = [{"item_id": dataset.catalogue[item].item_id, "timestamp": at, "action": actions[code]} for item, at, code in rows]
    return {"user_id": "measured", "behaviours": behaviours, "request_time": history.request_time, "k": 10, **COMPUTED}


def measure_all(url: str, requests: list[dict[str, Any]]) -> tuple[dict[str, Measured], dict[str, str]]:
    """What every encoder that runs here answered, and why the others do not."""
    measured, absent = {}, {}
    with httpx.Client(base_url=url, timeout=300) as client:
        stages = {one["stage"]: one for one in client.get("/v1/backends").raise_for_status().json()["stages"]}
        for backend in stages["encoder"]["backends"]:
            if not backend["available_on"]:
                absent[backend["name"]] = "; ".join(backend["reasons"])
        usable = [encoder for encoder in ENCODERS if encoder not in absent]
        for encoder in usable:
            for other in usable:
                switch = "enable" if other == encoder else "disable"
                client.post(f"/v1/backends/encoder/{other}:{switch}").raise_for_status()
            measured[encoder] = measure(client, encoder, requests)
    return measured, absent


def measure(client: httpx.Client, encoder: str, requests: list[dict[str, Any]]) -> Measured:
    wait_until_it_serves(client, encoder, requests[0])
    began = time.perf_counter()
    answers: list[dict[str, Any]] = []
    for start in range(0, len(requests), USERS_A_CALL):
        call = client.post("/v1/recommend:batch", json={"requests": requests[start : start + USERS_A_CALL]})
        answers += call.raise_for_status().json()["answers"]
    if others := [answer["stages"] for answer in answers if encoded_by(answer) != encoder]:
        raise RuntimeError(f"{encoder} should have served alone, but {len(others)} of {len(answers)} answers came as {others[0]}")
    items = [[item["item_id"] for item in answer["items"]] for answer in answers]
    scores = [[item["score"] for item in answer["items"]] for answer in answers]
    return Measured(items, scores, time.perf_counter() - began)


def encoded_by(answer: dict[str, Any]) -> str:
    """The name of the engine; "none" where the answer needed no encoder, or had none."""
    return next((str(stage["backend"]) for stage in answer["stages"] if stage["stage"] == "encode"), "none")


def wait_until_it_serves(client: httpx.Client, encoder: str, request: dict[str, Any]) -> None:
    """An engine that was switched on is loaded beside the calls, which for torch.compile takes minutes."""
    deadline = time.monotonic() + LOADED_WITHIN_S
    while encoded_by(client.post("/v1/recommend", json=request).raise_for_status().json()) != encoder:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{encoder} did not serve within {LOADED_WITHIN_S} s; see GET /v1/backends")
        time.sleep(1)


def report(model: str, items: int, wanted: list[str], measured: dict[str, Measured], absent: dict[str, str]) -> str:
    """A table, the verdict and the environment."""
    reference = measured[REFERENCE]
    lines = [f"# Encoders through the endpoint: {model}, {len(wanted)} users, {items} items", ""]
    lines += ["| encoder | hr@10 | same top 10 as torch | largest score difference | users a second |", "|---" * 5 + "|"]
    for encoder, one in measured.items():
        same = np.mean([a == b for a, b in zip(one.items, reference.items, strict=True)])
        difference = np.abs(np.array(one.scores) - np.array(reference.scores)).max()
        speed = len(wanted) / one.seconds
        lines.append(f"| {encoder} | {one.hit_rate(wanted):.4f} | {same:.2%} | {difference:.1e} | {speed:.0f} |")
    for encoder, reason in absent.items():
        lines.append(f"| {encoder} | did not run: {reason} | | | |")
    verdict = "within" if apart(measured, wanted) <= SAME_HR_WITHIN else "beyond"
    lines += ["", f"hr@10 differs by {apart(measured, wanted):.4f} at most ({verdict} {SAME_HR_WITHIN})."]
    versions = ", ".join(f"{package} {version(package)}" for package in ("ray", "torch", "onnxruntime", "openvino"))
    lines += ["", f"Python {platform.python_version()}, {versions}; {platform.machine()}, one gateway and one encoder replica."]
    lines += ["", "Command: `python benchmarks/endpoint_parity.py DATASET [--path DIRECTORY]`", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
