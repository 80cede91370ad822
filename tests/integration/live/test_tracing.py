"""The way of one request, as traces and logs tell it: real replicas, real OTLP, and the log that Serve writes."""

import json
import time
import uuid
from collections import Counter

import httpx
import pytest

from tests.collector import Collector
from tests.integration.conftest import Live, behaviours
from tests.waiting import until_right

pytestmark = pytest.mark.cluster
HISTORY = {"behaviours": behaviours(3, 14, 15, 92, 65), "request_time": 1_700_100_000}
WITHIN_S = 300.0


def ask(live: Live, *, sampled: bool, **request: object) -> tuple[str, httpx.Response]:
    """(the trace that the caller began, the answer)."""
    trace_id = uuid.uuid4().hex
    body = {"user_id": "traced", "cache": "bypass", **HISTORY, **request}
    headers = {"traceparent": f"00-{trace_id}-{uuid.uuid4().hex[:16]}-0{int(sampled)}", "x-request-id": f"request-{trace_id}"}
    response = httpx.post(f"{live.url}/v1/recommend", json=body, headers=headers, timeout=WITHIN_S)
    assert response.status_code == 200, response.text
    return trace_id, response


def told(span) -> dict[str, object]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def spans_of(collector: Collector, trace_id: str, wanted: set[str]) -> dict[str, object]:
    return until_right(lambda: {one.name: one for one in collector.of(trace_id)}, lambda found: wanted <= found.keys(), WITHIN_S)


def way_of(spans: list) -> list[str]:
    """From the batch up to the caller, as far as spans have come; those of Ray's handles are left out."""
    of_id = {one.span_id: one for one in spans}
    one, way = next((one for one in spans if one.name == "batch"), None), []
    while one is not None:
        way.append(one.name)
        one = of_id.get(one.parent_span_id)
    return [name for name in way if not name.startswith("route_to_replica")]


def test_a_trace_leads_from_the_caller_through_the_gateway_and_the_encoder_to_its_batch(live: Live, collector: Collector):
    trace_id, _ = ask(live, sampled=True)
    outermost = "replica_handle_request gateway __call__"  # ends last, as each span does before the one around it
    way = until_right(lambda: way_of(collector.of(trace_id)), lambda way: way[-1:] == [outermost], WITHIN_S)
    assert way == ["batch", "replica_handle_request encoder together", "encode", "recommend", outermost]
    found = spans_of(collector, trace_id, {"recommend", "encode", "batch"})
    assert told(found["recommend"])["genrec.degraded"] is False
    assert told(found["encode"])["genrec.backend"] == "onnxruntime"
    assert "fallback_from" in "".join(told(found["encode"]))
    # the copy of a call that a busy machine stalls may join its original's batch
    assert told(found["batch"])["genrec.requests"] >= 1
    assert told(found["batch"])["genrec.longest"] == 5
    assert {link.trace_id.hex() for link in found["batch"].links} == {trace_id}


def test_what_the_caller_does_not_sample_is_not_recorded(live: Live, collector: Collector):
    unsampled, _ = ask(live, sampled=False)
    sampled, _ = ask(live, sampled=True)
    spans_of(collector, sampled, {"recommend", "encode", "batch"})
    assert not collector.of(unsampled)


def test_a_stored_history_has_a_span_of_its_own(live: Live, collector: Collector):
    events = [{"user_id": "traced", "item_id": "3", "action": "view", "timestamp": HISTORY["request_time"]}]
    assert httpx.post(f"{live.url}/v1/events", json={"events": events}, timeout=120).is_success
    trace_id, _ = ask(live, sampled=True, behaviours=None)
    assert told(spans_of(collector, trace_id, {"history"})["history"])["genrec.events"] == 1


def test_the_request_id_is_in_the_response_and_in_the_json_log_of_what_took_long(live: Live):
    trace_id, response = ask(live, sampled=False)
    assert response.headers["x-request-id"] == f"request-{trace_id}"
    deadline, lines = time.monotonic() + WITHIN_S, []
    while not lines:
        assert time.monotonic() < deadline, "no line of the log has the request's id"
        time.sleep(0.2)
        logs = live.logs.rglob("replica_*_gateway_*.log")
        lines = [json.loads(line) for log in logs for line in log.read_text().splitlines() if f"request-{trace_id}" in line]
    (line,) = lines
    assert line["request_id"] == f"request-{trace_id}"
    assert line["levelname"] == "WARNING"
    assert line["duration_ms"] > 0
    assert Counter(one.split()[0] for one in line["stages"])["encode"] == 1
    assert "traced" not in json.dumps({key: value for key, value in line.items() if key != "request_id"}), "a log holds no user"
