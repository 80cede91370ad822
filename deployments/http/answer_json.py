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
from pydantic_core import to_json

from cluster.dataset import Catalogue
from cluster.events.store import StoredHistory
from cluster.ranking import Ranking
from cluster.titled_items import TitledItems
from cluster.values import Action, Behaviour, CacheReport, Explanation, Recommendation, ScoredItem, SkippedBackend, StageReport

Fields: TypeAlias = dict[str, Any]
FEW = 64
"""Items in objects, as explained ones are, that are written at once: each takes about 10 microseconds."""
FEW_EVENTS = 1000
"""Events of a history that are written at once: each takes about a microsecond."""
_ENCODER = msgspec.json.Encoder()
_THREAD = ThreadPoolExecutor(1, "writes an answer")


def as_json(fields: Mapping[str, Any] | list[Fields]) -> bytes:
    return to_json(fields, inf_nan_mode="null")


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
    """The JSON of RecommendOut."""
    items = answer.items.as_json() if isinstance(answer.items, TitledItems) else as_json([item_fields(one) for one in answer.items])
    return _whole(answer, items, answer.cache and replace(answer.cache, age_s=round(answer.cache.age_s, 3)))


def ranking_json(answer: Ranking) -> bytes:
    """The JSON of RankOut; a number that is not finite is null. It is written at once: a candidate takes half a microsecond."""
    ranked = [_Ranked(one.item.item_id, one.item.title, dict(one.item.attributes), one.score, one.predictions) for one in answer.items]
    return _whole(answer, _ENCODER.encode(ranked))


def _whole(answer: Recommendation | Ranking, items: bytes, cache: CacheReport | UnsetType | None = UNSET) -> bytes:
    """The answer's JSON around that of its items."""
    stages = [replace(one, duration_ms=round(one.duration_ms, 3)) for one in answer.stages]
    rest = _Rest(stages, answer.degraded, answer.model_version, answer.unknown_items, cache)
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


def item_fields(scored: ScoredItem) -> Fields:
    """The item with the fields of ScoredItemOut."""
    item = scored.item
    return {
        "item_id": item.item_id,
        "title": item.title,
        "attributes": dict(item.attributes),
        "score": scored.score,
        "stage": scored.stage,
        "explanation": _explanation_fields(scored.explanation) if scored.explanation else None,
    }


def stage_fields(report: StageReport) -> Fields:
    """The report with the fields of StageOut."""
    return {
        "stage": report.stage,
        "backend": report.backend,
        "duration_ms": round(report.duration_ms, 3),
        "fallback_from": [_skipped_fields(skipped) for skipped in report.fallback_from],
    }


def _skipped_fields(skipped: SkippedBackend) -> Fields:
    return {"backend": skipped.backend, "reason": skipped.reason, "failed": skipped.failed}


def _explanation_fields(why: Explanation) -> Fields:
    scores = {name: getattr(why, name) for name in ("retrieval", "generation", "blended", "ranking", "popularity", "freshness")}
    similar = [{"item_id": one.item.item_id, "title": one.item.title, "similarity": one.similarity} for one in why.similar]
    return {**scores, "similar": similar}
