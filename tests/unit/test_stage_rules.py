"""What counts as nonsense from an encoder, and when two encoders are the same model."""

import re
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

from cluster.engines.stage_rules import RULES, encoder_disagreement, encoder_rules, generator_rules, ranker_disagreement
from cluster.ranking import Ranked
from cluster.values import Encoded, EncodeRequest, Generated, GenerateRequest, SamplingOptions, UserState
from tests.broken_backends import GivesWideStates
from tests.bundles import make_bundle, make_complete_bundle, make_generative_bundle, random_sequence

REQUEST = EncodeRequest(random_sequence(5), top_n=4)
encoder_nonsense = encoder_rules(catalogue_size=9).nonsense
SOUND = Encoded(np.array([0.6, 0.8], np.float32), np.array([3, 1, 2, 9], np.int32), np.array([0.9, 0.8, 0.7, 0.6], np.float32))


def few(count: int) -> Encoded:
    return replace(SOUND, items=SOUND.items[:count], scores=SOUND.scores[:count])


def test_a_sound_answer_is_sound_also_where_there_are_no_more_items():
    assert encoder_nonsense(REQUEST, SOUND) == ""
    whole = replace(SOUND, items=np.arange(1, 10, dtype=np.int32), scores=np.ones(9, np.float32))
    assert encoder_nonsense(replace(REQUEST, top_n=20), whole) == ""
    assert encoder_nonsense(replace(REQUEST, top_n=0), few(0)) == ""
    for among, count in (((), 0), ((3,), 1), ((3, 1, 3, 0, -2, 10), 2)):
        assert encoder_nonsense(replace(REQUEST, among=np.array(among, np.int32)), few(count)) == ""


@pytest.mark.parametrize(("among", "count", "choice"), [(None, 0, 9), (None, 3, 9), ((3, 1, 3, 0, 10), 1, 2), ((3, 1, 2, 9, 5), 3, 5)])
def test_fewer_items_than_there_are_to_choose_from_are_nonsense(among, count, choice):
    request = replace(REQUEST, among=None if among is None else np.array(among, np.int32))
    assert encoder_nonsense(request, few(count)) == f"answered with {count} items to top_n 4 where {choice} are to be chosen from"


def to_generate(k: int, beam: int, *, blocked=(), among=None, sampling: SamplingOptions | None = None) -> GenerateRequest:
    user = UserState(np.zeros((5, 2), np.float32), random_sequence(5))
    return GenerateRequest(
        user, k, beam, np.array(blocked, np.int32), None if among is None else np.array(among, np.int32), sampling=sampling
    )


def named(*items: int) -> Generated:
    return Generated(np.array(items, np.int32), np.full(len(items), -1.0, np.float32))


