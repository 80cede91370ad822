"""The ranker on two TensorRT engines, `rank_append` and `rank`."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster.bundle import Bundle
from cluster.compilation import Precision
from cluster.errors import BackendUnavailable, CompileError, ConfigError
from cluster.values import FloatArray
from integrations.hstu.append_inputs import Arrays
from integrations.hstu.ranker_backend import RankerBackend
from integrations.hstu.ranking_engine import GRAPHS, RunRank, RunRankAppend, run_by_graphs
from integrations.onnx.layers import graph_inputs
from integrations.tensorrt.engine_files import checked_engine, engine_of
from integrations.tensorrt.options import MOST_CANDIDATES, known_precisions

if TYPE_CHECKING:
    from integrations.tensorrt.engine import Engine


class TensorRTRanker(RankerBackend):
    """Runs the engines for this GPU's architecture, in the first of `precisions` that was built; other options as in RankerBackend, with
    a `micro_batch` of at most MOST_CANDIDATES.
    """

    def __init__(self, precisions: Sequence[Precision] = ("fp32", "fp16"), **options: Any) -> None:
        """Raises UnknownChoice or ConfigError at an option that means nothing."""
        super().__init__(**options)
        self._precisions = known_precisions(precisions)
        if self._micro_batch > MOST_CANDIDATES:
            raise ConfigError(f"micro_batch ({self._micro_batch}) must be at most {MOST_CANDIDATES}, for which TensorRT engines are built")

    def _check(self, bundle: Bundle) -> None:
        for graph in GRAPHS:
            engine_of(bundle, graph, self._precisions)

    def _open(self, bundle: Bundle) -> tuple[RunRankAppend, RunRank]:
        try:
            append, rank = (checked_engine(bundle, engine_of(bundle, graph, self._precisions)) for graph in GRAPHS)
        except CompileError as error:
            raise BackendUnavailable(str(error)) from error
        return run_by_graphs(partial(_run, append), partial(_run, rank))


def _run(engine: "Engine", inputs: Arrays) -> dict[str, FloatArray]:
    import torch  # noqa: PLC0415 - loaded with the engine

    outputs = engine.run({name: torch.as_tensor(given) for name, given in graph_inputs(engine.inputs, inputs).items()})
    return {name: output.cpu().numpy() for name, output in outputs.items()}
