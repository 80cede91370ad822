"""The OpenAPI document, with the limits that this gateway is configured with."""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from cluster.config import GatewaySettings
from deployments.http.messages import Problem

LIMITED = {
    "RecommendIn": {"k": "max_k", "behaviours": "max_behaviours", "blocked": "max_listed_items", "allowed": "max_listed_items"},
    "RecommendBatchIn": {"requests": "max_batch"},
    "RankIn": {"candidates": "max_candidates", "behaviours": "max_behaviours"},
    "EventsIn": {"events": "max_events"},
}
"""Message -> field -> the setting that bounds it. The messages' own bounds are the highest that may be configured."""
_PROBLEMS = models_json_schema([(Problem, "validation")], ref_template="#/components/schemas/{model}")[1]["$defs"]
"""Problem and FieldProblem. What has a default is not required: HAProxy's problems leave it out."""


class DocumentedApi(FastAPI):
    """Its `state.limits` gives the present settings."""

    def openapi(self) -> dict[str, Any]:
        document, limits = super().openapi(), self.state.limits()
        document["components"]["schemas"] |= _PROBLEMS
        for message, fields in LIMITED.items():
            for name, setting in fields.items():
                _bound(document["components"]["schemas"][message]["properties"][name], limits, setting)
        _size_integers(document)
        return document


def _bound(field: dict[str, Any], limits: GatewaySettings, setting: str) -> None:
    """Write the setting into the field's schema, or the one of its alternatives that is not null."""
    for schema in field.get("anyOf", [field]):
        if schema["type"] in ("array", "integer"):
            schema["maxItems" if schema["type"] == "array" else "maximum"] = getattr(limits, setting)


def _size_integers(part: Any) -> None:
    """Mark the integers that may have more than 32 bits, and write the bounds of all as integers: FastAPI makes 2.0**63 of 2**63 - 1."""
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _size_integers(inner)
    if isinstance(part, dict) and part.get("type") == "integer":
        part.update({bound: min(int(part[bound]), 2**63 - 1) for bound in ("minimum", "maximum") if bound in part})
        if part.get("maximum", 2**63) >= 2**31:
            part["format"] = "int64"
