"""An engine against its model, on the GPU that is here: when it is built, or when it is loaded where its GPU was not at hand then."""

from cluster.bundle import Artifact, Bundle
from cluster.errors import BackendError, CompileError
from integrations.hstu.weights import load_model
from integrations.onnx.graphs import graphs
from integrations.onnx.parity import measure, require_parity
from integrations.onnx.samples import samples
from integrations.tensorrt.engine import Engine


def measure_here(engine: Engine, bundle: Bundle, artifact: Artifact) -> dict[str, float]:
    """Raises CompileError where the engine breaks or is outside the tolerance of its precision."""
    model = load_model(bundle)
    computation = next(candidate for candidate in graphs(model, bundle.prompt_length) if candidate.name == artifact.graph)
    try:
        parity = measure(
            computation,
            lambda inputs: {name: tensor.cpu().numpy() for name, tensor in engine.run(inputs).items()},
            samples(computation, model.config),
            model.item_vectors().detach().numpy(),
        )
    except (RuntimeError, BackendError) as error:  # torch raises RuntimeError for whatever goes wrong on the GPU
        raise CompileError(f"the engine was built and broke when it ran: {error}") from error
    require_parity(parity, artifact.precision)
    return parity
