"""The rules for a stage's answers: which answers are plain nonsense, and when two backends agree."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from msgspec.structs import replace

from cluster.bundle import Bundle
from cluster.ranking import Ranked, RankRequest
from cluster.values import Encoded, EncodeRequest, FloatArray, Generated, GenerateRequest, Int32Array

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class StageRules(Generic[RequestT, AnswerT]):
    """`nonsense(request, answer)`, `lacking(request, pieces of the whole answer)` and `disagreement(reference's answer, another's)` return
    what is wrong, or "". `lacking` is given pieces that make sense, each by itself.
    `returning(sample, number)` turns a sample into the request of a returning user, REHEARSING: for all numbers it has the same events but
    the last. None for a stage to which that makes no difference.
    """

    nonsense: Callable[[RequestT, AnswerT], str]
    disagreement: Callable[[AnswerT, AnswerT], str]
    returning: Callable[[RequestT, int], RequestT] | None = None
    lacking: Callable[[RequestT, Sequence[AnswerT]], str] = lambda request, pieces: ""  # noqa: ARG005 - the names tell what is given

    def problem(self, request: RequestT, answer: AnswerT) -> str:
        """What is wrong with a whole answer, or ""."""
        return self.nonsense(request, answer) or self.lacking(request, [answer])


REHEARSING = ("genrec rehearses", "returning")
"""A tenant and a user that no request can name: a tenant's name has no blanks."""
AsksForUserT = TypeVar("AsksForUserT", EncodeRequest, RankRequest)


def returning(request: AsksForUserT, number: int) -> AsksForUserT:
    """The sample as asked by a returning user: the reserved user REHEARSING, its last event's time moved by `number` seconds, so that each
    number is one new event after the same history.
    """
    timestamps = request.sequence.timestamps.copy()
    timestamps[-1:] += number
    tenant, user = REHEARSING
    return replace(request, sequence=replace(request.sequence, timestamps=timestamps), tenant=tenant, user_id=user)


STATE_TOLERANCE = 0.01
"""Largest difference in any component of the unit-length user state; fp16 engines stay within it."""

LOG_PROB_TOLERANCE = 0.05
"""Largest difference of an item's log-probability from the reference's; bf16 decoders stay within it."""

PREDICTION_TOLERANCE = 0.02
"""Largest `distance_of_predictions` from the reference; fp16 engines stay within it."""

AGREEING_SHARE = 0.9
"""Share of the reference's items that another backend must retrieve too: near ties may change places, the set may not change much."""


def encoder_nonsense(request: EncodeRequest, answer: Encoded, catalogue_size: int, width: int | None = None) -> str:
    if not isinstance(answer, Encoded):
        return f"answered with a {type(answer).__name__}, not with Encoded"
    if problem := _wrong_rows(answer, {"state": "f", "items": "iu", "scores": "f"}):
        return problem
    if not _finite(answer.state) or not _finite(answer.scores):
        return "answered with NaN or infinity"
    if problem := _wrong_number(request, answer, catalogue_size) or _wrong_states(answer, len(request.sequence), width):
        return problem
    return _wrong_choice(answer.items, answer.scores, request.among, catalogue_size)


def _wrong_number(request: EncodeRequest, answer: Encoded, catalogue_size: int) -> str:
    found, among = len(answer.items), request.among
    if found != len(answer.scores) or found > request.top_n:
        return f"answered with {found} items and {len(answer.scores)} scores to top_n {request.top_n}"
    if found == request.top_n:
        return ""
    choice = _choice(among, catalogue_size)
    return f"answered with {found} items to top_n {request.top_n} where {choice} are to be chosen from" if found < choice else ""


def _choice(among: Int32Array | None, catalogue_size: int, blocked: Int32Array | None = None) -> int:
    """How many items of the catalogue may be chosen: all or those of `among`, less the blocked."""
    if among is None:
        return catalogue_size - (0 if blocked is None else _choice(blocked, catalogue_size))
    allowed = np.unique(among if blocked is None else np.setdiff1d(among, blocked))
    return int(((allowed >= 1) & (allowed <= catalogue_size)).sum())


def _wrong_states(answer: Encoded, events: int, width: int | None) -> str:
    """What is wrong with an answer's states. A decoder is prompted with them: a wrong shape or a NaN would end its engine."""
    states = answer.states
    if states is None:
        return ""
    if not isinstance(states, np.ndarray) or states.ndim != 2 or states.dtype.kind != "f":
        return f"answered with states that are not rows of numbers, but {type(states).__name__} {getattr(states, 'shape', '')}".rstrip()
    if states.shape[1] != len(answer.state) or not 1 <= len(states) <= events:
        return f"answered with states of shape {states.shape} to {events} events and a state of {len(answer.state)}"
    if width is not None and states.shape[1] != width:
        return f"answered with states of {states.shape[1]} numbers; the decoder is prompted with {width}"
    return "" if _finite(states) else "answered with NaN or infinity"


def _wrong_choice(items: Int32Array, scores: FloatArray, among: Int32Array | None, catalogue_size: int) -> str:
    if not len(items):
        return ""
    if items.min() < 1 or items.max() > catalogue_size:
        wrong = items[(items < 1) | (items > catalogue_size)][0]
        return f"answered with catalogue index {wrong}; items are 1 to {catalogue_size}"
    if len(set(items.tolist())) < len(items):
        return "answered with the same item more than once"
    if (scores[1:] > scores[:-1]).any():
        return "answered with items that are not ordered by score, best first"
    if among is not None and (others := np.setdiff1d(items, among)).size:
        return f"answered with catalogue index {others[0]}, which is not among the items asked for"
    return ""


