"""A process's part in a rollout, beside a real fleet board in this process: what it reads, holds, tells and learns."""

from types import SimpleNamespace

import pytest

from cluster.bundle import WEIGHTS, BundleStore
from cluster.errors import BundleError
from cluster.fleet import READY, FleetBoard, Presence
from cluster.rollout import ROLLOUT, RolloutStore, Trial, VersionFigures
from deployments.membership import Membership
from deployments.shelf import ModelShelf
from deployments.switchboard import SwitchboardDeployment
from tests.bundles import make_bundle
from tests.fakes.handles import Handle

NOW = 1_760_000_000.0


@pytest.fixture
def rollouts(three_versions):
    """Version 1 is stable, of 3."""
    store = BundleStore(three_versions)
    store.promote(1)
    return RolloutStore(store)


@pytest.fixture
def board():
    return FleetBoard(now=NOW - 60)


@pytest.fixture
def handle(board):
    return Handle(SimpleNamespace(exchange_versions=board.exchange), now=NOW)


def told(handle):
    """Every presence that was told."""
    return [presence for _, _, presence in handle.calls]


async def made(bundle):
    return SimpleNamespace(bundle=bundle)


async def discarded(model):
    pass


def member(handle, rollouts, role="encoder", **more):
    shelf = ModelShelf(rollouts.store, made, discarded, keep_s=60.0)
    return Membership(role, f"{role}/a", handle, rollouts, shelf, **more), shelf


async def settled(membership, shelf):
    await membership.follow()
    await shelf.settled()
    await membership.follow()


async def test_who_joins_holds_what_serves_before_it_serves_and_tells_so(handle, rollouts):
    membership, shelf = member(handle, rollouts)
    await membership.join()
    assert shelf.holds == {1: READY}
    assert [dict(presence.holds) for presence in told(handle)] == [{}, {1: READY}]
    assert membership.news.ready == {1}


async def test_a_replica_that_joins_in_the_middle_of_a_rollout_holds_what_others_still_answer_with_too(handle, board, rollouts):
    board.exchange("gateway/b", Presence("gateway", {}, frozenset({2})), now=NOW)
    rollouts.promote(3)
    membership, shelf = member(handle, rollouts)
    await membership.join()
    assert shelf.holds == {3: READY, 2: READY}


async def test_a_promoted_version_is_loaded_and_told_of_once_it_is_there(handle, rollouts):
    membership, shelf = member(handle, rollouts)
    await membership.join()
    rollouts.promote(2)
    await settled(membership, shelf)
    assert (membership.rollout.stable, shelf.holds, membership.news.ready) == (2, {1: READY, 2: READY}, {1, 2})


async def test_one_that_cannot_be_served_is_told_with_the_reason(handle, rollouts):
    membership, shelf = member(handle, rollouts)
    await membership.join()
    rollouts.promote(2)
    (rollouts.store.root / "2" / WEIGHTS).unlink()
    await settled(membership, shelf)
    assert "weights.safetensors is missing" in told(handle)[-1].holds[2]
    assert membership.news.ready == {1}


async def test_a_version_on_trial_is_held_beside_the_stable_one_and_figures_are_told_during_the_trial_only(handle, board, rollouts):
    figures = {2: VersionFigures(requests=5)}
    membership, shelf = member(handle, rollouts, "gateway", uses=lambda: frozenset({1, 2}), figures=lambda: figures)
    await membership.join()
    assert (told(handle)[-1].trial, told(handle)[-1].figures, told(handle)[-1].uses) == ("", {}, {1, 2})
    trial = rollouts.promote(2, Trial(version=2, share=0.5)).trial
    await settled(membership, shelf)
    assert shelf.holds == {1: READY, 2: READY}
    assert (told(handle)[-1].trial, told(handle)[-1].figures) == (trial.name, figures)
    assert board.figures(trial) == figures


async def test_a_pinned_version_is_the_only_one_whatever_is_promoted(handle, rollouts):
    membership, shelf = member(handle, rollouts, pinned=3)
    await membership.join()
    rollouts.promote(2)
    await settled(membership, shelf)
    assert (shelf.holds, membership.rollout.versions) == ({3: READY}, (3,))


async def test_while_the_switchboard_is_away_the_rollout_is_followed_all_the_same(handle, rollouts, caplog):
    membership, shelf = member(handle, rollouts)
    await membership.join()
    news, handle.replica = membership.news, None
    rollouts.promote(2)
    await settled(membership, shelf)
    assert (shelf.holds, membership.news) == ({1: READY, 2: READY}, news)
    assert "it is not known who else holds which version" in caplog.text


async def test_a_rollout_that_cannot_be_read_stays_as_it_is(handle, rollouts, caplog):
    membership, shelf = member(handle, rollouts)
    await membership.join()
    rollouts.promote(2)
    (rollouts.store.root / ROLLOUT).write_text("{")
    await settled(membership, shelf)
    assert (membership.rollout.stable, shelf.holds) == (1, {1: READY})
    assert "the rollout stays as it is" in caplog.text
    (rollouts.store.root / ROLLOUT).unlink()
    await settled(membership, shelf)
    assert membership.rollout.stable == 2


async def test_without_any_version_to_serve_joining_is_an_error(handle, rollouts):
    for version in (1, 2, 3):
        (rollouts.store.root / str(version) / WEIGHTS).unlink()
    membership, _ = member(handle, rollouts)
    with pytest.raises(BundleError, match=r"no version in .* can be served"):
        await membership.join()


async def test_where_a_version_is_pinned_it_is_the_one_that_is_told(tmp_path):
    root = tmp_path / "tiny"
    for _ in range(2):
        make_bundle(root)
    told = [await SwitchboardDeployment({"model_dir": str(root), **pinned}).versions() for pinned in ({}, {"version": 1})]
    assert [rollout.stable for rollout, _ in told] == [2, 1]
