"""The ranker on OpenVINO: ONNX Runtime's graphs, `rank_append` and `rank`, on the CPU."""

from functools import partial
from importlib.util import find_spec
from typing import Any

from cluster.bundle import Bundle
from cluster.errors import BackendUnavailable
from integrations.hstu.append_inputs import Arrays
from integrations.hstu.limits import MOST_PAIRS
from integrations.hstu.ranker_backend import RankerBackend
from integrations.hstu.ranking_engine import GRAPHS, KeptEvents, RunRank, RunRankAppend, run_by_graphs
from integrations.onnx.files import compiled_graph
from integrations.onnx.layers import graph_inputs
from integrations.onnx.session import threads_granted
from integrations.openvino.engine import INSTALL, Graph, OpenVinoBackend, compiled

KEPT = 200
"""How many compiled shapes are kept. A ranker's shapes hardly ever come twice: 200 are as fast as 5,000, 0 takes two thirds more time."""


class OpenVinoRanker(OpenVinoBackend[KeptEvents], RankerBackend):
    """Computes in f32. `threads` as for OpenVinoEncoder, other options as for RankerBackend."""

    most_pairs = MOST_PAIRS

    def __init__(self, threads: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._threads = threads

    def _check(self, bundle: Bundle) -> None:
        if find_spec("openvino") is None:
            raise BackendUnavailable(INSTALL)
        for graph in GRAPHS:
            compiled_graph(bundle, graph)

    def _open(self, bundle: Bundle) -> tuple[RunRankAppend, RunRank]:
        threads = self._threads or threads_granted()
        append, rank = (compiled(compiled_graph(bundle, graph), threads, "f32", KEPT) for graph in GRAPHS)
        self._graphs = append, rank
        return run_by_graphs(partial(_run, append), partial(_run, rank))


def _run(engine: Graph, inputs: Arrays) -> Any:
    return engine(graph_inputs([node.any_name for node in engine.inputs], inputs))
