"""HSTU and SASRec on ONNX Runtime, through the `retrieve` graph: state and nearest items in one call, no torch needed."""

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, get_args

import numpy as np

from cluster.bundle import Bundle
from cluster.errors import BackendUnavailable, UnknownChoice
from cluster.nearest import finite, index_availability, known_index, make_index
from cluster.values import Availability, Encoded, EncodeRequest, FloatArray
from integrations.hstu.append_inputs import Arrays, Shapes
from integrations.hstu.config import HSTUConfig
from integrations.hstu.encoder_backend import EncoderBackend
from integrations.hstu.engine_batch import with_states
from integrations.hstu.limits import MOST_PAIRS, MOST_PAIRS_ON_GPU, limits, rows_at_once
from integrations.hstu.stateful import KeptStates, states_if_any
from integrations.hstu.user_behavior_schema import BehaviourBatch
from integrations.onnx.append import GRAPH, OUTPUTS, append_run
from integrations.onnx.files import compiled_graph
from integrations.onnx.session import computes_here, open_session

Precision = Literal["fp32", "int8"]


class OnnxRuntimeEncoder(EncoderBackend):
    """Computes by the CUDA provider where this build of ONNX Runtime has it, else on the CPU.

    `threads`: of a session; by default as many as Ray grants the replica. At small sizes several sessions of one thread beat one of many.
    `index`: searches for users with kept rows, see cluster/nearest.py; for all others the `retrieve` graph searches.
    `precision`: int8 is for CPUs, and for models that were compiled with it (genrec compile --precision fp32,fp16,int8), as their quality
    allowed. In int8, values are scaled by the largest of a batch, so a state depends a little on the other histories of its batch; users
    with kept rows are encoded in fp32.
    `state`: the options of what is kept of users, see StateOptions; the `append` graph then encodes their new events only.
    """

    brief = False
    """Until a session is open that computes on the CPU."""

    def __init__(self, threads: int | None = None, *, precision: Precision = "fp32", index: str = "exact", **state: Any) -> None:
        """Raises UnknownChoice at an option that means nothing."""
        super().__init__(**state)
        if precision not in get_args(Precision):
            raise UnknownChoice("precision", precision, get_args(Precision))
        self._threads, self._precision, self._index_name = threads, precision, known_index(index)

    def get_availability(self, bundle: Bundle) -> Availability:
        if find_spec("onnxruntime") is None:
            return Availability.no("onnxruntime is not installed; install genrec with its extra cpu (on a GPU machine: gpu)")
        try:
            compiled_graph(bundle, "retrieve", self._precision)
        except BackendUnavailable as error:
            return Availability.because(error)
        return index_availability(self._index_name)

    def load(self, bundle: Bundle) -> None:
        self.get_availability(bundle).require()
        self._engine = open_session(compiled_graph(bundle, "retrieve", self._precision), self._threads)
        self.brief = computes_here(self._engine)
        self._inputs = [node.name for node in self._engine.get_inputs() if node.name != "top_n"]
        self._outputs = ["state", "nearest", "scores", *(["states"] if bundle.prompt_length else [])]
        self._index = make_index(self._index_name, bundle.item_vectors)
        self._window = limits(bundle.manifest.model).window
        self._kept = states_if_any("onnxruntime", bundle, self._state_options, partial(self._keep, bundle))

    def _whole(self, requests: Sequence[EncodeRequest], batch: BehaviourBatch) -> list[Encoded]:
        most = max((request.top_n for request in requests if request.among is None), default=1)
        states, nearest, scores, *latest = self._retrieve(batch, max(1, most))
        answers = [
            Encoded(state, items[: request.top_n], cosines[: request.top_n])
            if request.among is None
            else self._index.among(request.among, state, request.top_n)
            for request, state, items, cosines in zip(requests, finite(states), nearest.astype(np.int32), scores, strict=True)
        ]
        return with_states(requests, answers, latest[0], batch) if latest else answers

    def _retrieve(self, batch: BehaviourBatch, top_n: int) -> list[FloatArray]:
        """The graph's outputs: state, nearest, scores and, where there is a decoder, the latest states."""
        given: dict[str, Any] = {name: getattr(batch, name) for name in self._inputs}
        outputs: list[FloatArray] = self._engine.run(self._outputs, {**given, "top_n": np.array(top_n, np.int64)})
        return outputs

    def _keep(self, bundle: Bundle) -> KeptStates:
        session = open_session(compiled_graph(bundle, GRAPH), self._threads)
        inputs, outputs = ([node.name for node in nodes] for nodes in (session.get_inputs(), session.get_outputs()))

        def call(given: Arrays) -> Arrays:
            return dict(zip(OUTPUTS, session.run(OUTPUTS, given), strict=True))

        config = HSTUConfig.model_validate(bundle.manifest.model.config)
        pairs = MOST_PAIRS if computes_here(session) else MOST_PAIRS_ON_GPU
        shapes = Shapes(most_new=rows_at_once(config, pairs), most_pairs=pairs // config.heads)
        return KeptStates(bundle, append_run(bundle, call, inputs, outputs), self._state_options, shapes=shapes)
