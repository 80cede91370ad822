"""HSTU and SASRec in PyTorch: in eager mode (`torch`, needs nothing compiled) and through torch.compile (`torch_compiled`)."""

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.bundle import WEIGHTS, Bundle
from cluster.engines.buffers import BufferPool
from cluster.errors import BundleError
from cluster.nearest import AUTO, index_availability, known_index, make_index
from cluster.values import Availability, Encoded, EncodeRequest, FloatArray
from integrations.hstu.append_inputs import GROUP_BYTES_ON_GPU, Shapes
from integrations.hstu.encoder_backend import EncoderBackend
from integrations.hstu.engine_batch import with_states
from integrations.hstu.state.copies import pinned
from integrations.hstu.stateful import KeptStates, RunAppend
from integrations.hstu.user_behavior_schema import BehaviourBatch

if TYPE_CHECKING:
    import torch

    from integrations.hstu.model import HSTU
    from integrations.hstu.sequence_model import SequenceModel

_INPUTS = ("items", "times", "next_times", "lengths")
NEW_BUCKETS = (8, 64)
"""The numbers of new rows for which an append is compiled: a returning user's, and a step's of a user without kept rows."""


class TorchEncoder(EncoderBackend):
    """The model in eager mode, on the first GPU where there is one.

    `index`: see cluster/nearest.py. `state`: what is kept of users, see StateOptions.
    """

    def __init__(self, *, index: str = AUTO, **state: Any) -> None:
        super().__init__(**state)
        self._index_name = known_index(index)

    def get_availability(self, bundle: Bundle) -> Availability:
        if find_spec("torch") is None:
            return Availability.no("torch is not installed; install genrec with its extra cpu")
        try:
            bundle.verified(WEIGHTS)
        except BundleError as error:
            return Availability.because(error)
        return index_availability(self._index_name)

    def load(self, bundle: Bundle) -> None:
        self.get_availability(bundle).require()
        import torch  # noqa: PLC0415 - an encoder process that serves another engine need not pay for importing torch

        from integrations.hstu.latest_states import latest_states  # noqa: PLC0415
        from integrations.hstu.weights import load_model  # noqa: PLC0415

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_model(bundle).to(device)

        self._prompt_length = bundle.prompt_length
        count = max(1, self._prompt_length)

        def encode(items: "torch.Tensor", times: "torch.Tensor", next_times: "torch.Tensor", lengths: "torch.Tensor") -> "torch.Tensor":
            return latest_states(model, items, times, next_times, lengths, count)

        self._window = model.config.window
        self._device = device
        if device.type == "cuda":
            self._pool = BufferPool(lambda count, dtype: pinned((count,), dtype))
        self._engine: Callable[..., torch.Tensor] = encode
        with torch.inference_mode():
            self._index = make_index(self._index_name, model.item_vectors().cpu().numpy(), on_gpu=device.type == "cuda")
        self._kept = self._keep(bundle, model)

    def _whole(self, requests: Sequence[EncodeRequest], batch: BehaviourBatch) -> list[Encoded]:
        states_BCD = self._states(batch)
        answers = self._index.answer(requests, states_BCD[:, -1])
        return with_states(requests, answers, states_BCD, batch) if self._prompt_length else answers

    def _keep(self, bundle: Bundle, model: "SequenceModel") -> KeptStates | None:
        """The users' states, or None where none are kept for such a model."""
        from integrations.hstu.model import HSTU  # noqa: PLC0415 - imports torch
        from integrations.hstu.torch_append import device_states  # noqa: PLC0415 - imports torch

        if self._device.type == "cuda":
            self._keeps_on_gpu()
        if not isinstance(model, HSTU) or not self._state_options.keeps_of(model.config.max_history):
            return None
        run, shapes, pool = self._appending(model)
        store = None if self._device.type == "cpu" else device_states(model.config, self._state_options, bundle, self._device)
        return KeptStates(bundle, run, self._state_options, store, pool, shapes=shapes)

    def _appending(self, model: "HSTU") -> tuple[RunAppend, Shapes, BufferPool | None]:
        """The model's append, the shapes it takes, and the memory in which kept rows are put side by side for it; None: host memory."""
        from integrations.hstu.torch_append import append_run, device_memory  # noqa: PLC0415 - imports torch

        if self._device.type == "cpu":
            return append_run(model.append, self._device), Shapes(), None
        return append_run(model.append, self._device), Shapes(most_bytes=GROUP_BYTES_ON_GPU), device_memory(self._device)

    def _states(self, batch: BehaviourBatch) -> FloatArray:
        """The latest states of each user, (B, C, D)."""
        import torch  # noqa: PLC0415

        tensors = batch.tensors()
        with torch.inference_mode():
            states: FloatArray = self._engine(*(tensors[name].to(self._device) for name in _INPUTS)).cpu().numpy()
        return states


