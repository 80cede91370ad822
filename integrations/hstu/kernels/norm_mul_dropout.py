"""dropout(U * LayerNorm(x)) as one kernel forward and one backward: what HSTU does to its attention before the output projection.

LayerNorm is without affine. The backward kernel draws the dropout anew from the same seed and places (Philox), so no mask is kept; nor are
means and deviations, as a row is in registers anyway.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from integrations.hstu.kernels.reference import EPSILON
from integrations.hstu.kernels.tiles import LAUNCH, load_rows, store_rows

# ruff: noqa: PLR0917 - a kernel takes what a C function takes

_MOST_ELEMENTS = 2**31
_TILE_ELEMENTS = 2048


@triton.jit
def _normalised(
    x: tl.tensor, rows: tl.tensor, x_row: tl.tensor, there: tl.tensor, epsilon: tl.tensor, WIDTH: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The rows with mean 0 and deviation 1, and the reciprocal of each row's deviation; zeros beyond WIDTH."""
    tile = load_rows(x, rows, x_row, there, WIDTH, TILE).to(tl.float32)
    centred = tl.where((tl.arange(0, TILE) < WIDTH)[None, :], tile - (tl.sum(tile, 1) / WIDTH)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + epsilon)
    return centred * inverse[:, None], inverse


@triton.jit
def _dropped(tile: tl.tensor, rows: tl.tensor, dropout: tl.tensor, seed: tl.tensor, WIDTH: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """The tile with some elements 0 and the others divided by 1 - dropout; which ones follows from the seed and their place."""
    drawn = tl.rand(seed, rows[:, None] * WIDTH + tl.arange(0, TILE)[None, :])
    return tl.where(drawn >= dropout, tile / (1.0 - dropout), 0.0)


@triton.jit
def norm_mul_dropout_forward(
    x: tl.tensor,
    u: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    x_row: tl.tensor,
    u_row: tl.tensor,
    epsilon: tl.tensor,
    dropout: tl.tensor,
    seed: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DROPS: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < count
    normed, _ = _normalised(x, rows.to(tl.int64), x_row, there, epsilon, WIDTH, WIDTH_TILE)
    gated = load_rows(u, rows.to(tl.int64), u_row, there, WIDTH, WIDTH_TILE).to(tl.float32) * normed
    if DROPS:
        gated = _dropped(gated, rows, dropout, seed, WIDTH, WIDTH_TILE)
    store_rows(out, rows.to(tl.int64), WIDTH, there, gated, WIDTH, WIDTH_TILE)


@triton.jit
def norm_mul_dropout_backward(
    x: tl.tensor,
    u: tl.tensor,
    out_gradient: tl.tensor,
    x_gradient: tl.tensor,
    u_gradient: tl.tensor,
    count: tl.tensor,
    x_row: tl.tensor,
    u_row: tl.tensor,
    epsilon: tl.tensor,
    dropout: tl.tensor,
    seed: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DROPS: tl.constexpr,
) -> None:
    """With y the normalised row and g the gradient of y: dx = (g - mean(g) - y mean(g y)) / deviation."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < count
    places = rows.to(tl.int64)
    normed, inverse = _normalised(x, places, x_row, there, epsilon, WIDTH, WIDTH_TILE)
    gated = load_rows(out_gradient, places, WIDTH, there, WIDTH, WIDTH_TILE).to(tl.float32)
    if DROPS:
        gated = _dropped(gated, rows, dropout, seed, WIDTH, WIDTH_TILE)
    store_rows(u_gradient, places, WIDTH, there, gated * normed, WIDTH, WIDTH_TILE)
    gradient = gated * load_rows(u, places, u_row, there, WIDTH, WIDTH_TILE).to(tl.float32)
    mean = (tl.sum(gradient, 1) / WIDTH)[:, None]
    along = (tl.sum(gradient * normed, 1) / WIDTH)[:, None]
    store_rows(x_gradient, places, WIDTH, there, (gradient - mean - normed * along) * inverse[:, None], WIDTH, WIDTH_TILE)


def row_sizes(width: int) -> dict[str, int]:
    """The compile-time sizes of the kernels by name."""
    tile = int(triton.next_power_of_2(width))
    return {"WIDTH": width, "WIDTH_TILE": tile, "ROWS": max(1, _TILE_ELEMENTS // tile)}


class _NormMulDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, u: Tensor, dropout: float, seed: int) -> Tensor:
        ctx.save_for_backward(x, u)
        ctx.dropout, ctx.seed = dropout, seed
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        arguments = _arguments(x, u, dropout, seed)
        norm_mul_dropout_forward[_grid(arguments)](out=out, **arguments)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, u = ctx.saved_tensors
        x_gradient, u_gradient = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (x, u))
        arguments = _arguments(x, u, ctx.dropout, ctx.seed)
        norm_mul_dropout_backward[_grid(arguments)](
            out_gradient=grads[0].contiguous(), x_gradient=x_gradient, u_gradient=u_gradient, **arguments
        )
        return x_gradient, u_gradient, None, None


def _arguments(x: Tensor, u: Tensor, dropout: float, seed: int) -> dict[str, Any]:
    return {
        "x": x,
        "u": u,
        "count": len(x),
        "x_row": x.stride(0),
        "u_row": u.stride(0),
        "epsilon": EPSILON,
        "dropout": dropout,
        "seed": seed,
        "DROPS": dropout > 0,
        **row_sizes(x.shape[1]),
        **LAUNCH,
    }


def _grid(arguments: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(arguments["count"], arguments["ROWS"]),)


def norm_mul_dropout(x: Tensor, u: Tensor, *, dropout: float = 0.0, seed: int = 0) -> Tensor:
    """dropout(u * LayerNorm(x)) in the shape of x, (..., D) as is u; LayerNorm over D, without affine, eps 1e-6.

    `dropout`: which share becomes 0, none when serving; the others are divided by 1 - `dropout`. The same `seed` leaves the same elements.
    Gradients for x and u. Raises ValueError where the two differ in shape, or have more elements than are told apart here (2^31).
    """
    if x.shape != u.shape or x.numel() >= _MOST_ELEMENTS:
        raise ValueError(f"x {tuple(x.shape)} and u {tuple(u.shape)} must have one shape with less than {_MOST_ELEMENTS} elements")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout ({dropout}) must be at least 0 and less than 1")
    flat_x, flat_u = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, u))
    dense = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (flat_x, flat_u))
    out: Tensor = _NormMulDropout.apply(*dense, dropout, seed)  # type: ignore[no-untyped-call]
    return out.view(x.shape)
