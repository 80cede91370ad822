"""The checks that any backend is put through: what is right passes, and each thing that is wrong is found and named."""

import json
import re
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cluster.checks.report import Result
from cluster.checks.suite import check
from cluster.errors import BundleError, ConfigError, UnknownChoice
from deployments.cli import backends
from tests.broken_backends import hanging
from tests.bundles import make_complete_bundle

BROKEN = [
    ("AnswersBackwards", "encoder", "answers a batch in the order asked", r"it is the answer to user 6's .* in the order asked"),
    ("AnswersNaN", "encoder", "answers a history of one event", "it answered with NaN or infinity"),
    ("FindsFewItems", "encoder", "answers a history of one event", "it answered with 6 items to top_n 10 where 200 are to be chosen from"),
    ("FindsFewItems", "encoder", "respects a few items to choose from", "it answered with 6 items to top_n 10 where 7 are to be"),
    ("IgnoresAmong", "encoder", "respects a few items to choose from", "which is not among the items asked for"),
    ("NeedsArguments", "encoder", "is made without arguments", "'url'.*; give every option a default"),
    ("LacksMethods", "encoder", "has the methods of a backend", "it lacks load, infer, batch_infer, close"),
    ("ProbeRaises", "encoder", "says whether it can serve", "RuntimeError: no driver .*broken_backends.py:"),
    ("ProbeGivesNoReason", "encoder", "says whether it can serve", "says no without a reason"),
    ("ProbeGivesAnErrorAsReason", "encoder", "says whether it can serve", "gave a OSError as its reason, not text; Availability.because"),
    ("ProbeSaysNoAsText", "encoder", "says whether it can serve", "an Availability with ok='no', not True or False"),
    ("ProbeIsSlow", "encoder", "says so cheaply", r"get_availability took \d+(\.\d+)? s"),
    (
        "BreaksAtLongHistories",
        "encoder",
        "answers a history longer than the window",
        "position 64 is beyond the table .*broken_backends.py:",
    ),
    ("Hangs", "encoder", "gives up what is late", "had not ended after 60 s"),
    ("SharesMemory", "encoder", "leaves earlier answers as they were", "the state of an answer changed"),
    ("MixesUpTenants", "encoder", "does not mix up users", "asked without a user and for ada of tenant-a.*off"),
    ("ForgetsNobody", "encoder", "forgets users", "forget erased 1 more when it was called again"),
    ("TakesOverWhatever", "encoder", "hands users over", "before and after what it keeps of users was handed over"),
    ("LoadsOnce", "encoder", "answers the same after close and load", "the engine is in use"),
    ("ExitsAsItLoads", "encoder", "loads", "it raised SystemExit: 2 .*broken_backends.py:"),
    ("IsCancelledAsItLoads", "encoder", "loads", "it raised CancelledError: its own task .*broken_backends.py:"),
    ("ClosesOnce", "encoder", "closes", "RuntimeError: the device is gone .*broken_backends.py:"),
    ("NamesBlockedItems", "generator", "respects half of the items blocked", "which is blocked"),
    ("NamesNothing", "generator", "answers a prompt of one event", "it named 0 items to k 10 where 200 might be named"),
    ("NamesFewItems", "generator", "answers a prompt of one event", "it named 9 items to k 10 where 200 might be named"),
    ("NamesFewItems", "generator", "respects a few items to choose from", "it named 6 items to k 10 where 7 might be named"),
    ("StreamsNothingMuch", "generator", "streams what makes sense", "as a stream, it named 9 items to k 10 where 200 might be"),
    ("MixesUpCalls", "generator", "answers many at a time", "by infer, and by one of 28 calls of ainfer"),
    ("ForgetsACandidate", "ranker", "answers a history of one event", "answered with 29 rows to 30 candidates"),
    ("ForgetsATask", "ranker", "answers a history of one event", "predicts 2 things of a candidate; the model's record names 3"),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_complete_bundle(tmp_path_factory.mktemp("checked") / "tiny")


@pytest.fixture(autouse=True)
def _limit_is_over_once_a_backend_hangs(monkeypatch: pytest.MonkeyPatch):
    """A check has its minute, however slow this machine is, and the minute of `Hangs` need not be waited for."""

    def waited(futures, limit_s):
        until = time.monotonic() + limit_s
        while not (done := wait(futures, 0.05)).done and time.monotonic() < until and not hanging.is_set():
            pass
        return done

    hanging.clear()
    monkeypatch.setattr("cluster.checks.worker.wait", waited)


def failures(report):
    return {outcome.check: outcome.reason for outcome in report.outcomes if outcome.result is Result.FAILED}


@pytest.mark.parametrize(
    ("backend", "stage"),
    [
        ("tests.broken_backends:Sound", "encoder"),
        ("tests.broken_backends:Flat", "generator"),
        ("integrations.hstu.encoder:TorchEncoder", "encoder"),
        ("integrations.torch_beam.generator:TorchBeamGenerator", "generator"),
        ("integrations.hstu.torch_ranker:TorchRanker", "ranker"),
    ],
)
def test_what_does_everything_right_passes(backend, stage, bundle):
    report = check(backend, stage, bundle)
    assert (failures(report), report.unavailable) == ({}, "")
    assert report.count(Result.PASSED) >= 25


@pytest.mark.parametrize(("backend", "stage", "name", "reason"), BROKEN, ids=[case[0] for case in BROKEN])
def test_what_is_wrong_is_found_and_named(backend, stage, name, reason, bundle):
    report = check(f"tests.broken_backends:{backend}", stage, bundle)
    (found,) = [outcome for outcome in report.outcomes if outcome.check.startswith(name)]
    assert found.result is Result.FAILED
    assert re.search(reason, found.reason), found.reason
    assert report.failed


def test_after_a_call_that_hangs_nothing_else_is_asked(bundle):
    outcomes = check("tests.broken_backends:Hangs", "encoder", bundle).outcomes
    place = next(index for index, outcome in enumerate(outcomes) if outcome.result is Result.FAILED)
    assert {outcome.reason for outcome in outcomes[place + 1 :]} == {"it is still busy with 'gives up what is late, or answers it'"}


def test_a_probe_that_breaks_later_does_not_end_the_checks(bundle):
    report = check("tests.broken_backends:ProbesBreakLater", "encoder", bundle)
    assert (failures(report), report.unavailable) == ({}, "")


def test_a_stage_that_there_is_not_is_an_error(bundle):
    with pytest.raises(UnknownChoice, match="unknown stage 'retriever'; choose from encoder, generator, ranker"):
        check("tests.broken_backends:Sound", "retriever", bundle)


@pytest.fixture
def genrec_backends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")
    app = typer.Typer()
    app.add_typer(backends.app, name="backends")
    app.callback()(lambda: None)

    def run(*arguments):
        result = CliRunner().invoke(app, ["backends", *map(str, arguments)])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout

    return run


def test_the_command_exits_with_0_where_a_backend_passes_and_makes_its_own_model(genrec_backends):
    code, output = genrec_backends("check", "tests.broken_backends:Sound")
    assert code == 0, output
    assert "encoder tests.broken_backends:Sound with random/2" in output
    assert "answers a batch in the order asked, each as alone" in output


def test_the_command_exits_with_1_and_says_which_check_failed(genrec_backends, bundle):
    code, output = genrec_backends("check", "tests.broken_backends:AnswersNaN", "--model-dir", bundle.path.parent, "--json")
    shown = json.loads(output)
    assert (code, shown["failed"], shown["model_version"]) == (1, True, "tiny/2")
    failed = [outcome for outcome in shown["outcomes"] if outcome["result"] == "failed"]
    assert "answered with NaN or infinity" in failed[0]["reason"]


def test_the_command_exits_with_3_and_the_reason_where_a_backend_cannot_run_here(genrec_backends):
    code, output = genrec_backends("check", "tests.broken_backends:IsNotHere")
    assert code == 3
    assert "it cannot run here: there is no such accelerator here; attach one" in output


def test_a_name_stands_for_what_is_registered_and_options_reach_the_backend(genrec_backends, bundle):
    given = ("--stage", "generator", "--model-dir", bundle.path.parent)
    code, output = genrec_backends("check", "torch_beam", *given, "--option", "prompt_bytes=0", "--json")
    assert (code, json.loads(output)["backend"]) == (0, "integrations.torch_beam.generator:TorchBeamGenerator")
    code, output = genrec_backends("check", "torch_beam", *given, "--option", "dtype=float13", "--json")
    assert (code, json.loads(output)["outcomes"][0]["reason"]) == (
        1,
        "it raised UnknownChoice: unknown dtype 'float13'; choose from bfloat16, float32",
    )


def test_a_module_in_the_current_directory_is_found(genrec_backends, bundle):
    Path("lies_here.py").write_text("from tests.broken_backends import Sound as Mine\n")
    code, output = genrec_backends("check", "lies_here:Mine", "--model-dir", bundle.path.parent)
    assert code == 0, output


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["nosuch"], UnknownChoice, "unknown encoder backend 'nosuch'; choose from module:Class, onnxruntime"),
        (["torch", "--option", "threads"], ConfigError, "'threads' is not NAME=VALUE"),
        (["torch", "--option", "since=2027-02-30"], ConfigError, "its value is not YAML: day "),
        (["torch", "--model-dir", "nowhere"], BundleError, "no model has been published in nowhere"),
    ],
)
def test_a_command_that_means_nothing_is_an_error(arguments, error, message, genrec_backends):
    with pytest.raises(error, match=message):
        genrec_backends("check", *arguments)


def test_without_check_the_group_is_still_the_listing(genrec_backends):
    code, output = genrec_backends("--json")
    assert (code, [stage["stage"] for stage in json.loads(output)["stages"]]) == (0, ["encoder", "generator", "ranker"])
