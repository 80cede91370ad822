"""Which versions serve: who takes part in a trial, what ends one, and changes by several processes at once."""

import dataclasses
import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bundle import WEIGHTS
from cluster.bundle_store import BundleStore
from cluster.errors import BundleError
from cluster.fleet.rollout import REMEMBERED, ROLLOUT, Rollout, RolloutStore, Trial
from cluster.fleet.trial_guard import FEWEST, Guard, VersionFigures, judge, least_share
from cluster.traffic.latency import LatencySummary, bucket_of
from tests.fakes.clock import Clock

USERS = [f"user {number}" for number in range(4000)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rollouts(three_versions: Path, clock: Clock) -> RolloutStore:
    store = BundleStore(three_versions)
    store.promote(1)
    return RolloutStore(store, clock)


def canary(version: int = 2, share: float = 0.5, **more: object) -> Trial:
    return Trial(version=version, share=share, **more)


@given(st.text(), st.text(), st.floats(0.01, 1))
def test_a_user_belongs_to_a_trial_as_long_as_it_lasts_and_to_any_larger_share_of_it(tenant: str, user: str, share: float):
    trial = canary(share=share, began=7.0)
    belongs = trial.includes(tenant, user)
    assert Trial.model_validate_json(trial.model_dump_json()).includes(tenant, user) == belongs
    assert not belongs or trial.model_copy(update={"share": min(1.0, 2 * share)}).includes(tenant, user)
    assert trial.model_copy(update={"share": 1.0}).includes(tenant, user)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_over_many_users_it_is_that_share_of_them(share: float):
    included = sum(canary(share=share).includes("default", user) for user in USERS)
    assert included == pytest.approx(share * len(USERS), abs=4 * (share * (1 - share) * len(USERS)) ** 0.5)


def test_who_belongs_to_one_trial_says_nothing_of_the_next_nor_of_another_tenant():
    one, next_ = canary(began=1.0), canary(began=2.0)
    both = sum(one.includes("default", user) and next_.includes("default", user) for user in USERS)
    tenants = sum(one.includes("a", user) and one.includes("b", user) for user in USERS)
    for together in (both, tenants):
        assert together == pytest.approx(len(USERS) / 4, abs=4 * (3 / 16 * len(USERS)) ** 0.5)


@pytest.mark.parametrize(("kind", "answers"), [("canary", {1, 2}), ("ab", {1, 2}), ("shadow", {1})])
def test_only_a_shadow_answers_nobody(kind: str, answers: set[int]):
    rollout = Rollout(stable=1, trial=canary(kind=kind))
    tried = [rollout.trial_for("default", user) for user in USERS]
    assert {trial.version if trial else rollout.stable for trial in tried} == answers
    assert rollout.versions == (1, 2)


def test_what_was_rolled_back_is_told_from_what_another_version_has_followed(rollouts: RolloutStore):
    first, second = rollouts.read(), rollouts.promote(3)
    tried = rollouts.promote(2, canary())
    assert [second.rolled_back_since(first), tried.rolled_back_since(first), second.rolled_back_since(second)] == [set()] * 3
    ended = rollouts.rollback("its answers are degraded")
    assert ended.rolled_back_since(tried) == {2}
    assert rollouts.rollback("it is worse").rolled_back_since(ended) == {3}


def figures(requests: int = 0, degraded: int = 0, ms: float = 10.0, overlaps: int = 0, overlap: float = 0.0) -> VersionFigures:
    """As if every request had taken `ms`."""
    latency = LatencySummary(requests, 1.0, (*[0] * bucket_of(ms), requests))
    return VersionFigures(requests, degraded, latency, overlaps, overlap)


def test_figures_add_up():
    total = figures(10, 1, 5.0, 4, 2.0) + figures(20, 2, 50.0, 6, 3.0) + VersionFigures()
    assert (total.requests, total.degraded, total.overlaps, total.overlap, sum(total.latency.buckets)) == (30, 3, 10, 5.0, 30)


def test_wilsons_lower_end_is_below_the_share_and_comes_near_it_with_many_requests():
    assert least_share(0, 100) == 0.0
    assert least_share(10, 20) == pytest.approx(0.328, abs=0.001)  # Wilson (1927) with z = 1.645
    assert least_share(5000, 10_000) == pytest.approx(0.492, abs=0.001)
    assert least_share(100, 100) < 1.0


def test_a_trial_whose_answers_are_degraded_ends_and_the_reason_has_both_shares():
    reason = judge(Guard(), figures(1000, 10), figures(100, 20))
    assert reason.startswith("20 of 100 answers are degraded (at least 14.2%), of the stable version 1.0%")


@pytest.mark.parametrize(
    ("stable", "tried"),
    [
        (figures(1000, 0), figures(FEWEST - 1, FEWEST - 1)),
        (figures(1000, 0), figures(100, 3)),
        (figures(1000, 200), figures(100, 20)),
        (figures(0), figures(100, 0)),
        (VersionFigures(), VersionFigures()),
    ],
    ids=["too few requests", "within the margin of chance", "no more than the stable version's", "nothing to compare with", "nothing"],
)
def test_a_trial_goes_on_where_its_degraded_answers_prove_nothing(stable: VersionFigures, tried: VersionFigures):
    assert judge(Guard(), stable, tried) == ""


def test_a_trial_that_is_slow_ends_but_not_by_a_few_requests_nor_within_the_slack():
    guard = Guard(latency_ratio=2.0, latency_slack_ms=10.0)
    slow = judge(guard, figures(200, ms=100), figures(200, ms=300))
    assert "more than" in slow
    assert "the stable version's is" in slow
    assert judge(guard, figures(200, ms=100), figures(200, ms=190)) == ""
    assert judge(guard, figures(200, ms=1), figures(200, ms=9)) == "", "a few milliseconds are no reason"
    assert judge(guard, figures(199, ms=100), figures(200, ms=300)) == ""
    assert judge(guard, figures(200, ms=100), figures(199, ms=300)) == ""


def test_a_trial_is_not_slow_by_the_few_of_its_requests_that_were_timed_of_late():
    slow = figures(199, ms=300).latency
    many = VersionFigures(requests=10_000, latency=dataclasses.replace(slow, count=5000))
    assert judge(Guard(), figures(10_000, ms=100), many) == "", "the others were streams, or are longer ago"
    assert judge(Guard(), dataclasses.replace(many, latency=figures(199, ms=100).latency), figures(10_000, ms=300)) == ""


def test_a_shadow_that_recommends_something_else_ends_where_that_was_asked_for():
    unlike = figures(100, overlaps=100, overlap=30.0)
    reason = judge(Guard(least_overlap=0.5), figures(100), unlike)
    assert reason.startswith("of 100 answers, 30.0% of the items are the stable version's too")
    assert judge(Guard(), figures(100), unlike) == ""
    assert judge(Guard(least_overlap=0.3), figures(100), unlike) == ""
    assert judge(Guard(least_overlap=0.5), figures(100), figures(100, overlaps=FEWEST - 1)) == ""


def test_a_trial_whose_latency_does_not_matter_is_read_as_it_was_written(rollouts: RolloutStore):
    guard = Guard(latency_ratio=float("inf"))
    rollouts.promote(2, Trial(version=2, share=0.5, guard=guard))
    trial = rollouts.read().trial
    assert trial is not None
    assert trial.guard == guard
    assert judge(trial.guard, figures(1000, ms=1), figures(1000, ms=1000)) == ""
    assert rollouts.rollback("by hand").ended[-1].trial == trial


def test_a_promoted_version_is_stable_and_a_rollback_brings_back_what_was_before(rollouts: RolloutStore):
    assert rollouts.read() == Rollout(stable=1, previous=[1, 2, 3])
    assert rollouts.promote(3).stable == 3
    assert (rollouts.rollback("by hand").stable, rollouts.read().stable) == (1, 1)


def test_a_trial_leaves_the_stable_version_as_it_is_until_it_ends(rollouts: RolloutStore, clock: Clock):
    began = rollouts.promote(2, canary())
    assert (began.stable, began.versions, began.trial.began) == (1, (1, 2), clock.now)
    clock.advance(60)
    ended = rollouts.rollback("people complained")
    assert (ended.stable, ended.versions) == (1, (1,))
    (record,) = ended.ended
    assert (record.trial, record.outcome, record.reason, record.ended) == (began.trial, "rolled back", "people complained", clock.now)
    assert RolloutStore(rollouts.store).read() == ended, "a restart forgets nothing"


@pytest.mark.parametrize(("promoted", "outcome"), [(2, "promoted"), (3, "replaced")])
def test_a_promotion_ends_the_trial_that_was_going_on(rollouts: RolloutStore, promoted: int, outcome: str):
    rollouts.promote(2, canary())
    rollout = rollouts.promote(promoted)
    assert (rollout.stable, rollout.trial, rollout.ended[-1].outcome) == (promoted, None, outcome)


def test_a_new_trial_takes_the_place_of_the_one_before(rollouts: RolloutStore):
    rollouts.promote(2, canary())
    rollout = rollouts.promote(3, canary(3))
    assert (rollout.versions, [(one.trial.version, one.outcome) for one in rollout.ended]) == ((1, 3), [(2, "replaced")])


def test_a_trial_that_became_stable_in_another_way_is_none_any_more(rollouts: RolloutStore):
    rollouts.promote(2, canary())
    rollouts.store.promote(2)
    assert rollouts.read().trial is None


def test_a_trial_that_became_stable_in_another_way_does_not_come_back_once_a_newer_version_is_stable(rollouts: RolloutStore):
    rollouts.promote(2, canary())
    (rollouts.store.root / "current").write_text("2")
    rollouts.store.promote(3)
    assert (rollouts.read().stable, rollouts.read().trial) == (3, None)


def test_a_trial_goes_on_beside_a_newer_version_that_was_trained_meanwhile(rollouts: RolloutStore):
    rollouts.store.promote(2)
    rollouts.store.promote(1)  # that it was stable before its trial is no end of it
    rollouts.promote(2, canary())
    rollouts.store.promote(3)
    assert rollouts.read().versions == (3, 2)


def test_a_rollback_of_a_version_that_became_stable_in_another_way_does_not_begin_its_trial_again(rollouts: RolloutStore):
    rollouts.promote(2, canary())
    rollouts.store.promote(2)
    rolled_back = rollouts.rollback("people complained")
    assert (rolled_back.stable, rolled_back.trial) == (1, None)
    assert rollouts.read() == rolled_back


def test_exactly_the_trial_that_was_judged_ends(rollouts: RolloutStore, clock: Clock):
    judged = rollouts.promote(2, canary()).trial
    clock.advance(1)
    again = rollouts.promote(2, canary()).trial
    rollouts.end(judged, "it was slow")
    assert rollouts.read().trial == again, "the same version is tried again, and nothing is known of that yet"
    rollouts.end(again, "it was slow")
    rollouts.end(again, "it was slow")
    rollout = rollouts.read()
    assert (rollout.trial, [one.reason for one in rollout.ended]) == (None, ["a trial of 2 began", "it was slow"])


def flags(version: int = 1, **changed: object) -> Trial:
    return canary(version, kind="ab", flags=changed)


def test_flags_alone_are_tried_on_users_of_the_stable_version_and_promoted_or_rolled_back_as_a_version_is(rollouts: RolloutStore):
    began = rollouts.promote(1, flags(cache="false", strategy="retrieval"))
    assert (began.stable, began.versions, began.trial.flags) == (1, (1,), {"cache": False, "strategy": "retrieval"})
    assert {trial is not None for user in USERS for trial in [began.trial_for("default", user)]} == {True, False}
    assert rollouts.read() == began, "a restart forgets nothing"
    promoted = rollouts.promote(1)
    assert (promoted.stable, promoted.trial, promoted.ended[-1].outcome) == (1, None, "promoted")
    rollouts.promote(1, flags(anticipate=False))
    rolled_back = rollouts.rollback("by hand")
    assert (rolled_back.stable, rolled_back.trial, rolled_back.ended[-1].outcome) == (1, None, "rolled back")


def test_a_version_may_be_tried_with_flags(rollouts: RolloutStore):
    began = rollouts.promote(2, flags(2, cache=False))
    assert (began.versions, began.trial.tried) == ((1, 2), "2 with cache=false")
    rollouts.store.promote(2)
    assert rollouts.read().trial is None


def test_a_trial_of_flags_is_over_once_another_version_is_stable(rollouts: RolloutStore):
    rollouts.promote(1, flags(cache=False))
    rollouts.store.promote(2)
    assert (rollouts.read().stable, rollouts.read().trial) == (2, None)
    rollouts.store.promote(1)
    rollouts.promote(1, flags(cache=False))
    assert rollouts.promote(2).ended[-1].outcome == "replaced"


@pytest.mark.parametrize(
    ("changed", "kind", "why"),
    [
        ({"hedge": True}, "ab", "hedge cannot be tried on a share of the users: one call of an encoder carries several users"),
        ({"cach": False}, "ab", "unknown flag 'cach'; choose from anticipate, cache, strategy"),
        ({"cache": "perhaps"}, "ab", "cache = 'perhaps': Input should be a valid boolean"),
        ({"strategy": "popular"}, "canary", "strategy = 'popular': Input should be 'unified', 'retrieval' or 'generative'"),
        ({"cache": False}, "shadow", "a shadow answers no user"),
    ],
)
def test_flags_that_cannot_be_tried_are_refused_by_name_and_value(changed: dict[str, object], kind: str, why: str):
    with pytest.raises(ValueError, match=why):
        Trial(version=1, kind=kind, share=0.5, flags=changed)


@pytest.mark.parametrize("strategy", ["unified", "generative"])
def test_what_needs_a_decoder_is_not_tried_on_a_version_without_one(rollouts: RolloutStore, strategy: str):
    with pytest.raises(BundleError, match=f"tiny/1 has no decoder, and cannot be tried with strategy={strategy}; choose retrieval"):
        rollouts.promote(1, flags(strategy=strategy))
    assert rollouts.read().trial is None


def test_what_cannot_serve_is_not_promoted_and_changes_nothing(rollouts: RolloutStore):
    going_on = rollouts.promote(3, canary(3))
    with (rollouts.store.root / "2" / WEIGHTS).open("r+b") as file:
        file.truncate(100)
    for trial in (None, canary(2)):
        with pytest.raises(BundleError, match="it is cut off or was altered"):
            rollouts.promote(2, trial)
        with pytest.raises(BundleError, match=r"has no version 9; it has \[1, 2, 3\]"):
            rollouts.promote(9, trial)
    with pytest.raises(BundleError, match=r"version 1 is the stable one already; try another of \[1, 2, 3\]"):
        rollouts.promote(1, canary(1))
    assert rollouts.read() == going_on


def test_a_rollback_without_anything_before_says_what_to_do(rollouts: RolloutStore):
    (rollouts.store.root / "previous").unlink()
    with pytest.raises(BundleError, match="no earlier version to go back to; promote one of"):
        rollouts.rollback("by hand")
    with pytest.raises(BundleError, match=r"no model has been published in .*; run: genrec train"):
        RolloutStore(BundleStore(rollouts.store.root.parent / "none")).read()


@pytest.mark.parametrize("content", ["{", '{"trial": {"version": 2}}', '{"trial": null, "later": 1}'])
def test_a_file_that_cannot_be_understood_is_an_error_with_the_cure(rollouts: RolloutStore, content: str):
    (rollouts.store.root / ROLLOUT).write_text(content)
    for change in (rollouts.read, lambda: rollouts.promote(2), lambda: rollouts.rollback("by hand")):
        with pytest.raises(BundleError, match=r"(?s)rollout\.json cannot be understood: .*; delete it to serve the current version"):
            change()
    assert rollouts.store.current() == 1


def test_a_wrong_share_or_guard_is_refused():
    for wrong in ({"share": 0}, {"share": 1.5}, {"kind": "blue-green"}, {"guard": {"fewest_requests": 1}}):
        with pytest.raises(ValueError, match="validation error"):
            Trial.model_validate({"version": 1, "share": 0.1, **wrong})


def test_only_the_latest_trials_are_remembered(rollouts: RolloutStore, clock: Clock):
    for version in itertools.islice(itertools.cycle((2, 3)), REMEMBERED + 5):
        clock.advance(1)
        rollouts.promote(version, canary(version))
    assert len(rollouts.read().ended) == REMEMBERED


def _slow_clock() -> float:
    """It is read in the midst of a change, so that others would come between."""
    time.sleep(0.01)
    return time.time()


def _try_often(root: Path, version: int) -> None:
    for _ in range(8):
        RolloutStore(BundleStore(root), _slow_clock).promote(version, canary(version))


def test_two_processes_at_once_lose_none_of_each_others_changes(rollouts: RolloutStore):
    spawn = multiprocessing.get_context("spawn")
    operators = [spawn.Process(target=_try_often, args=(rollouts.store.root, version)) for version in (2, 3)]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.join(300)
    assert [operator.exitcode for operator in operators] == [0, 0]
    ended = rollouts.read().ended
    assert len(ended) == len({one.trial.name for one in ended}) == 15, "all but the last"
    assert json.loads((rollouts.store.root / ROLLOUT).read_text())["trial"]["version"] in {2, 3}


@pytest.fixture
def as_another_user(monkeypatch):
    """Files that are there can be read only; none can be made."""
    opened = Path.open

    def open_as_another_user(path, mode="r", *arguments, **options):
        if path.name == ".rollout.lock" and set(mode) & set("wax+"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, mode, *arguments, **options)

    def begin():
        monkeypatch.setattr(Path, "open", open_as_another_user)

    return begin


def test_a_lock_that_another_user_made_keeps_no_user_out(rollouts: RolloutStore, as_another_user):
    rollouts.promote(2, Trial(version=2, share=0.5))
    as_another_user()
    assert rollouts.rollback("it was enough").trial is None
    (rollouts.store.root / ".rollout.lock").unlink()
    with pytest.raises(PermissionError):
        rollouts.promote(2)


def test_a_lock_that_a_network_file_system_does_not_lock_for_this_user_is_named_with_the_cure(
    rollouts: RolloutStore, as_another_user, monkeypatch
):
    def flock(file, _):
        if not file.writable():  # as Linux has it on NFS
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", flock)
    rollouts.promote(2, Trial(version=2, share=0.5))
    as_another_user()
    with pytest.raises(BundleError, match=r"\.rollout\.lock is another user's, and .*; have its owner, or root, run: chmod a\+w /"):
        rollouts.rollback("it was enough")
    assert rollouts.read().trial is not None


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o1777])
def test_all_that_may_write_the_models_directory_may_write_the_lock_and_its_owner_alone_what_serves_which_all_may_read(
    rollouts: RolloutStore, mode: int
):
    """Some network file systems lock no file that one may not write."""
    root = rollouts.store.root
    root.chmod(mode)
    (root / ".rollout.lock").unlink()  # it was made as the directory was another one's
    if os.geteuid() == 0:
        os.chown(root, 4711, 4712)
    before = os.umask(0o077)
    try:
        rollouts.promote(2, canary(3))
        rollouts.promote(2)
    finally:
        os.umask(before)
    directory = root.stat()
    for name in (".rollout.lock", "current", "previous", ROLLOUT):
        file = (root / name).stat()
        written_by = mode & 0o222 if name == ".rollout.lock" else 0o200
        assert (file.st_mode & 0o666, file.st_uid, file.st_gid) == (0o444 | written_by, directory.st_uid, directory.st_gid), name


@pytest.mark.parametrize("ended", [False, True])
def test_the_number_of_a_version_that_was_deleted_after_its_trial_began_is_not_given_again(rollouts: RolloutStore, ended: bool):
    rollouts.promote(3, canary(3))
    if ended:
        rollouts.rollback("it was worse")
    for version in (2, 3):
        shutil.rmtree(rollouts.store.root / str(version))
    (rollouts.store.root / "previous").unlink(missing_ok=True)
    assert rollouts.store.adopt(rollouts.store.open(1)) == 4
