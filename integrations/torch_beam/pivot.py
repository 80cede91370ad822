"""Draw tokens on a CPU without sorting: pivot rejection over float32 rows, exact, O(vocabulary) a pass, free of the GIL.

    weigh ─► one token is enough? ─► top_k: cut at the k-th ─► find a token ─► mass ranked above it < top_p x mass? ─► it
             (dominant)              (one pass with a heap)         ▲                        │ no: it is outside the nucleus,
                                                                    └── among those above ◄──┘     and so is all below it

Rank: the greater logit first, equal logits by the lower id. A token is in the nucleus when the mass ranked above it is less than
top_p of the whole, so a drawn token is judged by one sum over the row. A token that is refused is the next pivot: only what ranks
above it is drawn from again. That leaves the distribution within the nucleus as it is, and needs 1 + ln(1 / top_p) rounds on average
at most, since each refusal cuts what is left at a uniformly drawn place. The idea is that of FlashInfer's kernels for GPUs
(https://flashinfer.ai/2025/03/10/sampling.html), which narrow the search with a second pivot too.

Weights are exp((logit - greatest logit) / temperature), rounded to multiples of 2 ** -mass_bits(vocabulary). So every sum of weights
is exact in float64, in any order: the nucleus never depends on vector width or batch. The price: in a vocabulary of 150,000, a
token less than 2 ** -36 as probable as the best is never drawn.

Legend: x (V,) logits of a row, -inf for what is forbidden, at least one finite; w (V,) its weights; blocks (V / 512,) sums of weights.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

BLOCK = 512  # tokens summed at a time: a draw looks through the blocks' sums first, then within one block
GLANCE = 32  # tokens compared at a time with the k-th so far
PATHS = ("dominant", "top_k", "pivot")
DOMINANT, TOP_K, PIVOT = range(3)

Floats = NDArray[np.float32]
Masses = NDArray[np.float64]
Ids = NDArray[np.int64]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

LOWEST = np.float32(-np.inf)
LOG2_E, HALF, ONE = np.float32(np.log2(np.e)), np.float32(0.5), np.float32(1)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # ln 2 in two parts (Cody and Waite, 1980): n x the first is exact
C7, C6, C5, C4, C3 = (np.float32(1 / factorial) for factorial in (5040, 720, 120, 24, 6))
UNDERFLOW = np.float32(-88)
EXPONENT_BIAS, MANTISSA_BITS = np.int32(127), np.int32(23)
TO_UNIT, BITS_OVER_53 = 2.0**-53, np.uint64(11)
GOLDEN, MIX_1, MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFT_1, SHIFT_2, SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def compiled(function: Kernel) -> Kernel:
    """Compiled at the first call, and kept on disk beside this file (or in NUMBA_CACHE_DIR)."""
    return cast("Kernel", numba.njit(cache=True, nogil=True)(function))


def compiled_to_sum_in_any_order(function: Kernel) -> Kernel:
    """As `compiled`, with sums in as many lanes as the processor has. Never for `weigh_block`, whose rounding it would optimise away."""
    return cast("Kernel", numba.njit(cache=True, nogil=True, fastmath={"reassoc", "nsz"})(function))


@compiled
def draw_rows(  # noqa: PLR0917 - compiled: arrays by position
    logits_BV: Floats,
    best_B: Ids,
    scale_B: Floats,
    top_k_B: Ids,
    top_p_B: Masses,
    bits_B: NDArray[np.uint64],
    w: Floats,
    blocks_2N: Masses,
    heap: Ids,
    tokens_B: Ids,
    log_probs_B: Floats,
    paths_B: Ids,
) -> None:
    """Draw a token for every row, and fill `tokens_B`, `log_probs_B` and `paths_B`.

    `best_B`: the place of each row's first greatest logit; `scale_B`: 1 / temperature, or 0 for greedy; `bits_B`: 64 random bits a row.
    `w`, `blocks_2N` and `heap` (at least as long as the greatest top_k) are scratch: what they hold before does not matter.
    """
    for row in range(logits_BV.shape[0]):
        x, best, scale = logits_BV[row], best_B[row], scale_B[row]
        whole = weigh(x, x[best], ONE, w, blocks_2N[0])
        token, path = best, DOMINANT
        if scale > 0:
            mass = whole if scale == ONE else weigh(x, x[best], scale, w, blocks_2N[0])
            if top_p_B[row] * mass > 1.0:  # the best token's own weight is 1
                token, path = draw_row(x, w, mass, top_k_B[row], top_p_B[row], bits_B[row], blocks_2N, heap)
        tokens_B[row], paths_B[row] = token, path
        log_probs_B[row] = np.float64(x[token]) - np.float64(x[best]) - np.log(whole)


@compiled
def draw_row(  # noqa: PLR0917
    x: Floats, w: Floats, mass: float, top_k: int, top_p: float, bits: np.uint64, blocks_2N: Masses, heap: Ids
) -> tuple[int, int]:
    """A token by pivot rejection, and the path taken. Tokens that rank above (logit, id) are drawn from: at first all, or the top_k."""
    here, above = blocks_2N[0], blocks_2N[1]
    logit, index, path = LOWEST, 0, PIVOT
    if 0 < top_k < x.size:
        last = kth(x, top_k, heap)
        logit, index, path = x[last], last + 1, TOP_K
        mass = mass_above(x, w, logit, index, here)
    enough = top_p * mass
    while True:
        token = find(x, w, logit, index, here, np.float64(bits >> BITS_OVER_53) * TO_UNIT * mass)
        if top_p == 1.0:
            return token, path
        mass = mass_above(x, w, x[token], token, above)
        if mass < enough:
            return token, path
        logit, index = x[token], token
        here, above = above, here
        bits = scramble(bits)


@compiled
def weigh(x: Floats, greatest: np.float32, scale: np.float32, w: Floats, blocks: Masses) -> float:
    """Fill `w` and its blocks' sums; returns the whole mass."""
    exact_above = np.float32(2.0 ** (23 - mass_bits(x.size)))
    mass = 0.0
    for block in range(blocks.size):
        start = block * BLOCK
        weigh_block(x[start : start + BLOCK], greatest, scale, exact_above, w[start : start + BLOCK])
        blocks[block] = sum_from(x[start : start + BLOCK], w[start : start + BLOCK], LOWEST)
        mass += blocks[block]
    return mass


