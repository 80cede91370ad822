"""The rule that merges two lists, and how it is fitted."""

from dataclasses import astuple
from dataclasses import replace as dataclasses_replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.bundle import BlendRecord
from cluster.errors import BundleError, DataError
from cluster.values import Generated, StageReport
from pipelines.blend import BlendWeights, blend
from pipelines.candidates import Candidates
from pipelines.fit_blend import UNRANKED, Events, fit, measure


class Ranked(NamedTuple):
    items: np.ndarray
    scores: np.ndarray


def listed(stage, pairs):
    """Candidates of {item: score}, best first."""
    ordered = sorted(pairs.items(), key=lambda pair: -pair[1])
    items, scores = [item for item, _ in ordered], [score for _, score in ordered]
    return Candidates(np.array(items, np.int32), np.array(scores, np.float32), StageReport(stage, stage, 1.0))


def blended(retrieved, generated, weights):
    found = blend(listed("encode", retrieved), listed("generate", generated), weights)
    return dict(zip(found.items.tolist(), found.scores.tolist(), strict=True))


def test_an_items_score_is_the_weighted_sum_of_its_log_probabilities_with_floors_for_what_a_list_lacks():
    w, temperature, margin = 0.3, 0.1, 2.0
    log_p = np.log(np.exp([5, 3]) / np.exp([5, 3]).sum())
    assert blended({1: 0.5, 2: 0.3}, {2: -0.7, 9: -1.5}, BlendWeights(w, temperature, margin)) == pytest.approx({
        1: (1 - w) * log_p[0] + w * (-1.5 - margin),
        2: (1 - w) * log_p[1] + w * -0.7,
        9: (1 - w) * log_p[1] + w * -1.5,
    })  # fmt: skip


items = st.integers(1, 30)
retrieved_lists = st.dictionaries(items, st.floats(-1, 1, width=32), max_size=12)
generated_lists = st.dictionaries(items, st.floats(-40, 0, width=32), max_size=8)
all_weights = st.builds(BlendWeights, st.floats(0, 1), st.floats(0.01, 1), st.floats(0, 10))


@given(retrieved_lists, generated_lists, all_weights)
def test_the_blend_holds_every_item_of_both_lists_once_best_first_and_finite(retrieved, generated, weights):
    found = blend(listed("encode", retrieved), listed("generate", generated), weights)
    assert sorted(found.items.tolist()) == sorted(retrieved.keys() | generated.keys())
    assert (np.diff(found.scores) <= 0).all()
    assert np.isfinite(found.scores).all()


@given(retrieved_lists, st.lists(items, unique=True, max_size=8), all_weights)
def test_more_of_either_makes_no_item_worse(retrieved, named, weights):
    """An item that both stages prefer to another stands before it."""
    generated = {item: -1.0 - place for place, item in enumerate(named)}
    found = blend(listed("encode", retrieved), listed("generate", generated), weights).items.tolist()
    for a in retrieved.keys() & generated.keys():
        for b in retrieved.keys() & generated.keys():
            if retrieved[a] > retrieved[b] + 1e-3 and generated[a] > generated[b] and 1e-3 < weights.generator < 0.999:
                assert found.index(a) < found.index(b)


@given(retrieved_lists.filter(bool), generated_lists)
def test_weight_0_keeps_retrievals_order_and_weight_1_the_generators(retrieved, generated):
    ours, theirs = listed("encode", retrieved), listed("generate", generated)
    only_retrieval, only_generation = [blend(ours, theirs, BlendWeights(w)).items.tolist() for w in (0.0, 1.0)]
    assert only_retrieval[: len(ours.items)] == ours.items.tolist()
    assert sorted(generated.values(), reverse=True) == [generated[item] for item in only_generation[: len(generated)]]
    assert only_generation[len(generated) :] == [item for item in ours.items.tolist() if item not in generated]


@given(retrieved_lists, generated_lists, all_weights, st.floats(-0.5, 0.5))
def test_what_moves_all_cosines_alike_does_not_change_the_scores(retrieved, generated, weights, shift):
    moved = {item: score + shift for item, score in retrieved.items()}
    assert blended(moved, generated, dataclasses_replace(weights, temperature=0.5)) == pytest.approx(
        blended(retrieved, generated, dataclasses_replace(weights, temperature=0.5)), abs=1e-5
    )


def test_the_blend_reports_itself_and_passes_a_degradation_on():
    ours, theirs = listed("encode", {1: 0.5}), listed("generate", {2: -0.5})
    assert (blend(ours, theirs, BlendWeights()).report.stage, blend(ours, theirs, BlendWeights()).degraded) == ("blend", False)
    assert blend(ours, replace(theirs, degraded=True), BlendWeights()).degraded


