"""HSTU's projection SiLU(x W), x the normed rows: by torch, or by the CUTLASS kernel (gemm_silu.py) where that can run.

Shapes: M rows of all users, K the model's width, N the widths of U, V, Q and K of all heads together.
"""

import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.values import Availability
from integrations.hstu.config import HSTUConfig
from integrations.hstu.kernels.gpu import usable_gpu

Project: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""x (M, K) and W (K, N) -> SiLU(x W) (M, N), of x's type."""

HALVES = (torch.float16, torch.bfloat16)
VECTOR = 8
"""How many fp16 or bf16 numbers are copied at once; K and N are multiples of it."""

_LOG = logging.getLogger(__name__)


def chosen(name: str, config: HSTUConfig) -> Project:
    """The projection of this name, or torch's where that cannot run, which is logged with the reason."""
    if name == "torch":
        return by_torch
    if not (availability := cutlass_availability(config)).ok:
        _LOG.warning("projection=torch (%s: %s)", name, availability.reason)
        return by_torch
    return by_cutlass


def by_torch(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    return F.silu(x_MK @ w_KN)


def by_cutlass(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    """fp32 is rounded to fp16, whose 10 bits of mantissa are those of TF32, before it is multiplied; sums and results stay fp32."""
    from integrations.hstu.kernels.gemm_silu import gemm_silu  # noqa: PLC0415 - nvidia-cutlass-dsl need not be installed

    kind = x_MK.dtype if x_MK.dtype in HALVES else torch.float16
    return gemm_silu(x_MK.to(kind), w_KN.to(kind), x_MK.dtype)


def cutlass_availability(config: HSTUConfig) -> Availability:
    """Whether gemm_silu can be compiled here, fits the model and has a GPU to run on."""
    compiles = cutlass_compiles(config)
    return usable_gpu("gemm_silu") if compiles.ok else compiles


def cutlass_compiles(config: HSTUConfig) -> Availability:
    if find_spec("nvidia_cutlass_dsl") is None:
        return Availability.no("nvidia-cutlass-dsl is not installed; run: pip install 'genrec[cutlass]'")
    for name, width in zip(("dim", "2 * heads * (attention_dim + linear_dim)"), sizes(config), strict=True):
        if width % VECTOR:
            return Availability.no(
                f"gemm_silu copies {VECTOR} numbers at once and {name} is {width}; train a model where that is a multiple of {VECTOR}"
            )
    return Availability.yes()


def sizes(config: HSTUConfig) -> tuple[int, int]:
    """K and N."""
    return config.dim, 2 * config.heads * (config.attention_dim + config.linear_dim)


def refuse(x_MK: Tensor, w_KN: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError at what gemm_silu would compute wrongly, or not at all."""
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
