"""HSTU's projection SiLU(x W), x the normed rows: by torch, or by the CUTLASS kernel (gemm_silu.py) where that can run.

Shapes: M rows of all users, K the model's width, N the widths of U, V, Q and K of all heads together.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.values import Availability
from integrations.hstu.config import HSTUConfig
from integrations.hstu.kernels.gemm_silu_inputs import HALVES, VECTOR
from integrations.hstu.kernels.gpu import usable_gpu

Project: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""x (M, K) and W (K, N) -> SiLU(x W) (M, N), of x's type."""

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
    """The projection by gemm_silu. fp32 inputs are rounded to fp16, which has TF32's 10 bits of mantissa; sums and results stay fp32."""
    from integrations.hstu.kernels.gemm_silu import gemm_silu  # noqa: PLC0415 - nvidia-cutlass-dsl need not be installed

    kind = x_MK.dtype if x_MK.dtype in HALVES else torch.float16
    return gemm_silu(x_MK.to(kind), w_KN.to(kind), x_MK.dtype)


def cutlass_availability(config: HSTUConfig) -> Availability:
    """Whether gemm_silu can be compiled here, fits the model, has a GPU to run on and can be imported. It never raises."""
    if not (compiles := cutlass_compiles(config)).ok:
        return compiles
    if not (gpu := usable_gpu("gemm_silu")).ok:
        return gpu
    try:
        import_module("integrations.hstu.kernels.gemm_silu")
    except Exception as error:  # noqa: BLE001 - packages of CUDA that do not fit together raise any
        return Availability.no(f"nvidia-cutlass-dsl is installed but cannot be imported: {type(error).__name__}: {error}")
    return Availability.yes()


def cutlass_compiles(config: HSTUConfig) -> Availability:
    if find_spec("nvidia_cutlass_dsl") is None:
        return Availability.no("nvidia-cutlass-dsl is not installed; install genrec with its extra cutlass")
    for name, width in zip(("dim", "2 * heads * (attention_dim + linear_dim)"), sizes(config), strict=True):
        if width % VECTOR:
            return Availability.no(
                f"gemm_silu copies {VECTOR} numbers at once and {name} is {width}; train a model where that is a multiple of {VECTOR}"
            )
    return Availability.yes()


def sizes(config: HSTUConfig) -> tuple[int, int]:
    """K and N."""
    return config.dim, 2 * config.heads * (config.attention_dim + config.linear_dim)
