"""A graph in fp16 where that is cheap and safe: matrix products and embedding tables; all else stays fp32.

LayerNorm of small attention sums, logarithms of seconds and the final normalisation lose too much in fp16, and cost little. TensorRT, which
builds strongly typed engines, takes the types from the graph.
"""

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

_PRODUCTS = ("MatMul", "Gemm")


def halved(model: ModelProto) -> ModelProto:
    """A copy of an fp32 model whose products and lookups work in fp16; inputs and outputs keep their types."""
    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    tables = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    narrowed: dict[str, NodeProto | None] = {}
    nodes: list[NodeProto] = []
    for node in graph.node:
        positions = _narrow_inputs(node, tables)
        for position in positions:
            name = node.input[position]
            if name not in narrowed:
                narrowed[name] = None if name in tables else helper.make_node("Cast", [name], [f"{name}_fp16"], to=TensorProto.FLOAT16)
                nodes += [cast] if (cast := narrowed[name]) is not None else []
            node.input[position] = f"{name}_fp16"
        nodes.append(node)
        if positions:
            wide = node.output[0]
            node.output[0] = f"{wide}_narrow"
            nodes.append(helper.make_node("Cast", [node.output[0]], [wide], to=TensorProto.FLOAT))
    _narrow_tables(graph, narrowed.keys() & tables, nodes)
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    onnx.checker.check_model(result)
    return result


def _narrow_inputs(node: NodeProto, tables: set[str]) -> list[int]:
    """Which inputs of this node become fp16, if any."""
    if node.op_type in _PRODUCTS:
        return [position for position, name in enumerate(node.input) if name]
    return [0] if node.op_type == "Gather" and node.input[0] in tables else []


def _narrow_tables(graph: onnx.GraphProto, names: set[str], nodes: list[NodeProto]) -> None:
    used = {name for node in nodes for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    narrow = [
        numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), f"{tensor.name}_fp16")
        for tensor in graph.initializer
        if tensor.name in names
    ]
    del graph.initializer[:]
    graph.initializer.extend([*kept, *narrow])
