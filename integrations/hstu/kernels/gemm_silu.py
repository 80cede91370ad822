"""SiLU(x W) as one CuTe DSL kernel: the product of HSTU's projection is gated before it is written, instead of written, read and written.

x (M, K) and W (K, N) are fp16 or bf16 and row-major, sums are fp32, the result is of their type or fp32. A block of four warps makes one
128 x 128 tile: cp.async brings tiles of x and W into a ring of stages, ldmatrix and mma.sync m16n8k16 add up their product, and SiLU
runs on the sums in registers. Copies of 16 bytes that reach beyond a matrix read zeros, or write nothing, so any M will do while N and K
are multiples of 8. It uses nothing that came after sm_80.

It has been compiled for sm_80 to sm_120, and its PTX agrees with torch's product in an interpreter on a CPU (tests/ptx.py). On an H100 it
takes, at 6752 x 256 x 1024, 0.94 of the time of cuBLAS with SiLU after it in bf16, and 1.44 times that in fp16.
"""

import math
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.base_dsl import Arch
from cutlass.base_dsl.common import DSLBaseError
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp
from cutlass.cute.runtime import make_ptr
from cutlass.memory import SmemAllocator
from torch import Tensor

from cluster.errors import CompileError
from integrations.hstu.kernels.gemm_silu_inputs import refuse

# ruff: noqa: PLR0917 - functions on the device take what they need

BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 32
STAGES = 4
THREADS = 128
ALIGNMENT = 16
"""How many bytes one thread copies at once; every pointer is aligned to so many."""
_FIRST_WITH_SUFFIX = 9
_LOG2_E = math.log2(math.e)
TYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16, torch.float32: cutlass.Float32}


