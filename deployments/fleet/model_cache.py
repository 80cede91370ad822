"""The model versions that a process holds: loaded beside the versions that serve, and given up once no gateway needs them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Generic, Protocol, TypeVar

from cluster.background import Background
from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.engines.heap import collect_discarded, collect_rarely, freeze_loaded, return_freed
from cluster.errors import BundleError, GenrecError
from cluster.fleet.board import LOADING, READY
from cluster.traffic.utilisation import Uncounted

RETRY_AFTER_S, RETRY_AFTER_LOADS = 10.0, 4.0
"""A version that was refused is tried again after this time, or after so many times as long as the try took where that is more: a process
spends a fifth of its time on such tries at most.
"""
logger = logging.getLogger("ray.serve")


class Versioned(Protocol):
    """An object that serves a bundle."""

    @property
    def bundle(self) -> Bundle: ...


Model = TypeVar("Model", bound=Versioned)


@dataclass(slots=True)
class _Refused:
    reason: str
    retry_at: float


class ModelCache(Generic[Model]):
    """`make` turns a verified bundle into a warmed-up model that serves it; `discard` gives that up, `keep_s` after it was last wanted.

    `beside`: the work in threads by which versions are opened and given up.
    """

    def __init__(
        self,
        store: BundleStore,
        make: Callable[[Bundle], Awaitable[Model]],
        discard: Callable[[Model], Awaitable[None]],
        *,
        keep_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._store, self._make, self._discard, self._keep_s, self._clock = store, make, discard, keep_s, clock
        self._models: dict[int, Model] = {}
        self._wanted_at: dict[int, float] = {}
        self._refused: dict[int, _Refused] = {}
        self._loading, self._try_again_at = 0, -inf
        self._work: asyncio.Task[None] | None = None
        self._given_up = Background()
        self.beside = Uncounted()

    @property
    def holds(self) -> dict[int, str]:
        """Version -> READY, LOADING, or why it cannot be served, also while it is being loaded once more."""
        refused = {v: f"{one.reason}; {LOADING} again" if v == self._loading else one.reason for v, one in self._refused.items()}
        loading = {self._loading: LOADING} if self._loading else {}
        return {**loading, **refused, **dict.fromkeys(self._models, READY)}

    @property
    def loading(self) -> int:
        """The version that is being loaded, 0 where none is."""
        return self._loading

    @property
    def models(self) -> tuple[Model, ...]:
        return tuple(self._models.values())

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The versions that are held."""
        return tuple(model.bundle for model in self.models)

    def get(self, version: int) -> Model | None:
        return self._models.get(version)

    def named(self, identity: str) -> Model | None:
        """The model by its `Bundle.identity`."""
        return next((model for model in self._models.values() if model.bundle.identity == identity), None)

    async def fill(self, versions: Iterable[int], *, only: bool = False) -> None:
        """Load these versions before anything is served; where none of them can be loaded, the first of the store's `fallbacks` that can,
        unless the first is the `only` one to serve. Raises BundleError where no version can be loaded, or what `make` raises for the last
        good one.
        """
        first, *_ = wanted = tuple(dict.fromkeys(versions))
        for version in wanted:
            if version not in self._models:  # as where an earlier call was cancelled
                await self._load(version)
            if only and first not in self._models:
                raise BundleError(f"version {first} is the only one to serve, and cannot be: {self._refused[first].reason}")
        if not self._models:
            await self._fall_back()
        if first not in self._models:
            logger.warning("serving %s: %s", ", ".join(one.bundle.version for one in self.models), self._refused[first].reason)
        await self.beside.run(return_freed)
        collect_rarely()

    def refuse(self, version: int, reason: str) -> None:
        """Give up a version that is held, and hold it no more until it is loaded anew."""
        self._given_up.start(self._give_up(self._models.pop(version)))
        self._refuse(version, reason)

    def try_again(self) -> None:
        """Have versions that were refused, and are wanted still, tried again at once: what they need may be there by now."""
        self._try_again_at = self._clock()
        for refused in self._refused.values():
            refused.retry_at = -inf

    def want(self, versions: Iterable[int]) -> None:
        """Hold these versions from now on: they are loaded in the background, one after the other, and others given up. A version that is
        not wanted any more while it is being loaded, as after a rollback, delays no other: its engine may hang.
        """
        now = self._clock()
        self._wanted_at.update(wanted := dict.fromkeys(versions, now))
        if self._work and self._loading and self._loading not in wanted and not self._work.cancelling():
            logger.info("version %d is not needed any more, and is not loaded", self._loading)
            self._work.cancel()
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._tidy(now))

    async def settled(self) -> None:
        """Wait until the versions that were wanted last are held or refused."""
        if self._work:
            await self._work

    async def close(self) -> None:
        if self._work:
            self._work.cancel()
        await self._given_up.close()
        for version in list(self._models):
            await self._discard(self._models.pop(version))

    async def _tidy(self, now: float) -> None:
        wanted, held = [version for version, at in self._wanted_at.items() if at == now], set(self._models)
        self._refused = {version: refused for version, refused in self._refused.items() if version in wanted}
        for version in wanted:
            if version not in self._models and not self._refused_lately(version):
                await self._load(version)
        for version in set(self._models) - set(wanted):
            if len(self._models) > 1 and now - self._wanted_at.setdefault(version, now) >= self._keep_s:
                logger.info("version %d is not needed any more", version)
                self._given_up.start(self._give_up(self._models.pop(version)))
        if set(self._models) - held:
            await self.beside.run(freeze_loaded)

    async def _give_up(self, model: Model) -> None:
        """Discard a model. Runs in a task of its own, as an engine may hang while it is closed."""
        await self._discard(model)
        del model  # else it is alive as the garbage is collected, and stays until the next version is given up
        await self.beside.run(collect_discarded)

    async def _fall_back(self) -> None:
        for version in await self.beside.run(self._store.fallbacks):
            if version not in self._refused:
                await self._load(version)
            if self._models:
                return
        bundle, _ = await self.beside.run(self._store.open_last_good)  # raises what is wrong with all of them
        await self._keep(bundle)  # raises what is wrong with this one

    def _refused_lately(self, version: int) -> bool:
        refused = self._refused.get(version)
        return refused is not None and self._clock() < refused.retry_at

    async def _load(self, version: int) -> None:
        self._loading, began = version, self._clock()
        try:
            await self._keep(await self.beside.run(self._store.open, version))
        except GenrecError as error:
            self._refuse(version, str(error), began)
        except Exception as error:
            logger.exception("version %d could not be loaded", version)
            reason = f"loading it failed in a way that is not known ({error!r}); the log has the trace"
            self._refuse(version, reason, began)
        finally:
            self._loading = 0

    async def _keep(self, bundle: Bundle) -> None:
        version = bundle.manifest.version
        self._models[version] = await self._make(bundle)
        self._wanted_at.setdefault(version, self._clock())
        self._refused.pop(version, None)

    def _refuse(self, version: int, reason: str, began: float = inf) -> None:
        """`began`: when it was begun to be loaded; infinite where it was held."""
        if version not in self._refused:
            logger.error("version %d cannot be served here: %s", version, reason)
        now = self._clock()
        pause_s = max(RETRY_AFTER_S, RETRY_AFTER_LOADS * (now - began))
        self._refused[version] = _Refused(reason, -inf if self._try_again_at >= began else now + pause_s)