def test_weights_survive_the_manifest_and_are_documented_defaults_without_one():
    weights = BlendWeights(0.25, 0.1, 3.0)
    assert BlendWeights.of(weights.record("ml-100k validation", {"unified": {"hr@10": 0.1}})) == weights
    assert astuple(BlendWeights.of(None)) == (0.5, 0.05, 1.0)


@pytest.mark.parametrize("name", ["generator", "temperature", "margin"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_weights_that_no_rule_can_have_are_refused(name, value):
    """An infinite margin would leave what the decoder named without a score: infinity times 0."""
    weights = {"generator": 0.5, "temperature": 0.05, "margin": 1.0, name: value}
    with pytest.raises(BundleError, match="none of them infinite"):
        BlendWeights.of(BlendRecord(weights=weights, fitted_on="nothing"))


def events_of(users, *, seed=0, catalogue=300, pool=60, beam=12):
    """Lists of independent noisy views of the same taste, without outcomes."""
    rng = np.random.default_rng(seed)
    retrieved, generated = [], []
    for _ in range(users):
        order = rng.permutation(catalogue)[:pool].astype(np.int32) + 1
        retrieved.append(Ranked(order, np.sort(rng.uniform(-0.2, 0.6, pool).astype(np.float32))[::-1]))
        named = rng.permutation(catalogue)[:beam].astype(np.int32) + 1
        named[: beam // 2] = rng.choice(order, beam // 2, replace=False)
        named = np.unique(named)
        rng.shuffle(named)
        generated.append(Generated(named, np.sort(rng.uniform(-7, -0.5, len(named)).astype(np.float32))[::-1]))
    return retrieved, generated


def candidates(ranked):
    return Candidates(ranked.items, ranked.scores, StageReport("encode", "x", 1.0))


def generated_candidates(generated):
    return Candidates(generated.items, generated.log_probs, StageReport("generate", "x", 1.0))


@pytest.mark.parametrize("planted", [BlendWeights(0.3, 0.05, 2.0), BlendWeights(0.7, 0.05, 0.5)], ids=str)
def test_the_fit_recovers_a_planted_rule(planted):
    retrieved, generated = events_of(400)
    targets = [int(blend(candidates(r), generated_candidates(g), planted).items[0]) for r, g in zip(retrieved, generated, strict=True)]
    weights, quality = fit(retrieved, generated, targets)
    assert weights.generator == pytest.approx(planted.generator, abs=0.051)
    assert quality["unified"]["ndcg@10"] > 0.98
    assert quality["unified"]["ndcg@10"] > max(quality["retrieval"]["ndcg@10"], quality["generative"]["ndcg@10"])


def test_a_generator_that_knows_nothing_gets_no_weight():
    retrieved, generated = events_of(200)
    targets = [int(one.items[0]) for one in retrieved]
    weights, quality = fit(retrieved, generated, targets)
    assert weights.generator == 0  # of all that are as good, the smallest
    assert quality["unified"] == quality["retrieval"]


def test_the_fit_depends_on_its_arguments_only():
    """What it measures is measured on the events it is given: other events with the same weights give what `measure` says of them."""
    retrieved, generated = events_of(100)
    targets = [int(one.items[2]) for one in generated]
    first, second = fit(retrieved, generated, targets), fit(retrieved, generated, targets)
    assert first == second
    assert measure(first[0], retrieved, generated, targets) == first[1]
    others = events_of(100, seed=1)
    measure(first[0], *others, [1] * 100)
    assert fit(retrieved, generated, targets) == first


@given(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 5))
def test_the_ranks_that_are_fitted_are_the_ranks_that_are_served(seed, generator, margin):
    weights = BlendWeights(generator, 0.05, margin)
    retrieved, generated = events_of(4, seed=seed, catalogue=40, pool=20, beam=8)
    targets = [3, 7, 11, 19]
    served = []
    for ours, theirs, target in zip(retrieved, generated, targets, strict=True):
        order = blend(candidates(ours), generated_candidates(theirs), weights).items.tolist()
        served.append(order.index(target) + 1 if target in order else UNRANKED)
    assert sorted(Events.of(retrieved, generated, targets, 0.05).ranks(weights).tolist()) == sorted(served)


def test_an_outcome_that_no_list_holds_has_no_rank():
    retrieved, generated = events_of(3)
    quality = measure(BlendWeights(), retrieved, generated, [10**6] * 3)
    assert {name: one["hr@200"] for name, one in quality.items()} == {"retrieval": 0, "generative": 0, "unified": 0}
    assert fit(retrieved, generated, [10**6] * 3)[0].generator == 0


def test_empty_lists_are_measured_and_no_events_are_refused():
    nothing = Ranked(np.empty(0, np.int32), np.empty(0, np.float32))
    named = Generated(np.array([4], np.int32), np.array([-1.0], np.float32))
    assert measure(BlendWeights(), [nothing], [named], [4])["unified"]["hr@10"] == 1
    with pytest.raises(DataError, match="hold at least one"):
        fit([], [], [])
