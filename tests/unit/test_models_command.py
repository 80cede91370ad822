"""`genrec models`: what each command does to the model's directory, and what it says."""

import shutil
from functools import partial

import httpx
import pytest
from typer.testing import CliRunner

from cluster.bundle import WEIGHTS, BlendRecord
from cluster.bundle_store import BundleStore
from cluster.errors import BundleError, ConfigError
from cluster.fleet.rollout import RolloutStore, Trial
from deployments.cli import models
from deployments.cli.server import GONE
from deployments.cli.top import top
from tests.bundles import make_bundle
from tests.disks import largest_file
from tests.fakes.played_stages import bundle_with_ranker


@pytest.fixture
def model_dir(three_versions, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    return three_versions


def genrec_models(*arguments):
    answer = CliRunner().invoke(models.app, [str(one) for one in arguments], catch_exceptions=False)
    return answer.exit_code, answer.output


def test_promote_and_rollback_change_which_version_is_stable(model_dir):
    store = BundleStore(model_dir)
    code, said = genrec_models("promote", 1, "--model-dir", model_dir)
    assert (code, said.splitlines()[0]) == (0, "tiny/1 is stable; clusters that serve it follow within seconds")
    assert store.current() == 1
    assert genrec_models("rollback", "--model-dir", model_dir) == (0, "tiny/3 is stable\n")
    assert store.current() == 3


@pytest.mark.parametrize("kind", ["canary", "ab", "shadow"])
def test_a_trial_begins_with_its_share_and_guard_and_ends_with_the_reason(model_dir, kind):
    said = genrec_models("promote", 1, f"--{kind}", 0.05, "--degraded-margin", 0.1, "--latency-ratio", 3, "--model-dir", model_dir)[1]
    assert said.startswith(f"the {kind} of 1 begins, on 5.0% of users; tiny/3 is stable")
    trial = RolloutStore(BundleStore(model_dir)).read().trial
    assert (trial.version, trial.kind, trial.share) == (1, kind, 0.05)
    assert (trial.guard.degraded_margin, trial.guard.latency_ratio, trial.guard.least_overlap) == (0.1, 3, 0)
    said = f"the {kind} of 1 ended, and tiny/3 stays stable; to go back to 2, run it again\n"
    assert genrec_models("rollback", "--reason", "people complained", "--model-dir", model_dir) == (0, said)
    assert f"the {kind} of 1 was rolled back: people complained" in genrec_models("list", "--model-dir", model_dir)[1]


def test_a_rollback_that_only_ends_a_trial_says_so_and_that_another_goes_back(model_dir):
    genrec_models("promote", 1, "--model-dir", model_dir)
    genrec_models("promote", 2, "--ab", 0.05, "--model-dir", model_dir)
    said = "the ab of 2 ended, and tiny/1 stays stable; to go back to 3, run it again\n"
    assert genrec_models("rollback", "--model-dir", model_dir) == (0, said)
    assert genrec_models("rollback", "--model-dir", model_dir) == (0, "tiny/3 is stable\n")


def end_the_trial(rollouts):
    rollouts.end(rollouts.read().trial, "its answers are degraded")


@pytest.mark.parametrize(
    ("trial", "meanwhile", "told"),
    [
        (True, end_the_trial, "the canary of 2 was rolled back: its answers are degraded"),
        (True, lambda rollouts: rollouts.rollback("by hand"), "the canary of 2 was rolled back: by hand"),
        (False, lambda rollouts: rollouts.rollback("by hand"), "version 2 became stable"),
        (False, lambda rollouts: rollouts.promote(1, Trial(version=1, share=0.05)), "the canary of 1 began"),
    ],
    ids=["the guard was first", "another operator was first", "both went back", "a trial began"],
)
def test_a_rollback_of_what_another_has_rolled_back_meanwhile_is_refused_and_the_stable_version_stays(
    model_dir, monkeypatch, trial, meanwhile, told
):
    rollouts = RolloutStore(BundleStore(model_dir))
    if trial:
        rollouts.promote(2, Trial(version=2, share=0.05))
    read, after = RolloutStore.read, []

    def read_before_another_acts(self):
        seen = read(self)
        if not after:
            after.append(None)
            meanwhile(rollouts)
            after[0] = read(rollouts)
        return seen

    monkeypatch.setattr(RolloutStore, "read", read_before_another_acts)
    with pytest.raises(BundleError, match=f"nothing was rolled back: meanwhile {told}; if version . should not serve, run it again$"):
        genrec_models("rollback", "--model-dir", model_dir)
    assert read(rollouts) == after[0]


@pytest.mark.parametrize("options", [("--canary", 0.1, "--shadow", 0.1), ("--canary", 0)])
def test_two_kinds_of_trial_or_nobody_to_try_it_on_are_refused(model_dir, options):
    with pytest.raises(ConfigError, match="give one of --canary, --ab and --shadow, with a share above 0"):
        genrec_models("promote", 1, *options, "--model-dir", model_dir)
    assert RolloutStore(BundleStore(model_dir)).read().trial is None


def test_a_guard_that_cannot_be_is_refused_by_the_name_of_its_option(model_dir):
    with pytest.raises(ConfigError, match=r"--latency-ratio 0\.5: Input should be greater than or equal to 1"):
        genrec_models("promote", 1, "--canary", 0.1, "--latency-ratio", 0.5, "--model-dir", model_dir)
    assert RolloutStore(BundleStore(model_dir)).read().trial is None


def test_flags_are_tried_on_the_stable_version_and_to_be_written_down_once_they_are_promoted(model_dir):
    said = genrec_models("promote", 3, "--ab", 0.1, "--flags", "cache=false,strategy=retrieval", "--model-dir", model_dir)[1]
    assert said.startswith("the ab of 3 with cache=false, strategy=retrieval begins, on 10.0% of users; tiny/3 is stable")
    assert RolloutStore(BundleStore(model_dir)).read().trial.flags == {"cache": False, "strategy": "retrieval"}
    assert "stable; ab with cache=false, strategy=retrieval, 10.0% of users" in genrec_models("list", "--model-dir", model_dir)[1]
    said = genrec_models("promote", 3, "--model-dir", model_dir)[1]
    assert "write `flags: {cache: false, strategy: retrieval}` into the gateway's user_config, and run serve deploy" in said
    assert "flags" not in genrec_models("promote", 3, "--model-dir", model_dir)[1]
    assert "the ab of 3 with cache=false, strategy=retrieval was promoted" in genrec_models("list", "--model-dir", model_dir)[1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--ab", 0.1, "--flags", "hedge=true"), "--flags: hedge cannot be tried on a share of the users"),
        (("--ab", 0.1, "--flags", "cach=false"), "--flags: unknown flag 'cach'; choose from anticipate, cache, strategy"),
        (("--ab", 0.1, "--flags", "strategy=popular"), "--flags: strategy = 'popular': Input should be"),
        (("--ab", 0.1, "--flags", "cache=false,strategy"), "--flags: 'strategy' is no flag with its value; give them as cache=false"),
        (("--shadow", 0.1, "--flags", "cache=false"), "--flags: a shadow answers no user"),
        (("--flags", "cache=false"), "give --canary or --ab with --flags"),
    ],
)
def test_flags_that_cannot_be_tried_are_refused_by_name(model_dir, options, why):
    with pytest.raises(ConfigError, match=why):
        genrec_models("promote", 3, *options, "--model-dir", model_dir)
    assert RolloutStore(BundleStore(model_dir)).read().trial is None


