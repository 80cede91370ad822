"""Draw next tokens: each row of a batch by its own options and its own random stream, in any batch.

    sampler = Sampler()
    drawn = sampler.draw(logits_BV, [options] * B, [RandomStream(seed) for seed in seeds])

In this order: divide the logits by the temperature, keep the `top_k` most probable tokens, and of these the nucleus, the smallest
number of the most probable whose mass is at least `top_p` of theirs (Holtzman et al., 2020). Equal logits rank by the lower id, so that
both cuts are exact.

Paths, by which `Sampler.paths` counts rows:
    dominant   temperature 0, or the most probable token alone has a mass of top_p: it is taken
    top_k      the k best are found in one pass, then pivot rejection among them
    pivot      rejection over the whole vocabulary, no sort (pivot.py)
    sort       on a GPU, and where there are no kernels
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.engines.buffers import BufferPool
from cluster.errors import BackendFailed
from cluster.values import SamplingOptions

logger = logging.getLogger(__name__)
TEMPERATURES = (1e-30, 1e30)  # beyond, float32 would make NaN of equal or of forbidden logits


class RandomStream:
    """A request's own random bits: each row takes 64 of them on every path, so the n-th draw depends on the seed and n alone."""

    def __init__(self, seed: int | None) -> None:
        self._source = np.random.Philox(seed)

    def bits(self) -> int:
        return int(self._source.random_raw())


@dataclass(frozen=True)
class Drawn:
    """What was drawn, on the device of the logits."""

    tokens: Tensor  # (B,) int64
    log_probs: Tensor  # (B,) float32, under the model's own distribution: temperature 1, nothing cut but what is forbidden


