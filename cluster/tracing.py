"""OpenTelemetry spans: how long each step of a request took, in the traces that Ray Serve begins and carries from replica to replica.

    replica_handle_request gateway                        Serve's, or a child of the caller's `traceparent`
      recommend                                           strategy, degraded, where the answer came from
        encode                                            backend, fallbacks, model version
          replica_handle_request encoder                  Serve's
            batch                                         requests, the longest one's rows; linked to every request that is in it
        generate, rank                                    likewise

Where no trace is recorded, as without an exporter, a span costs one look at the current span.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context
from typing import TypeAlias

from opentelemetry import trace
from opentelemetry.context import attach, get_current
from opentelemetry.trace import Link, Span, SpanContext

from cluster.values import Recommendation, SkippedBackend, StageReport

Attribute: TypeAlias = str | bool | int | float | Sequence[str]
TRACER = trace.get_tracer("genrec")
NOT_RECORDED = nullcontext(trace.INVALID_SPAN)


def recording() -> bool:
    """Whether the request that is under way is traced."""
    return trace.get_current_span().is_recording()


def span(name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
    """A step of the request that is under way. Attributes that are known later go to `set_attribute` of the span that this yields."""
    if not recording():
        return NOT_RECORDED
    return TRACER.start_as_current_span(name, attributes=_named(attributes))


@contextmanager
def joined_span(name: str, places: Sequence[SpanContext | None], **attributes: Attribute) -> Iterator[Span]:
    """A step that several requests have in common: a child of the first request that is traced, linked to all that are. `places`: where the
    requests are in their traces, by `here`.
    """
    traced = [one for one in places if one is not None]
    if not traced:
        yield trace.INVALID_SPAN
        return
    parent = trace.set_span_in_context(trace.NonRecordingSpan(traced[0]))
    links = [Link(one) for one in traced]
    with TRACER.start_as_current_span(name, context=parent, links=links, attributes=_named(attributes)) as current:
        yield current


def here() -> SpanContext | None:
    """The caller's place in its trace; None where nothing is recorded."""
    current = trace.get_current_span()
    return current.get_span_context() if current.is_recording() else None


def continued_in(context: Context) -> Context:
    """A copy of that context, in which the caller's trace goes on."""
    copied = context.copy()
    copied.run(attach, get_current())
    return copied


def say_who_served(current: Span, report: StageReport) -> None:
    """Set the attributes of a stage's span to what the answer says of the stage."""
    if current.is_recording():
        told: dict[str, Attribute] = {
            "backend": report.backend,
            "engine_ms": report.duration_ms,
            "fallback_from": [_passed_over(one) for one in report.fallback_from],
        }
        current.set_attributes(_named(told))


def say_whence(current: Span, answer: Recommendation) -> None:
    """Set the attributes of the request's span to what the answer says of itself."""
    if current.is_recording():
        tier = answer.cache.tier if answer.cache else "none"
        told: dict[str, Attribute] = {
            "items": len(answer.items),
            "degraded": answer.degraded,
            "cache": tier,
            "model_version": answer.model_version,
        }
        current.set_attributes(_named(told))


def _passed_over(skipped: SkippedBackend) -> str:
    return f"{skipped.backend}: {skipped.reason}"


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {f"genrec.{name}": value for name, value in attributes.items()}
