"""Turn a request's behaviours and item ids into the sequence and catalogue indices that the stages take."""

import time
from collections.abc import Set as AbstractSet

import numpy as np
from msgspec import Struct

from cluster.dataset import Catalogue
from cluster.errors import InvalidRequest
from cluster.values import Int32Array, RecommendRequest, UserSequence


class ResolvedRequest(Struct, frozen=True, eq=False):
    """A request with its behaviours and items as catalogue indices. `barred`: items that must not be recommended; `among`: the only items
    to recommend, sorted and unique, None for any.
    """

    request: RecommendRequest
    sequence: UserSequence
    barred: AbstractSet[int]
    among: Int32Array | None
    unknown_items: tuple[str, ...]

    @property
    def excluded(self) -> Int32Array:
        """`barred` as an array, sorted."""
        return _ascending(self.barred)


def resolve(request: RecommendRequest, catalogue: Catalogue) -> ResolvedRequest:
    """Look up the request's items and sort its behaviours by time. Items that the catalogue lacks are listed as unknown, not refused.

    Raises InvalidRequest if a behaviour is later than the request's own time.
    """
    sequence, unknown = catalogue.sequence(request.behaviours or (), _request_time(request))
    barred, among = set(sequence.items.tolist() if request.exclude_seen else ()), None
    if request.blocked or request.allowed is not None:
        blocked, not_blocked = catalogue.look_up(request.blocked)
        allowed, not_allowed = catalogue.look_up(request.allowed or ())
        barred |= blocked
        among = None if request.allowed is None else _ascending(allowed)
        unknown = tuple(dict.fromkeys((*unknown, *sorted(not_blocked), *sorted(not_allowed))))
    return ResolvedRequest(request, sequence, barred, among, unknown)


def _request_time(request: RecommendRequest) -> int:
    """The request's time: as given; else now, or the last behaviour's if the caller's clock is ahead of ours."""
    behaviours = request.behaviours or ()
    last = max([one.timestamp for one in behaviours], default=0)
    if request.request_time is None:
        return max(int(time.time()), last)
    if last <= request.request_time:
        return request.request_time
    position, late = next((at, one.timestamp) for at, one in enumerate(behaviours) if one.timestamp > request.request_time)
    problem = f"{late} is after request_time ({request.request_time}); leave it out or ask at a later time"
    raise InvalidRequest(f"behaviours[{position}].timestamp", problem)


def _ascending(indices: AbstractSet[int]) -> Int32Array:
    """The indices, sorted. numpy.unique would release the interpreter, which an engine's thread then holds for longer than a sort takes."""
    return np.array(sorted(indices), np.int32)
