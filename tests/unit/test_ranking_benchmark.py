"""Figures of ways to rank stand beside each other, so that they are of equally many turns."""

import inspect

from benchmarks import ranking
from benchmarks.ranking import COUNTS, Contender, main, rows


def test_each_way_to_rank_takes_as_many_turns_and_a_p99_is_of_a_hundred_at_least(monkeypatch):
    ways = [[Contender(name, lambda _: None, lambda: None) for name in ("kept", "anew")] for _ in COUNTS]
    monkeypatch.setattr(ranking, "SETTLING_S", 0)
    monkeypatch.setattr(ranking, "contenders_of", lambda _, count, __: ways[COUNTS.index(count)])
    fewest = inspect.signature(main).parameters["rounds"].annotation.__metadata__[0].min
    assert fewest == 100
    assert [row[:2] for row in rows(None, 1, fewest)] == [[name, str(count)] for count in COUNTS for name in ("kept", "anew")]
    assert {len(way.seconds) for ways_of_count in ways for way in ways_of_count} == {fewest}
