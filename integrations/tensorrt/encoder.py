"""HSTU and SASRec on a TensorRT engine: the `encode` graph on the GPU, then the nearest items by scan."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cluster.bundle import Artifact, Bundle
from cluster.compilation import Precision, compile_command, why_missing
from cluster.errors import BackendUnavailable, BundleError, CompileError
from cluster.nearest import NearestItems
from cluster.values import Availability, Encoded, EncodeRequest, UserSequence
from integrations.hstu.engine_batch import engine_batch, with_states
from integrations.hstu.limits import limits
from integrations.tensorrt.device import gpu_architecture
from integrations.tensorrt.library import CURE, installed, load_library

if TYPE_CHECKING:
    from integrations.tensorrt.engine import Engine

_INPUTS = ("items", "times", "next_times", "lengths")
_ONE_EVENT = UserSequence(
    items=np.ones(1, np.int32),
    timestamps=np.zeros(1, np.int64),
    actions=np.zeros(1, np.int8),
    values=np.zeros(1, np.float32),
    request_time=0,
)


class TensorRTEncoder:
    """Takes the engine of this GPU's architecture in the first of `precisions` there is."""

    def __init__(self, precisions: Sequence[Precision] = ("fp32", "fp16")) -> None:
        self._precisions = tuple(precisions)

    def get_availability(self, bundle: Bundle) -> Availability:
        try:
            self._engine_of(bundle)
        except (BackendUnavailable, BundleError) as error:
            return Availability.no(str(error))
        return Availability.yes()

    def load(self, bundle: Bundle) -> None:
        try:
            artifact = self._engine_of(bundle)
            self._engine = _checked_engine(bundle, artifact)
        except (BundleError, CompileError, ImportError) as error:
            raise BackendUnavailable(str(error)) from error
        self._index = NearestItems(bundle.item_vectors)
        self._max_history = limits(bundle.manifest.model).max_history
        self._has_prompt = bool(bundle.prompt_length)
        self.infer(EncodeRequest(_ONE_EVENT, top_n=1))  # TensorRT for RTX finishes its kernels in the first call: not in a user's

    def infer(self, request: EncodeRequest) -> Encoded:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        size = self._engine.largest_batch
        parts = [requests[start : start + size] for start in range(0, len(requests), size)]
        return [answer for part in parts for answer in self._answer(part)]

    def close(self) -> None:
        for name in ("_engine", "_index"):
            self.__dict__.pop(name, None)

    def _answer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        batch = engine_batch(requests, self._max_history, len(self._index))
        tensors = batch.tensors()
        outputs = self._engine.run({name: tensors[name] for name in _INPUTS})
        answers = self._index.answer(requests, outputs["state"].cpu().numpy())
        return with_states(answers, outputs["states"].cpu().numpy(), batch) if self._has_prompt else answers

    def _engine_of(self, bundle: Bundle) -> Artifact:
        """The engine to serve here. The cheapest question comes first: packages, the bundle, the GPU, and only then the architecture.

        Raises BackendUnavailable or BundleError.
        """
        libraries = installed()
        if not libraries:
            raise BackendUnavailable(f"TensorRT is not installed; {CURE}")
        engines = [a for a in bundle.manifest.artifacts if (a.kind, a.graph) == ("tensorrt", "encode")]
        if not engines:
            raise BackendUnavailable(why_missing(bundle, "tensorrt", "encode"))
        if not any((bundle.path / engine.file).is_file() for engine in engines):
            bundle.verified(engines[0].file)
        engine = _fitting(bundle, engines, gpu_architecture(), self._precisions)
        if engine.builder.split()[0] not in libraries:
            raise BackendUnavailable(f"{engine.file} was built by {engine.builder}, which is not installed; {CURE}")
        bundle.verified(engine.file)
        return engine


def _checked_engine(bundle: Bundle, artifact: Artifact) -> "Engine":
    """The engine, once it is known to answer as the model does. Raises ImportError, BackendUnavailable, BundleError or CompileError."""
    library = load_library(artifact.builder.split()[0])
    from integrations.tensorrt.engine import Engine  # noqa: PLC0415 - imports torch, which availability must not cost

    engine = Engine(library, bundle.path / artifact.file)
    if not artifact.parity:
        from integrations.tensorrt.parity import measure_here  # noqa: PLC0415

        try:
            measure_here(engine, bundle, artifact)
        except CompileError as error:
            raise CompileError(f"{artifact.file}, built without its GPU and first checked here, is refused: {error}") from error
    return engine


def _fitting(bundle: Bundle, engines: Sequence[Artifact], architecture: str, precisions: Sequence[Precision]) -> Artifact:
    """The engine for this architecture. Raises BackendUnavailable where there is none."""
    for precision in precisions:
        for engine in engines:
            if (engine.target, engine.precision) == (architecture, precision):
                return engine
    there = ", ".join(f"{engine.target} {engine.precision}" for engine in engines)
    wanted = [f"tensorrt encode {precision} {architecture}" for precision in precisions]
    failed = next((step for step in bundle.manifest.failed_steps if step.step in wanted), None)
    cure = f"run on this machine: {compile_command(bundle)} --only tensorrt"
    because = f"the step {failed.step!r} failed: {failed.reason}" if failed else cure
    asked = f"{architecture} {'/'.join(precisions)}"
    raise BackendUnavailable(f"{bundle.version} has engines for {there}, none for this GPU, {asked}; {because}")
