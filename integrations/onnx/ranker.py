"""The ranker on ONNX Runtime: the graphs `rank_append` and `rank`, no torch needed."""

from functools import partial
from importlib.util import find_spec
from typing import Any

from cluster.bundle import Bundle
from cluster.errors import BackendUnavailable
from cluster.values import FloatArray
from integrations.hstu.append_inputs import Arrays
from integrations.hstu.limits import MOST_PAIRS, MOST_PAIRS_ON_GPU
from integrations.hstu.ranker_backend import RankerBackend
from integrations.hstu.ranking_engine import GRAPHS, RunRank, RunRankAppend, run_by_graphs
from integrations.onnx.files import compiled_graph
from integrations.onnx.layers import graph_inputs
from integrations.onnx.session import computes_here, open_session


class OnnxRuntimeRanker(RankerBackend):
    """Computes by the CUDA provider where this build of ONNX Runtime has it, else on the CPU. `threads` as for OnnxRuntimeEncoder, other
    options as for RankerBackend.
    """

    brief = False
    """Until a session is open that computes on the CPU."""

    def __init__(self, threads: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._threads = threads

    def _check(self, bundle: Bundle) -> None:
        if find_spec("onnxruntime") is None:
            raise BackendUnavailable("onnxruntime is not installed; install genrec with its extra cpu (on a GPU machine: gpu)")
        for graph in GRAPHS:
            compiled_graph(bundle, graph)

    def _open(self, bundle: Bundle) -> tuple[RunRankAppend, RunRank]:
        append, rank = (open_session(compiled_graph(bundle, graph), self._threads) for graph in GRAPHS)
        self.brief = computes_here(rank)
        self.most_pairs = MOST_PAIRS if self.brief else MOST_PAIRS_ON_GPU
        return run_by_graphs(partial(_run, append), partial(_run, rank))


def _run(session: Any, inputs: Arrays) -> dict[str, FloatArray]:
    names = [node.name for node in session.get_outputs()]
    made = session.run(names, graph_inputs([node.name for node in session.get_inputs()], inputs))
    return dict(zip(names, made, strict=True))
