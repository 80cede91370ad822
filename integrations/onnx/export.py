"""PyTorch -> ONNX: the model's graphs with dynamic batch and length, each checked against the model before it is kept."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch

from cluster.bundle import Artifact, Bundle
from cluster.bundle_store import Draft
from cluster.compilation import CompileOptions, CompileStep, Precision
from cluster.errors import CompileError
from cluster.values import FloatArray
from integrations.hstu.config import SequenceConfig
from integrations.hstu.user_behavior_schema import BehaviourBatch
from integrations.hstu.weights import load_model, load_ranker
from integrations.onnx.files import graph_file
from integrations.onnx.graphs import Graph, graphs, ranker_graphs
from integrations.onnx.half import halved
from integrations.onnx.int8 import quantize
from integrations.onnx.parity import Run, measure, require_parity
from integrations.onnx.quality_gate import LEAST, States, compare
from integrations.onnx.samples import Inputs, samples
from integrations.onnx.session import open_session
from integrations.onnx.shapes import constant_shapes

OPSET = 20
MOST_BYTES = 2**31 - 1
"""How large an ONNX file may be, as any message of protobuf."""
DIMENSIONS = {"B": "batch", "L": "length", "S": "new", "P": "past", "M": "candidates"}
"""The name in the graph of each dimension that varies; engines have a range for each."""


class OnnxCompiler:
    """Exports `encode`, `retrieve`, of an HSTU `append`, and of a ranker `rank` and `rank_append`; those that engines take also in
    fp16.

    `retrieve`, which serves on CPUs, is also made in int8 where that is asked for.
    """

    def steps(self, bundle: Bundle, draft: Draft, options: CompileOptions) -> Sequence[CompileStep]:
        model = load_model(bundle)
        (draft.path / "onnx").mkdir(exist_ok=True)
        made: list[tuple[Graph, SequenceConfig]] = [(graph, model.config) for graph in graphs(model, bundle.prompt_length)]
        if bundle.manifest.ranker:
            ranker = load_ranker(bundle)
            made += [(graph, ranker.config) for graph in ranker_graphs(ranker)]
        return [
            CompileStep(f"onnx {graph.name} {precision}", partial(self._make, graph, precision, config, bundle, draft.path))
            for graph, config in made
            for precision in _precisions(graph, options)
        ]

    def _make(self, graph: Graph, precision: Precision, config: SequenceConfig, bundle: Bundle, directory: Path) -> Artifact:
        file = graph_file(graph.name, precision)
        if precision == "fp32":
            export(graph, config, directory / file)
        else:
            narrow(directory, graph, precision, directory / file)
        if precision == "int8":
            parity = check_quality(bundle, directory, graph, directory / file)
        else:
            parity = measure(graph, session_run(directory / file), samples(graph, config), bundle.item_vectors)
            require_parity(parity, precision)
        builder = f"torch {torch.__version__}, onnx opset {OPSET}"
        return Artifact(kind="onnx", graph=graph.name, file=file, precision=precision, builder=builder, parity=parity)


def export(graph: Graph, config: SequenceConfig, path: Path) -> None:
    """Write the graph. Raises CompileError where its weights are larger than a file may be, and with the exporter's own reason, also where
    what is traced depends on the example.
    """
    if (size := sum(tensor.nbytes for tensor in graph.module.state_dict().values())) > MOST_BYTES:
        cure = "engines that need no such graph serve the model; for one that has it, train with fewer items or a smaller --dim"
        raise CompileError(f"the graph is larger than the 2 GiB that one ONNX file may hold: its weights take {size:,} bytes; {cure}")
    example = max(samples(graph, config), key=partial(_smallest_dimension, graph))  # what has a size of 1 would be traced as broadcast
    module = graph.module.eval()
    try:
        with torch.no_grad(), constant_shapes(OPSET), _strict():
            torch.onnx.export(
                module,
                tuple(example.values()),
                path,
                dynamo=False,  # tracing takes a fifth of the time of torch.export
                input_names=list(graph.inputs),
                output_names=list(graph.outputs),
                dynamic_axes={
                    name: {axis: DIMENSIONS[letter] for axis, letter in enumerate(dims) if letter} for name, dims in graph.inputs.items()
                },
                opset_version=OPSET,
            )
        _name_all_inputs(graph, example, path)
    except Exception as error:
        raise CompileError(f"torch.onnx.export could not express it: {_first_line(error.__cause__ or error)}") from error


def _name_all_inputs(graph: Graph, example: Inputs, path: Path) -> None:
    """Give the graph at `path` back what the exporter drops, the inputs that no output depends on, as SASRec's times."""
    model = onnx.load(path)
    kept = {value.name: value for value in model.graph.input}
    if kept.keys() == graph.inputs.keys():
        return
    for name, dims in graph.inputs.items():
        shape = [DIMENSIONS[letter] if letter else size for letter, size in zip(dims, example[name].shape, strict=True)]
        element = onnx.helper.np_dtype_to_tensor_dtype(example[name].numpy().dtype)
        kept.setdefault(name, onnx.helper.make_tensor_value_info(name, element, shape))
    del model.graph.input[:]
    model.graph.input.extend(kept[name] for name in graph.inputs)
    onnx.save(model, path)


