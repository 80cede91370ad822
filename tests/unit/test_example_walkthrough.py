"""examples/walkthrough.py, as somebody would run it."""

import sys
from pathlib import Path

import pytest

from tests.examples import EXAMPLES, run


@pytest.mark.slow
def test_it_runs_from_a_table_to_ranked_candidates_and_leaves_nothing_behind(tmp_path: Path):
    shown = run(sys.executable, EXAMPLES / "walkthrough.py", TMPDIR=str(tmp_path)).splitlines()
    recommended = [line.split()[1] for line in shown if line.startswith("recommended: ")]
    assert recommended.count("Western") >= 4  # of five, for somebody who watches westerns
    assert [line.split()[1] for line in shown if line.startswith("ranked: ")][:2] == ["Western", "Western"]
    assert any(line.startswith("encode: onnxruntime in ") for line in shown)
    assert not list(tmp_path.rglob("films.csv"))
    assert not list(tmp_path.rglob("manifest.json"))
