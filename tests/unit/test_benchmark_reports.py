"""What a benchmark's report says of the packages that it was measured with."""

import pytest

from benchmarks import append
from benchmarks.reporting import Machine


def test_a_package_that_is_not_installed_is_left_out_of_a_report():
    assert list(Machine.now("benchmarks.any", ("numpy", "genrec-none-such"), 0.0).packages) == ["Python", "numpy"]


@pytest.mark.parametrize(("engine", "other"), [("onnxruntime", "openvino"), ("openvino", "onnxruntime")])
def test_the_report_of_appends_names_the_engines_asked_for_alone(monkeypatch, engine, other):
    monkeypatch.setattr("benchmarks.reporting.version_of", "of {}".format)
    monkeypatch.setattr("sys.argv", ["append"])  # a report has the command's arguments, which may name engines
    text = append.report({name: [] for name in append.HEADINGS}, [engine, "torch"], threads=1, load=0.0)
    assert (f"{engine} of {engine}" in text, other in text) == (True, False)
