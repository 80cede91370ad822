"""Exporters of Serve's spans; ray_config.yaml names one: `tracing_config: {exporter_import_path: deployments.tracing:otlp}`."""

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from cluster.errors import ConfigError


def otlp() -> list[SpanProcessor]:
    """Send spans to an OpenTelemetry collector over HTTP, at OTEL_EXPORTER_OTLP_ENDPOINT (and the other variables of its specification).

    These variables must be set on every node before Ray starts there. Raises ConfigError where the exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - only tracing needs it
    except ImportError as error:
        raise ConfigError("traces need OpenTelemetry's exporter (pip install -e '.[tracing]', on every node)") from error
    return [BatchSpanProcessor(OTLPSpanExporter())]
