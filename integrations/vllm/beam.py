"""The constrained beam over an engine that answers one question at a time: with what probability does each of these tokens follow?

    root ──ask──► level 1: the `beam` best paths ──ask each──► level 2: ... ──ask each──► the `k` best items

A path's score is the sum of log p over its codes, p renormalised over the children that may be named. A node with one such child is not
asked about: p is 1. Of equal scores the lower node goes first.
"""

import asyncio
import math
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, TypeAlias, TypeVar

from cluster.errors import BackendFailed
from cluster.trie import TrieView

SPARE = 8
"""How many more tokens are asked for than are kept, for the case that several are equally probable at the boundary.

An engine may choose among equals in any way. So where more than SPARE + 1 tokens are exactly as probable as the last one kept, a higher
node may take the place of a lower one.
"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question:
    """Which of the tokens `allowed`, ascending, follows the codes `suffix`? The `best` most probable are wanted, at least."""

    suffix: tuple[int, ...]
    allowed: list[int]
    best: int


@dataclass(frozen=True, slots=True)
class Path:
    """The path to a node: its tokens and their log p."""

    node: int = 0
    tokens: tuple[int, ...] = ()
    score: float = 0.0


Ask: TypeAlias = Callable[[Question], Awaitable[Mapping[int, float]]]
Found: TypeAlias = Callable[[list[Path]], None]


async def search(view: TrieView, beam: int, k: int, ask: Ask, found: Found | None = None) -> list[Path]:
    """The paths to the `k` most probable items, best first; none where nothing may be named. Raises what `ask` raises, and BackendFailed.

    A level's questions are asked all at once. `found` is called with the items below each node of the level before the last, best first, as
    soon as that node's question is answered.
    """
    paths = [Path()] if view.items else []
    for level in range(view.trie.levels):
        last = level == view.trie.levels - 1
        keep = k if last else beam
        tell = found if last else None
        expansions = await together(_told(_expand(view, level, path, ask, keep), tell) for path in paths)
        paths = best((path for expansion in expansions for path in expansion), keep)
    return paths


def best(paths: Iterable[Path], keep: int) -> list[Path]:
    return nsmallest(keep, paths, key=lambda path: (-path.score, path.node))


class BestSoFar:
    """Filters paths that come piece by piece: those pass that are among the `k` best of all so far."""

    def __init__(self, k: int) -> None:
        self._k, self._paths = k, list[Path]()

    def add(self, paths: list[Path]) -> list[Path]:
        self._paths = best([*self._paths, *paths], self._k)
        kept = {path.node for path in self._paths}
        return [path for path in paths if path.node in kept]


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _told(expansion: Coroutine[Any, Any, list[Path]], found: Found | None) -> list[Path]:
    paths = await expansion
    if found:
        found(paths)
    return paths


async def _expand(view: TrieView, level: int, path: Path, ask: Ask, keep: int) -> list[Path]:
    """The `keep` best ways on from a node."""
    children = view.children(level, path.node)
    nodes, tokens = children.tolist(), view.tokens(level, children).tolist()
    answer = await ask(Question(path.tokens, tokens, min(len(tokens), keep + SPARE))) if len(tokens) > 1 else {tokens[0]: 0.0}
    found = ((nodes[_place(tokens, token, log_p)], token, log_p) for token, log_p in answer.items())
    return best((Path(node, (*path.tokens, token), path.score + log_p) for node, token, log_p in found), keep)


def _place(tokens: list[int], token: int, log_p: float) -> int:
    """The place of an answered token among the allowed ones. Raises BackendFailed where it is not allowed, or has no probability."""
    place = bisect_left(tokens, token)
    if place == len(tokens) or tokens[place] != token or not math.isfinite(log_p):
        raise BackendFailed(f"vLLM answered with log p = {log_p} for token {token}; tokens {tokens[0]} to {tokens[-1]} were asked about")
    return place
