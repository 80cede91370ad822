"""HSTU and SASRec on ONNX Runtime, through the `retrieve` graph: state and nearest items in one call, no torch needed."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from cluster.bundle import Bundle
from cluster.compilation import artifact_file, compile_command, why_missing
from cluster.errors import BackendUnavailable, BundleError
from cluster.nearest import NearestItems, finite
from cluster.values import Availability, Encoded, EncodeRequest, FloatArray
from integrations.hstu.engine_batch import engine_batch, with_states
from integrations.hstu.limits import limits
from integrations.hstu.user_behavior_schema import BehaviourBatch
from integrations.onnx.session import open_session


class OnnxRuntimeEncoder:
    """On the CUDA provider where this build of ONNX Runtime has it, else on the CPU.

    `threads` a session; the default is what Ray grants the replica. At small sizes several sessions of one thread beat one of several.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def get_availability(self, bundle: Bundle) -> Availability:
        if find_spec("onnxruntime") is None:
            return Availability.no("onnxruntime is not installed; run: pip install 'genrec[cpu]' (or 'genrec[gpu]')")
        if (artifact := bundle.artifact("onnx", "retrieve")) is None:
            return Availability.no(why_missing(bundle, "onnx", "retrieve"))
        try:
            artifact_file(artifact, bundle)
        except BundleError as error:
            return Availability.no(f"{error}; run: {compile_command(bundle)}")
        return Availability.yes()

    def load(self, bundle: Bundle) -> None:
        if not (availability := self.get_availability(bundle)).ok:
            raise BackendUnavailable(availability.reason)
        artifact = bundle.artifact("onnx", "retrieve")
        assert artifact is not None
        self._session = open_session(artifact_file(artifact, bundle), self._threads)
        self._outputs = ["state", "nearest", "scores", *(["states"] if bundle.prompt_length else [])]
        self._index = NearestItems(bundle.item_vectors)
        self._max_history = limits(bundle.manifest.model).max_history

    def infer(self, request: EncodeRequest) -> Encoded:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        most = max((request.top_n for request in requests if request.among is None), default=1)
        batch = engine_batch(requests, self._max_history, len(self._index))
        states, nearest, scores, *latest = self._retrieve(batch, max(1, most))
        answers = [
            Encoded(state, items[: request.top_n], cosines[: request.top_n])
            if request.among is None
            else self._index.among(request.among, state, request.top_n)
            for request, state, items, cosines in zip(requests, finite(states), nearest.astype(np.int32), scores, strict=True)
        ]
        return with_states(answers, latest[0], batch) if latest else answers

    def close(self) -> None:
        for name in ("_session", "_index"):
            self.__dict__.pop(name, None)

    def _retrieve(self, batch: BehaviourBatch, top_n: int) -> list[FloatArray]:
        """The graph's outputs: state, nearest, scores and, where there is a decoder, the latest states."""
        given: dict[str, Any] = {name: getattr(batch, name) for name in ("items", "times", "next_times", "lengths")}
        outputs: list[FloatArray] = self._session.run(self._outputs, {**given, "top_n": np.array(top_n, np.int64)})
        return outputs
