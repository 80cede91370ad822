"""Where the exporter leaves its files in a bundle, and where engines find them."""

from pathlib import Path

from cluster.bundle import Bundle
from cluster.compilation import Precision, artifact_file, compile_command, unavailable, why_missing
from cluster.errors import BundleError


def graph_file(graph: str, precision: Precision) -> str:
    return f"onnx/{graph}.{precision}.onnx"


def compiled_graph(bundle: Bundle, graph: str, precision: Precision = "fp32") -> Path:
    """The file of the graph to serve. Raises BackendUnavailable where the model was compiled without it, or the file was altered."""
    if (artifact := bundle.artifact("onnx", graph, precision=precision)) is None:
        raise unavailable(bundle, why_missing(bundle, "onnx", graph, precision))
    try:
        return artifact_file(artifact, bundle)
    except BundleError as error:
        raise unavailable(bundle, f"{error}; run: {compile_command(bundle, precision)}") from error
