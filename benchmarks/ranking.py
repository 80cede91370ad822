"""How long does a user wait for candidates to be ranked? With the user's events kept, computed anew, and by the naive way, in one run.

    python -m benchmarks.ranking [--model a --model b] [--threads 2] [--rounds 200]

Rankers with random weights (models.py), one user at a time whose history fills the window. "kept": the events' K and V are kept, and only
candidates are computed, in micro-batches (M-FALCON); "one event more": one event came since; "anew": nothing is kept; "naive": PyTorch
computes the history again, eagerly, for each micro-batch of candidates. The contenders take turns in every round; each times a whole
request to the backend. Writes benchmarks/results/ranking_DEVICE_DATE.md.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from msgspec.structs import replace

from benchmarks.models import compiled, described
from benchmarks.reporting import Machine, dated, table
from cluster.bundle import Bundle
from cluster.ranking import RankRequest
from integrations.hstu.ranker_backend import RankerBackend
from integrations.hstu.ranking_engine import MICRO_BATCH
from integrations.hstu.torch_ranker import TorchRanker
from integrations.hstu.weights import load_ranker
from integrations.onnx.ranker import OnnxRuntimeRanker
from integrations.openvino.ranker import OpenVinoRanker
from tests.bundles import make_ranking_bundle, random_sequence

NAMES = ("a", "b")
COUNTS = (100, 500, 2048)
ENGINES: Mapping[str, type[RankerBackend]] = {"onnxruntime": OnnxRuntimeRanker, "openvino": OpenVinoRanker, "torch": TorchRanker}
SETTLING_S = 0.01
"""Before a turn: threads of an engine go on spinning for a while, which in a replica of its own would slow no other engine."""
COLUMNS = ("", "candidates", "p50 (ms)", "p99 (ms)")
LIMIT_MS = 80.0
"""MLPerf's for DLRMv3, p99 at 2,048 candidates."""


@dataclass
class Contender:
    """A way to rank; `request` makes one for each round."""

    name: str
    rank: Callable[[RankRequest], object]
    request: Callable[[], RankRequest]
    seconds: list[float] = field(default_factory=list)

    def take_turn(self) -> None:
        asked = self.request()
        time.sleep(SETTLING_S)
        began = time.perf_counter()
        self.rank(asked)
        self.seconds.append(time.perf_counter() - began)

    def ms(self, percentile: float) -> float:
        return float(np.percentile(self.seconds, percentile)) * 1e3


def main(
    model: Annotated[list[str] | None, typer.Option(help="by default each of " + ", ".join(NAMES))] = None,
    threads: Annotated[int, typer.Option(help="of torch and of each ONNX Runtime session")] = 2,
    rounds: Annotated[int, typer.Option(min=100, help="turns of each contender: a p99 is of a hundred at least")] = 200,
) -> None:
    """Measure, print and file."""
    torch.set_num_threads(threads)
    began = os.getloadavg()[0]
    lines: list[str] = []
    for name in model or NAMES:
        with tempfile.TemporaryDirectory() as directory:
            bundle = compiled(Path(directory) / name, name, make_ranking_bundle)
            lines += [f"## {name}", "", *table(COLUMNS, rows(bundle, threads, rounds)), ""]
    text = "\n".join([*heading(threads, began), *lines])
    print(text)
    dated("ranking_cpu", "md").write_text(text)


def rows(bundle: Bundle, threads: int, rounds: int) -> Iterator[list[str]]:
    """A contender and a number of candidates each."""
    for count in COUNTS:
        contenders = list(contenders_of(bundle, count, threads))
        for _ in range(rounds):
            for contender in contenders:
                contender.take_turn()
        yield from ([one.name, str(count), f"{one.ms(50):.2f}", f"{one.ms(99):.2f}"] for one in contenders)


def contenders_of(bundle: Bundle, count: int, threads: int) -> Iterator[Contender]:
    items = int(str(bundle.ranker().config["items"]))
    length = int(str(bundle.ranker().config["max_history"]))
    rng = np.random.default_rng(count)
    candidates = rng.choice(np.arange(1, items + 1, dtype=np.int32), count, replace=False)
    whole = random_sequence(length, items=items)
    same = RankRequest(whole, candidates, "ada")

    def grown() -> RankRequest:
        """The last event is another one than in any call before."""
        newest, times = whole.items.copy(), whole.timestamps.copy()
        newest[-1], times[-1] = rng.integers(1, items + 1), times[-1] + int(rng.integers(1, 1000))
        return replace(same, sequence=replace(whole, items=newest, timestamps=times, request_time=int(times[-1]) + 60), user_id="bea")

    for name, engine in ENGINES.items():
        ranker = engine(**({"threads": threads} if name != "torch" else {}))
        ranker.load(bundle)
        for request in (same, grown()):
            ranker.infer(request)
        yield Contender(f"{name}, kept", ranker.infer, lambda: same)
        yield Contender(f"{name}, one event more", ranker.infer, grown)
        yield Contender(f"{name}, anew", ranker.infer, lambda: replace(same, user_id=""))
    model = load_ranker(bundle)

    @torch.inference_mode()
    def naive(request: RankRequest) -> None:
        for start in range(0, count, MICRO_BATCH):
            model.after(request.sequence, torch.from_numpy(request.candidates[start : start + MICRO_BATCH].astype(np.int64)))

    yield Contender("naive: the history with each micro-batch, torch", naive, lambda: same)


def heading(threads: int, load: float) -> list[str]:
    return [
        "# Ranking given candidates",
        "",
        f"One user at a time, the window full, {threads} threads, micro-batches of {MICRO_BATCH}.",
        f"MLPerf asks of DLRMv3 a p99 of at most {LIMIT_MS:g} ms at 2,048 candidates.",
        "",
        *described(NAMES),
        *Machine.now("benchmarks.ranking", ("torch", "onnxruntime", "openvino"), load).lines(),
    ]


if __name__ == "__main__":
    typer.run(main)
