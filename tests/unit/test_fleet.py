"""Who holds which version: what is ready, what is used, and how a trial goes, over all processes that live."""

import pytest

from cluster.fleet.board import LOADING, READY, FleetBoard, FleetNews, Presence
from cluster.fleet.rollout import Arm, Rollout, Trial
from cluster.fleet.trial_guard import TIMED_FOR_S, VersionFigures
from cluster.traffic.latency import LatencySummary

TRIAL = Trial(version=2, share=0.5, began=1.0)
STABLE, TRIED = Arm(1), TRIAL.arm
ROLLOUT = Rollout(stable=1, trial=TRIAL)


@pytest.fixture
def board() -> FleetBoard:
    return FleetBoard(ttl_s=5.0, now=0.0)


def stage(role: str, *ready: int, **obstacles: str) -> Presence:
    return Presence(role, {**dict.fromkeys(ready, READY), **{int(name[1:]): why for name, why in obstacles.items()}})


def gateway(*uses: int, period: str = "", figures: dict[Arm, VersionFigures] | None = None) -> Presence:
    return Presence("gateway", {1: READY}, frozenset(uses), period, figures or {})


def reported(board: FleetBoard, name: str, presence: Presence, *, now: float) -> FleetNews:
    """What every process should know once this one has reported."""
    board.report(name, presence, now=now)
    return board.news(now=now)


def test_a_version_is_ready_once_every_replica_of_every_stage_has_it(board: FleetBoard):
    assert reported(board, "e1", stage("encoder", 1, 2), now=0).ready == {1, 2}
    assert reported(board, "g1", stage("generator", 1, v2=LOADING), now=0).ready == {1}
    assert reported(board, "g1", stage("generator", 1, 2), now=1).ready == {1, 2}
    assert reported(board, "e2", stage("encoder", 1), now=1).ready == {1}, "a new replica has to load it first"


def test_it_is_told_what_each_stages_replicas_hold_in_common_and_what_every_stage_holds_somewhere(board: FleetBoard):
    board.report("g1", stage("generator", 2, 3), now=0)
    news = reported(board, "gw", gateway(1), now=0)
    assert (news.common, news.held) == ({"generator": {2, 3}}, frozenset()), "without an encoder, no version"
    board.report("e1", stage("encoder", 1, v2="it is cut off"), now=0)
    news = reported(board, "e2", stage("encoder", 1, 2), now=0)
    assert (news.common, news.ready, news.held) == ({"generator": {2, 3}, "encoder": {1}}, frozenset(), {2})
    news = reported(board, "e3", Presence("encoder", {}), now=5.1)
    assert (news.common, news.held) == ({}, frozenset()), "a silent replica holds nothing, nor does one that starts"


def test_a_gateway_is_no_stage_and_without_an_encoder_nothing_is_ready(board: FleetBoard):
    board.report("g1", stage("generator", 1, 2), now=0)
    assert reported(board, "gw", gateway(1), now=0).ready == frozenset()
    board.report("e1", stage("encoder", 1, 2), now=0)
    assert reported(board, "gw", gateway(1), now=0).ready == {1, 2}, "the gateway's own shelf is its own business"


def test_a_stage_without_replicas_is_not_waited_for(board: FleetBoard):
    assert reported(board, "e1", stage("encoder", 1), now=0).ready == {1}


def test_a_dead_replica_does_not_hold_a_version_up(board: FleetBoard):
    board.report("e1", stage("encoder", 1, v2=LOADING), now=0)
    assert reported(board, "e2", stage("encoder", 1, 2), now=5.0).ready == {1}
    assert reported(board, "e2", stage("encoder", 1, 2), now=5.1).ready == {1, 2}


def test_a_replica_that_holds_nothing_yet_is_listed_once_it_can_serve(board: FleetBoard):
    news = reported(board, "generator/x", Presence("generator", {}), now=10)
    assert (news.generators, news.replicas.get("generator", ())) == (0, ())
    news = reported(board, "generator/x", stage("generator", v1=LOADING), now=11)
    assert (news.generators, news.replicas.get("generator", ())) == (0, ())
    news = reported(board, "generator/x", stage("generator", 1, v2=LOADING), now=12)
    assert (news.generators, news.replicas["generator"]) == (1, ("x",))


