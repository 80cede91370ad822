"""Spans: where a trace is recorded they hang in it, and elsewhere they are nothing."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster import tracing
from cluster.values import SkippedBackend, StageReport


@pytest.fixture
def exporter(monkeypatch):
    """A provider of this test's own; the process's is left as it is."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "TRACER", provider.get_tracer("genrec"))
    yield exporter
    provider.shutdown()


def begun():
    """What Serve begins for a request."""
    return tracing.TRACER.start_as_current_span("request")


def test_where_no_trace_is_recorded_there_is_no_span(exporter):
    with tracing.span("encode", events=3) as one, tracing.joined_span("batch", [None, tracing.here()], requests=2) as other:
        assert not one.is_recording()
        assert not other.is_recording()
    assert exporter.get_finished_spans() == ()


def test_a_step_hangs_in_the_request_and_says_who_served_it(exporter):
    report = StageReport("encode", "torch", 6.0, (SkippedBackend("onnxruntime", "boom"),))
    with begun() as request, tracing.span("encode", events=3) as current:
        tracing.say_who_served(current, report)
    encode = exporter.get_finished_spans()[0]
    assert encode.parent.span_id == request.get_span_context().span_id
    assert dict(encode.attributes) == {
        "genrec.events": 3, "genrec.backend": "torch", "genrec.engine_ms": 6.0, "genrec.fallback_from": ("onnxruntime: boom",)
    }  # fmt: skip


def test_a_batch_is_a_child_of_its_first_request_and_linked_to_all(exporter):
    places = []
    for _ in range(2):
        with begun():
            places.append(tracing.here())
    with tracing.joined_span("batch", [None, *places], requests=3):
        pass
    batch = exporter.get_finished_spans()[-1]
    assert (batch.name, batch.parent.span_id) == ("batch", places[0].span_id)
    assert [link.context.span_id for link in batch.links] == [place.span_id for place in places]


def test_an_error_ends_the_span_and_goes_on(exporter):
    with pytest.raises(ValueError, match="boom"), begun(), tracing.span("encode"):
        raise ValueError("boom")
    assert [one.name for one in exporter.get_finished_spans()] == ["encode", "request"]
    assert not exporter.get_finished_spans()[0].status.is_ok