class CompiledTorchEncoder(TorchEncoder):
    """The model through torch.compile, one compilation for each bucket of length and batch size.

    By default torch.compile recompiles for new shapes, and after eight of them silently runs eagerly. Here every shape is a bucket that
    `load` has compiled, inputs are padded up to it, and a shape outside the buckets is an error.
    The append to kept states has few: the first two batch sizes, NEW_BUCKETS, and a quarter of the longest history kept or all of it.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    shortest = 64

    def get_availability(self, bundle: Bundle) -> Availability:
        if not (eager := super().get_availability(bundle)).ok:
            return eager
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            return Availability.no(
                f"torch.compile needs a C++ compiler and {compiler!r} is not on the PATH; run: apt-get install g++, or set CXX"
            )
        return Availability.yes()

    def load(self, bundle: Bundle) -> None:
        super().load(bundle)
        import torch  # noqa: PLC0415

        self._lengths = doublings(self.shortest, self._window.longest)
        shapes = [(batch, length) for batch in self.batches for length in self._lengths]
        self._engine = torch.compile(  # type: ignore[call-overload]  # torch 2.13's stubs lack the two options its documentation describes
            self._engine, fullgraph=True, dynamic=False, recompile_limit=len(shapes), isolate_recompiles=True
        )
        for batch, length in shapes:
            self._compiled(_padding(batch, length))

    def _appending(self, model: "HSTU") -> tuple[RunAppend, Shapes, BufferPool | None]:
        from integrations.hstu.torch_append import compiled_append, device_memory  # noqa: PLC0415 - imports torch

        longest = self._window.longest
        users, new = self.batches[:2], sorted({min(rows, longest) for rows in NEW_BUCKETS})
        kept = sorted({min(max(self.shortest, longest // 4), longest), longest})
        pool = None if self._device.type == "cpu" else device_memory(self._device)
        return compiled_append(model, self._device, users, new, kept), bucket_shapes(users, new, kept), pool

    def _states(self, batch: BehaviourBatch) -> FloatArray:
        largest = self.batches[-1]
        starts = range(0, max(1, len(batch)), largest)  # of an empty batch too, an empty part
        return np.concatenate([self._bucketed(batch, start, min(start + largest, len(batch))) for start in starts])

    def _bucketed(self, batch: BehaviourBatch, start: int, stop: int) -> FloatArray:
        padded = _padding(bucket(self.batches, stop - start), bucket(self._lengths, batch.items.shape[1]))
        for name in _INPUTS:
            source, target = getattr(batch, name)[start:stop], getattr(padded, name)
            target[tuple(slice(size) for size in source.shape)] = source
        return self._compiled(padded)[: stop - start]

    def _compiled(self, batch: BehaviourBatch) -> FloatArray:
        """The compiled states. Compiled code holds for one setting of autocast's cache, which is each thread's own, and other code may have
        changed.
        """
        import torch  # noqa: PLC0415

        torch.set_autocast_cache_enabled(True)
        return super()._states(batch)


def bucket_shapes(users: Sequence[int], new: Sequence[int], kept: Sequence[int]) -> Shapes:
    """The shapes of an append that is compiled for these sizes, each ascending."""

    def rows(count: int) -> int:
        """The bucket of so many new rows; many new rows go in steps of the largest bucket."""
        return bucket(new, count) if count <= new[-1] else -(-count // new[-1]) * new[-1]

    return Shapes(partial(bucket, users), rows, partial(bucket, kept), users[-1], new[-1])


def bucket(sizes: Sequence[int], size: int) -> int:
    return next(bucket for bucket in sizes if bucket >= size)


def doublings(shortest: int, longest: int) -> list[int]:
    """`shortest`, twice that and so on, up to `longest`, which ends the list."""
    sizes = []
    while shortest < longest:
        sizes.append(shortest)
        shortest *= 2
    return [*sizes, longest]


def _padding(batch: int, length: int) -> BehaviourBatch:
    """A batch of users whose one event is padding."""
    shape = batch, length
    return BehaviourBatch(
        items=np.zeros(shape, np.int64),
        times=np.zeros(shape, np.int32),
        next_times=np.zeros(shape, np.int32),
        lengths=np.ones(batch, np.int64),
        actions=np.zeros(shape, np.int8),
        values=np.full(shape, np.nan, np.float32),
    )