def test_a_corrupt_version_is_not_promoted_and_the_list_says_why(model_dir):
    (model_dir / "2" / WEIGHTS).unlink()
    with pytest.raises(BundleError, match=r"weights\.safetensors is missing"):
        genrec_models("promote", 2, "--model-dir", model_dir)
    shown = genrec_models("list", "--model-dir", model_dir)[1]
    assert "refused" in shown
    assert "stable" in shown


def test_the_list_says_which_version_does_what(model_dir):
    genrec_models("promote", 2, "--canary", 0.25, "--model-dir", model_dir)
    lines = genrec_models("list", "--model-dir", model_dir)[1].splitlines()
    rows = {cells[1].strip(): cells[2].strip() for line in lines if len(cells := line.split("│")) > 3}
    assert rows == {"1": "", "2": "canary, 25.0% of users", "3": "stable"}


@pytest.mark.parametrize("version", ["", "2"])
def test_a_version_or_the_current_one_of_a_model_is_published_and_does_not_serve_yet(model_dir, tmp_path, version):
    target = BundleStore(shutil.copytree(model_dir, tmp_path / "served"))
    code, said = genrec_models("publish", model_dir / version, "--model-dir", target.root)
    assert (code, said.splitlines()[0]) == (0, f"published served/4; to serve it: genrec models promote 4 --model-dir {target.root}")
    assert target.current() == 3
    assert len(target.open(4).catalogue) == (30 if version else 40)


