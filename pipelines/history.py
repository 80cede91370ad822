"""Turn a request's behaviours and item ids into the sequence and catalogue indices that the stages take."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cluster.dataset import Catalogue
from cluster.errors import InvalidRequest
from cluster.values import Int32Array, RecommendRequest, UserSequence


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedRequest:
    """A request in catalogue indices. `among`: the only items to recommend, None for any. `excluded` and `among` are sorted and unique."""

    sequence: UserSequence
    excluded: Int32Array
    among: Int32Array | None
    unknown_items: tuple[str, ...]
    user: str = ""
    tenant: str = "default"


def resolve(request: RecommendRequest, catalogue: Catalogue) -> ResolvedRequest:
    """Look up the request's items and sort its behaviours by time. Items that the catalogue lacks are listed as unknown, not refused.

    Raises InvalidRequest if a behaviour is later than the request's own time.
    """
    sequence, unknown = catalogue.sequence(request.behaviours or (), _request_time(request))
    listed = catalogue.unknown((*sorted(request.blocked), *sorted(request.allowed or ())))
    seen = sequence.items.tolist() if request.exclude_seen else ()
    return ResolvedRequest(
        sequence=sequence,
        excluded=_ascending({*seen, *_known(request.blocked, catalogue)}),
        among=None if request.allowed is None else _ascending(_known(request.allowed, catalogue)),
        unknown_items=tuple(dict.fromkeys((*unknown, *listed))),
        user=request.user_id,
        tenant=request.tenant,
    )


def _request_time(request: RecommendRequest) -> int:
    """The request's time: as given; else now, or the last behaviour's if the caller's clock is ahead of ours."""
    behaviours = request.behaviours or ()
    last = max([behaviour.timestamp for behaviour in behaviours], default=0)
    if request.request_time is None:
        return max(int(time.time()), last)
    if last <= request.request_time:
        return request.request_time
    for position, behaviour in enumerate(behaviours):
        if behaviour.timestamp > request.request_time:
            problem = f"{behaviour.timestamp} is after request_time ({request.request_time}); leave it out or ask at a later time"
            raise InvalidRequest(f"behaviours[{position}].timestamp", problem)
    return request.request_time


def _known(item_ids: Iterable[str], catalogue: Catalogue) -> set[int]:
    return {index for item_id in item_ids if (index := catalogue.index_of(item_id)) is not None}


def _ascending(indices: set[int]) -> Int32Array:
    """Sorted, without numpy.unique: that releases the interpreter, and an engine's thread then holds it for longer than this sort takes."""
    return np.array(sorted(indices), np.int32)