def gemm_silu(x_MK: Tensor, w_KN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """SiLU(x W) (M, N) of row-major fp16 or bf16 matrices on one GPU, as `dtype`, which is theirs or fp32; it has no gradient.

    The first call for a (type, N, K, architecture) compiles for about a second, so it must not be recorded in a CUDA graph. Raises
    ValueError at matrices it does not take, and CompileError.
    """
    dtype = dtype or x_MK.dtype
    refuse(x_MK, w_KN, dtype)
    y_MN = x_MK.new_empty(len(x_MK), w_KN.shape[1], dtype=dtype)
    if len(x_MK):
        kernel = compiled(x_MK.dtype, dtype, *reversed(w_KN.shape), _architecture(x_MK.device))
        kernel(*map(_pointer, (x_MK, w_KN, y_MN)), len(x_MK), CUstream(torch.cuda.current_stream(x_MK.device).cuda_stream))
    return y_MN


def cubin(dtype: torch.dtype, out: torch.dtype, columns: int, depth: int, target: str) -> bytes:
    """The kernel for an architecture, as ``sm_90``, which need not be here."""
    return bytes(compiled(dtype, out, columns, depth, target).__cubin__)


@cache
def compiled(dtype: torch.dtype, out: torch.dtype, columns: int, depth: int, target: str) -> Any:
    """A function that launches the kernel, given pointers to x, W and y, the number of rows and a stream; it holds its cubin and PTX.

    Raises CompileError with the compiler's own reason.
    """
    if target not in Arch.__members__:
        raise CompileError(f"CuTe DSL does not compile for {target!r}; choose from {', '.join(Arch.__members__)}")
    x, y = (make_ptr(TYPES[kind], ALIGNMENT, cute.AddressSpace.gmem, assumed_align=ALIGNMENT) for kind in (dtype, out))
    with TemporaryDirectory(prefix="gemm_silu") as directory:
        options = f"--gpu-arch {target} --keep-cubin --keep-ptx --dump-dir {directory}"
        try:
            return cute.compile(_launch, x, x, y, cutlass.Int32(1), columns, depth, CUstream(0), options=options)
        except (DSLBaseError, ValueError, RuntimeError) as error:
            raise CompileError(f"CuTe DSL cannot compile gemm_silu for {target}: {type(error).__name__}: {error}") from error


def _architecture(device: torch.device) -> str:
    """The architecture by CuTe DSL's own name for the GPU: where it finds sm_90a, it would not launch a kernel compiled for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= _FIRST_WITH_SUFFIX else "")


def _pointer(tensor: Tensor) -> Any:
    return make_ptr(TYPES[tensor.dtype], tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=ALIGNMENT)


@cute.jit
def _launch(
    x: cute.Pointer,
    w: cute.Pointer,
    y: cute.Pointer,
    rows: cutlass.Int32,
    columns: cutlass.Constexpr,
    depth: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Neighbouring blocks share rows of x, which are many, and go through all of W, which stays in the L2 cache."""
    x_MK = cute.make_tensor(x, cute.make_layout((rows, depth), stride=(depth, 1)))
    w_NK = cute.make_tensor(w, cute.make_layout((columns, depth), stride=(1, columns)))
    y_MN = cute.make_tensor(y, cute.make_layout((rows, columns), stride=(columns, 1)))
    grid = cute.ceil_div(columns, BLOCK_N), cute.ceil_div(rows, BLOCK_M), 1
    gemm_silu_kernel(x_MK, w_NK, y_MN).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def gemm_silu_kernel(x_MK: cute.Tensor, w_NK: cute.Tensor, y_MN: cute.Tensor) -> None:
    """One tile of y. While a stage's product is added up, the next ones are on their way."""
    thread, _, _ = cute.arch.thread_idx()
    tile_n, tile_m, _ = cute.arch.block_idx()
    kind = x_MK.element_type
    steps = cute.ceil_div(x_MK.shape[1], BLOCK_K)
    x_ring, w_ring = _rings(kind)

    read = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), kind, num_bits_per_copy=8 * ALIGNMENT)
    copy_x, copy_w = _vectors(read, BLOCK_K, kind, along=1), _vectors(read, BLOCK_N, kind, along=0)
    x_parts = _parts(copy_x, thread, x_MK, (BLOCK_M, BLOCK_K), (tile_m, None), x_ring)
    w_parts = _parts(copy_w, thread, w_NK, (BLOCK_N, BLOCK_K), (tile_n, None), w_ring)
    for step in cutlass.range_constexpr(STAGES - 1):
        if cutlass.const_expr(step < steps):
            _fetch(copy_x, x_parts, step, x_MK.shape)
            _fetch(copy_w, w_parts, step, w_NK.shape)
        cute.arch.cp_async_commit_group()

    product = cute.make_tiled_mma(warp.MmaF16BF16Op(kind, cutlass.Float32, (16, 8, 16)), cute.make_layout((2, 2, 1)), (32, 32, 16))
    take_x = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), kind), product).get_slice(thread)
    take_w = cute.make_tiled_copy_B(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), kind), product).get_slice(thread)
    part = product.get_slice(thread)
    x_own = product.make_fragment_A(part.partition_A(x_ring)[None, None, None, 0])
    w_own = product.make_fragment_B(part.partition_B(w_ring)[None, None, None, 0])
    x_staged, w_staged = take_x.partition_S(x_ring), take_w.partition_S(w_ring)
    sums = cute.make_rmem_tensor(product.partition_shape_C((BLOCK_M, BLOCK_N)), cutlass.Float32)
    sums.fill(0.0)
    for step in cutlass.range(steps, unroll=1):
        cute.arch.cp_async_wait_group(STAGES - 2)
        cute.arch.sync_threads()
        ahead = step + STAGES - 1
        if ahead < steps:
            _fetch(copy_x, x_parts, ahead, x_MK.shape)
            _fetch(copy_w, w_parts, ahead, w_NK.shape)
        cute.arch.cp_async_commit_group()
        cute.copy(take_x, x_staged[None, None, None, step % STAGES], take_x.retile(x_own))
        cute.copy(take_w, w_staged[None, None, None, step % STAGES], take_w.retile(w_own))
        cute.gemm(product, sums, x_own, w_own, sums)
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    _write(part, _silu(sums, y_MN.element_type), x_ring.iterator, y_MN, (tile_m, tile_n), thread)


@cute.jit
def _rings(kind: cutlass.Constexpr) -> tuple[cute.Tensor, cute.Tensor]:
    """Stages of tiles of x (BLOCK_M, BLOCK_K, STAGES) and W (BLOCK_N, BLOCK_K, STAGES), swizzled so that ldmatrix meets no bank twice."""
    memory = SmemAllocator()
    x_rows = cute.make_layout((8, BLOCK_K), stride=(BLOCK_K, 1))
    w_rows = cute.make_layout((64, 8), stride=(1, 64))
    x_layout = cute.tile_to_shape(x_rows, (BLOCK_M, BLOCK_K, STAGES), (0, 1, 2))
    w_layout = cute.tile_to_shape(w_rows, (BLOCK_N, BLOCK_K, STAGES), (0, 1, 2))
    x_ring = memory.allocate_tensor(kind, x_layout, byte_alignment=128, swizzle=cute.make_swizzle(2, 4, 3))
    w_ring = memory.allocate_tensor(kind, w_layout, byte_alignment=128, swizzle=cute.make_swizzle(3, 4, 3))
    return x_ring, w_ring


