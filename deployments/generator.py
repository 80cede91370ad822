"""The generator deployment: many requests at a time, each through the framework controller's ranked backends.

    request -> engine with a queue of its own (vllm)   awaited in the event loop
            -> any other (torch_beam)                  joined into batches, in the engine thread

For a model without a decoder it runs too, and says so: `ray_config.yaml` may not name a deployment that the application lacks.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TypeAlias

import numpy as np
from ray.serve.metrics import Gauge

from cluster.concurrent_controller import ConcurrentController
from cluster.controller import NoBackendAnswered, Served
from cluster.managed_backend import OutOfTime
from cluster.values import GenerateAnswer, Generated, GenerateRequest, SkippedBackend, StageReport, UserState
from deployments.batching import MicroBatcher
from deployments.replica import StageReplica, sample_history

Controller: TypeAlias = ConcurrentController[GenerateRequest, Generated]
Result: TypeAlias = Generated | SkippedBackend
WARM_UP_ITEMS = 10
WAY_BACK_S = 0.05


class Generator(StageReplica[Controller]):
    """One replica; `generate` and `generate_stream` are what the gateways call, with the seconds they may take from now on."""

    stage = "generator"
    controller_type = ConcurrentController

    def _set_up(self) -> None:
        self._batchers: dict[str, MicroBatcher[GenerateRequest, Result]] = {}
        self._gauge = Gauge("genrec_generator_queue", "What an engine says of its queue", tag_keys=("backend", "figure"))  # type: ignore[arg-type]  # Ray means any number

    async def generate(self, request: GenerateRequest, within_s: float) -> GenerateAnswer | NoBackendAnswered:
        """The items, or why no engine named any: a value, since for Ray this call did not fail."""
        try:
            self._check_version(request)
            return self._answer(await self._controller.serve(_due(request, within_s), self._batched))
        except NoBackendAnswered as error:
            return error

    async def generate_stream(
        self, request: GenerateRequest, within_s: float
    ) -> AsyncGenerator[Generated | GenerateAnswer | NoBackendAnswered, None]:
        """Items as they are found, the same perhaps twice; lastly the answer, or why there is none."""
        parts = self._controller.serve_stream(_due(request, within_s), self._batched, partial(merged, k=request.k))
        try:
            self._check_version(request)
            async with aclosing(parts):
                async for part in parts:
                    yield self._answer(part) if isinstance(part, Served) else part
        except NoBackendAnswered as error:
            yield error

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The figures of `cluster.autoscaling`, over all engines."""
        figures = self._figures().values()
        return {
            "waiting": sum(one.get("waiting", 0.0) for one in figures),
            "kv_cache_usage": max((one.get("kv_cache_usage", 0.0) for one in figures), default=0.0),
        }

    def _check_version(self, request: GenerateRequest) -> None:
        """Raises NoBackendAnswered where the request's indices are of another catalogue."""
        if request.model_version not in ("", self._bundle.version):
            reason = f"it serves {self._bundle.version}, the gateway {request.model_version}: a new version is being rolled out"
            raise NoBackendAnswered("generator", (SkippedBackend("generator", reason, failed=True),))

    def _answer(self, served: Served[Generated]) -> GenerateAnswer:
        report = StageReport("generate", served.backend, served.duration_ms, served.fallback_from)
        return GenerateAnswer(served.answer, report, self._bundle.version)

    async def _batched(self, name: str, request: GenerateRequest) -> Result:
        if name not in self._batchers:
            batching = self._settings.generator.batching
            self._batchers[name] = MicroBatcher(partial(self._run, name), batching, tokens=self._rows)
        return await self._batchers[name].submit(request)

    def _rows(self, request: GenerateRequest) -> int:
        """What a request takes up in a batch: its prompt's rows, and those of its paths' codes."""
        return len(request.user) + request.width * (self._bundle.semantic_ids.levels - 1)

    async def _run(self, name: str, requests: list[GenerateRequest]) -> Sequence[Result]:
        """A batch, less those for whom it comes too late: they would cost the others time."""
        now = monotonic()
        late = {index for index, one in enumerate(requests) if one.deadline is not None and one.deadline <= now}
        timely = [one for index, one in enumerate(requests) if index not in late]
        results = iter(await self._in_thread(lambda: self._controller.answer_batch(name, timely)) if timely else ())
        waited = OutOfTime(name, "the time was over while the request waited for a batch")
        return [waited if index in late else next(results) for index in range(len(requests))]

    def _figures(self) -> dict[str, dict[str, float]]:
        """What waits and runs, by backend, in paths: a user who waits for a batch counts as a beam's width of them."""
        beam, queues = self._settings.generator.beam, self._controller.queues()
        batches = {name: {"waiting": float(batcher.waiting * beam)} for name, batcher in self._batchers.items()}
        return {name: {**batches.get(name, {}), **queues.get(name, {})} for name in {**batches, **queues}}

    def _show_figures(self) -> None:
        for backend, figures in self._figures().items():
            for figure, value in figures.items():
                self._gauge.set(value, tags={"backend": backend, "figure": figure})

    def _samples(self) -> list[GenerateRequest]:
        """Random states before real items: the shortest prompt and the longest."""
        items, dim = len(self._bundle.catalogue), self._bundle.item_vectors.shape[1]
        lengths = sorted({1, self._bundle.prompt_length or 1})
        k, beam = min(WARM_UP_ITEMS, items), self._settings.generator.beam
        return [GenerateRequest(_user_of(length, items, dim), k, beam, blocked=np.zeros(0, np.int32)) for length in lengths]


def merged(pieces: Sequence[Generated], k: int) -> Generated:
    """The `k` most probable items of all pieces, each once."""
    items = np.concatenate([np.zeros(0, np.int32), *(piece.items for piece in pieces)]).astype(np.int32)
    log_probs = np.concatenate([np.zeros(0, np.float32), *(piece.log_probs for piece in pieces)]).astype(np.float32)
    order = np.argsort(-log_probs, kind="stable")
    _, first = np.unique(items[order], return_index=True)
    best = order[np.sort(first)[:k]]
    return Generated(items[best], log_probs[best])


def _due(request: GenerateRequest, within_s: float) -> GenerateRequest:
    """With a deadline on this process's clock, a little before the caller's, who can then be told why nothing was found."""
    return replace(request, deadline=monotonic() + within_s - min(WAY_BACK_S, within_s / 10))


def _user_of(length: int, items: int, dim: int) -> UserState:
    rng = np.random.default_rng(length)
    states = rng.standard_normal((length, dim)).astype(np.float32)
    return UserState(states / np.linalg.norm(states, axis=1, keepdims=True), sample_history(length, items))
