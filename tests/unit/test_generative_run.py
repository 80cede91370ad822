"""The lists a blend is fitted on are those that serving would make."""

from dataclasses import replace

import numpy as np
import pytest

from cluster.dataset import Dataset, Interactions
from deployments.training.generative import served_lists
from deployments.training.ranking import measure_strategies
from integrations.hstu.encoder import TorchEncoder
from pipelines import batches
from pipelines.blend import BlendWeights
from pipelines.fit_blend import measure
from pipelines.generative_run import serving_lists
from pipelines.splits import TEST, VALIDATION
from tests.bundles import make_generative_bundle

USERS, EVENTS = 6, 12


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_generative_bundle(tmp_path_factory.mktemp("generative") / "tiny")


@pytest.fixture(scope="module")
def interactions():
    rng, count = np.random.default_rng(0), USERS * EVENTS
    return Interactions(
        user_ids=[str(user) for user in range(USERS)],
        offsets=np.arange(0, count + 1, EVENTS),
        items=np.concatenate([rng.permutation(200)[:EVENTS] + 1 for _ in range(USERS)]).astype(np.int32),
        timestamps=np.tile(np.arange(EVENTS) * 3600, USERS),
        actions=np.zeros(count, np.int8),
        values=np.full(count, np.nan, np.float32),
    )


@pytest.mark.parametrize("from_end", [TEST, VALIDATION])
def test_lists_are_cut_to_the_pool_and_the_beam_and_hold_nothing_of_the_history(bundle, interactions, from_end):
    lists = serving_lists(bundle, interactions, from_end, beam=7, pool=50)
    assert lists.targets == interactions.items.reshape(USERS, EVENTS)[:, -from_end].tolist()
    for user, (retrieved, generated) in enumerate(zip(lists.retrieved, lists.generated, strict=True)):
        history = interactions.items.reshape(USERS, EVENTS)[user, :-from_end]
        assert (len(retrieved.items), len(generated.items)) == (50, 7)
        assert not np.isin(np.concatenate([retrieved.items, generated.items]), history).any()


def test_of_many_users_some_are_drawn_the_same_ones_each_time(bundle, interactions):
    first, again = (serving_lists(bundle, interactions, TEST, beam=3, pool=5, most_users=4).targets for _ in range(2))
    assert first == again
    assert len(first) == 4


def test_of_long_histories_few_are_taken_at_a_time_and_the_lists_stay_the_same(bundle, interactions, monkeypatch):
    uneven = replace(interactions, offsets=np.cumsum([0, 20, 6, 14, 10, 10, 12]))
    at_once, encode, users = serving_lists(bundle, uneven, TEST, beam=3, pool=5), TorchEncoder.batch_infer, []

    def counted(encoder, requests):
        users.append(len(requests))
        return encode(encoder, requests)

    monkeypatch.setattr(TorchEncoder, "batch_infer", counted)
    monkeypatch.setattr(batches, "MOST_PAIRS", 2 * 11**2)
    lists = serving_lists(bundle, uneven, TEST, beam=3, pool=5)
    assert users == [2, 2, 1, 1], "histories of 5 and 9, 9 and 11, 13, 19 events"
    assert lists.targets == at_once.targets
    for found, expected in ((lists.retrieved, at_once.retrieved), (lists.generated, at_once.generated)):
        assert [one.items.tolist() for one in found] == [one.items.tolist() for one in expected]


def test_a_list_holds_the_users_own_state_and_not_those_of_a_batch(bundle, interactions):
    lists = serving_lists(bundle, interactions, TEST, beam=3, pool=5)
    assert all(one.state.base is None and one.states is None for one in lists.retrieved)


def test_figures_of_more_items_than_are_generated_for_each_request_are_left_out(bundle, interactions):
    dataset = Dataset("drawn", interactions, bundle.catalogue, "made up")
    lists, told = served_lists(bundle, dataset, TEST), measure_strategies(bundle, dataset, TEST)
    whole = measure(BlendWeights.of(bundle.manifest.blend), lists.retrieved, lists.generated, lists.targets)
    assert told["retrieval"] == whole["retrieval"]
    for strategy in ("generative", "unified"):
        assert told[strategy] == {name: whole[strategy][name] for name in ("hr@10", "ndcg@10", "mrr")}


def test_the_lists_are_made_without_reading_the_catalogue(bundle, interactions, monkeypatch):
    monkeypatch.setattr("cluster.bundle.read_catalogue", lambda _: pytest.fail("it was read"))
    assert serving_lists(replace(bundle), interactions, TEST, beam=3, pool=5).reach == 3


def test_a_list_of_the_whole_catalogue_is_what_every_request_gets(bundle, interactions):
    assert serving_lists(bundle, interactions, TEST, beam=199, pool=5).reach == 199
    assert serving_lists(bundle, interactions, TEST, beam=200, pool=5).reach is None