@compiled
def mass_bits(vocabulary: int) -> int:
    """Weights are multiples of 2 ** -this: as many bits as leave float64's 53 room for a sum of `vocabulary` ones."""
    bits = 53
    while (1 << (53 - bits)) < vocabulary:
        bits -= 1
    return bits


@compiled
def weigh_block(x: Floats, greatest: np.float32, scale: np.float32, exact_above: np.float32, w: Floats) -> None:
    """Fill `w` with exp((x - greatest) * scale), in a form that compilers turn into vector instructions; exp(0) is 1 exactly.

    float32's spacing from `exact_above` on is what weights are rounded to; adding it to a smaller weight rounds that weight alike.
    """
    for i in range(x.size):
        t = max((x[i] - greatest) * scale, UNDERFLOW)
        n = np.floor(t * LOG2_E + HALF)
        f = (t - n * LN2_HIGH) - n * LN2_LOW
        series = ((((((C7 * f + C6) * f + C5) * f + C4) * f + C3) * f + HALF) * f + ONE) * f + ONE
        power_of_two = np.int32((np.int32(n) + EXPONENT_BIAS) << MANTISSA_BITS).view(np.float32)
        weight = series * power_of_two
        w[i] = weight if weight >= exact_above else (weight + exact_above) - exact_above


@compiled
def mass_above(x: Floats, w: Floats, logit: np.float32, index: int, blocks: Masses) -> float:
    """The mass of all tokens that rank above one with `logit` at `index`; fills its sums by blocks. (`index` + 1 counts that token in.)"""
    mass = 0.0
    for block in range(blocks.size):
        start = block * BLOCK
        split = min(max(index - start, 0), BLOCK)
        here, there = slice(start, start + split), slice(start + split, start + BLOCK)
        blocks[block] = sum_from(x[here], w[here], logit) + sum_over(x[there], w[there], logit)
        mass += blocks[block]
    return mass


@compiled_to_sum_in_any_order
def sum_from(x: Floats, w: Floats, logit: np.float32) -> float:
    mass = 0.0
    for i in range(x.size):
        if x[i] >= logit:
            mass += w[i]
    return mass


@compiled_to_sum_in_any_order
def sum_over(x: Floats, w: Floats, logit: np.float32) -> float:
    mass = 0.0
    for i in range(x.size):
        if x[i] > logit:
            mass += w[i]
    return mass


@compiled
def find(x: Floats, w: Floats, logit: np.float32, index: int, blocks: Masses, aim: float) -> int:  # noqa: PLR0917
    """The token at which the running mass, in order of ids, of what ranks above (logit, index) first exceeds `aim` < their mass."""
    block, mass = 0, 0.0
    while mass + blocks[block] <= aim:
        mass += blocks[block]
        block += 1
    i = block * BLOCK
    while True:
        if x[i] > logit or (x[i] == logit and i < index):
            mass += w[i]
            if mass > aim:
                return i
        i += 1


@compiled
def kth(x: Floats, k: int, heap: Ids) -> int:
    """The k-th token by rank, 0 < k <= V: the root of a heap of the k best so far. Most tokens cost one comparison with it, in vectors."""
    for i in range(k):
        heap[i] = i
    for place in range(k // 2 - 1, -1, -1):
        sift(x, heap, k, place)
    for start in range(k, x.size, GLANCE):
        if count_over(x[start : start + GLANCE], x[heap[0]]):
            for i in range(start, min(start + GLANCE, x.size)):
                if x[i] > x[heap[0]]:  # at equal logits the lower id stays
                    heap[0] = i
                    sift(x, heap, k, 0)
    return int(heap[0])


@compiled
def count_over(x: Floats, logit: np.float32) -> int:
    count = 0
    for i in range(x.size):
        count += x[i] > logit
    return count


@compiled
def sift(x: Floats, heap: Ids, k: int, place: int) -> None:
    """Move the token at `place` down until both below it rank above it."""
    child = 2 * place + 1
    while child < k:
        if child + 1 < k and ranks_below(x, heap[child + 1], heap[child]):
            child += 1
        if not ranks_below(x, heap[child], heap[place]):
            return
        heap[place], heap[child] = heap[child], heap[place]
        place, child = child, 2 * child + 1


@compiled
def ranks_below(x: Floats, one: int, other: int) -> bool:
    return x[one] < x[other] or (x[one] == x[other] and one > other)


@compiled
def scramble(bits: np.uint64) -> np.uint64:
    """The next 64 random bits of a chain (splitmix64; Steele, Lea and Flood, 2014)."""
    z = bits + GOLDEN
    z = (z ^ (z >> SHIFT_1)) * MIX_1
    z = (z ^ (z >> SHIFT_2)) * MIX_2
    return z ^ (z >> SHIFT_3)
