"""The plan of a cluster has a part for everything that was measured to cost something and that the planned cluster does."""

import json

import pytest

from benchmarks.capacity import APPEND_MS, APPENDED, IDLE_MS, RESULTS, ROOT, WHOLE_MS, Load, parts, plan, row_bytes
from integrations.hstu.config import HSTUConfig

FIGURES = json.loads((RESULTS / "capacity_figures_cpu.json").read_text())


@pytest.mark.parametrize("kind", ["unified, computed", "retrieval, computed"])
def test_each_role_that_an_event_costs_something_without_anticipation_has_a_part(kind):
    events = Load().peak_per_s(Load.events_a_day)
    planned = {one.ms for one in parts(FIGURES, Load(), kind, 0.6) if one.per_s == events}
    costs = {role: ms for role, ms in FIGURES["cpu_ms_per_request"]["event"].items() if ms > IDLE_MS}
    assert costs.keys() == {"gateway", "proxy", "cache shard"}
    assert planned == {costs["gateway"], costs["proxy"]}


def test_a_ranker_has_a_part_where_it_costs_something():
    kind = "unified, computed"
    costs = FIGURES["cpu_ms_per_request"]
    ranked = {**FIGURES, "cpu_ms_per_request": {**costs, kind: {**costs[kind], "ranker": 3.0}}}
    before, after = (parts(figures, Load(), kind, 0.6) for figures in (FIGURES, ranked))
    (rankers,) = [one for one in after if one not in before]
    computed = Load().peak_per_s(Load.requests_a_day) * (1 - Load.l1_share - Load.l2_share)
    assert (rankers.name, rankers.per_s, rankers.cores) == (
        "rankers, without what they keep of users",
        computed,
        pytest.approx(computed * 0.003 / 0.6),
    )


def test_before_a_decoder_a_row_has_the_users_state_too_whatever_is_asked_for():
    config = HSTUConfig(**FIGURES["model"]["config"])
    assert [row_bytes(config, decoder=decoder) for decoder in (False, True)] == [400, 500]
    costs = FIGURES["cpu_ms_per_request"]
    alone = {**FIGURES, "cpu_ms_per_request": {kind: {**ms, "generator": 0.0} for kind, ms in costs.items()}}
    generating, retrieving, without = (
        next(one for one in parts(figures, Load(), kind, 0.6) if one.name.startswith("encoders"))
        for figures, kind in ((FIGURES, "unified, computed"), (FIGURES, "retrieval, computed"), (alone, "retrieval, computed"))
    )
    states_gb = Load().active_at_peak * Load.history * config.dim * 2 / 1e9
    assert retrieving.gigabytes - without.gigabytes == pytest.approx(states_gb)
    assert generating.gigabytes - retrieving.gigabytes < 0.1 * states_gb  # what more replicas take


def test_what_one_event_more_costs_the_large_model_is_as_the_newest_run_has_it():
    """Of the whole encoder, at 200 events: nothing kept, the first time, one more."""
    row = "| c 200 | onnxruntime |"
    runs = [path for path in sorted(RESULTS.glob("append_cpu_*.md")) if row in path.read_text()]
    assert runs[-1].name == APPENDED
    whole = runs[-1].read_text().split("## The whole encoder, ms")[1].split(row)[1].split("|")
    assert (float(whole[0]), float(whole[2])) == (WHOLE_MS, APPEND_MS)


def test_the_page_is_what_the_program_makes_of_the_filed_figures(capsys):
    plan()
    assert capsys.readouterr().out == (ROOT / "docs" / "capacity.md").read_text() + "\n"
