"""The chaos suite's own book-keeping: what counts as held, what is written, and the report made of it."""

import json

import pytest

from benchmarks import chaos_report
from tests.chaos.rows import Claim, Row, recorded


def test_a_claim_holds_within_its_bounds_and_never_of_what_is_no_number():
    assert Claim("failed", 0, most=0).held
    assert not Claim("failed", 1, most=0).held
    assert not Claim("share", float("nan"), least=0).held
    assert str(Claim("p99", 2.5, most=2)) == "p99: 2.5, wanted <= 2"


def test_a_row_is_written_even_where_its_run_breaks_off(tmp_path):
    with pytest.raises(RuntimeError, match="lost"), recorded(Row("fault", "all"), tmp_path, timings=True):
        raise RuntimeError("the cluster was lost")
    (line,) = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert "the run broke off: RuntimeError: the cluster was lost" in json.loads(line)["notes"][0]


def test_claims_about_time_count_only_where_they_are_asked_for(tmp_path):
    def late(row):
        row.claim("seconds", 9, most=5, timing=True)

    with recorded(Row("fault", "soon"), tmp_path, timings=False) as row:
        late(row)
    with pytest.raises(AssertionError, match="seconds: 9, wanted <= 5"), recorded(Row("fault", "soon"), tmp_path, timings=True) as row:
        late(row)


def test_a_row_that_claims_nothing_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="nothing was claimed"), recorded(Row("fault", "all"), tmp_path, timings=True):
        pass


def test_the_report_tells_a_claim_that_one_run_refutes_by_its_worst_value(tmp_path):
    for number, value in enumerate((1.0, 7.0, 6.0)):
        row = Row("a fault", "p99 <= 5", number)
        row.claim("p99", value, most=5)
        row.claim("failed", 0, most=0)
        row.write(tmp_path)
    chaos_report.main(tmp_path / "rows.jsonl", tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert "| a fault | p99 <= 5 | 3 | 1 of 2 | p99: 7 (<= 5) |" in text
    assert "| p99 | <= 5 | 1, 7, 6 | NO |" in text
