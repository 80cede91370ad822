"""Histories, projections and kept rows for HSTU's kernels, on any device and in any precision. They need neither pytest nor triton."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.bundle import Bundle
from cluster.values import Availability
from integrations.hstu.kernels.buckets import Record
from integrations.hstu.kernels.encoder import TritonEncoder
from integrations.hstu.kernels.rows import Rows

N, LONGEST, BUCKETS = 211, 1000, 128
_SHORT = 200


def times_of(rng: np.random.Generator, length: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """When the events of a history happened and when the next ones did, seconds to years before the request."""
    spread, unit = (16.0, 1) if length <= _SHORT else (3.0, int(np.exp(rng.uniform(0, 11))))
    times = -np.cumsum(unit * np.exp(rng.uniform(-1, spread, length)).astype(np.int64))[::-1]
    return times.astype(np.int32), np.append(times[1:], 0).astype(np.int32)


def beside_bucket_edges(most: int = 64) -> npt.NDArray[np.int32]:
    """Whole seconds within `most` of where a time bucket ends, as far as int32 goes."""
    edges = np.exp(0.301 * np.arange(72)).astype(np.int64)
    seconds = np.unique(edges[:, None] + np.arange(-most, most + 1))
    return seconds[(seconds >= 0) & (seconds < 2**31)].astype(np.int32)


def ragged(lengths: Sequence[int], device: str = "cpu") -> Rows:
    """User b has the `lengths[b]` rows behind those of the users before."""
    starts = np.cumsum([0, *lengths[:-1]])
    return Rows(torch.tensor(starts, device=device), torch.tensor(lengths, device=device), max(lengths))


class Example:
    """Ragged histories, as views of one projection like the model's. `shape`: heads, and the widths of one of them in Q and K, and in V."""

    def __init__(
        self,
        lengths: Sequence[int],
        shape: tuple[int, int, int] = (2, 16, 8),
        seed: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        n: int = N,
    ) -> None:
        heads, attention_dim, linear_dim = shape
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        times = [times_of(rng, length) for length in lengths]
        self.times, self.next_times = (torch.from_numpy(np.concatenate([pair[i] for pair in times])).to(device) for i in range(2))
        self.rows = ragged(lengths, device)
        self.projected = torch.randn(sum(lengths), heads * (2 * attention_dim + linear_dim)).to(device, dtype)
        self.widths = [heads * attention_dim, heads * attention_dim, heads * linear_dim]
        self.heads = heads
        self.tables = torch.randn(2 * n - 1).to(device), torch.randn(BUCKETS + 1).to(device)
        self.out_gradient = torch.randn(sum(lengths), heads, linear_dim).to(device, dtype)

    def qkv(self, projected: Tensor | None = None) -> list[Tensor]:
        given = self.projected if projected is None else projected
        return [part.unflatten(1, (self.heads, -1)) for part in given.split(self.widths, 1)]

    def run(self, attend: Callable[..., Tensor], **options: Any) -> tuple[Tensor, ...]:
        """The output and the gradients of the projection and of both tables."""
        inputs = [tensor.clone().requires_grad_() for tensor in (self.projected, *self.tables)]
        out = attend(*self.qkv(inputs[0]), self.next_times, self.times, self.rows, *inputs[1:], **options)
        return out.detach(), *torch.autograd.grad(out, inputs, self.out_gradient)

    def exact(self) -> "Example":
        """The same numbers in float64 on the CPU."""
        other = copy(self)
        other.times, other.next_times = self.times.cpu(), self.next_times.cpu()
        other.rows = Rows(self.rows.starts.cpu(), self.rows.lengths.cpu(), self.rows.longest)
        other.projected, other.out_gradient = self.projected.cpu().double(), self.out_gradient.cpu().double()
        other.tables = self.tables[0].cpu().double(), self.tables[1].cpu().double()
        return other


def append_inputs(
    new: int, pasts: Sequence[int], shape: tuple[int, int, int] = (2, 12, 8), device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """What `append` takes: `new` rows of each user behind as many kept ones as `pasts` says."""
    torch.manual_seed(new)
    heads, attention_dim, linear_dim = shape
    rng, users, past = np.random.default_rng(new), len(pasts), max(pasts)
    histories = [times_of(rng, length + new) for length in pasts]
    times, next_times = (torch.from_numpy(np.stack([pair[i][-new:] for pair in histories])) for i in range(2))
    past_times = torch.from_numpy(np.stack([np.resize(pair[0][: len(pair[0]) - new], past) if past else pair[0][:0] for pair in histories]))
    widths = [heads * attention_dim, heads * attention_dim, heads * linear_dim]
    q, k, v = (part.unflatten(2, (heads, -1)) for part in torch.randn(users, new, sum(widths)).to(device, dtype).split(widths, 2))
    kept = (torch.randn(users, heads, attention_dim, past).to(dtype), torch.randn(users, heads, past, linear_dim).to(dtype))
    tables = torch.randn(2 * LONGEST - 1), torch.randn(BUCKETS + 1)
    return q, k, v, *(one.to(device) for one in (*kept, torch.tensor(pasts), next_times, times, past_times, *tables))


def exact(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers on the CPU, those that are not whole in float64."""
    return [one.cpu().double() if one.is_floating_point() else one.cpu() for one in inputs]


class InterpretedEncoder(TritonEncoder):
    """The encoder without its GPU: what it would record as CUDA graphs it runs."""

    device, batches, shortest = "cpu", (1, 2), 10

    def get_availability(self, bundle: Bundle) -> Availability:
        return Availability.yes()

    def _recorder(self) -> Record:
        return lambda encode, inputs: lambda: encode(*inputs)
