"""The kernels as cubins for a GPU that is not here: neither the compilers of Triton and CuTe DSL nor their assembler need one.

A cubin holds for what was constant when it was compiled: a model's heads and their widths, the type of its tensors, a window or none.
Pointers must be aligned to 16 bytes, as torch's are; strides to 16 elements where the heads' widths are multiples of 16.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from integrations.hstu.config import HSTUConfig
from integrations.hstu.kernels.append import APPEND_PRODUCTS, append_forward, append_sizes
from integrations.hstu.kernels.attention import (
    ATTENTION_PRODUCTS,
    attention_backward,
    attention_forward,
    backward_launches,
)
from integrations.hstu.kernels.norm_mul_dropout import norm_mul_dropout_backward, norm_mul_dropout_forward, row_sizes
from integrations.hstu.kernels.projection import cutlass_compiles, sizes
from integrations.hstu.kernels.tiles import LAUNCH, head_sizes

DataType: TypeAlias = Literal["fp32", "fp16", "bf16"]
_TABLES = ("position_weights", "time_weights", "q_sums", "position_sums", "time_sums", "parts")
_TYPES = {
    **dict.fromkeys(_TABLES, "*fp32"),
    **dict.fromkeys(("next_times", "times", "past_times", "ends"), "*i32"),
    **dict.fromkeys(("starts", "lengths", "past_lengths"), "*i64"),
    **dict.fromkeys(("epsilon", "dropout"), "fp32"),
    **dict.fromkeys(("new", "past", "count", "n", "last", "window"), "i32"),
    "seed": "i64",
}
"""Argument -> its type, the same in every kernel. Strides are i32, and all other arguments are pointers to data."""
_GEMM_TYPES: dict[DataType, tuple[torch.dtype, torch.dtype]] = {
    "fp32": (torch.float16, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
}


def compile_ahead(
    config: HSTUConfig,
    targets: Sequence[str],
    *,
    dtype: DataType = "fp32",
    precision: str = ATTENTION_PRODUCTS,
    windowed: bool = False,
) -> dict[str, dict[str, bytes]]:
    """Kernel's name -> architecture, such as ``sm_90`` -> cubin, for a model of these sizes; one for each slice of wide heads' gradients.

    `precision`: of the attention's products, as in `attention`. CUTLASS's `gemm_silu` is among the kernels where nvidia-cutlass-dsl is
    installed and the model's widths are multiples of 8.
    """
    capabilities = {target: int(target.removeprefix("sm_")) for target in targets}
    kernels = _kernels(config, dtype, precision, windowed=windowed)
    cubins = {
        name: {target: _compiled(kernel, constants, options, dtype, capability).asm["cubin"] for target, capability in capabilities.items()}
        for name, kernel, constants, options in kernels
    }
    return cubins | _gemm_silu(config, targets, dtype) if cutlass_compiles(config).ok else cubins


def _gemm_silu(config: HSTUConfig, targets: Sequence[str], dtype: DataType) -> dict[str, dict[str, bytes]]:
    """CUTLASS's kernel, which multiplies a model's fp32 numbers as fp16."""
    from integrations.hstu.kernels.gemm_silu import cubin  # noqa: PLC0415 - nvidia-cutlass-dsl need not be installed

    multiplied, out = _GEMM_TYPES[dtype]
    depth, columns = sizes(config)
    return {"gemm_silu": {target: cubin(multiplied, out, columns, depth, target) for target in targets}}


def _kernels(
    config: HSTUConfig, dtype: DataType, precision: str, *, windowed: bool
) -> list[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Every kernel's name, the kernel, its compile-time arguments by name and how it is compiled."""
    sizes = config.heads, config.attention_dim, config.linear_dim, 4 if dtype == "fp32" else 2
    ways = {"WINDOWED": windowed, "PRECISION": precision}
    rows = row_sizes(config.heads * config.linear_dim)
    launches, options = backward_launches(*sizes)
    return [
        _one(attention_forward, head_sizes(*sizes) | ways),
        *(_one(attention_backward, one | ways, options, one["SLICE_FROM"]) for one in launches),
        _one(norm_mul_dropout_forward, {**rows, "DROPS": False}),
        _one(norm_mul_dropout_backward, {**rows, "DROPS": config.dropout > 0}),
        _one(append_forward, {**append_sizes(*sizes), "PRECISION": APPEND_PRODUCTS}),
    ]


def _one(
    kernel: Any, constants: dict[str, Any], options: dict[str, Any] = LAUNCH, first: int = 0
) -> tuple[str, Any, dict[str, Any], dict[str, Any]]:
    """A kernel as `_kernels` gives it. One of several launches, each for a slice of columns, has the `first` of its columns in its name."""
    return f"{kernel.__name__}_{first}" if first else kernel.__name__, kernel, constants, options


def _compiled(kernel: Any, constants: dict[str, Any], options: dict[str, Any], dtype: DataType, capability: int) -> Any:
    types = {name: "constexpr" if name in constants else _type(name, dtype) for name in kernel.arg_names}
    source = ASTSource(kernel, types, constexprs=constants, attrs=_alignments(types, constants))
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _type(name: str, dtype: DataType) -> str:
    return "i32" if name.endswith(("_row", "_head")) else _TYPES.get(name, f"*{dtype}")


def _alignments(types: dict[str, str], constants: dict[str, Any]) -> dict[tuple[int], list[list[Any]]]:
    """Which arguments are multiples of 16: Triton then loads several elements at once."""
    widths = [constants[name] for name in ("K", "W", "WIDTH") if name in constants]
    even = all(width % 16 == 0 for width in widths)
    return {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or (even and name.endswith(("_row", "_head")))
    }
