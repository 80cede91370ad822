"""Where the exporter leaves its files in a bundle."""

from cluster.compilation import Precision


def graph_file(graph: str, precision: Precision) -> str:
    return f"onnx/{graph}.{precision}.onnx"
