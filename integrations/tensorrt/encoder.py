"""HSTU and SASRec on a TensorRT engine: the `encode` graph on the GPU, then the nearest items by scan."""

from collections.abc import Sequence

import numpy as np

from cluster.bundle import Bundle
from cluster.compilation import Precision
from cluster.errors import BackendUnavailable, BundleError, CompileError
from cluster.nearest import index_availability, known_index, make_index
from cluster.values import Availability, Encoded, EncodeRequest, UserSequence
from integrations.hstu.engine_batch import engine_batch, with_states
from integrations.hstu.limits import limits
from integrations.tensorrt.engine_files import checked_engine, engine_of

GRAPH = "encode"
_INPUTS = ("items", "times", "next_times", "lengths")
_ONE_EVENT = UserSequence(
    items=np.ones(1, np.int32),
    timestamps=np.zeros(1, np.int64),
    actions=np.zeros(1, np.int8),
    values=np.zeros(1, np.float32),
    request_time=0,
)


class TensorRTEncoder:
    """Takes the engine of this GPU's architecture in the first of `precisions` there is. `index`: see cluster/nearest.py."""

    def __init__(self, precisions: Sequence[Precision] = ("fp32", "fp16"), *, index: str = "exact") -> None:
        self._precisions, self._index_name = tuple(precisions), known_index(index)

    def get_availability(self, bundle: Bundle) -> Availability:
        try:
            engine_of(bundle, GRAPH, self._precisions)
        except (BackendUnavailable, BundleError) as error:
            return Availability.no(str(error))
        return index_availability(self._index_name)

    def load(self, bundle: Bundle) -> None:
        try:
            self._engine = checked_engine(bundle, engine_of(bundle, GRAPH, self._precisions))
        except (BundleError, CompileError, ImportError) as error:
            raise BackendUnavailable(str(error)) from error
        self._index = make_index(self._index_name, bundle.item_vectors)
        self._window = limits(bundle.manifest.model).window
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
        batch = engine_batch(requests, self._window, len(self._index))
        tensors = batch.tensors()
        outputs = self._engine.run({name: tensors[name] for name in _INPUTS})
        answers = self._index.answer(requests, outputs["state"].cpu().numpy())
        return with_states(answers, outputs["states"].cpu().numpy(), batch) if self._has_prompt else answers
