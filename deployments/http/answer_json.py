"""Answers and histories as they are sent: the fields of the models in `messages`, `ranking` and `event_messages`, and their JSON.

No pydantic model is built on the way: the service's own answers need no check, and an object for each item costs several times its JSON.
"""

from asyncio import get_running_loop
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from cluster.dataset import Catalogue
from cluster.events.store import StoredHistory
from cluster.ranking import Ranking
from cluster.titled_items import TitledItems
from cluster.values import Action, Behaviour, CacheReport, Explanation, Recommendation, ScoredItem, StageReport

Fields: TypeAlias = dict[str, Any]
FEW = 64
"""Items in objects, as explained ones are, that are written at once: each takes some microseconds."""
FEW_EVENTS = 1000
"""Events of a history that are written at once: each takes about a microsecond."""
_ENCODER = msgspec.json.Encoder()
_THREAD = ThreadPoolExecutor(1, "writes an answer")


async def written(answer: Recommendation) -> bytes:
    """As `answer_json`; where that would hold the event loop, in a thread, which writes one answer after the other."""
    return await beside_the_loop(answer.items, lambda: answer_json(answer))


async def written_history(tenant: str, user_id: str, stored: StoredHistory, catalogue: Catalogue) -> bytes:
    """As `history_json`, in that thread too."""
    return await beside_the_loop(stored.behaviours, lambda: history_json(tenant, user_id, stored, catalogue), FEW_EVENTS)


async def beside_the_loop(items: Sequence[ScoredItem | Behaviour], write: Callable[[], bytes], few: int = FEW) -> bytes:
    """What `write` makes of these items; in the thread that writes answers, where they are more than `few` in objects."""
    if isinstance(items, TitledItems) or len(items) <= few:
        return write()
    return await get_running_loop().run_in_executor(_THREAD, write)


def answer_json(answer: Recommendation) -> bytes:
    """The JSON of RecommendOut; a score that is not finite is null."""
    found = answer.items
    items = found.as_json() if isinstance(found, TitledItems) else _ENCODER.encode([_scored(one) for one in found])
    return _whole(answer, items, answer.cache and replace(answer.cache, age_s=round(answer.cache.age_s, 3)))


def ranking_json(answer: Ranking) -> bytes:
    """The JSON of RankOut; a number that is not finite is null. It is written at once: a candidate takes half a microsecond."""
    ranked = [_Ranked(one.item.item_id, one.item.title, dict(one.item.attributes), one.score, one.predictions) for one in answer.items]
    return _whole(answer, _ENCODER.encode(ranked))


def _whole(answer: Recommendation | Ranking, items: bytes, cache: CacheReport | UnsetType | None = UNSET) -> bytes:
    """The answer's JSON around that of its items."""
    rest = _Rest([_rounded(one) for one in answer.stages], answer.degraded, answer.model_version, answer.unknown_items, cache)
    return b'{"user_id":%b,"items":%b,%b' % (_ENCODER.encode(answer.user_id), items, _ENCODER.encode(rest)[1:])


class _Ranked(Struct, gc=False):
    """The fields of RankedItemOut."""

    item_id: str
    title: str
    attributes: dict[str, str]
    score: float
    predictions: Mapping[str, float]


class _Rest(Struct):
    """The fields of an answer that follow its items; a ranking has no `cache`."""

    stages: list[StageReport]
    degraded: bool
    model_version: str
    unknown_items: tuple[str, ...]
    cache: CacheReport | UnsetType | None


def history_json(tenant: str, user_id: str, stored: StoredHistory, catalogue: Catalogue) -> bytes:
    """The JSON of HistoryOut, with the titles of `catalogue`."""
    events = [_past(one, catalogue) for one in stored.behaviours]
    return _ENCODER.encode(_History(user_id, tenant, stored.version, stored.total, events))


class _PastEvent(Struct):
    """The fields of PastEventOut."""

    item_id: str
    title: str | None
    timestamp: int
    action: Action
    value: float | None


class _History(Struct):
    """The fields of HistoryOut."""

    user_id: str
    tenant: str
    version: str
    total: int
    events: list[_PastEvent]


def _past(done: Behaviour, catalogue: Catalogue) -> _PastEvent:
    index = catalogue.index_of(done.item_id)
    return _PastEvent(done.item_id, None if index is None else catalogue[index].title, done.timestamp, done.action, done.value)


def item_json(scored: ScoredItem) -> bytes:
    """The JSON of ScoredItemOut; a number that is not finite is null."""
    return _ENCODER.encode(_scored(scored))


def stage_json(report: StageReport) -> bytes:
    """The JSON of StageOut."""
    return _ENCODER.encode(_rounded(report))


def _rounded(report: StageReport) -> StageReport:
    return replace(report, duration_ms=round(report.duration_ms, 3))


class _Scored(Struct, gc=False):
    """The fields of ScoredItemOut."""

    item_id: str
    title: str
    attributes: dict[str, str]
    score: float
    stage: str
    explanation: Fields | None


def _scored(one: ScoredItem) -> _Scored:
    item, why = one.item, one.explanation
    return _Scored(item.item_id, item.title, dict(item.attributes), one.score, one.stage, _explanation_fields(why) if why else None)


def _explanation_fields(why: Explanation) -> Fields:
    scores = {name: getattr(why, name) for name in ("retrieval", "generation", "blended", "ranking", "popularity", "freshness")}
    similar = [{"item_id": one.item.item_id, "title": one.item.title, "similarity": one.similarity} for one in why.similar]
    return {**scores, "similar": similar}