def _finite(numbers: FloatArray) -> bool:
    """Whether no number is NaN or infinite. A sum of squares shows it at a third of the cost, unless the numbers are huge."""
    flat = numbers.ravel()
    return bool(np.isfinite(flat @ flat) or np.isfinite(flat).all())


def _wrong_rows(answer: object, kinds: Mapping[str, str]) -> str:
    """What is wrong with the arrays of an answer, or "". `kinds`: field -> the letters of numpy's kinds that it may have."""
    for field, kind in kinds.items():
        array = getattr(answer, field)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kind:
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


def generator_nonsense(request: GenerateRequest, answer: Generated, catalogue_size: int) -> str:
    if not isinstance(answer, Generated):
        return f"answered with a {type(answer).__name__}, not with Generated"
    if problem := _wrong_rows(answer, {"items": "iu", "log_probs": "f"}):
        return problem
    if len(answer.items) != len(answer.log_probs) or len(answer.items) > request.k:
        return f"answered with {len(answer.items)} items and {len(answer.log_probs)} scores to k {request.k}"
    if not np.isfinite(answer.log_probs).all() or (answer.log_probs > LOG_PROB_TOLERANCE).any():
        return "answered with log-probabilities that are NaN, infinite or above 0"
    if len(blocked := np.intersect1d(answer.items, request.blocked)):
        return f"answered with catalogue index {blocked[0]}, which is blocked"
    return _wrong_choice(answer.items, answer.log_probs, request.among, catalogue_size)


def generator_lacking(request: GenerateRequest, pieces: Sequence[Generated], catalogue_size: int) -> str:
    """A search whose beam is wide enough names `k` items, or all that may be named; what is drawn may be one item again and again."""
    found = len(np.unique(np.concatenate([np.empty(0, np.int32), *(piece.items for piece in pieces)])))
    least = 1 if request.sampling else min(request.k, request.beam)
    if found >= least:
        return ""
    choice = _choice(request.among, catalogue_size, request.blocked)
    return f"named {found} items to k {request.k} where {choice} might be named" if found < min(least, choice) else ""


def generator_disagreement(reference: Generated, answer: Generated) -> str:
    shared, ours, theirs = np.intersect1d(reference.items, answer.items, return_indices=True)
    if len(shared) < AGREEING_SHARE * len(reference.items):
        return f"it generates only {len(shared)} of the same {len(reference.items)} items"
    distance = float(np.abs(reference.log_probs[ours] - answer.log_probs[theirs]).max(initial=0.0))
    return f"its log-probabilities are {distance:.3g} off (tolerance {LOG_PROB_TOLERANCE})" if distance > LOG_PROB_TOLERANCE else ""


def generator_rules(catalogue_size: int) -> StageRules[GenerateRequest, Generated]:
    """The rules of the generator stage, for a catalogue of that many items."""
    lacking = partial(generator_lacking, catalogue_size=catalogue_size)
    return StageRules(partial(generator_nonsense, catalogue_size=catalogue_size), generator_disagreement, lacking=lacking)


def encoder_rules(catalogue_size: int, width: int | None = None) -> StageRules[EncodeRequest, Encoded]:
    """The rules of the encoder stage, for a catalogue of that many items; `width`: of the states that a decoder is prompted with."""
    return StageRules(partial(encoder_nonsense, catalogue_size=catalogue_size, width=width), encoder_disagreement, returning)


def ranker_nonsense(request: RankRequest, answer: Ranked, tasks: int) -> str:
    predictions = answer.predictions if isinstance(answer, Ranked) else None
    if not isinstance(predictions, np.ndarray) or predictions.ndim != 2 or not np.issubdtype(predictions.dtype, np.floating):
        return f"answered with a {type(answer).__name__}, not with Ranked and a table of predictions"
    if len(predictions) != len(request.candidates):
        return f"answered with {len(predictions)} rows to {len(request.candidates)} candidates"
    if predictions.shape[1] != tasks:
        return f"predicts {predictions.shape[1]} things of a candidate; the model's record names {tasks}"
    return "" if np.isfinite(predictions).all() else "answered with NaN or infinity"


def ranker_disagreement(reference: Ranked, answer: Ranked) -> str:
    if reference.predictions.shape != answer.predictions.shape:
        return f"its predictions have shape {answer.predictions.shape}, not {reference.predictions.shape}"
    distance = distance_of_predictions(reference.predictions, answer.predictions)
    return "" if distance <= PREDICTION_TOLERANCE else f"its predictions are {distance:.3g} off (tolerance {PREDICTION_TOLERANCE})"


def distance_of_predictions(reference: FloatArray, other: FloatArray) -> float:
    """The largest difference, as a share of the reference where that is above 1: ratings have a unit."""
    return float((np.abs(reference - other) / np.maximum(1.0, np.abs(reference))).max(initial=0.0))


def ranker_rules(tasks: int) -> StageRules[RankRequest, Ranked]:
    """The rules of the ranker stage, for a model that predicts that many tasks."""
    return StageRules(partial(ranker_nonsense, tasks=tasks), ranker_disagreement, returning)


def _prompted_width(bundle: Bundle) -> int | None:
    """The width of the states that the decoder is prompted with; None without a decoder, or where its record does not say."""
    decoder = bundle.manifest.decoder
    width = decoder.config.get("state_dim") if decoder else None
    return width if isinstance(width, int) else None


RULES: Mapping[str, Callable[[Bundle], StageRules[Any, Any]]] = {
    "encoder": lambda bundle: encoder_rules(bundle.items, _prompted_width(bundle)),
    "generator": lambda bundle: generator_rules(bundle.items),
    "ranker": lambda bundle: ranker_rules(len(bundle.manifest.ranker.tasks) if bundle.manifest.ranker else 0),
}
"""Stage -> its rules, for the model in a bundle."""
