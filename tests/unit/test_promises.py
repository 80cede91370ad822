"""docs/promises.md tells the truth: each promise has a test, and each test that it names is there, in the suite that it names."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.documents import ROOT

TESTS = ROOT / "tests"
DOCUMENT = ROOT / "docs" / "promises.md"
TEST = re.compile(r"`([^`]+)`")
HEADER = "| promise | guarded by | runs in |"
SUITES = {frozenset({False}): "`make test`", frozenset({True}): "`make chaos`", frozenset({False, True}): "both"}
"""What a row says of where its tests run, by whether they are marked `chaos`."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A row: what is promised, the tests that guard it, and where it says they run."""

    sentence: str
    tests: tuple[str, ...]
    suite: str


def promises(text: str) -> list[Promise]:
    """Every row of the document's tables."""
    lines = (line for line in text.splitlines() if line.startswith("|") and line != HEADER and not line.startswith("|-"))
    return [
        Promise(sentence, tuple(TEST.findall(tests)), suite) for sentence, tests, suite in (line.strip("| ").split(" | ") for line in lines)
    ]


def is_chaos(*expressions: ast.expr) -> bool:
    """Whether a mark among the expressions has `make test` leave the test out."""
    return any("mark.chaos" in ast.unparse(expression) for expression in expressions)


@cache
def functions(file: Path) -> dict[str, bool]:
    """The test functions of a file, its classes' too, and whether only `make chaos` runs them."""
    module = ast.parse(file.read_text())
    whole = is_chaos(*(node.value for node in module.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"))
    definitions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: whole or is_chaos(*node.decorator_list) for node in definitions if node.name.startswith("test_")}


def problem(promise: Promise) -> str | None:
    """What is wrong with a row."""
    if not promise.tests:
        return "no test guards it"
    marks = set()
    for test in promise.tests:
        name, _, function = test.partition("::")
        file = TESTS / name
        if not file.is_file():
            return f"tests/{name} is not there"
        if function not in functions(file):
            return f"tests/{name} has no {function!r}"
        marks.add(functions(file)[function])
    suite = SUITES[frozenset(marks)]
    return None if promise.suite == suite else f"its tests run in {suite}, not in {promise.suite}"


def test_every_promise_is_guarded_by_tests_that_are_there_and_run_where_it_says():
    assert {promise.sentence: why for promise in promises(DOCUMENT.read_text()) if (why := problem(promise))} == {}


@pytest.mark.parametrize(("document", "least"), [("SECURITY.md", 12), ("docs/measured.md", 20)])
def test_every_threat_that_a_document_tells_of_is_guarded_by_a_promised_test(document: str, least: int):
    threats = re.findall(r"^\| .* \| `(\w+/[^`]+::[^`]+)` \|$", (ROOT / document).read_text(), re.MULTILINE)
    promised = {test for promise in promises(DOCUMENT.read_text()) for test in promise.tests}
    assert len(threats) >= least
    assert [test for test in threats if test not in promised] == []


def test_no_promise_stands_twice():
    sentences = [promise.sentence for promise in promises(DOCUMENT.read_text())]
    assert len(sentences) == len(set(sentences)) > 90


HERE = "unit/test_promises.py::test_no_promise_stands_twice"


@pytest.mark.parametrize(
    ("tests", "suite", "why"),
    [
        ("", "`make test`", "no test guards it"),
        ("`unit/test_hopes.py::test_all_is_well`", "`make test`", "tests/unit/test_hopes.py is not there"),
        ("`unit/test_promises.py::test_all_is_well`", "`make test`", "tests/unit/test_promises.py has no 'test_all_is_well'"),
        (f"`{HERE}`", "`make chaos`", "its tests run in `make test`, not in `make chaos`"),
        (
            f"`{HERE}` <br> `chaos/test_soak.py::test_memory_and_open_files_stay_where_they_are`",
            "`make test`",
            "its tests run in both, not in `make test`",
        ),
    ],
)
def test_a_promise_that_is_not_kept_is_found(tests, suite, why):
    (row,) = promises(f"{HEADER}\n|---|---|---|\n| It holds. | {tests} | {suite} |\n")
    assert problem(row) == why


def test_a_promise_that_is_kept_has_no_problem():
    (row,) = promises(f"{HEADER}\n|---|---|---|\n| It holds. | `{HERE}` | `make test` |\n")
    assert (row.sentence, row.tests, problem(row)) == ("It holds.", (HERE,), None)