def test_a_gateway_counts_once_it_holds_a_version_and_one_that_always_starts_anew_takes_no_share_of_the_rates(board: FleetBoard):
    board.report("gateway/a", gateway(1), now=0)
    assert reported(board, "gateway/b", Presence("gateway", {}), now=0).gateways == 1
    news = reported(board, "gateway/b", Presence("gateway", {1: LOADING}), now=1)
    assert (news.gateways, dict(news.replicas)) == (1, {})
    assert reported(board, "gateway/b", gateway(1), now=2).gateways == 2


def test_what_any_living_gateway_answers_with_is_used(board: FleetBoard):
    board.report("a", gateway(1), now=0)
    news = reported(board, "b", gateway(2, 3), now=4)
    assert (news.used, news.gateways) == ({1, 2, 3}, 2)
    news = reported(board, "b", gateway(2, 3), now=6)
    assert (news.used, news.gateways) == ({2, 3}, 1)


def test_a_board_that_was_just_started_has_not_heard_of_everybody_yet():
    board = FleetBoard(ttl_s=5.0, now=100.0)
    assert not reported(board, "e1", stage("encoder", 1), now=105.0).settled
    assert reported(board, "e1", stage("encoder", 1), now=105.1).settled
    assert not FleetNews().settled


def measured(requests: int, degraded: int = 0) -> VersionFigures:
    return VersionFigures(requests, degraded, LatencySummary(requests, 1.0, (requests,)))


def test_figures_are_added_up_over_the_gateways_and_those_of_a_dead_one_still_count(board: FleetBoard):
    board.report("a", gateway(1, 2, period=ROLLOUT.period, figures={STABLE: measured(10), TRIED: measured(5, 1)}), now=0)
    board.report("b", gateway(1, 2, period=ROLLOUT.period, figures={TRIED: measured(1)}), now=0)
    board.report("b", gateway(1, 2, period=ROLLOUT.period, figures={TRIED: measured(7, 2)}), now=60)
    total = board.figures(ROLLOUT)
    assert {arm: (one.requests, one.degraded) for arm, one in total.items()} == {STABLE: (10, 0), TRIED: (12, 3)}


def timed(requests: int, bucket: int) -> VersionFigures:
    return VersionFigures(requests, latency=LatencySummary(requests, 1.0, (*[0] * bucket, requests)))


def test_how_long_answers_of_a_gateway_that_is_gone_took_counts_for_a_while_and_that_there_were_some_always(board: FleetBoard):
    slow = gateway(1, 2, period=ROLLOUT.period, figures={STABLE: timed(500, 0), TRIED: timed(500, 90)})
    fast = gateway(1, 2, period=ROLLOUT.period, figures={STABLE: timed(500, 0), TRIED: timed(500, 0)})
    board.report("a", slow, now=0)
    board.report("b", fast, now=60)
    assert "p95 is" in board.judge(ROLLOUT)
    board.report("b", fast, now=3 * TIMED_FOR_S)
    total = board.figures(ROLLOUT)[TRIED]
    assert (board.judge(ROLLOUT), total.requests, total.latency.p95_ms) == ("", 1000, fast.figures[TRIED].latency.p95_ms)
    board.report("a", slow, now=3 * TIMED_FOR_S + 1)
    assert "p95 is" in board.judge(ROLLOUT), "it was only unheard of"


def test_figures_of_one_trial_are_not_those_of_the_next(board: FleetBoard):
    next_ = TRIAL.model_copy(update={"began": 2.0})
    board.report("a", gateway(1, period=ROLLOUT.period, figures={TRIED: measured(100, 100)}), now=0)
    assert (board.figures(Rollout(stable=1, trial=next_)), board.judge(Rollout(stable=1, trial=next_))) == ({}, "")
    board.report("a", gateway(1, period=Rollout(stable=1, trial=next_).period, figures={TRIED: measured(1)}), now=1)
    assert (board.figures(ROLLOUT), board.figures(Rollout(stable=1, trial=next_))[TRIED].requests) == ({}, 1)
    assert board.figures(Rollout(stable=1)) == {}


