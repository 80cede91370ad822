"""Shapes as constants in a traced graph, where the exporter would compute them by a dozen nodes each time: a fifth of a small model's time.

In the shape that ONNX's Reshape takes, 0 copies the input's own dimension of that place and -1 is what is left.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.onnx import register_custom_op_symbolic, symbolic_helper, unregister_custom_op_symbolic  # type: ignore[attr-defined]

_NAME = "aten::reshape"


@contextmanager
def constant_shapes(opset: int) -> Iterator[None]:
    """Within the block, the tracing exporter writes each `reshape` with a constant shape: 0, the input's own, for a size that varies."""
    register_custom_op_symbolic(_NAME, _reshape, opset)
    try:
        yield
    finally:
        unregister_custom_op_symbolic(_NAME, opset)


def _reshape(graph: Any, x: Any, sizes: Any) -> Any:
    """The first size is the number of users, which may be 0: it is written as -1, what is left."""
    found = [symbolic_helper._maybe_get_const(size, "i") for size in symbolic_helper._unpack_list(sizes)]  # noqa: SLF001 - symbolics' own
    users, *rest = [size if isinstance(size, int) else 0 for size in found]
    return graph.op("Reshape", x, graph.op("Constant", value_t=torch.tensor([users or -1, *rest])))
