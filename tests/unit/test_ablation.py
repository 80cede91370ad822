"""The rows of the ablation: each switches something that genrec takes, and the report sets it beside its own trace's base."""

import json
from collections import Counter
from contextlib import nullcontext

import pytest

from benchmarks.ablation import COLUMNS, ENGINES, TRACES, Figures, check_computed, chosen, main, report
from benchmarks.load_bodies import alike, bodies
from benchmarks.reporting import Machine
from benchmarks.serving import SHIPPED, merged
from cluster.config import parse
from cluster.config_file import read_document
from cluster.registry import BACKENDS, resolve
from tests.bundles import make_bundle

ROWS = [(trace, name) for trace in TRACES for name in trace.otherwise]


def configured(trace, changes):
    config = SHIPPED["split" if trace.pauses else "colocated"]
    return parse(merged(merged(read_document(config)["applications"][0]["args"], trace.always), changes), str(config))


@pytest.mark.parametrize(("trace", "name"), ROWS, ids=[name for _, name in ROWS])
def test_a_row_is_a_configuration_other_than_its_base(trace, name):
    settings = configured(trace, trace.otherwise[name])
    assert settings != configured(trace, {})
    for stage in ("encoder", "generator"):
        for backend, options in getattr(settings, stage).options.items():
            resolve(BACKENDS[stage][backend])(**options)


@pytest.mark.parametrize(("trace", "name"), ROWS, ids=[name for _, name in ROWS])
def test_a_row_that_changes_engines_alone_has_a_trace_that_they_answer(trace, name):
    if trace.otherwise[name].keys() <= ENGINES.keys() and not trace.alike:  # users that come once have no kept answers
        assert not configured(trace, {}).gateway.flags.anticipate
    if "no kept prompts" in name and not trace.alike:
        assert configured(trace, {}).generator.options["torch_beam"]["cache_bytes"] == 0


def test_a_row_that_times_engines_ends_the_program_unless_most_answers_were_computed():
    engines = {"encoder": {"selection": "fastest"}}
    kept, computed = TRACES[:2]
    check_computed("a row", kept, engines, {"computed": 2, "l1": 1})
    check_computed("a row", kept, {**engines, "cache": {"enabled": True}}, {"l1": 3})
    check_computed("as shipped", kept, {}, {"l1": 3})
    check_computed("as shipped", computed, {}, {"computed": 2, "l1": 1})
    for trace, changes in ((kept, engines), (computed, engines), (computed, {})):
        for came_from in ({"l1": 3}, {"computed": 2, "l1": 1, "joined": 1}):
            with pytest.raises(SystemExit, match=f"a row: of {sum(came_from.values())} answers"):
                check_computed("a row", trace, changes, came_from)


def test_rows_before_one_that_ends_the_program_are_filed(tmp_path, monkeypatch):
    came_from = iter([{"computed": 3}] * 8 + [{"l1": 3}])
    monkeypatch.setattr("benchmarks.ablation.serving", lambda *_: nullcontext())
    monkeypatch.setattr("benchmarks.ablation.measure", lambda *_: Figures(4, 10, 20, 100, 1000, next(came_from)))
    with pytest.raises(SystemExit, match="one request a batch: of 3 answers 0 were computed"):
        main(only=["retrieval, computed"], rounds=2, out=tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert [text.count(f"| {name} | computed {number}") for name, number in (("no kept states", 6), ("one request a batch", 3))] == [1, 1]
    assert text.count("1.00 (1.00 to 1.00)") == 5 * len(TRACES[1].otherwise)


def test_rows_and_traces_have_names_of_their_own():
    names = [name for trace in TRACES for name in (trace.name, trace.base, *trace.otherwise)]
    assert len(set(names)) == len(names) - sum(trace.name in trace.otherwise for trace in TRACES)


def test_rows_are_chosen_by_their_names_or_by_their_traces():
    retrieval, computed = TRACES[:2]
    assert chosen(retrieval, []) == chosen(retrieval, ["retrieval"]) == retrieval.otherwise
    assert list(chosen(retrieval, ["no anticipation", computed.name])) == ["no anticipation"]
    assert chosen(computed, ["no anticipation"]) == {}


def test_a_row_stands_as_a_ratio_to_its_base_in_the_same_round():
    trace = TRACES[0]
    found = {
        trace.base: [Figures(4, 10, 20, 100, 1000, {"l1": 3}), Figures(2, 10, 20, 100, 1000)],
        "no answer cache": [
            Figures(8, 10, 20, 50, 1000, {"computed": 5}, {"encoder": 0.5}),
            Figures(6, 10, 20, 50, 1000, {"computed": 1, "joined": 1}, {"encoder": 0.7}),
        ],
    }
    machine = Machine("2026-01-01", "a processor", 2, 0.1, 0.2, {}, "python -m benchmarks.ablation")
    lines = report(found, [trace], 40, 2, machine).splitlines()
    assert f"| {trace.base} | 3.0 | 10.0 | 20.0 | 100.0 | 1000.0 |" in lines
    assert f"| no answer cache | 2.50 (2.00 to 3.00) |{' 1.00 (1.00 to 1.00) |' * 2} 0.50 (0.50 to 0.50) | 1.00 (1.00 to 1.00) |" in lines
    assert "| no answer cache | computed 6, joined 1 | encoder 60% |" in lines
    assert len(COLUMNS) == 5


def test_histories_that_are_alike_begin_with_the_same_events_and_go_on_apart(tmp_path):
    make_bundle(tmp_path / "tiny")
    asked = [json.loads(body) for body in alike(tmp_path / "tiny", 5, 6, 2, strategy="unified")]
    assert len({one["user_id"] for one in asked}) == 5
    assert {json.dumps(one["behaviours"][:6]) for one in asked} == {json.dumps(asked[0]["behaviours"][:6])}
    assert len({json.dumps(one["behaviours"]) for one in asked}) == 5
    assert Counter(len(one["behaviours"]) for one in asked) == {8: 5}
    assert bodies(tmp_path / "tiny", users=3) == bodies(tmp_path / "tiny", users=3)
