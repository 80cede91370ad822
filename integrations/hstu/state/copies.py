"""Copies between pinned host memory and an accelerator, beside the computation. On a CPU the same calls copy at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cluster.errors import BackendUnavailable
from cluster.values import Availability

if TYPE_CHECKING:
    import torch


def get_availability(device: str) -> Availability:
    """Whether tensors can be kept on the device ("cpu", "cuda", "cuda:1"), and if not, why."""
    try:
        import torch  # noqa: PLC0415 - the rest of the package works without it
    except ImportError:
        return Availability.no("torch is not installed; install genrec with its extra gpu")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        return Availability.no(f"no CUDA device here; keep states on '{device}' where there is one, and in host memory otherwise")
    return Availability.yes()


def require(device: str) -> "torch.device":
    """The device. Raises BackendUnavailable, with the reason, where it is not there."""
    import torch  # noqa: PLC0415

    if not (available := get_availability(device)).ok:
        raise BackendUnavailable(available.reason)
    return torch.device(device)


def pinned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Memory that a GPU reads and writes by itself, for PagePool(allocate=pinned). The system may round it up to a power of two bytes."""
    import torch  # noqa: PLC0415

    require("cuda")
    return torch.from_numpy(np.empty(0, dtype)).new_empty(shape, pin_memory=True).numpy()


class SideCopies:
    """A side stream for copies, which start after the work of the current stream so far, and events to wait for."""

    def __init__(self, device: "torch.device") -> None:
        import torch  # noqa: PLC0415

        self._device = device
        self._cuda: Any = torch.cuda if device.type == "cuda" else None
        self._stream: Any = self._cuda.Stream(device) if self._cuda else None

    @contextmanager
    def stream(self) -> Iterator[None]:
        if self._cuda is None:
            yield
            return
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            yield

    def mark(self) -> "torch.cuda.Event | None":
        """The end of the copies so far: None on a CPU, where they are done."""
        return self._stream.record_event() if self._stream else None

    def wait(self, event: "torch.cuda.Event | None") -> None:
        """Have the current stream's further work wait for the event; the caller goes on at once."""
        if self._cuda is not None and event is not None:
            self._cuda.current_stream(self._device).wait_event(event)

    def keep(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Note that the copies read this tensor, so that its memory is not used again before they are done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
        return tensor

    def staging(self, tensor: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
        """Host memory for such a tensor, pinned where there is a GPU."""
        import torch  # noqa: PLC0415

        return torch.empty(tensor.shape, dtype=dtype, pin_memory=self._cuda is not None)
