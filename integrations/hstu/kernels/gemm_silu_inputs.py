"""Which inputs gemm_silu takes, known without nvidia-cutlass-dsl."""

from collections.abc import Iterator

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
VECTOR = 8
"""How many fp16 or bf16 numbers are copied at once; K and N are multiples of it."""


def refuse(x_MK: Tensor, w_KN: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError at inputs that gemm_silu would compute wrongly, or not at all."""
    for fault in _faults(x_MK, w_KN, dtype):
        raise ValueError(f"gemm_silu takes {fault}")


def _faults(x: Tensor, w: Tensor, dtype: torch.dtype) -> Iterator[str]:
    shapes = f"x {tuple(x.shape)} and W {tuple(w.shape)}"
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[0]:
        yield f"x (M, K) and W (K, N), and these are {shapes}; flatten the dimensions before the last one"
    elif x.shape[1] % VECTOR or w.shape[1] % VECTOR or not w.numel():
        yield f"K and N that are multiples of {VECTOR}, and these are {shapes}; pad them with zeros"
    elif len(x) >= 2**22 or len(x) * max(w.shape) >= 2**31:
        yield f"fewer than 2**22 rows, and 2**31 elements in x and in the result, and these are {shapes}; give it fewer rows at once"
    elif x.dtype not in HALVES or w.dtype != x.dtype or dtype not in {x.dtype, torch.float32}:
        yield f"x and W both fp16 or both bf16 and gives that or fp32, and these are {x.dtype}, {w.dtype} and {dtype}; convert them"
    elif torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        yield "no part in gradients, and one of x and W requires one; run it under torch.inference_mode(), or train with torch's projection"
    yield from _misplaced(x, w)


def _misplaced(x: Tensor, w: Tensor) -> Iterator[str]:
    for name, tensor in (("x", x), ("W", w)):
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            yield f"row-major matrices aligned to 16 bytes, and {name} has strides {tensor.stride()}; call .contiguous() on it, or .clone()"
    if x.device != w.device or x.device.type != "cuda":
        yield f"x and W on one GPU, and these are on {x.device} and {w.device}; move them there, or use torch's projection"
