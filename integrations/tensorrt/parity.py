"""Compare an engine with its model on this machine's GPU: when it is built or, where its GPU was not at hand then, when it is loaded."""

from cluster.bundle import Artifact, Bundle
from cluster.errors import BackendError, CompileError
from integrations.hstu.config import SequenceConfig
from integrations.hstu.sequence_model import SequenceModel
from integrations.hstu.weights import load_model, load_ranker
from integrations.onnx.graphs import Graph, graphs, ranker_graphs
from integrations.onnx.parity import measure, require_parity
from integrations.onnx.samples import samples
from integrations.tensorrt.engine import Engine


def measure_here(engine: Engine, bundle: Bundle, artifact: Artifact) -> dict[str, float]:
    """The engine's parity. Raises CompileError where it is outside the tolerance of its precision, and from what breaks the engine."""
    model = load_model(bundle)
    computation, config = _computation(bundle, model, artifact.graph)
    try:
        parity = measure(
            computation,
            lambda inputs: {name: tensor.cpu().numpy() for name, tensor in engine.run(inputs).items()},
            samples(computation, config),
            model.item_vectors().detach().numpy(),
        )
    except (RuntimeError, BackendError) as error:  # torch raises RuntimeError for any error on the GPU
        raise CompileError(f"the engine was built and broke when it ran: {error}") from error
    require_parity(parity, artifact.precision)
    return parity


def _computation(bundle: Bundle, model: SequenceModel, name: str) -> tuple[Graph, SequenceConfig]:
    found = {graph.name: (graph, model.config) for graph in graphs(model, bundle.prompt_length)}
    if name not in found:
        ranker = load_ranker(bundle)
        found |= {graph.name: (graph, ranker.config) for graph in ranker_graphs(ranker)}
    return found[name]
