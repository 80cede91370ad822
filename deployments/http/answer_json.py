"""Answers as they are sent: the fields of `deployments.http.messages`' models, and their JSON.

No model is built on the way: what this service says itself needs no check, and an object for each item costs several times its JSON.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from pydantic_core import to_json

from cluster.values import CacheReport, Explanation, Recommendation, ScoredItem, SkippedBackend, StageReport

Fields: TypeAlias = dict[str, Any]


def as_json(fields: Mapping[str, Any]) -> bytes:
    return to_json(fields, inf_nan_mode="null")


def answer_fields(answer: Recommendation) -> Fields:
    """Those of RecommendOut."""
    return {
        "user_id": answer.user_id,
        "items": [item_fields(scored) for scored in answer.items],
        "stages": [stage_fields(report) for report in answer.stages],
        "degraded": answer.degraded,
        "model_version": answer.model_version,
        "unknown_items": answer.unknown_items,
        "cache": _cache_fields(answer.cache) if answer.cache else None,
    }


def item_fields(scored: ScoredItem) -> Fields:
    """Those of ScoredItemOut."""
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
    """Those of StageOut."""
    return {
        "stage": report.stage,
        "backend": report.backend,
        "duration_ms": round(report.duration_ms, 3),
        "fallback_from": [_skipped_fields(skipped) for skipped in report.fallback_from],
    }


def _skipped_fields(skipped: SkippedBackend) -> Fields:
    return {"backend": skipped.backend, "reason": skipped.reason, "failed": skipped.failed}


def _cache_fields(report: CacheReport) -> Fields:
    return {"tier": report.tier, "age_s": round(report.age_s, 3), "stale": report.stale}


def _explanation_fields(why: Explanation) -> Fields:
    scores = {name: getattr(why, name) for name in ("retrieval", "generation", "blended", "ranking", "popularity", "freshness")}
    similar = [{"item_id": one.item.item_id, "title": one.item.title, "similarity": one.similarity} for one in why.similar]
    return {**scores, "similar": similar}