class Sampler:
    """Draws tokens, for one thread. The sampler keeps its buffers: once they have grown, a call allocates nothing of the vocabulary's size.

    The first sampler on a machine compiles the kernels (seconds); `why_sorting` says why a sampler has none.
    """

    def __init__(self, *, pivot: bool = True) -> None:
        self.paths: Counter[str] = Counter()
        self.buffers = BufferPool()
        self.kernels, self.why_sorting = load_kernels() if pivot else (None, "asked to sort")
        if self.kernels:
            self._warm_up(self.kernels)
        if pivot and not self.kernels:
            logger.warning("draws are slow, and by a seed others than those of replicas with kernels: %s", self.why_sorting)

    def draw(self, logits_BV: Tensor, options: Sequence[SamplingOptions], streams: Sequence[RandomStream]) -> Drawn:
        """A token for every row of `logits_BV` (B, V >= 1), -inf for what is forbidden.

        Rows may share a stream (the beams of a request): it is read in their order. With the same seed, the kernels and the sort draw
        from the same distribution, but not the same tokens. Raises BackendFailed, before any stream is read, naming a row in which all is
        forbidden or something is NaN or +inf.
        """
        if logits_BV.dim() != 2 or not logits_BV.shape[1] or not len(options) == len(streams) == len(logits_BV):
            raise ValueError(
                f"logits {tuple(logits_BV.shape)}, {len(options)} options and {len(streams)} streams; they must be (B, V), B and B"
            )
        logits_BV = logits_BV.detach().float()
        if self.kernels and logits_BV.device.type == "cpu":
            return self._draw_by_pivots(self.kernels, logits_BV.numpy(), options, streams)
        check_peaks(logits_BV.amax(dim=1).cpu().numpy())
        self.paths["sort"] += len(options)
        return draw_by_sorting(logits_BV, options, [stream.bits() for stream in streams])

    def _warm_up(self, kernels: Any) -> None:
        """Compile the kernels, or read them from numba's cache. Where its files are damaged or cannot be written, there are no kernels."""
        try:
            self.draw(torch.zeros(1, 2), [SamplingOptions()], [RandomStream(0)])
        except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
            directory, self.kernels = kernels.draw_rows.stats.cache_path, None
            self.why_sorting = (
                f"the compiled kernels cannot be used ({type(error).__name__}: {error}); "
                f"delete numba's cache (*.nbi, *.nbc) in {directory}, or make room on its disk"
            )
        self.paths.clear()

    def _draw_by_pivots(
        self, kernels: Any, logits_BV: NDArray[np.float32], options: Sequence[SamplingOptions], streams: Sequence[RandomStream]
    ) -> Drawn:
        B, V = logits_BV.shape
        best_B = logits_BV.argmax(axis=1)  # the first of equals; a NaN counts as the greatest
        check_peaks(logits_BV[np.arange(B), best_B])
        blocks = -(-V // kernels.BLOCK)
        top_k_B = np.array([min(one.top_k, V) for one in options], np.int64)
        tokens_B, log_probs_B, paths_B = np.empty(B, np.int64), np.empty(B, np.float32), np.empty(B, np.int64)
        kernels.draw_rows(
            self._contiguous(logits_BV),
            best_B,
            np.array([scale(one) for one in options], np.float32),
            top_k_B,
            np.array([one.top_p for one in options], np.float64),
            np.array([stream.bits() for stream in streams], np.uint64),
            self.buffers.array("weights", (V,)),
            self.buffers.array("blocks", (2, blocks), np.float64),
            self.buffers.array("heap", (int(top_k_B.max(initial=0)),), np.int64),
            tokens_B,
            log_probs_B,
            paths_B,
        )
        self.paths.update(kernels.PATHS[path] for path in paths_B)
        return Drawn(torch.from_numpy(tokens_B), torch.from_numpy(log_probs_B))

    def _contiguous(self, logits_BV: NDArray[np.float32]) -> NDArray[np.float32]:
        if logits_BV.flags.c_contiguous:
            return logits_BV
        copied: NDArray[np.float32] = self.buffers.array("logits", logits_BV.shape)
        np.copyto(copied, logits_BV)
        return copied


def load_kernels() -> tuple[ModuleType | None, str]:
    """The module of compiled kernels, or why there is none."""
    try:
        from integrations.torch_beam import pivot  # noqa: PLC0415 - loads numba, which may be absent
    except (ImportError, RuntimeError) as error:  # RuntimeError: numba finds no directory to cache in
        return None, f"{error} (pip install numba, or set NUMBA_CACHE_DIR to a directory that can be written)"
    return pivot, ""


def scale(options: SamplingOptions) -> float:
    """1 / temperature, within what float32 can carry; 0 for greedy."""
    low, high = TEMPERATURES
    return 1 / min(max(options.temperature, low), high) if options.temperature else 0.0


def check_peaks(peaks_B: NDArray[np.float32]) -> None:
    """Raises BackendFailed at a row whose greatest logit (NaN where it holds one) is not finite."""
    if (wrong := np.flatnonzero(~np.isfinite(peaks_B))).size:
        row = int(wrong[0])
        problem = "forbids every token (all -inf)" if peaks_B[row] == -np.inf else f"holds {peaks_B[row]}"
        raise BackendFailed(f"row {row} of {len(peaks_B)} of the logits {problem}; no token can be drawn from it")


def draw_by_sorting(logits_BV: Tensor, options: Sequence[SamplingOptions], bits: Sequence[int]) -> Drawn:
    """Draw from the same distributions by a full sort, in torch operations only: on any device with float64, a transfer for each option."""
    masses_BV, order_BV = nucleus_by_sorting(logits_BV, options)
    running_BV = masses_BV.cumsum(dim=1)
    aim_B1 = column([(one >> 11) * 2.0**-53 for one in bits], logits_BV) * running_BV[:, -1:]
    tokens_B1 = order_BV.gather(1, (running_BV <= aim_B1).sum(dim=1, keepdim=True))
    return Drawn(tokens_B1.squeeze(1), logits_BV.log_softmax(dim=1).gather(1, tokens_B1).squeeze(1))


def nucleus_by_sorting(logits_BV: Tensor, options: Sequence[SamplingOptions]) -> tuple[Tensor, Tensor]:
    """Masses (B, V) by rank, 0 for tokens that are cut, and the tokens (B, V) in that order. Masses are whole, so sums are exact."""
    V = logits_BV.shape[1]
    ranked_BV, order_BV = logits_BV.sort(dim=1, descending=True, stable=True)
    scales_B1 = column([scale(one) or 1.0 for one in options], logits_BV).float()
    weights_BV = ((ranked_BV - ranked_BV[:, :1]) * scales_B1).exp().double()
    masses_BV = (weights_BV * 2.0 ** (53 - (V - 1).bit_length())).round().long()
    kept_B1 = column([1 if one.temperature == 0 else min(one.top_k or V, V) for one in options], logits_BV)
    masses_BV.masked_fill_(torch.arange(V, device=logits_BV.device) >= kept_B1, 0)
    running_BV = masses_BV.cumsum(dim=1)
    enough_B1 = column([one.top_p for one in options], logits_BV) * running_BV[:, -1:]
    return masses_BV.masked_fill_(running_BV - masses_BV >= enough_B1, 0), order_BV


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """The values as a (B, 1) float64 tensor on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)
