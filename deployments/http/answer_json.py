"""Answers as they are sent: the fields of `deployments.http.messages`' models, and their JSON.

No pydantic model is built on the way: the service's own answers need no check, and an object for each item costs several times its JSON.
"""

from asyncio import get_running_loop
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from pydantic_core import to_json

from cluster.titled_items import TitledItems
from cluster.values import CacheReport, Explanation, Recommendation, ScoredItem, SkippedBackend, StageReport

Fields: TypeAlias = dict[str, Any]
FEW = 64
"""Items in objects, as explained ones are, that are written at once: each takes about 10 microseconds."""
_ENCODER = msgspec.json.Encoder()
_THREAD = ThreadPoolExecutor(1, "writes an answer")


def as_json(fields: Mapping[str, Any] | list[Fields]) -> bytes:
    return to_json(fields, inf_nan_mode="null")


async def written(answer: Recommendation) -> bytes:
    """As `answer_json`; where that would hold the event loop, in a thread, which writes one answer after the other."""
    return await beside_the_loop(answer.items, lambda: answer_json(answer))


async def beside_the_loop(items: Sequence[ScoredItem], write: Callable[[], bytes]) -> bytes:
    """What `write` makes of these items; in the thread that writes answers, where they are many in objects."""
    if isinstance(items, TitledItems) or len(items) <= FEW:
        return write()
    return await get_running_loop().run_in_executor(_THREAD, write)


def answer_json(answer: Recommendation) -> bytes:
    """The JSON of RecommendOut."""
    items = answer.items.as_json() if isinstance(answer.items, TitledItems) else as_json([item_fields(one) for one in answer.items])
    stages = [replace(one, duration_ms=round(one.duration_ms, 3)) for one in answer.stages]
    rest = _Rest(
        stages,
        answer.degraded,
        answer.model_version,
        answer.unknown_items,
        answer.cache and replace(answer.cache, age_s=round(answer.cache.age_s, 3)),
    )
    return b'{"user_id":%b,"items":%b,%b' % (_ENCODER.encode(answer.user_id), items, _ENCODER.encode(rest)[1:])


class _Rest(Struct):
    """The fields of an answer that follow its items."""

    stages: list[StageReport]
    degraded: bool
    model_version: str
    unknown_items: tuple[str, ...]
    cache: CacheReport | None


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
