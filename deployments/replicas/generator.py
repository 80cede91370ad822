"""The generator stage: many requests at a time, each through the framework controller's ranked backends.

    request -> engine with a queue of its own (vllm)   awaited on the event loop
            -> any other (torch_beam)                  joined into batches, in the engine thread

The stage also runs for a model without a decoder, and says so: `ray_config.yaml` may not name a deployment that the application lacks.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from time import monotonic

import numpy as np

from cluster.bundle import Bundle
from cluster.config import Settings
from cluster.engines.controller import Served
from cluster.engines.room import AskBatch, Joined
from cluster.engines.skipped import NoBackendAnswered, OutOfTime
from cluster.errors import ModelGone
from cluster.values import Generated, GeneratedPart, GenerateRequest, StageAnswer, UserState
from deployments.replicas.batching import TOO_LATE, engine_batcher
from deployments.replicas.replica import AsDeployment, StageReplica, due
from deployments.replicas.stage_model import StageModel, sample_history
from deployments.telemetry.metrics import StageRecorder, meter

WARM_UP_ITEMS = 10


class GeneratorModel(StageModel[GenerateRequest, Generated]):
    """One version of the model: its batches and its engines."""

    stage = "generator"

    def __init__(self, settings: Settings, bundle: Bundle) -> None:
        super().__init__(settings, bundle, self._join)

    async def answer(self, request: GenerateRequest) -> StageAnswer[Generated]:
        return self._reported(await self.controller.call_one(request))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GeneratedPart, None]:
        """Items as an engine finds them, some perhaps twice, and lastly the answer. Raises NoBackendAnswered."""
        async with aclosing(self.controller.stream(request, partial(merged, k=request.k))) as parts:
            async for part in parts:
                yield self._reported(part) if isinstance(part, Served) else part

    def _join(self, name: str, answer: AskBatch[GenerateRequest, Generated]) -> Joined[GenerateRequest, Generated]:
        """Answers a backend's requests in batches, which `answer` computes. What waits is counted in paths: a request counts as many as a
        beam is wide.
        """
        limits, beam, watch = self._settings.generator.batching, self._settings.generator.beam, StageRecorder(self.stage, meter()).batch
        batcher = engine_batcher(answer, limits, self._rows, lambda: OutOfTime(name, TOO_LATE), watch)
        return batcher.submit, lambda: float(batcher.waiting * beam)

    def _rows(self, request: GenerateRequest) -> int:
        """How many rows a request takes up in a batch: its prompt's, and those of its paths' codes."""
        return len(request.state) + request.width * (self.bundle.semantic_ids.levels - 1)

    def _samples(self) -> list[GenerateRequest]:
        """Random states before real items: the shortest prompt and the longest."""
        items, dim = self.bundle.items, self.bundle.item_vectors.shape[1]
        lengths = sorted({1, self.bundle.prompt_length or 1})
        k, beam = min(WARM_UP_ITEMS, items), self._settings.generator.beam
        return [GenerateRequest(_user_of(length, items, dim), k, beam, blocked=np.zeros(0, np.int32)) for length in lengths]


class Generator(StageReplica[GeneratorModel]):
    """Answers a GenerateRequest with Generated: the items that a decoder names, and how probable they are."""

    stage = "generator"
    model_type = GeneratorModel

    async def stream(
        self, request: GenerateRequest, within_s: float
    ) -> AsyncGenerator[GeneratedPart | NoBackendAnswered | ModelGone, None]:
        """The parts of the answer as they are found; where there is none, the reason comes in its place: for Ray the call did not fail."""
        try:
            with self._recorded(began := monotonic()):
                async with aclosing(self._model_for(request.model_version).stream(due(request, began, within_s))) as parts:
                    async for part in parts:
                        yield part
        except (NoBackendAnswered, ModelGone) as error:
            yield error

    async def record_routing_stats(self) -> dict[str, float]:
        """The speed of this replica's machine; empty where an engine has a queue of its own: its computing time is not seen here."""
        queued = any(model.controller.queued for model in self._models.models)
        return {} if queued else await super().record_routing_stats()


class GeneratorDeployment(AsDeployment, Generator):
    """The generator as Serve makes it."""


def merged(pieces: Sequence[Generated], k: int) -> Generated:
    """The `k` most probable items of all pieces, each once."""
    items = np.concatenate([np.zeros(0, np.int32), *(piece.items for piece in pieces)]).astype(np.int32)
    log_probs = np.concatenate([np.zeros(0, np.float32), *(piece.log_probs for piece in pieces)]).astype(np.float32)
    order = np.argsort(-log_probs, kind="stable")
    _, first = np.unique(items[order], return_index=True)
    best = order[np.sort(first)[:k]]
    return Generated(items[best], log_probs[best])


def _user_of(length: int, items: int, dim: int) -> UserState:
    rng = np.random.default_rng(length)
    states = rng.standard_normal((length, dim)).astype(np.float32)
    return UserState(states / np.linalg.norm(states, axis=1, keepdims=True), sample_history(length, items))