def _smallest_dimension(graph: Graph, inputs: Inputs) -> int:
    """The smallest of the sizes that vary."""
    sizes = (zip(dims, inputs[name].shape, strict=True) for name, dims in graph.inputs.items())
    return min((size for dims in sizes for letter, size in dims if letter), default=0)


def narrow(directory: Path, graph: Graph, precision: Precision, path: Path) -> None:
    """Write the fp16 or int8 form of a graph whose fp32 form stands in `directory`. Raises CompileError."""
    full = directory / graph_file(graph.name, "fp32")
    if not full.is_file():
        raise CompileError(f"there is no fp32 graph {graph.name!r} to narrow: its own step failed")
    try:
        if precision == "int8":
            quantize(full, path)
        else:
            onnx.save(halved(onnx.load(full)), path)
    except Exception as error:
        raise CompileError(f"narrowing it to {precision} broke: {_first_line(error)}") from error


def check_quality(bundle: Bundle, directory: Path, graph: Graph, path: Path) -> dict[str, float]:
    """The figures of the coarse form at `path` of a `retrieve` graph whose fp32 form stands in `directory`, as an artifact records them.

    Raises CompileError where they are not good enough.
    """
    coarse, full = (_states(session_run(file)) for file in (path, directory / graph_file(graph.name, "fp32")))
    quality = compare(bundle, coarse, full)
    if missed := quality.shortcoming(LEAST):
        raise CompileError(f"{missed}; serve this model in fp32 and leave int8 out of --precision")
    return {"top10_agreement": quality.overlap, "cosine": quality.cosine}


def _states(run: Run) -> States:
    def states(batch: BehaviourBatch) -> FloatArray:
        made: FloatArray = run({**batch.tensors(), "top_n": torch.tensor(1)})["state"]
        return made

    return states


def session_run(path: Path) -> Run:
    """The graph at `path` as a function, on ONNX Runtime. Raises CompileError where it does not load."""
    try:
        session = open_session(path)
    except Exception as error:
        raise CompileError(f"ONNX Runtime could not load it: {_first_line(error)}") from error
    inputs_taken = {node.name for node in session.get_inputs()}
    outputs = [node.name for node in session.get_outputs()]

    def run(inputs: Inputs) -> dict[str, Any]:
        given = {name: value.contiguous().numpy() for name, value in inputs.items() if name in inputs_taken}
        try:
            return dict(zip(outputs, session.run(outputs, given), strict=True))
        except Exception as error:
            raise CompileError(f"ONNX Runtime could not run it: {_first_line(error)}") from error

    return run


def _precisions(graph: Graph, options: CompileOptions) -> list[Precision]:
    """fp32, and the narrower precision of the graph: `retrieve` serves on ONNX Runtime only, where fp16 is of no use on a CPU."""
    coarse: Precision = "int8" if graph.name == "retrieve" else "fp16"
    return ["fp32", *([coarse] if coarse in options.precisions else [])]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


@contextmanager
def _strict() -> Iterator[None]:
    """Raise where the tracer would make a constant of the example's number or branch; keep quiet that tracing is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        warnings.filterwarnings("ignore", message="You are using the legacy TorchScript-based ONNX export", category=DeprecationWarning)
        warnings.filterwarnings("ignore", module=r"torch\.onnx\.", category=DeprecationWarning)  # of its own parts
        yield
