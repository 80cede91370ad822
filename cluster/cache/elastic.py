"""The shared cache with shards that become more and fewer while it serves, without losing what they hold.

    follow(layout) -> the owners are made -> keys go to them -> all shards are told: entries move -> shards that own nothing are ended

Erasures reach every shard that exists, of whatever layout, and are repeated until no entry can have slipped through (see
cluster.cache.moving).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast

from cluster.cache.entry import CacheStatistics
from cluster.cache.layout import Layout, ShardsSeen
from cluster.cache.moving import ShardState
from cluster.cache.shared import Erased, Shard, ShardedCache, SharedSettings
from cluster.errors import BackendUnavailable

T = TypeVar("T")
LOOK_S = 0.5
"""How often shards are asked whether they still give entries away."""
ROUNDS = 6
"""After so many rounds an erasure is given up as unconfirmed: layouts change more slowly than that."""
NONE = Layout(-1, 0)
"""The layout before there are shards."""
logger = logging.getLogger(__name__)


class Movable(Shard, Protocol):
    """A shard that can move its entries; see MovingShard."""

    async def follow(self, layout: Layout) -> ShardState: ...
    async def erase(self, namespace: str | None, group: str | None, layout: Layout) -> tuple[int, Layout]: ...


class Shards(Protocol):
    """Makes, finds and ends shards by name. Each method raises BackendUnavailable where that is not possible now."""

    async def make(self, names: Sequence[str]) -> Mapping[str, Movable]:
        """The shards of these names; those that do not exist are made. Until the next call, only these are made anew where they end."""
        ...

    async def others(self, names: Sequence[str]) -> Mapping[str, Movable]:
        """The existing shards with other names than these."""
        ...

    async def end(self, name: str) -> None:
        """End the shard of this name for good; what it holds is lost."""
        ...


class _Away:
    """Stands in for shards that cannot be reached yet: every call raises BackendUnavailable."""

    def __getattr__(self, method: str) -> Any:
        async def refused(*_: object, **__: object) -> None:
            raise BackendUnavailable("no cache shard could be had yet")

        return refused


class ElasticCache(ShardedCache):
    """To be made by `made`. The cache begins with `least` shards. Shards that other gateways use already know a later layout, which the
    cache follows; where that has fewer than `least` shards or more than `most`, as of an earlier configuration, one within replaces it.

    Until the shards can be reached, all keys are misses and no erasure is confirmed.
    """

    def __init__(
        self,
        *,
        name: str,
        place: Shards,
        bounds: tuple[int, int],
        settings: SharedSettings,
        clock: Callable[[], float],
    ) -> None:
        super().__init__({name: cast(Shard, _Away())}, settings, clock)
        self._name, self._place, self._bounds = name, place, bounds
        self._layout, self._wanted = NONE, Layout(0, bounds[0])
        self._is_new, self._listed = True, True
        self._silent = frozenset[str]()  # shards that there are, and that gave no answer when they were asked last
        self._seen = ShardsSeen(self._layout)
        self._work: asyncio.Task[None] | None = None

    @classmethod
    async def made(
        cls,
        name: str,
        place: Shards,
        *,
        least: int,
        most: int,
        settings: SharedSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> "ElasticCache":
        """The cache, after a first attempt to make its shards; where that fails, further attempts are made in the background."""
        made = cls(name=name, place=place, bounds=(least, most), settings=settings or SharedSettings(), clock=clock)
        first = Layout(0, least)
        with suppress(BackendUnavailable):  # told once they are asked for again
            made._give_keys_to(await place.make(first.names(name)), first)
        made.follow(first)
        return made

    @property
    def seen(self) -> ShardsSeen | None:
        return None if self._layout == NONE else self._seen

    def follow(self, layout: Layout) -> None:
        self._wanted = max(layout, self._wanted)
        if (self._wanted != self._layout or self._seen.moving) and (self._work is None or self._work.done()):
            self._work = asyncio.get_running_loop().create_task(self._settle())

    async def settled(self) -> None:
        """Wait until every shard follows the layout and holds no entry that another shard owns."""
        if self._work is not None:
            await asyncio.shield(self._work)

    async def invalidate(self, namespace: str | None = None, group: str | None = None) -> Erased:
        """Forget a group, a namespace or everything in every shard, also while entries move between them."""
        count, before = 0, dict[str, Layout]()
        for _ in range(ROUNDS):
            latest = max([self._layout, *before.values()])
            try:
                answers = await self._of_all(lambda shard: shard.erase(namespace, group, latest))  # noqa: B023 - awaited in this round
            except (BackendUnavailable, TimeoutError) as error:
                logger.warning("which cache shards there are is not known: %s", error or type(error).__name__)
                known = await super().invalidate(namespace, group)
                return Erased(count + known.entries, tuple(sorted({*known.unconfirmed, self._name})))
            count += sum(answer[0] for answer in answers.values() if answer is not None)
            if silent := tuple(name for name, answer in answers.items() if answer is None):
                return Erased(count, silent)
            layouts = {name: answer[1] for name, answer in answers.items() if answer is not None}
            self.follow(max(layouts.values()))
            if layouts == before and len(set(layouts.values())) == 1:
                return Erased(count)
            before = layouts
        return Erased(count, tuple(self._names))

    async def statistics(self) -> Mapping[str, CacheStatistics]:
        """The figures of each shard that answers. Tells the shards the layout too: a shard that was restarted knows none."""
        if self._work is None or self._work.done():
            await self._looked()
            self.follow(self._wanted)
        return await super().statistics()

    async def worth_repeating(self, unconfirmed: Collection[str]) -> bool:
        there = self._silent.difference(self._names)  # shards that own no keys here, and are not gone: they may answer again
        one_answers = await super().worth_repeating({*unconfirmed} - there - {self._name})  # which looks for shards
        return one_answers or (self._name in unconfirmed and self._listed and self._layout != NONE)

    async def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
        await super().close()

    async def _settle(self) -> None:
        said = ""
        while True:
            try:
                await self._make_owners()
            except BackendUnavailable as error:
                problem = f"the cache stays with {self._layout.owners} shards: {error}"
                if problem != said:
                    logger.warning(problem)
                said = problem
            if self._layout != NONE and await self._looked() and self._wanted == self._layout:
                return
            await asyncio.sleep(LOOK_S)

    async def _make_owners(self) -> None:
        """Make the shards of the wanted layout, before others give them entries: a shard that does not run yet would miss those. They are
        told that layout first: by an earlier one, as another gateway tells it, they would own nothing and be ended. Raises
        BackendUnavailable.
        """
        if (layout := self._wanted) == self._layout:
            return
        shards = await self._place.make(layout.names(self._name))
        new = [self._guarded(name, shard) for name, shard in shards.items() if name not in self._shards]
        started = await asyncio.gather(*(shard.insist(lambda asked: cast(Movable, asked).follow(layout)) for shard in new))
        if silent := [shard.name for shard, answer in zip(new, started, strict=True) if answer is None]:
            raise BackendUnavailable(f"{', '.join(silent)} does not answer yet")
        self._give_keys_to(shards, layout)
        logger.info("%s: keys belong to %d shards from now on", self._name, layout.owners)

    def _give_keys_to(self, shards: Mapping[str, Movable], layout: Layout) -> None:
        self._own(shards)
        self._layout, self._seen = layout, ShardsSeen(layout)

    async def _looked(self) -> bool:
        """Tell all shards the layout, and end those that own nothing and have given all away. Returns whether nothing moves any more."""
        try:
            states = await self._of_all(lambda shard: shard.follow(self._layout))
            known = {name: state for name, state in states.items() if state is not None}
            if known:
                self._take(max(state.layout for state in known.values()), all_known=len(known) == len(states))
            done = {name for name, state in known.items() if state.layout == self._layout and not state.moving}
            for name in done - {*self._names, *self._wanted.names(self._name)}:
                await self._place.end(name)
        except (BackendUnavailable, TimeoutError) as error:
            logger.warning("which cache shards there are is not known: %s", error or type(error).__name__)
            return False
        busy = sum(state.busy for name, state in known.items() if name in self._names)
        self._seen = ShardsSeen(self._layout, busy, moving=done != states.keys())
        return done == states.keys()

    def _take(self, latest: Layout, *, all_known: bool) -> None:
        """Follow the latest layout that a shard follows, and at the start, once all have answered, one within the bounds."""
        least, most = self._bounds
        if self._is_new and all_known and not least <= latest.owners <= most:
            latest = Layout(latest.number + 1, min(max(latest.owners, least), most))
        self._is_new = self._is_new and not all_known
        self._wanted = max(latest, self._wanted)

    async def _of_all(self, call: Callable[[Movable], Awaitable[T]]) -> dict[str, T | None]:
        """The answers of all existing shards, by name; None where a shard gives none. Raises BackendUnavailable or TimeoutError."""
        self._listed = False
        async with asyncio.timeout(self._settings.operator_s):
            others = await self._place.others(self._names)
        self._listed = True
        guarded = {**{name: self._guarded(name, shard) for name, shard in others.items()}, **self._shards}
        answers = await asyncio.gather(*(shard.insist(lambda asked: call(cast(Movable, asked))) for shard in guarded.values()))
        self._silent = frozenset(name for name, answer in zip(guarded, answers, strict=True) if answer is None)
        return dict(zip(guarded, answers, strict=True))
