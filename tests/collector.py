"""An OpenTelemetry collector of the tests' own: takes spans over HTTP, as OTLP in protobuf, and keeps them."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.ports import free_port


class Collector:
    """`url` is for OTEL_EXPORTER_OTLP_ENDPOINT; it listens between `start` and `stop`."""

    def __init__(self) -> None:
        self._spans: list[Any] = []
        collected = self._spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                collected.extend(one for resource in sent.resource_spans for scope in resource.scope_spans for one in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Not to the tests' output."""

        self._handler, self.url = Handler, f"http://127.0.0.1:{free_port()}"

    def start(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", int(self.url.rpartition(":")[2])), self._handler)
        Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, trace_id: str) -> list[Any]:
        """The spans of a trace that have come so far."""
        return [one for one in list(self._spans) if one.trace_id.hex() == trace_id]
