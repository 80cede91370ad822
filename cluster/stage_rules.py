"""What the controller must know about a stage's answers: which are plain nonsense, and when two backends agree."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from cluster.values import Encoded, EncodeRequest

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class StageRules(Generic[RequestT, AnswerT]):
    """Both functions say what is wrong, or "" where nothing is: `nonsense` given a request and its answer, `disagreement` given the
    reference backend's answer and another's to the same request.
    """

    nonsense: Callable[[RequestT, AnswerT], str]
    disagreement: Callable[[AnswerT, AnswerT], str]


STATE_TOLERANCE = 0.01
"""Largest difference in any component of the unit-length user state; fp16 engines stay within it."""

AGREEING_SHARE = 0.9
"""Share of the reference's items that another backend must retrieve too: near ties may change places, the set may not change much."""


def encoder_nonsense(request: EncodeRequest, answer: Encoded, catalogue_size: int) -> str:
    if not isinstance(answer, Encoded):
        return f"answered with a {type(answer).__name__}, not with Encoded"
    if problem := _wrong_arrays(answer):
        return problem
    if not np.isfinite(answer.state).all() or not np.isfinite(answer.scores).all():
        return "answered with NaN or infinity"
    if len(answer.items) != len(answer.scores) or len(answer.items) > request.top_n:
        return f"answered with {len(answer.items)} items and {len(answer.scores)} scores to top_n {request.top_n}"
    return _wrong_items(request, answer, catalogue_size)


def _wrong_items(request: EncodeRequest, answer: Encoded, catalogue_size: int) -> str:
    if (wrong := answer.items[(answer.items < 1) | (answer.items > catalogue_size)]).size:
        return f"answered with catalogue index {wrong[0]}; items are 1 to {catalogue_size}"
    if len(np.unique(answer.items)) < len(answer.items):
        return "answered with the same item more than once"
    if (np.diff(answer.scores) > 0).any():
        return "answered with items that are not ordered by score, best first"
    if request.among is not None and (others := np.setdiff1d(answer.items, request.among)).size:
        return f"answered with catalogue index {others[0]}, which is not among the items asked for"
    return ""


def _wrong_arrays(answer: Encoded) -> str:
    kinds = {"state": np.floating, "items": np.integer, "scores": np.floating}
    for field, kind in kinds.items():
        array = getattr(answer, field)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or not np.issubdtype(array.dtype, kind):
            return (
                f"answered with {field} that are not one row of numbers, but {type(array).__name__} {getattr(array, 'shape', '')}".rstrip()
            )
    return ""


def encoder_disagreement(reference: Encoded, answer: Encoded) -> str:
    if reference.state.shape != answer.state.shape:
        return f"its user state has shape {answer.state.shape}, not {reference.state.shape}"
    distance = float(np.abs(reference.state - answer.state).max(initial=0.0))
    if not distance <= STATE_TOLERANCE:  # NaN is a disagreement
        return f"its user state is {distance:.3g} off (tolerance {STATE_TOLERANCE})"
    shared = len(np.intersect1d(reference.items, answer.items))
    if shared < AGREEING_SHARE * len(reference.items):
        return f"it retrieves only {shared} of the same {len(reference.items)} items"
    return ""


def encoder_rules(catalogue_size: int) -> StageRules[EncodeRequest, Encoded]:
    """The rules of the encoder stage, for a catalogue of that many items."""
    return StageRules(partial(encoder_nonsense, catalogue_size=catalogue_size), encoder_disagreement)
