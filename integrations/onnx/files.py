"""Where the exporter leaves its files in a bundle."""

from cluster.compilation import Precision

ITEM_VECTORS = "onnx/item_vectors.npy"


def graph_file(graph: str, precision: Precision) -> str:
    return f"onnx/{graph}.{precision}.onnx"
