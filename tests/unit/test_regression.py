"""Regressions: the test's p-values against published ones, what is a regression, and when regressions become a failure."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.errors import ConfigError, DataError, UnknownChoice
from cluster.regression import LEAST_SAMPLES, Rule, compare, in_a_row, mann_whitney
from deployments.cli.bench import app
from deployments.cli.bench_files import read_history, read_measurement

MALES, FEMALES = [19, 22, 16, 29, 24], [20, 11, 17, 12]
THREE = [210.052110, 110.190630, 307.918612]
THIRTEEN = [436.08811482466416, 416.37397329768191, 179.96975939463582, 197.8118754228619, 34.038757281225756, 138.54220550921517]
THIRTEEN += [128.7769351470246, 265.92721427951852, 275.6617533155341, 592.34083395416258, 448.73177590617018, 300.61495185038905]
THIRTEEN += [187.97508449019588]
TEN, FIVE = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46], [1.15, 0.88, 0.90, 0.74, 1.21]
SHIFTED = np.array([0, 0, 1, 0, 0]) * 0.01
TWICE = np.array([0, 1, 0, 1, 0]) * 0.01
UP_TO_FIVE = np.arange(1, 6)


@pytest.mark.parametrize(
    ("larger", "smaller", "expected"),
    [
        # scipy 1.17, tests of mannwhitneyu (method asymptotic, with the continuity correction), which were made with R's wilcox.test
        (THREE, THIRTEEN, 0.7047591913255),
        (THIRTEEN, THREE, 0.3432520908938),
        (TEN, FIVE, 0.1223118025635),
        (FIVE, TEN, 0.900775348204),
        ([1], [2], 0.977249868052),
        ([2], [1], 0.5),
        # the example of its documentation; the published value is of both sides
        (MALES, FEMALES, 0.11134688653314041 / 2),
    ],
)
def test_p_values_are_those_that_scipy_and_r_give(larger, smaller, expected):
    assert mann_whitney(larger, smaller) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("other", "both_sides"),
    [
        (UP_TO_FIVE - TWICE, 0.9017048037317),
        (UP_TO_FIVE - SHIFTED, 0.804080657472),
        (UP_TO_FIVE, 0.7086240584439),
        (UP_TO_FIVE + SHIFTED, 0.6197963884941),
        (UP_TO_FIVE + TWICE, 0.5368784563079),
        (UP_TO_FIVE + 0.01, 0.3912672792826),
        ([3, 6, 7, 8, 9, 3, 2, 1, 4, 4, 5], 0.1297704873477),
    ],
)
def test_p_values_with_ties_are_those_of_r(other, both_sides):
    ours = [1, 2, 3, 4]
    assert 2 * min(mann_whitney(ours, other), mann_whitney(other, ours)) == pytest.approx(both_sides, rel=1e-10)


def test_values_that_are_all_the_same_are_no_evidence():
    assert mann_whitney([3.0] * 40, [3.0] * 7) == 1.0
    assert mann_whitney([1], [1]) == 1.0
    with pytest.raises(DataError, match="0 and 2 samples cannot be compared"):
        mann_whitney([], [1, 2])


def test_one_distribution_is_called_larger_than_itself_as_often_as_the_significance_says():
    rng = np.random.default_rng(0)
    p_values = [mann_whitney(*rng.lognormal(size=(2, 30))) for _ in range(2000)]
    assert np.mean(np.array(p_values) < 0.01) == pytest.approx(0.01, abs=0.005)
    assert np.mean(np.array(p_values) < 0.2) == pytest.approx(0.2, abs=0.03)


def times(scale=1.0, count=200, seed=0):
    """Right-skewed, as latencies are, with a median of about 10 * scale."""
    return 10 * scale * np.random.default_rng(seed).lognormal(sigma=0.2, size=count)


def test_the_same_samples_are_unchanged():
    found = compare("end_to_end_ms", times(), times())
    assert (found.ratio, found.verdict) == (1.0, "unchanged")
    assert found.p_value == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("scale", "verdict"), [(1.2, "regression"), (1.05, "unchanged"), (0.97, "unchanged"), (0.8, "improvement")])
def test_a_shift_counts_once_it_is_beyond_the_tolerance(scale, verdict):
    found = compare("end_to_end_ms", times(), times(scale, seed=1))
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(scale, rel=0.05)


def test_the_tolerance_moves_the_bound():
    before, after = times(), times(1.2)
    assert compare("ms", before, after, Rule(tolerance=0.25)).verdict == "unchanged"
    assert compare("ms", before, times(1.05), Rule(tolerance=0.01)).verdict == "regression"


def test_a_worse_median_of_few_samples_that_overlap_is_no_regression():
    found = compare("ms", [10, 11, 12, 13, 14], [9, 10, 14, 15, 20])
    assert found.ratio > 1.1
    assert found.verdict == "unchanged"


def test_the_fewest_samples_that_are_taken_can_be_significant():
    before, after = list(range(10, 10 + LEAST_SAMPLES)), list(range(20, 20 + LEAST_SAMPLES))
    assert compare("ms", before, after).verdict == "regression"
    assert mann_whitney(after[1:], before[1:]) > Rule().significance


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ([1, 2, 3, 4], [1] * 9, "the baseline has 4 samples of ms; the test needs 5 on either side"),
        ([1] * 9, [], "the candidate has 0 samples of ms"),
        ([0] * 9, [1] * 9, "baseline's median of ms is 0"),
        ([1] * 9, [1] * 8 + [-1], "the candidate's samples of ms hold values that are no costs"),
        ([1] * 8 + [float("nan")], [1] * 9, "the baseline's samples of ms hold values that are no costs"),
    ],
)
def test_samples_that_cannot_be_judged_are_refused(before, after, complaint):
    with pytest.raises(DataError, match=complaint):
        compare("ms", before, after)


@pytest.mark.parametrize("values", [{"tolerance": -0.1}, {"tolerance": float("nan")}, {"significance": 0}, {"failures": 0}])
def test_a_rule_that_makes_no_sense_is_refused(values):
    with pytest.raises(ConfigError, match=r"makes no sense|must be 1 or more"):
        Rule(**values)


def test_a_row_of_regressions_ends_at_the_first_comparison_that_is_none():
    worse, better, same = "regression", "improvement", "unchanged"
    assert in_a_row([]) == 0
    assert in_a_row([worse, worse]) == 2
    assert in_a_row([worse, worse, same, worse]) == 1
    assert in_a_row([worse, better]) == 0
    assert [Rule().fails(row) for row in range(5)] == [False, False, False, True, True]
    assert Rule(failures=1).fails(1)


# The command


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def measurement(path, scale=1.0, seed=0, metrics=("end_to_end_ms",), figures=None, **scenario):
    samples = {name: times(scale, seed=seed).tolist() for name in metrics}
    tree = {"schema": 1, "samples": samples, "scenario": scenario, "figures": figures or {}}
    path.write_text(json.dumps(tree))
    return path


def bench_compare(*arguments):
    answer = CliRunner().invoke(app, ["compare", *map(str, arguments)], catch_exceptions=False)
    return answer.exit_code, answer.output


def test_a_third_regression_in_a_row_fails_and_those_before_it_warn(tmp_path):
    base, slow, history = measurement(tmp_path / "base.json"), measurement(tmp_path / "slow.json", 1.5, 1), tmp_path / "new" / "h.jsonl"
    status, said = bench_compare(base, slow, "--history", history)
    assert status == 0
    assert "regression" in said
    assert "warning: end_to_end_ms: 1 of 3 regressions in a row" in said
    assert bench_compare(base, slow, "--history", history)[0] == 0
    status, said = bench_compare(base, slow, "--history", history)
    assert status == 1
    assert "end_to_end_ms: 3 regressions in a row, which is a failure" in said
    assert [one.verdict for one in read_history(history)] == ["regression"] * 3


def test_a_comparison_that_is_no_regression_begins_the_count_anew(tmp_path):
    base, history = measurement(tmp_path / "base.json"), tmp_path / "h.jsonl"
    for scale in (1.5, 1.5, 1.0, 1.5, 1.5):
        assert bench_compare(base, measurement(tmp_path / "now.json", scale, 1), "--history", history)[0] == 0
    assert bench_compare(base, measurement(tmp_path / "now.json", 1.5, 2), "--history", history)[0] == 1


def test_without_a_history_the_candidates_of_one_call_are_counted(tmp_path):
    base = measurement(tmp_path / "base.json")
    slow = [measurement(tmp_path / f"{seed}.json", 1.5, seed) for seed in (1, 2, 3)]
    assert bench_compare(base, *slow[:2])[0] == 0
    assert bench_compare(base, *slow)[0] == 1
    assert bench_compare(base, *slow, base)[0] == 0
    assert bench_compare(base, slow[0], "--failures", 1)[0] == 1
    assert bench_compare(base, slow[0], "--failures", 1, "--tolerance", 0.7)[0] == 0


def test_only_the_metrics_that_are_asked_for_count(tmp_path):
    base = measurement(tmp_path / "base.json", metrics=("end_to_end_ms", "per_item_ms"))
    tree = json.loads(measurement(tmp_path / "slow.json", 1.5, 1, metrics=("end_to_end_ms", "per_item_ms", "mine")).read_text())
    tree["samples"]["per_item_ms"] = times(seed=2).tolist()
    (tmp_path / "slow.json").write_text(json.dumps(tree))
    status, said = bench_compare(base, tmp_path / "slow.json", "--failures", 1, "--metric", "per_item_ms")
    assert status == 0
    assert "end_to_end_ms" not in said
    status, said = bench_compare(base, tmp_path / "slow.json", "--failures", 1)
    assert status == 1
    assert "mine" not in said, "the baseline lacks it"
    with pytest.raises(UnknownChoice, match=r"unknown metric of .*base.json 'mine'; choose from end_to_end_ms, per_item_ms"):
        bench_compare(base, tmp_path / "slow.json", "--metric", "mine")


def test_rows_of_different_workloads_do_not_mix_in_a_history(tmp_path):
    history = tmp_path / "h.jsonl"
    for strategy in ("retrieval", "generative"):
        workload = {"strategy": strategy}
        base = measurement(tmp_path / f"{strategy}.json", name="serve/short/single", workload=workload)
        slow = measurement(tmp_path / f"{strategy}-slow.json", 1.5, 1, name="serve/short/single", workload=workload)
        assert bench_compare(base, slow, slow, "--history", history)[0] == 0
    assert bench_compare(base, slow, "--history", history)[0] == 1


def test_measurements_of_different_things_are_not_compared(tmp_path):
    short = measurement(tmp_path / "short.json", name="serve/short/single", workload={"users": 64, "k": 10})
    long = measurement(tmp_path / "long.json", name="serve/long/peak", workload={"users": 64, "k": 10})
    more = measurement(tmp_path / "more.json", name="serve/short/single", workload={"users": 64, "k": 50})
    with pytest.raises(DataError, match="did not measure the same: 'serve/short/single' is not 'serve/long/peak'"):
        bench_compare(short, long)
    with pytest.raises(DataError, match="did not measure the same: k 10 is not 50; measure both alike"):
        bench_compare(short, more)
    with pytest.raises(DataError, match=r"no metric in common: .*short.json has end_to_end_ms; .*other.json has wall_clock_s"):
        bench_compare(short, measurement(tmp_path / "other.json", metrics=("wall_clock_s",), **json.loads(short.read_text())["scenario"]))


def counted(errors=0, degraded=0, requests=1000):
    return {"requests": requests, "errors": errors, "degraded": degraded}


def test_a_quick_candidate_that_answers_fewer_requests_is_no_improvement_and_fails_at_once(tmp_path):
    base = measurement(tmp_path / "base.json", figures=counted(errors=1))
    broken = measurement(tmp_path / "broken.json", 0.5, 1, figures=counted(errors=300))
    status, said = bench_compare(base, broken, "--history", tmp_path / "h.jsonl")
    assert (status, "improvement" in said.partition("broken.json: ")[0]) == (1, False)
    assert "broken.json: 30.00% of the requests have no answer, and of base.json's 0.10%, which is a failure" in said
    assert [one.verdict for one in read_history(tmp_path / "h.jsonl")] == ["unchanged"]
    longer = measurement(tmp_path / "longer.json", 0.5, 1, figures=counted(errors=2, requests=2000))
    status, said = bench_compare(base, longer)
    assert (status, "improvement" in said, "no answer" in said) == (0, True, False), "as large a share"
    assert bench_compare(base, longer, broken)[0] == 1
    by_chance = measurement(tmp_path / "chance.json", 0.5, 1, figures=counted(errors=3))
    status, said = bench_compare(base, by_chance)
    assert (status, "improvement" in said, "no answer" in said) == (0, True, False)


def test_a_quick_candidate_that_answers_degraded_is_no_improvement(tmp_path):
    base = measurement(tmp_path / "base.json", figures=counted(degraded=10))
    status, said = bench_compare(base, measurement(tmp_path / "new.json", 0.5, 1, figures=counted(degraded=900)))
    assert (status, "unchanged" in said) == (0, True)
    told = "warning: new.json: 90.00% of the requests are answered degraded, and of base.json's 1.00%; nothing counts as an improvement"
    assert told in said


def test_a_metric_of_the_baselines_that_a_candidate_has_no_samples_of_is_told(tmp_path):
    base = measurement(tmp_path / "base.json", metrics=("end_to_end_ms", "first_item_ms"))
    new = measurement(tmp_path / "new.json", 0.5, 1)
    status, said = bench_compare(base, new)
    assert (status, "unchanged" in said) == (0, True)
    assert "warning: new.json has no samples of first_item_ms, as base.json has" in said
    status, said = bench_compare(base, new, "--metric", "end_to_end_ms")
    assert (status, "improvement" in said, "first_item_ms" in said) == (0, True, False)


def test_another_machine_is_told(tmp_path):
    base, other = measurement(tmp_path / "base.json"), measurement(tmp_path / "other.json")
    other.write_text(json.dumps({**json.loads(other.read_text()), "machine": {"cores": 64}}))
    assert "base.json and other.json are of different machines" in bench_compare(base, other)[1]
    assert "machines" not in bench_compare(base, base)[1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"schema": 1, "samp', r"file\.json is damaged: .*; measure again"),
        ("[1, 2]", r"file\.json is no measurement: its schema is None, not 1; `genrec bench serve`"),
        ('{"results": []}', r"its schema is None, not 1"),
        ('{"schema": 2, "samples": {}}', r"its schema is 2, not 1"),
        ('{"schema": 1}', r"file\.json: samples: Field required"),
        ('{"schema": 1, "samples": {"ms": [1, "fast"]}}', r"samples\.ms\.1: .*valid number, not fast"),
        ('{"schema": 1, "samples": {"ms": [1, NaN]}}', r"samples\.ms\.1: .*finite number, not nan"),
        ('{"schema": 1, "samples": {"ms": [-1]}}', r"samples\.ms\.0: .*greater than or equal to 0, not -1"),
    ],
)
def test_a_damaged_or_foreign_file_is_named_with_what_is_wrong(tmp_path, text, complaint):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(DataError, match=complaint):
        read_measurement(path)


def test_a_file_that_is_not_there_or_no_text_is_told(tmp_path):
    with pytest.raises(DataError, match=r"absent\.json cannot be read: .*No such file"):
        read_measurement(tmp_path / "absent.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"binary cannot be read"):
        read_measurement(tmp_path / "binary")


def test_a_damaged_line_of_a_history_is_named_and_nothing_is_added(tmp_path):
    base, history = measurement(tmp_path / "base.json"), tmp_path / "h.jsonl"
    bench_compare(base, base, "--history", history)
    whole = history.read_text()
    history.write_text(whole + whole[:40])
    with pytest.raises(DataError, match=r"h\.jsonl:2 is damaged"):
        bench_compare(base, base, "--history", history)
    history.write_text(whole + '{"verdict": "slower"}\n')
    with pytest.raises(DataError, match=r"h\.jsonl:2: at: Field required"):
        bench_compare(base, base, "--history", history)
    assert len(history.read_text().splitlines()) == 2
