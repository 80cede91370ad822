"""The pipeline's stages, played by objects that a test controls, and a bundle that says it has a decoder."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Generic, TypedDict, TypeVar, Unpack

import numpy as np

from cluster.bundle import BlendRecord, Bundle, DecoderRecord, RankerRecord
from cluster.bundle_store import BundleStore
from cluster.ranking import Ranked, RankRequest, RatingScale, Task
from cluster.values import Encoded, EncodeRequest, Generated, GeneratedPart, GenerateRequest, SkippedBackend, StageAnswer, StageReport
from tests.bundles import make_bundle

RequestT = TypeVar("RequestT")


def bundle_with_decoder(root: Path, *, items: int = 50, blend: BlendRecord | None = None) -> Bundle:
    """As `make_bundle`. The decoder stands in the manifest only: enough where the generator is a fake."""
    store, bundle = BundleStore(root), make_bundle(root, items=items)
    with store.recompile(bundle) as draft:
        draft.decoder = DecoderRecord(family="fake", prompt_length=8, semantic_ids="0" * 16)
        draft.blend = blend
    return store.open()


class Options(TypedDict, total=False):
    """What each stage of this file may be made with, see Played."""

    error: Exception | None
    version: str | None
    skipped: Sequence[SkippedBackend]
    delay: float


class Played(Generic[RequestT]):
    """What the stages of this file share: each remembers what it was `asked` and for how many `seconds`, takes `delay` seconds, and raises
    `error` where that is set. `version`: the identity of the version that it says has answered; by default the bundle's.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        error: Exception | None = None,
        version: str | None = None,
        skipped: Sequence[SkippedBackend] = (),
        delay: float = 0.0,
    ) -> None:
        self.bundle, self.error, self.version, self.skipped, self.delay = bundle, error, version or bundle.identity, tuple(skipped), delay
        self.asked, self.seconds = list[RequestT](), list[float]()

    async def take(self, request: RequestT, within_s: float) -> None:
        """To be awaited before each answer."""
        self.asked.append(request)
        self.seconds.append(within_s)
        await asyncio.sleep(self.delay)
        if self.error:
            raise self.error


class Descending(Played[EncodeRequest]):
    """An encoder stage that ranks the catalogue from its last item down, and remembers what it was asked. `delay`: seconds it takes."""

    def __init__(self, bundle: Bundle, *, states: bool = True, **rest: Unpack[Options]) -> None:
        super().__init__(bundle, **rest)
        self.states = states

    async def __call__(self, request: EncodeRequest, within_s: float) -> StageAnswer[Encoded]:
        await self.take(request, within_s)
        ranked = np.arange(len(self.bundle.catalogue), 0, -1, dtype=np.int32)
        if request.among is not None:
            ranked = ranked[np.isin(ranked, request.among)]
        items = ranked[: request.top_n]
        states = np.arange(min(3, len(request.sequence)) * 4, dtype=np.float32).reshape(-1, 4) if self.states and request.states else None
        encoded = Encoded(np.ones(4, np.float32), items, (items / len(self.bundle.catalogue)).astype(np.float32), states)
        return StageAnswer(encoded, StageReport("encode", "descending", 1.0, self.skipped), self.version)


RANKER = RankerRecord(
    family="fake", config={}, tasks=(Task.CLICK, Task.RATING, Task.PURCHASE), rating=RatingScale(low=1, high=5, mean=3, deviation=1)
)


def bundle_with_ranker(root: Path, *, items: int = 50, last_stage: bool = False, decoder: bool = False) -> Bundle:
    """As `bundle_with_decoder`, with a ranker that stands in the manifest only."""
    store, bundle = BundleStore(root), bundle_with_decoder(root, items=items) if decoder else make_bundle(root, items=items)
    with store.recompile(bundle) as draft:
        draft.ranker = RANKER.model_copy(update={"last_stage": last_stage})
    return store.open()


class Ascending(Played[RankRequest]):
    """A ranker stage that likes an item the more the lower its index: click (V - index) / V, rating 5 for even items and 1 for odd ones,
    purchase index / V.
    """

    async def __call__(self, request: RankRequest, within_s: float) -> StageAnswer[Ranked]:
        await self.take(request, within_s)
        items = request.candidates / len(self.bundle.catalogue)
        predictions = np.stack([1 - items, np.where(request.candidates % 2, 1.0, 5.0), items], axis=1).astype(np.float32)
        return StageAnswer(Ranked(predictions), StageReport("rank", "ascending", 1.0, self.skipped), self.version)


class Naming(Played[GenerateRequest]):
    """A generator stage that names the given items in that order, each half as probable as the one before. `delay`: seconds it takes.

    It is both: call it for the answer, call `stream` for the items by twos and then the answer.
    """

    def __init__(self, bundle: Bundle, *items: int, **rest: Unpack[Options]) -> None:
        super().__init__(bundle, **rest)
        self.items, self.closed = items, False

    async def __call__(self, request: GenerateRequest, within_s: float) -> StageAnswer[Generated]:
        await self.take(request, within_s)
        return StageAnswer(self.generated(request), StageReport("generate", "naming", 2.0, self.skipped), self.version)

    def generated(self, request: GenerateRequest) -> Generated:
        items = np.array(self.items, np.int32)
        items = items[~np.isin(items, request.blocked)]
        if request.among is not None:
            items = items[np.isin(items, request.among)]
        return Generated(items[: request.k], -np.log(2) * np.arange(1, len(items) + 1, dtype=np.float32)[: request.k])

    async def stream(self, request: GenerateRequest, within_s: float) -> AsyncGenerator[GeneratedPart, None]:
        try:
            generated = self.generated(request)
            for start in range(0, len(generated.items), 2):
                rows = slice(max(0, start - 1), start + 2)  # each time the last one once again
                yield Generated(generated.items[rows], generated.log_probs[rows])
            yield await self(request, within_s)
        finally:
            self.closed = True
