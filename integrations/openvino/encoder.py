"""HSTU and SASRec on OpenVINO: the `encode` graph on the CPU, then the nearest items by scan. No torch needed."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from cluster.bundle import Bundle
from cluster.errors import BackendUnavailable
from cluster.nearest import index_availability, known_index, make_index
from cluster.values import Availability, Encoded, EncodeRequest, FloatArray
from integrations.hstu.config import HSTUConfig
from integrations.hstu.encoder_backend import EncoderBackend
from integrations.hstu.engine_batch import with_states
from integrations.hstu.limits import limits
from integrations.hstu.stateful import KeptStates, states_if_any
from integrations.hstu.user_behavior_schema import BehaviourBatch
from integrations.onnx import append
from integrations.onnx.files import compiled_graph
from integrations.onnx.quality_gate import LEAST, compare
from integrations.onnx.session import threads_granted
from integrations.openvino.engine import INSTALL, Graph, OpenVinoBackend, Precision, compiled, known_precision
from integrations.openvino.shapes import USERS, append_shapes, bucket, padded_length

_LOG = logging.getLogger(__name__)
GRAPH = "encode"


class OpenVinoEncoder(OpenVinoBackend[KeptStates], EncoderBackend):
    """Computes on the CPU. Compared with ONNX Runtime, on one thread, for users without kept rows: with 4 layers of 256 a quarter less time
    for 512 events, and equal time for histories of mixed lengths; with 2 layers of 50 and 200 events a quarter less for 32 users at a time,
    and a quarter more for one.

    `threads`: by default as many as Ray grants the replica. `precision`: bf16 saves a third of the time where the CPU multiplies bf16, and
    moves a state by up to 8e-3; other CPUs compute in f32 all the same. `load` refuses a model for which bf16 is too coarse. Users with
    kept rows are encoded in f32. `index`: see cluster/nearest.py. `state`: the options of what is kept of users, see StateOptions; the
    `append` graph then encodes their new events only.
    """

    def __init__(self, threads: int | None = None, precision: Precision = "f32", index: str = "exact", **state: Any) -> None:
        """Raises UnknownChoice or ConfigError at an option that means nothing."""
        super().__init__(**state)
        self._threads, self._precision, self._index_name = threads, known_precision(precision), known_index(index)

    def get_availability(self, bundle: Bundle) -> Availability:
        if find_spec("openvino") is None:
            return Availability.no(INSTALL)
        try:
            compiled_graph(bundle, GRAPH)
        except BackendUnavailable as error:
            return Availability.because(error)
        return index_availability(self._index_name)

    def load(self, bundle: Bundle) -> None:
        """Make the engine ready. Raises BackendUnavailable, also where the states in bf16 are too far from those in f32."""
        self.get_availability(bundle).require()
        self._window = limits(bundle.manifest.model).window
        engine = self._compiled(bundle, GRAPH, self._precision)
        if self._precision != "f32":
            self._require_quality(bundle, engine)
        self._engine, self._graphs = engine, [engine]
        self._index = make_index(self._index_name, bundle.item_vectors)
        self._prompt_length = bundle.prompt_length
        self._kept = states_if_any("openvino", bundle, self._state_options, partial(self._keep, bundle))

    def _whole(self, requests: Sequence[EncodeRequest], batch: BehaviourBatch) -> list[Encoded]:
        outputs = self._run(self._engine, batch)
        answers = self._index.answer(requests, outputs["state"][: len(batch)])
        return with_states(requests, answers, outputs["states"][: len(batch)], batch) if self._prompt_length else answers

    def _keep(self, bundle: Bundle) -> KeptStates:
        engine = self._compiled(bundle, append.GRAPH, "f32")
        inputs = [node.any_name for node in engine.inputs]
        outputs = [name for node in engine.outputs for name in node.names]  # with one layer, K^T and V have other names too
        shapes = append_shapes(HSTUConfig.model_validate(bundle.manifest.model.config))
        kept = KeptStates(bundle, append.append_run(bundle, engine, inputs, outputs), self._state_options, shapes=shapes)
        self._graphs = [self._engine, engine]
        return kept

    def _compiled(self, bundle: Bundle, graph: str, precision: Precision) -> Graph:
        return compiled(compiled_graph(bundle, graph), self._threads or threads_granted(), precision)

    def _require_quality(self, bundle: Bundle, engine: Graph) -> None:
        quality = compare(bundle, partial(self._states, engine), partial(self._states, self._compiled(bundle, GRAPH, "f32")))
        found = f"openvino in {self._precision}"
        if missed := quality.shortcoming(LEAST):
            raise BackendUnavailable(f"{found} is too coarse for {bundle.version}: {missed}; set its option precision to f32")
        _LOG.info("%s: %.1f%% of %s's nearest items are those of f32", found, 100 * quality.overlap, bundle.version)

    def _states(self, engine: Graph, batch: BehaviourBatch) -> FloatArray:
        return self._run(engine, batch)["state"][: len(batch)]

    def _run(self, engine: Graph, batch: BehaviourBatch) -> Mapping[str, FloatArray]:
        """The graph's outputs, including those for padding."""
        users, events = batch.items.shape
        shape = bucket(users, USERS), padded_length(events, self._window.longest)
        outputs: Mapping[str, FloatArray] = engine({node.any_name: _padded(getattr(batch, node.any_name), shape) for node in engine.inputs})
        return outputs


def _padded(array: "np.ndarray[Any, Any]", shape: tuple[int, int]) -> "np.ndarray[Any, Any]":
    """The array (B, L) or (B,), filled up with zeros to `shape`."""
    padded = np.zeros(shape[: array.ndim], array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded
