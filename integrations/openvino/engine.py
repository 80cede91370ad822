"""A graph compiled by OpenVINO for the CPU."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from cluster.errors import UnknownChoice
from integrations.hstu.append_inputs import Arrays
from integrations.hstu.stateful_backend import KeptT, StatefulBackend

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


class Graph:
    """A compiled graph that is called with arrays by name. One request of OpenVINO's is used again, call after call, until `clear`: it
    refers to the last inputs, which are not copied, and has memory of its own for the last outputs, which are. For one thread.
    """

    def __init__(self, model: Any) -> None:
        """`model`: an openvino.CompiledModel, of which a call would make a request that cannot be dropped."""
        self.model, self.inputs, self.outputs = model, model.inputs, model.outputs
        self._request: Any = None

    def __call__(self, inputs: Arrays) -> Mapping[str, Any]:
        if (request := self._request) is None:
            request = self._request = self.model.create_infer_request()
        made: Mapping[str, Any] = request.infer(inputs, share_inputs=True)
        return made

    def clear(self) -> None:
        """Free the last inputs and outputs. The next call takes the time to make a request, well below a millisecond."""
        self._request = None


class OpenVinoBackend(StatefulBackend[KeptT]):
    """What OpenVINO's backends have in common. A subclass puts the graphs that it calls into `_graphs`."""

    _graphs: Sequence[Graph] = ()

    def _clear(self) -> None:
        super()._clear()
        for graph in self._graphs:
            graph.clear()

    def close(self) -> None:
        super().close()
        self._graphs = ()


def compiled(graph: Path, threads: int, precision: Precision, kept: int | None = None) -> Graph:
    """The graph for single calls. `threads` 0: all cores. `kept`: for how many operations OpenVINO keeps the
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
            return Graph(core.compile_model(model, "CPU", {**options, CAPACITY: kept}))
        except RuntimeError as error:
            if CAPACITY not in str(error):
                raise
            _LOG.warning("this OpenVINO does not let the programs be bounded that it keeps, which come to some GB (%s)", error)
    return Graph(core.compile_model(model, "CPU", options))
