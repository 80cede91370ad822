"""Dynamic int8 quantization of a graph: layers' weights in int8, their inputs quantized at each call; all else stays fp32."""

from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto


def quantize(full: Path, path: Path) -> None:
    """Write the int8 form of the graph at `full` to `path`: weights with a scale for each column, activations with one for each call.

    The product that is searched for the nearest items keeps its fp32 table: in int8 it would rank near ties by rounding. Weights have 7
    bits, so that CPUs without VNNI, which add two products in 16 bits, answer as those with it.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic  # noqa: PLC0415 - a third of a second that only this form costs

    model = onnx.load(full)
    onnx.helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})  # else it advises to fold what the exporter folded
    options: dict[str, Any] = {"op_types_to_quantize": ["MatMul"], "nodes_to_exclude": _searched(model)}
    quantize_dynamic(model, path, **options, per_channel=True, reduce_range=True, weight_type=QuantType.QInt8)


def _searched(model: ModelProto) -> list[str]:
    """The names of the nodes with outputs that a TopK searches."""
    searched = {node.input[0] for node in model.graph.node if node.op_type == "TopK"}
    return [node.name for node in model.graph.node if searched.intersection(node.output)]
