"""A deserialised engine that runs on the current GPU with torch tensors as its buffers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.errors import BackendFailed, BackendUnavailable
from integrations.gpu import alone_on_the_gpu
from integrations.tensorrt.library import broken_as, make_logger, title

ALIGNMENT = 256
"""Bytes, of which an address given to TensorRT has to be a multiple. What torch allocates on a GPU begins so; a layer of it may not."""


class Engine:
    """Not thread-safe: an execution context runs one call at a time. Raises BackendUnavailable where the file does not deserialise here."""

    def __init__(self, library: Any, file: Path, device: str = "cuda") -> None:
        self._device = device
        with broken_as(BackendUnavailable, f"{title(library)}, loading {file.name},"):
            plan = file.read_bytes()
        with alone_on_the_gpu(), broken_as(BackendUnavailable, f"{title(library)}, loading {file.name},"):
            self._open(library, file, plan)

    def _open(self, library: Any, file: Path, plan: bytes) -> None:
        self._logger = make_logger(library)
        self._runtime = library.Runtime(self._logger)  # an engine needs its runtime alive
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise BackendUnavailable(f"{title(library)} cannot load {file.name} here: {self._reasons()}")
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise BackendUnavailable(f"{title(library)} cannot run {file.name} here, as for a lack of GPU memory: {self._reasons()}")
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        self.inputs = [name for name in names if self._engine.get_tensor_mode(name) == library.TensorIOMode.INPUT]
        self.outputs = {name: _torch_type(library, self._engine.get_tensor_dtype(name)) for name in names if name not in self.inputs}
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._nowhere = torch.empty(1, device=self._device)  # the address of tensors without elements, which must not be null

    @property
    def largest_batch(self) -> int:
        """How many users one call may hold: the upper end of the optimisation profile."""
        return self.largest(self.inputs[0], 0)

    def largest(self, name: str, axis: int) -> int:
        """The largest size of the input of that name along that axis."""
        return int(self._engine.get_tensor_profile_shape(name, 0)[2][axis])

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name, on the GPU. Raises BackendFailed where a shape is outside the profile or the engine breaks."""
        self._stream.wait_stream(torch.cuda.current_stream())  # on which kept rows may still be put side by side
        with torch.cuda.stream(self._stream):
            held = {name: self._bind(name, inputs[name]) for name in self.inputs}
            outputs = {name: self._allocate(name, dtype) for name, dtype in self.outputs.items()}
            ran = self._context.execute_async_v3(self._stream.cuda_stream)
        self._stream.synchronize()
        del held  # inputs may only go once the stream has read them
        if not ran:
            raise BackendFailed(f"the TensorRT engine broke: {self._reasons()}")
        return outputs

    def _bind(self, name: str, tensor: Tensor) -> Tensor:
        on_gpu = tensor.to(self._device, non_blocking=True).contiguous()
        if on_gpu.data_ptr() % ALIGNMENT:
            on_gpu = on_gpu.clone()
        if not self._context.set_input_shape(name, tuple(on_gpu.shape)):
            raise BackendFailed(f"the TensorRT engine does not take shape {tuple(on_gpu.shape)} for {name!r}: {self._reasons()}")
        return self._placed(name, on_gpu)

    def _allocate(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._placed(name, torch.empty(tuple(self._context.get_tensor_shape(name)), dtype=dtype, device=self._device))

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor, from which the next execution reads or into which it writes. Raises BackendFailed: else it would do so at the address
        of the call before.
        """
        address = tensor.data_ptr() or self._nowhere.data_ptr()
        if not self._context.set_tensor_address(name, address):
            raise BackendFailed(f"the TensorRT engine does not take the address {address} for {name!r}: {self._reasons()}")
        return tensor

    def _reasons(self) -> str:
        reasons, self._logger.errors = "; ".join(self._logger.errors), []
        return reasons or "no reason given"


def _torch_type(library: Any, dtype: Any) -> torch.dtype:
    return {
        library.DataType.FLOAT: torch.float32,
        library.DataType.HALF: torch.float16,
        library.DataType.INT32: torch.int32,
        library.DataType.INT64: torch.int64,
    }[dtype]