@pytest.mark.parametrize(
    ("request_", "least"),
    [
        (to_generate(4, 20), 4),
        (to_generate(4, 3), 3),
        (to_generate(30, 40), 9),
        (to_generate(4, 20, blocked=[1, 2, 3, 3, 0, 77]), 4),
        (to_generate(4, 20, blocked=[1, 2, 3, 3, 0, 77, 4, 5, 6]), 3),
        (to_generate(4, 20, among=[9, 8, 8, 0, 77]), 2),
        (to_generate(4, 20, among=[9, 8, 7], blocked=[7, 1]), 2),
        (to_generate(4, 20, among=[9], blocked=[9]), 0),
        (to_generate(4, 20, sampling=SamplingOptions(samples=16)), 1),
    ],
)
def test_fewer_items_than_a_generator_might_name_are_nonsense(request_: GenerateRequest, least: int):
    rules = generator_rules(catalogue_size=9)
    choice = [
        item for item in (9, 8, 7, 6, 5, 4, 3, 2, 1) if item not in request_.blocked and (request_.among is None or item in request_.among)
    ]
    assert rules.problem(request_, named(*choice[:least])) == ""
    assert rules.lacking(request_, [named(item) for item in choice[:least]]) == "", "piece by piece"
    if least:
        too_few = choice[: least - 1]
        problem = f"named {least - 1} items to k {request_.k} where {len(choice)} might be named"
        assert rules.problem(request_, named(*too_few)) == problem
        assert rules.nonsense(request_, named(*too_few)) == "", "it may be a piece of a whole answer"
        assert rules.lacking(request_, [named(item) for item in (*too_few, *too_few)]) == problem, "some came twice"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "NoneType, not with Encoded"),
        (replace(SOUND, state=np.array([np.nan, 1], np.float32)), "NaN or infinity"),
        (replace(SOUND, scores=np.array([1, 1, 1, -np.inf], np.float32)), "NaN or infinity"),
        (replace(SOUND, scores=np.array([1, 1, 1, np.nan], np.float32)), "NaN"),
        (replace(SOUND, items=SOUND.items[:3]), "3 items and 4 scores"),
        (replace(SOUND, items=np.arange(1, 6, dtype=np.int32), scores=np.ones(5, np.float32)), "5 items and 5 scores to top_n 4"),
        (replace(SOUND, items=np.array([0, 1, 2, 3], np.int32)), "catalogue index 0; items are 1 to 9"),
        (replace(SOUND, items=np.array([1, 2, 3, 10], np.int32)), "catalogue index 10; items are 1 to 9"),
        (replace(SOUND, items=np.array([1, 2, 3, 1], np.int32)), "the same item more than once"),
        (replace(SOUND, scores=SOUND.scores[::-1]), "not ordered by score"),
        (replace(SOUND, items=[1, 2, 3, 4]), "items that are not one row of numbers, but list"),
        (replace(SOUND, items=SOUND.scores), "items that are not one row of numbers"),
        (replace(SOUND, state=np.ones((1, 2), np.float32)), r"state that are not one row of numbers, but ndarray \(1, 2\)"),
    ],
)
def test_nonsense_is_named(answer: Encoded, problem: str):
    assert re.search(problem, encoder_nonsense(REQUEST, answer))


def test_items_that_were_not_asked_for_are_nonsense():
    request = replace(REQUEST, among=np.array([1, 2, 3], np.int32))
    assert encoder_nonsense(request, SOUND) == "answered with catalogue index 9, which is not among the items asked for"
    assert encoder_nonsense(request, replace(SOUND, items=SOUND.items[:3], scores=SOUND.scores[:3])) == ""


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (make_generative_bundle, "answered with states of 32 numbers; the decoder is prompted with 16"),
        (partial(make_complete_bundle, dim=8), "answered with states of 16 numbers; the decoder is prompted with 8"),
        (make_bundle, ""),
    ],
)
def test_states_of_a_width_that_the_decoder_does_not_take_are_nonsense(tmp_path, make, problem):
    bundle, encoder = make(tmp_path / "tiny"), GivesWideStates()
    encoder.load(bundle)
    assert RULES["encoder"](bundle).nonsense(REQUEST, encoder.infer(REQUEST)) == problem


def test_small_differences_and_near_ties_are_agreement():
    swapped = replace(SOUND, items=SOUND.items[[1, 0, 2, 3]], state=SOUND.state + 0.004)
    assert encoder_disagreement(SOUND, swapped) == ""


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (replace(SOUND, state=np.ones(3, np.float32)), "its user state has shape (3,), not (2,)"),
        (replace(SOUND, state=SOUND.state + np.float32(0.05)), "its user state is 0.05 off (tolerance 0.01)"),
        (replace(SOUND, state=SOUND.state * np.float32(np.nan)), "its user state is nan off (tolerance 0.01)"),
        (replace(SOUND, items=np.array([3, 1, 7, 8], np.int32)), "it retrieves only 2 of the same 4 items"),
    ],
)
def test_another_model_is_disagreement(answer: Encoded, problem: str):
    assert encoder_disagreement(SOUND, answer) == problem


@pytest.mark.parametrize(("reference", "other", "alike"), [(60.0, 60.5, True), (60.0, 63.0, False), (0.5, 0.51, True), (0.5, 0.55, False)])
def test_ratings_are_compared_by_their_size_and_probabilities_as_they_are(reference, other, alike):
    one, another = (Ranked(np.array([[value]], np.float32)) for value in (reference, other))
    assert (ranker_disagreement(one, another) == "") is alike
