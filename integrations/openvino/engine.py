"""A graph compiled by OpenVINO for the CPU."""

import logging
from pathlib import Path
from typing import Any, Literal, get_args

from cluster.errors import UnknownChoice

_LOG = logging.getLogger(__name__)
Precision = Literal["f32", "bf16"]
CAPACITY = "CPU_RUNTIME_CACHE_CAPACITY"
"""A property that OpenVINO does not document: a later version may not have it."""
INSTALL = "openvino is not installed; install genrec with its extra openvino"


def known_precision(precision: Precision) -> Precision:
    """The precision as it is. Raises UnknownChoice where it is none."""
    if precision not in get_args(Precision):
        raise UnknownChoice("precision", precision, get_args(Precision))
    return precision


def compiled(graph: Path, threads: int, precision: Precision, kept: int | None = None) -> Any:
    """The graph as an openvino.CompiledModel for single calls. `threads` 0: all cores. `kept`: for how many operations OpenVINO keeps the
    programs that it made for earlier shapes; by default 5,000, which take 2 GB.

    The precision is always named: where the CPU multiplies bf16, OpenVINO takes that unless it is told otherwise. Threads stay unpinned:
    several replicas of a machine would pin theirs to the same cores.
    """
    import openvino  # noqa: PLC0415 - an optional package

    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,
    }
    core = openvino.Core()
    model = core.read_model(graph)
    if kept is not None:
        try:
            return core.compile_model(model, "CPU", {**options, CAPACITY: kept})
        except RuntimeError as error:
            if CAPACITY not in str(error):
                raise
            _LOG.warning("this OpenVINO does not let the programs be bounded that it keeps, which come to some GB (%s)", error)
    return core.compile_model(model, "CPU", options)
