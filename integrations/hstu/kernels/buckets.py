"""Batches padded up to one of few shapes, each recorded once: a CUDA graph replays a whole encoding with one launch, for one shape."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from integrations.gpu import alone_on_the_gpu
from integrations.hstu.encoder import bucket

Encode: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""items, times, next_times (B, L) and lengths (B,) -> states (B, C, D)."""
Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
Record: TypeAlias = Callable[[Callable[..., Any], tuple[Tensor, ...]], Callable[[], Any]]
"""(a function of tensors, its inputs) -> a function that runs it again on the inputs' present content, and overwrites the last result."""

_WARM_UPS = 3


def cuda_graphs() -> Record:
    """A recorder of CUDA graphs that share memory: one may run at a time, and its result is to be copied before the next one runs."""
    pool = torch.cuda.graph_pool_handle()

    def record(encode: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        with alone_on_the_gpu():
            _warm_up(encode, inputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads serve meanwhile
                out = encode(*inputs)

        def replay() -> Any:
            graph.replay()
            return out

        return replay

    return record


def _warm_up(encode: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    """Run the function a few times, so that kernels are compiled and libraries take their memory before a graph is recorded."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            encode(*inputs)
    torch.cuda.current_stream().wait_stream(stream)


class Bucketed:
    """Encodes any batch of at most `lengths[-1]` events a user by recorded encodings. For one thread at a time.

    `batches` and `lengths` ascend. A larger batch is cut; a smaller one is filled up with users of one event, which is padding. The last
    batch of each shape, and its result, stay in memory until the next one or `clear`.
    """

    def __init__(self, encode: Encode, batches: Sequence[int], lengths: Sequence[int], device: torch.device, record: Record) -> None:
        self._batches, self._lengths = batches, lengths
        self._encode = encode  # a CUDA graph reads the weights where they are, and does not keep them there
        self._recorded: dict[tuple[int, int], tuple[Inputs, Callable[[], Tensor]]] = {}
        self._used: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        for shape in [(batch, length) for batch in reversed(batches) for length in reversed(lengths)]:  # the largest takes the memory
            inputs = _padding(shape, device)
            self._recorded[shape] = inputs, record(encode, inputs)

    def __call__(self, items: Tensor, times: Tensor, next_times: Tensor, lengths: Tensor) -> Tensor:
        size = self._batches[-1]
        batches = zip(*(torch.split(column, size) for column in (items, times, next_times, lengths)), strict=True)
        return torch.cat([self._run(batch) for batch in batches])

    def _run(self, given: Inputs) -> Tensor:
        users, length = given[0].shape
        shape = bucket(self._batches, users), bucket(self._lengths, length)
        inputs, replay = self._recorded[shape]
        for held, column in zip(inputs, given, strict=True):
            held.fill_(1 if held.dim() == 1 else 0)
            held[tuple(slice(size) for size in column.shape)].copy_(column)
        states = replay()
        self._used[shape] = *inputs, states
        return states[:users].clone()

    def clear(self) -> None:
        """Overwrite the last batches and their results."""
        overwrite(self._used)


def overwrite(used: dict[Any, tuple[Tensor, ...]]) -> None:
    """Fill the tensors with zeros where they are, and empty the dictionary."""
    with torch.inference_mode():  # as in which recorded code makes its results
        for tensors in used.values():
            for one in tensors:
                one.zero_()
    used.clear()


def _padding(shape: tuple[int, int], device: torch.device) -> Inputs:
    times = torch.zeros(shape, dtype=torch.int32, device=device)
    lengths = torch.ones(shape[0], dtype=torch.int64, device=device)
    return torch.zeros(shape, dtype=torch.int64, device=device), times, times.clone(), lengths
