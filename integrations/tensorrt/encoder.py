"""HSTU and SASRec on TensorRT engines: the `encode` and `append` graphs on the GPU, then the nearest items by scan."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from cluster.bundle import Bundle
from cluster.compilation import Precision
from cluster.engines.skipped import kind_of
from cluster.errors import BackendUnavailable, BundleError, CompileError
from cluster.nearest import AUTO, index_availability, known_index, make_index
from cluster.values import Availability, Encoded, EncodeRequest, UserSequence
from integrations.hstu.append_inputs import GROUP_BYTES_ON_GPU, Arrays, Shapes
from integrations.hstu.config import HSTUConfig
from integrations.hstu.encoder_backend import EncoderBackend
from integrations.hstu.engine_batch import with_states
from integrations.hstu.limits import limits
from integrations.hstu.stateful import KeptStates, states_if_any
from integrations.hstu.user_behavior_schema import BehaviourBatch
from integrations.onnx import append
from integrations.tensorrt.engine_files import checked_engine, engine_of
from integrations.tensorrt.options import known_precisions

GRAPH = "encode"
KEPT = ("kt", "v")
_INPUTS = ("items", "times", "next_times", "lengths")
_ONE_EVENT = UserSequence(
    items=np.ones(1, np.int32),
    timestamps=np.zeros(1, np.int64),
    actions=np.zeros(1, np.int8),
    values=np.zeros(1, np.float32),
    request_time=0,
)


class TensorRTEncoder(EncoderBackend):
    """Runs the engines for this GPU's architecture, in the first of `precisions` that was built. `index`: see cluster/nearest.py. `state`:
    the options of what is kept of users, see StateOptions; the `append` engine then encodes their new events only.
    """

    def __init__(self, precisions: Sequence[Precision] = ("fp32", "fp16"), *, index: str = AUTO, **state: Any) -> None:
        """Raises UnknownChoice or ConfigError at an option that means nothing."""
        super().__init__(**state)
        self._precisions, self._index_name = known_precisions(precisions), known_index(index)

    def get_availability(self, bundle: Bundle) -> Availability:
        try:
            engine_of(bundle, GRAPH, self._precisions)
        except (BackendUnavailable, BundleError) as error:
            return Availability.because(error)
        return index_availability(self._index_name)

    def load(self, bundle: Bundle) -> None:
        try:
            self._engine = checked_engine(bundle, engine_of(bundle, GRAPH, self._precisions))
        except (BundleError, CompileError, ImportError) as error:
            raise BackendUnavailable(str(error), told=kind_of(error)) from error
        self._index = make_index(self._index_name, bundle.item_vectors, on_gpu=True)
        self._window = limits(bundle.manifest.model).window
        self._prompt_length = bundle.prompt_length
        self._keeps_on_gpu()
        self._kept = states_if_any("tensorrt", bundle, self._state_options, partial(self._keep, bundle))
        self.infer(EncodeRequest(_ONE_EVENT, top_n=1))  # TensorRT for RTX finishes its kernels in the first call: not in a user's

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        size = self._engine.largest_batch
        parts = [requests[start : start + size] for start in range(0, len(requests), size)]
        return list(chain.from_iterable(map(super().batch_infer, parts)))

    def _whole(self, requests: Sequence[EncodeRequest], batch: BehaviourBatch) -> list[Encoded]:
        tensors = batch.tensors()
        outputs = self._engine.run({name: tensors[name] for name in _INPUTS})
        answers = self._index.answer(requests, outputs["state"].cpu().numpy())
        return with_states(requests, answers, outputs["states"].cpu().numpy(), batch) if self._prompt_length else answers

    def _keep(self, bundle: Bundle) -> KeptStates:
        """The kept states, with their rows on the GPU."""
        import torch  # noqa: PLC0415 - loaded with the engine

        from integrations.hstu.torch_append import device_memory, device_states, nothing  # noqa: PLC0415 - imports torch

        engine = checked_engine(bundle, engine_of(bundle, append.GRAPH, self._precisions))
        config, on_gpu = HSTUConfig.model_validate(bundle.manifest.model.config), torch.cuda.is_available()

        def call(inputs: Arrays) -> Arrays:
            outputs = engine.run({name: torch.as_tensor(given) for name, given in inputs.items()})
            return {name: made if on_gpu and name in KEPT else made.cpu().numpy() for name, made in outputs.items()}

        run = append.append_run(bundle, call, engine.inputs, engine.outputs)
        run(nothing(config, 1, 1, 1))  # as in `load`
        gpu = torch.device("cuda")
        memory = (device_states(config, self._state_options, bundle, gpu), device_memory(gpu)) if on_gpu else ()
        shapes = Shapes(most_users=engine.largest_batch, most_new=engine.largest("items", 1), most_bytes=GROUP_BYTES_ON_GPU)
        return KeptStates(bundle, run, self._state_options, *memory, shapes=shapes)
