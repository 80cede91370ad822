"""The bucket of a time between two events: logarithmic, floor(ln(max(1, |seconds|)) / 0.301) as IEEE fp32 arithmetic gives it.

Engines' logarithms differ in their last bits, which decide the bucket of whole seconds beside an edge from some days on. A logarithm
therefore only estimates the bucket, as the right one or the one before, and ENDS, the same for every engine, decides.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

ENDS = (
    1, 1, 2, 3, 4, 6, 8, 11, 15, 20, 27, 37, 50, 67, 91, 123, 166, 225, 304, 411, 556, 751, 1015, 1371, 1853, 2504, 3384, 4573, 6179,
    8349, 11282, 15244, 20599, 27833, 37609, 50817, 68665, 92781, 125366, 169396, 228890, 309279, 417900, 564671, 762989, 1030958,
    1393041, 1882289, 2543366, 3436622, 4643594, 6274466, 8478122, 11455708, 15479070, 20915477, 28261150, 38186754, 51598325, 69720052,
    94206443, 127292699, 171999191, 232406600, 314030160, 424319919, 573345375, 774710111, 1046794144, 1414438847, 1911204160, 2147483647,
)  # fmt: skip
"""The last whole second of each bucket, as far as int32 goes; no second is in bucket 1."""
BUCKET_WIDTH = 0.301
"""The width of a bucket, in natural logarithms of seconds."""
ESTIMATE_WIDTH = 0.30101
"""Wider than a bucket by more than fp32 logarithms are off, and by too little to skip a bucket."""
_ENDS = torch.tensor(ENDS, dtype=torch.int32)


def time_buckets(next_times_BL: Tensor, times_BP: Tensor, last: int) -> Tensor:
    """The bucket of the time from event j to the event after event i, (B, L, P) int32, 0..`last`. Times are int32 or int64."""
    seconds = (next_times_BL.unsqueeze(2) - times_BP.unsqueeze(1)).abs().clamp(min=1)
    estimate = (seconds.float().log() / ESTIMATE_WIDTH).int()
    ends = F.embedding(estimate, _ENDS.to(seconds.device).unsqueeze(1)).squeeze(-1)  # exports as Gather, see `lookup`
    buckets = estimate + (seconds > ends)
    return buckets if last >= len(ENDS) - 1 else buckets.clamp(max=last)


@cache
def ends_on(device: torch.device) -> Tensor:
    """ENDS as a kernel reads them."""
    return _ENDS.to(device)