def test_the_version_in_the_working_directory_is_published(model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(model_dir / "2")
    assert "published served/1" in genrec_models("publish", ".", "--model-dir", tmp_path / "served")[1]


def test_a_copy_of_a_version_under_another_number_is_not_promoted_and_may_be_published(model_dir):
    shutil.copytree(model_dir / "1", copied := model_dir / "5")
    with pytest.raises(BundleError, match=rf"run: genrec models publish {copied} --model-dir {model_dir}"):
        genrec_models("promote", 5, "--model-dir", model_dir)
    assert genrec_models("publish", copied, "--model-dir", model_dir)[1].startswith("published tiny/6; ")
    genrec_models("promote", 6, "--model-dir", model_dir)
    assert len(BundleStore(model_dir).open().catalogue) == 20


def test_a_directory_is_not_taken_for_the_version_of_a_similar_name(model_dir, tmp_path):
    with pytest.raises(BundleError, match="02 is not named by its version's number; rename it to one"):
        genrec_models("publish", shutil.copytree(model_dir / "1", model_dir / "02"), "--model-dir", tmp_path / "served")


def test_the_first_version_of_a_model_may_be_one_that_was_published(model_dir, tmp_path):
    target = tmp_path / "served"
    genrec_models("publish", model_dir, "--model-dir", target)
    for command in (("list",), ("promote", 1, "--canary", 0.1), ("rollback",)):
        with pytest.raises(BundleError, match=r"has \[1\], and none is current; run: genrec models promote 1 --model-dir .*served"):
            genrec_models(*command, "--model-dir", target)
    assert genrec_models("promote", 1, "--model-dir", target) == (0, "served/1 is stable; clusters that serve it follow within seconds\n")
    assert BundleStore(target).current() == 1


def test_items_of_the_stable_version_that_another_lacks_are_told_as_it_is_published_and_promoted(tmp_path):
    """As where the stable version had items added, and the other was trained on a table without them."""
    served, trained = tmp_path / "shop", tmp_path / "new" / "shop"
    make_bundle(served, items=40)
    make_bundle(trained, items=38)
    lacking = "version 2 lacks 2 of the 40 items of version 1: 39, 40; to recommend them, train with a table of items that has them"
    assert lacking in genrec_models("publish", trained, "--model-dir", served)[1]
    assert lacking in genrec_models("promote", 2, "--canary", 0.5, "--model-dir", served)[1]
    assert lacking in genrec_models("promote", 2, "--model-dir", served)[1]
    assert "lacks" not in genrec_models("promote", 1, "--model-dir", served)[1]
    (served / "1" / WEIGHTS).write_bytes(b"damaged")
    assert genrec_models("promote", 2, "--model-dir", served) == (0, "shop/2 is stable; clusters that serve it follow within seconds\n")


def test_what_is_corrupt_or_no_version_is_not_published(model_dir, tmp_path):
    target = tmp_path / "served"
    (model_dir / "2" / WEIGHTS).unlink()
    with pytest.raises(BundleError, match=r"weights\.safetensors is missing"):
        genrec_models("publish", model_dir / "2", "--model-dir", target)
    with pytest.raises(BundleError, match="is not named by its version's number; rename it to one"):
        genrec_models("publish", shutil.copytree(model_dir / "1", tmp_path / "mine"), "--model-dir", target)
    with pytest.raises(BundleError, match="no model has been published in"):
        genrec_models("publish", tmp_path / "none", "--model-dir", target)
    assert BundleStore(target).versions() == []


EACH = {"share": None, "holders": {}, "obstacles": [], "gateways": 0, "degraded": 0, "p95_ms": None, "overlap": None}
TOLD = {
    "model_version": "tiny/1",
    "replicas": {},
    "versions": [
        {**EACH, "version": 1, "role": "stable", "holders": {"encoder": 2}, "requests": 9, "p95_ms": 12.5},
        {
            **EACH,
            "version": 2,
            "role": "shadow",
            "holders": {"encoder": 1},
            "obstacles": ["it is cut off [/models]"],
            "requests": 3,
            "overlap": 0.8,
        },
        {**EACH, "version": 1, "role": "ab", "flags": {"cache": False}, "requests": 4},
    ],
    "ended": [],
}


def answering(monkeypatch, status=200, **content):
    """Have all calls answered so; the list of requests, which fills."""
    asked = []

    def answer(request):
        asked.append(request)
        return httpx.Response(status, **content)

    client = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", client)
    return asked


def test_the_status_shows_what_a_cluster_tells_and_brings_the_key(monkeypatch):
    asked = answering(monkeypatch, json=TOLD)
    monkeypatch.setenv("COLUMNS", "200")
    shown = genrec_models("status", "--url", "http://here:8000/under", "--key", "secret")[1]
    assert [(str(one.url), one.headers["authorization"]) for one in asked] == [("http://here:8000/under/v1/models", "Bearer secret")]
    for part in ("tiny/1 is stable", "2 encoder", "1 encoder; it is cut off [/models]", "12.5", "0.8", "ab with cache=false"):
        assert part in shown, part


def test_a_full_disk_is_told_with_the_file_that_it_did_not_take(model_dir):
    with largest_file(1), pytest.raises(OSError, match=r"previous'$"):
        genrec_models("promote", 1, "--model-dir", model_dir)


def test_a_rollout_file_that_cannot_be_understood_is_told_in_one_line(model_dir):
    (model_dir / "rollout.json").write_text('{"trial": {"version": "x"}}')
    with pytest.raises(BundleError, match=r"rollout\.json cannot be understood: trial\.version: .*; delete it to serve") as refused:
        genrec_models("list", "--model-dir", model_dir)
    assert len(str(refused.value).splitlines()) == 1
    assert "pydantic" not in str(refused.value)


def test_an_export_is_no_version_and_says_so(model_dir, tmp_path):
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(BundleError, match=r"is an export of genrec train, without the catalogue; give the version's own directory"):
        genrec_models("publish", tmp_path, "--model-dir", model_dir)


def test_a_version_that_is_refused_is_listed_with_the_whole_reason(model_dir):
    manifest = model_dir / "2" / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text("{}")
    shown = " ".join(genrec_models("list", "--model-dir", model_dir)[1].replace("│", "").split())
    assert "name: Field required; " in shown
    assert "files: Field required; serve another version" in shown


@pytest.mark.parametrize(("last_stage", "shown"), [(False, "0.2500"), (True, "0.5000")])
def test_the_figure_of_a_version_is_that_of_the_lists_that_a_request_gets_which_chooses_nothing(tmp_path, monkeypatch, last_stage, shown):
    monkeypatch.setenv("COLUMNS", "200")
    store, bundle = BundleStore(tmp_path / "tiny"), bundle_with_ranker(tmp_path / "tiny", decoder=True, last_stage=last_stage)
    with store.recompile(bundle) as draft:
        strategies = {"retrieval": {"hr@10": 0.125}, "unified": {"hr@10": 0.25}}
        draft.blend = BlendRecord(weights={}, fitted_on="nothing", quality=strategies)
        draft.training["ranker"] = {"recommendations": {"found": {"hr@10": 0.25}, "ranked": {"hr@10": 0.5}}}
    (stable,) = [line for line in genrec_models("list", "--model-dir", store.root)[1].splitlines() if "stable" in line]
    assert shown in stable


@pytest.mark.parametrize("command", [("list",), ("promote", 1), ("rollback",)])
def test_a_directory_without_a_model_is_named_with_the_cure(tmp_path, command):
    with pytest.raises(BundleError, match=r"no model has been published in .*nothere; run: genrec train DATASET"):
        genrec_models(*command, "--model-dir", tmp_path / "nothere")
    assert not (tmp_path / "nothere").exists()


def test_a_cluster_that_cannot_be_reached_is_named():
    with pytest.raises(ConfigError, match=r"no server answers at http://127\.0\.0\.1:9 \(.*\); give the service's --url"):
        genrec_models("status", "--url", "http://127.0.0.1:9")


def test_a_cluster_that_wants_an_operators_key_is_asked_with_one(monkeypatch):
    answering(monkeypatch, 401, text="no key")
    with pytest.raises(ConfigError, match=r"http://here:8000/v1/models answered 401; give an operator's key as GENREC_API_KEY"):
        genrec_models("status", "--url", "http://here:8000")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://host:port", "http://host:80000"])
def test_a_url_that_is_none_is_refused_by_status_and_top(url):
    for command, more in ((models.status, {"key": None}), (top, {})):
        with pytest.raises(ConfigError, match="is no URL"):
            command(url=url, **more)


@pytest.mark.parametrize(
    ("status", "kind", "said", "told"),
    [
        (404, "text/html", "<!doctype html>", r"answered 404 and is not a genrec of this version; give the address of a gateway: --url$"),
        *[
            (gone, "text/html", "<!doctype html>", rf"answered {gone}: the server behind this address does not answer now; .*log$")
            for gone in GONE
        ],
        (500, "text/html", "<!doctype html>", r"answered 500 and is not a genrec of this version; .*--url$"),
        (404, "application/json", '{"detail": "Not Found"}', r"answered 404 and is not a genrec of this version; .*--url$"),
        (503, "application/problem+json", '{"detail": "later"}', r'answered 503; {"detail": "later"}$'),
        (503, "text/plain", "no replica", "answered 503; no replica$"),
    ],
)
def test_a_refusal_is_told_as_genrec_or_its_proxy_words_it_and_no_page_of_another_server_is(monkeypatch, status, kind, said, told):
    answering(monkeypatch, status, text=said, headers={"content-type": kind})
    with pytest.raises(ConfigError, match=rf"^http://here:8000/v1/models {told}"):
        genrec_models("status", "--url", "http://here:8000")


@pytest.mark.parametrize("said", ["<!doctype html>", "[]", "{}"])
def test_a_server_of_something_else_is_said_to_be_no_genrec(monkeypatch, said):
    answering(monkeypatch, text=said)
    with pytest.raises(ConfigError, match=r"http://here:8000/v1/models is not a genrec of this version"):
        genrec_models("status", "--url", "http://here:8000/")