@cute.jit
def _vectors(atom: cute.CopyAtom, width: cutlass.Constexpr, kind: cutlass.Constexpr, along: cutlass.Constexpr) -> cute.TiledCopy:
    """Neighbouring threads copy neighbouring vectors of a tile whose contiguous dimension is `along` and has `width` elements."""
    vector = 8 * ALIGNMENT // kind.width
    across = width // vector
    if cutlass.const_expr(along == 0):
        return cute.make_tiled_copy_tv(atom, cute.make_layout((across, THREADS // across)), cute.make_layout((vector, 1)))
    threads = cute.make_layout((THREADS // across, across), stride=(across, 1))
    return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, vector)))


@cute.jit
def _parts(
    copy: cute.TiledCopy, thread: cutlass.Int32, matrix: cute.Tensor, tile: cutlass.Constexpr, index: Any, shared: cute.Tensor
) -> Any:
    """The vectors that a thread copies of the matrix's tiles, their places in the matrix, and their places in shared memory."""
    own = copy.get_slice(thread)
    places = cute.make_identity_tensor(matrix.shape)
    return (
        own.partition_S(cute.local_tile(matrix, tile, index)),
        own.partition_S(cute.local_tile(places, tile, index)),
        own.partition_D(shared),
    )


@cute.jit
def _fetch(copy: cute.TiledCopy, parts: Any, step: Any, shape: Any) -> None:
    """Start to copy tile `step` into its stage."""
    source, places, target = parts
    _copy_within(copy, source[None, None, None, step], places[None, None, None, step], target[None, None, None, step % STAGES], shape)


@cute.jit
def _copy_within(copy: cute.TiledCopy, source: cute.Tensor, places: cute.Tensor, target: cute.Tensor, shape: Any) -> None:
    """Copy vectors; those that begin outside of the matrix are zeros in shared memory, and are not written to global memory."""
    within = cute.make_rmem_tensor(cute.make_layout((1, *places.shape[1:])), cutlass.Boolean)
    for i in cutlass.range_constexpr(places.shape[1]):
        for j in cutlass.range_constexpr(places.shape[2]):
            within[0, i, j] = cute.elem_less(places[0, i, j], shape)
    cute.copy(copy, source, target, pred=within)


@cute.jit
def _silu(sums: cute.Tensor, kind: cutlass.Constexpr) -> cute.Tensor:
    """SiLU(s) = s / (1 + 2^(-s log2 e)) by the two approximate instructions, whose relative errors are of the order of fp32's own."""
    gated = cute.make_rmem_tensor(sums.layout, kind)
    for index in cutlass.range(cute.size(sums), unroll_full=True):
        value = sums[index]
        gated[index] = (value * cute.arch.rcp_approx(1.0 + cute.math.exp2(value * -_LOG2_E, fastmath=True))).to(kind)
    return gated


@cute.jit
def _write(part: Any, out: cute.Tensor, shared: cute.Pointer, y_MN: cute.Tensor, tile: Any, thread: cutlass.Int32) -> None:
    """Write the block's results, by way of shared memory that is no longer read, so that whole rows are written; fp32 takes both rings."""
    kind = y_MN.element_type
    swizzle = cute.make_swizzle(3, 4, (BLOCK_N * kind.width // 8).bit_length() - 5)
    pointer = cute.recast_ptr(shared, swizzle, dtype=kind)
    y_tile = cute.make_tensor(pointer, cute.make_layout((BLOCK_M, BLOCK_N), stride=(BLOCK_N, 1)))
    cute.autovec_copy(out, part.partition_C(y_tile))
    cute.arch.sync_threads()
    copy = _vectors(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), kind, num_bits_per_copy=8 * ALIGNMENT), BLOCK_N, kind, along=1)
    target, places, source = _parts(copy, thread, y_MN, (BLOCK_M, BLOCK_N), tile, y_tile)
    rows = cute.make_fragment_like(source)
    cute.autovec_copy(source, rows)
    _copy_within(copy, rows, places, target, y_MN.shape)
