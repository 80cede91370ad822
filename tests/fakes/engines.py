"""Generators as a configuration names them, which do as a test's script says. `generating` is that configuration.

vllm         has a queue of its own, answers requests one by one, and streams
torch_beam   answers batches
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cluster.bundle import Bundle
from cluster.config import Settings, parse
from cluster.values import Availability, Generated, GenerateRequest


def generated(*items: int, first: float = -1.0) -> Generated:
    """These items, each a tenth less probable than the one before."""
    return Generated(np.array(items, np.int32), (first - 0.1 * np.arange(len(items))).astype(np.float32))


def completed(best: Generated, request: GenerateRequest, catalogue_size: int) -> Generated:
    """As many items as are asked for: `best`, and then others in order, each as probable as the last of those."""
    others = np.setdiff1d(np.arange(1, catalogue_size + 1, dtype=np.int32), best.items)[: max(0, request.k - len(best.items))]
    return Generated(np.append(best.items, others), np.append(best.log_probs, np.full(len(others), best.log_probs[-1])))


@dataclass
class Script:
    """`answer` gives the best of a request's answer, which other items complete, or raises, and `pieces` what a stream finds of it;
    `loading` is told of each load as it begins.

    `asked` has every batch so far, those of the warm-up among them.
    """

    answer: Callable[[GenerateRequest, Bundle], Generated] = lambda request, bundle: generated(3, 1)
    pieces: tuple[Generated, ...] = ()
    loading: Callable[[Bundle], object] = lambda bundle: None
    declines: str = ""
    queue: dict[str, float] = field(default_factory=dict)
    asked: list[list[GenerateRequest]] = field(default_factory=list)


class Batching:
    def __init__(self, script: Script) -> None:
        self.script = script

    def get_availability(self, bundle: Bundle) -> Availability:
        return Availability.yes()

    def load(self, bundle: Bundle) -> None:
        self.script.loading(bundle)
        self.bundle = bundle

    def infer(self, request: GenerateRequest) -> Generated:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        self.script.asked.append(list(requests))
        return [completed(self.script.answer(request, self.bundle), request, self.bundle.items) for request in requests]

    def queue(self) -> dict[str, float]:
        return self.script.queue

    def close(self) -> None:
        """It holds nothing."""


class Queueing(Batching):
    async def ainfer(self, request: GenerateRequest) -> Generated:
        return self.infer(request)

    async def astream(self, request: GenerateRequest) -> AsyncIterator[Generated]:
        self.script.asked.append([request])
        for piece in self.script.pieces:
            yield piece

    def declines(self, request: GenerateRequest) -> str:
        return self.script.declines


def generating(model_dir: Path, *, vllm: Script | None = None, torch_beam: Script | None = None, **generator: Any) -> Settings:
    """Those that have a script serve, in this order."""
    scripts = {name: script for name, script in (("vllm", vllm), ("torch_beam", torch_beam)) if script}
    stage = {
        "backends": {"vllm": f"{__name__}:Queueing", "torch_beam": f"{__name__}:Batching"},
        "order": list(scripts),
        "options": {name: {"script": script} for name, script in scripts.items()},
    }
    return parse({"model_dir": str(model_dir), "generator": {**stage, **generator}})
