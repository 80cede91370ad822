"""HSTU and SASRec on ONNX Runtime, through the `retrieve` graph: state and nearest items in one call, no torch needed."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from cluster.bundle import Bundle
from cluster.compilation import artifact_file, compile_command, why_missing
from cluster.errors import BackendUnavailable, BundleError
from cluster.nearest import NearestItems, finite
from cluster.values import Availability, Encoded, EncodeRequest, FloatArray, Int32Array
from integrations.hstu.engine_batch import engine_batch
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
        self._index = NearestItems(bundle.item_vectors)
        self._max_history = limits(bundle.manifest.model).max_history

    def infer(self, request: EncodeRequest) -> Encoded:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        most = max((request.top_n for request in requests if request.among is None), default=1)
        states, nearest, scores = self._retrieve(engine_batch(requests, self._max_history, len(self._index)), max(1, most))
        return [
            Encoded(state, items[: request.top_n], cosines[: request.top_n])
            if request.among is None
            else self._index.among(request.among, state, request.top_n)
            for request, state, items, cosines in zip(requests, states, nearest, scores, strict=True)
        ]

    def close(self) -> None:
        for name in ("_session", "_index"):
            self.__dict__.pop(name, None)

    def _retrieve(self, batch: BehaviourBatch, top_n: int) -> tuple[FloatArray, Int32Array, FloatArray]:
        given: dict[str, Any] = {name: getattr(batch, name) for name in ("items", "times", "next_times", "lengths")}
        states, nearest, scores = self._session.run(["state", "nearest", "scores"], {**given, "top_n": np.array(top_n, np.int64)})
        return finite(states), nearest.astype(np.int32), scores