def test_figures_beside_one_stable_version_are_not_those_beside_the_next(board: FleetBoard):
    """As where `genrec compile` publishes during a trial: the new version has no figures yet to compare with."""
    later = Rollout(stable=3, trial=TRIAL)
    board.report("a", gateway(1, period=ROLLOUT.period, figures={STABLE: measured(500, 25), TRIED: measured(500, 25)}), now=0)
    assert (board.judge(ROLLOUT), board.judge(later)) == ("", "")
    board.report("a", gateway(1, period=later.period, figures={TRIED: measured(200, 10)}), now=1)
    assert board.judge(later) == "", "the new stable version has answered nothing yet"
    board.report("a", gateway(1, period=later.period, figures={Arm(3): measured(100), TRIED: measured(200, 10)}), now=2)
    assert board.judge(later).startswith("10 of 200 answers are degraded")


def test_a_trial_of_all_users_is_judged_by_itself(board: FleetBoard):
    rollout = Rollout(stable=1, trial=TRIAL.model_copy(update={"share": 1.0}))
    board.report("a", gateway(2, period=rollout.period, figures={rollout.trial.arm: measured(200, 20)}), now=0)
    assert board.judge(rollout).startswith("20 of 200 answers are degraded")


def test_the_trial_is_judged_by_what_all_gateways_measured_together(board: FleetBoard):
    board.report("a", gateway(1, period=ROLLOUT.period, figures={STABLE: measured(500), TRIED: measured(15, 15)}), now=0)
    assert board.judge(ROLLOUT) == ""
    board.report("b", gateway(1, period=ROLLOUT.period, figures={TRIED: measured(15, 15)}), now=0)
    assert board.judge(ROLLOUT).startswith("30 of 30 answers are degraded")
    assert board.judge(Rollout(stable=1)) == ""


def test_a_trial_is_judged_beside_whichever_version_answers_the_other_users(board: FleetBoard):
    """As where a replica refuses the stable version 6, and gateways go on to answer by 5."""
    trial = Trial(version=7, share=0.5, began=1.0)
    rollout = Rollout(stable=6, trial=trial, previous=[5])
    others = {Arm(5): timed(500, 0)}
    board.report("a", gateway(5, 7, period=rollout.period, figures={**others, trial.arm: measured(30, 30)}), now=0)
    assert board.judge(rollout).startswith("30 of 30 answers are degraded")
    board.report("a", gateway(5, 7, period=rollout.period, figures={**others, trial.arm: timed(500, 90)}), now=1)
    assert board.judge(rollout).startswith("p95 is")


def test_a_trial_of_flags_is_judged_beside_the_other_users_of_the_same_version(board: FleetBoard):
    trial = Trial(version=1, share=0.5, flags={"strategy": "retrieval"}, began=1.0)
    board.report(
        "a", gateway(1, period=Rollout(stable=1, trial=trial).period, figures={STABLE: measured(500), trial.arm: measured(30, 30)}), now=0
    )
    assert board.judge(Rollout(stable=1, trial=trial)).startswith("30 of 30 answers are degraded")


def test_the_status_says_who_holds_what_and_why_somebody_does_not(board: FleetBoard):
    board.report("e1", stage("encoder", 1, 2), now=0)
    board.report("e2", stage("encoder", 1, v2="it is cut off"), now=0)
    board.report("e3", stage("encoder", 1, v2="it is cut off"), now=0)
    board.report("a", gateway(1, 2, period=ROLLOUT.period, figures={TRIED: measured(3)}), now=0)
    status = board.status(ROLLOUT, now=1)
    assert status.processes == {"encoder": 3, "gateway": 1}
    assert status.holders == {1: {"encoder": 3, "gateway": 1}, 2: {"encoder": 1, "gateway": 0}}
    assert status.obstacles == {1: (), 2: ("it is cut off",)}
    assert status.used == {1: 1, 2: 1}
    assert status.figures[TRIED].requests == 3
    assert board.status(ROLLOUT, now=60).processes == {}


def test_a_restarted_board_knows_everything_again_after_the_next_exchanges(board: FleetBoard):
    told = {"e1": stage("encoder", 1, 2), "a": gateway(1, period=ROLLOUT.period, figures={TRIED: measured(3)})}
    restarted = FleetBoard(ttl_s=5.0, now=50.0)
    for name, presence in told.items():
        board.report(name, presence, now=60)
        restarted.report(name, presence, now=60)
    assert restarted.status(ROLLOUT, now=60) == board.status(ROLLOUT, now=60)
