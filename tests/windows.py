"""Counts the windows of users' events that training makes."""

from weakref import WeakSet

import pytest

from pipelines import splits
from pipelines.splits import Example


class CountedWindows:
    """`made`: windows since this began, until the test ends; `most`: the most that were in memory together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = self.most = 0
        self._alive: WeakSet[Example] = WeakSet()
        monkeypatch.setattr(splits, "Example", self._counted)

    def _counted(self, *given) -> Example:
        example = Example(*given)
        self._alive.add(example)
        self.made, self.most = self.made + 1, max(self.most, len(self._alive))
        return example
