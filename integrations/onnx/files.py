"""Where the exporter leaves its files in a bundle, and where engines find them."""

from pathlib import Path

from cluster.bundle import Bundle
from cluster.compilation import Precision, artifact_file, compile_command, why_missing
from cluster.engines.skipped import kind_of
from cluster.errors import BackendUnavailable, BundleError


def graph_file(graph: str, precision: Precision) -> str:
    return f"onnx/{graph}.{precision}.onnx"


def compiled_graph(bundle: Bundle, graph: str, precision: Precision = "fp32") -> Path:
    """The file of the graph to serve. Raises BackendUnavailable where the model was compiled without it, or the file was altered."""
    if (artifact := bundle.artifact("onnx", graph, precision=precision)) is None:
        raise BackendUnavailable(why_missing(bundle, "onnx", graph, precision))
    try:
        return artifact_file(artifact, bundle)
    except BundleError as error:
        cure = f"run: {compile_command(bundle, precision)}"
        raise BackendUnavailable(f"{error}; {cure}", told=f"{kind_of(error)}; {cure}") from error
