"""ONNX -> TensorRT engines, one for each graph, precision and GPU architecture.

A network is strongly typed: its precisions are those of the ONNX graph, which has been checked against the model. An engine can only be
checked itself where its GPU is; there it passes the same gate.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from cluster.bundle import Artifact, Bundle, Manifest
from cluster.bundle_store import Draft
from cluster.compilation import CompileOptions, CompileStep
from cluster.errors import BackendUnavailable, CompileError
from integrations.hstu.config import RankerConfig
from integrations.hstu.limits import limits, row_blocks
from integrations.hstu.ranking_engine import MICRO_BATCH
from integrations.tensorrt.device import gpu_architecture, gpu_name
from integrations.tensorrt.engine import Engine
from integrations.tensorrt.library import CURE, FULL, RTX, broken_as, installed, load_library, make_logger, title
from integrations.tensorrt.options import MOST_CANDIDATES
from integrations.tensorrt.parity import measure_here

Range: TypeAlias = tuple[int, int, int]
GRAPHS = ("encode", "append", "rank_append", "rank")
"""The graphs that engines are built from. Not `retrieve`: an engine would store the item table twice, and double in size."""


class TensorRTCompiler:
    """Builds engines: with the full library and a GPU, for that GPU; with TensorRT for RTX, for every target, on any machine."""

    def steps(self, bundle: Bundle, draft: Draft, options: CompileOptions) -> Sequence[CompileStep]:
        here = _architecture_here()
        library = builder_library(here)
        targets = _targets(library, here, options)
        precisions = {"fp32", "fp16"} & set(options.precisions)
        if not precisions:  # int8 is for CPUs
            return []
        sources = [a for a in draft.artifacts if a.kind == "onnx" and a.graph in GRAPHS and a.precision in precisions]
        if not sources:
            raise CompileError(f"there is no ONNX graph ({' or '.join(GRAPHS)}) to build from: its export failed or was never run")
        (draft.path / "tensorrt").mkdir(exist_ok=True)
        return [
            CompileStep(f"tensorrt {graph.graph} {graph.precision} {target}", partial(_make, library, bundle, draft, graph, target))
            for graph in sources
            for target in targets
        ]


def _targets(library: Any, here: str | None, options: CompileOptions) -> tuple[str, ...]:
    """The architectures to build for. This machine's GPU is always among them: where that cannot be built for, the failed step says so.

    Raises CompileError where there is none.
    """
    if here and library.__name__ == FULL:
        return (here,)
    if not (here or options.targets):
        raise CompileError("none was named to build for, and this machine has no GPU; name GPU architectures: --targets sm_89")
    return tuple(dict.fromkeys((*options.targets, here))) if here else options.targets


def profile_ranges(graph: str, manifest: Manifest) -> dict[str, Range]:
    """The (smallest, most likely, largest) size of each named dimension of a graph."""
    if graph in {"rank", "rank_append"}:
        return _ranker_ranges(manifest)
    longest, usual = limits(manifest.model).max_length, limits(manifest.model).max_history
    if graph == "append":
        block = -(-longest // row_blocks(usual))  # of rows that `encode` attends at once: as much memory
        return {"batch": (1, 8, 32), "new": (1, 1, max(min(32, longest), block)), "past": (0, usual, longest)}
    return {"batch": (1, 8, 32), "length": (row_blocks(usual), usual, longest)}


def _ranker_ranges(manifest: Manifest) -> dict[str, Range]:
    assert manifest.ranker is not None  # its graphs are there
    longest = RankerConfig.of(manifest.ranker).max_history
    return {"new": (1, longest, longest), "past": (0, longest, longest), "candidates": (1, MICRO_BATCH, MOST_CANDIDATES)}


def build_engine(library: Any, graph: Path, ranges: Mapping[str, Range], target: str) -> Any:
    """The serialised engine, a bytes-like object. Raises CompileError with the library's own reason."""
    with broken_as(CompileError, f"{title(library)}, building {graph.name} for {target},"):
        return _built(library, graph, ranges, target)


def _built(library: Any, graph: Path, ranges: Mapping[str, Range], target: str) -> Any:
    logger = make_logger(library)
    builder = library.Builder(logger)
    network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = library.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        error = parser.get_error(0)
        raise CompileError(f"{title(library)} cannot parse {graph.name}: operator {error.node_operator()!r}: {error.desc()}")
    config = builder_config(library, builder, target)
    config.add_optimization_profile(_profile(builder, network, ranges))
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise CompileError(f"{title(library)} cannot build {graph.name} for {target}: {'; '.join(logger.errors) or 'no reason given'}")
    return engine


def _make(library: Any, bundle: Bundle, draft: Draft, graph: Artifact, target: str) -> Artifact:
    file = f"tensorrt/{graph.graph}.{graph.precision}.{target}.engine"
    engine = build_engine(library, draft.path / graph.file, profile_ranges(graph.graph, bundle.manifest), target)
    (draft.path / file).write_bytes(engine)
    made = {"kind": "tensorrt", "file": file, "target": target, "builder": title(library), "parity": {}}
    if target == _architecture_here():
        made |= {"parity": measured(library, bundle, draft.path / file, graph), "measured_on": gpu_name()}
    return graph.model_copy(update=made)


def measured(library: Any, bundle: Bundle, file: Path, graph: Artifact) -> dict[str, float]:
    try:
        return measure_here(Engine(library, file), bundle, graph)
    except BackendUnavailable as error:
        raise CompileError(str(error)) from error


def builder_config(library: Any, builder: Any, target: str) -> Any:
    """The configuration for an architecture, without TF32: it is on by default, and its 10 bits would fail the fp32 gate."""
    config = builder.create_builder_config()
    config.clear_flag(library.BuilderFlag.TF32)
    if library.__name__ == RTX:
        _target(library, config, target)
    return config


def _profile(builder: Any, network: Any, ranges: Mapping[str, Range]) -> Any:
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        names = [tensor.get_dimension_name(axis) if size == -1 else None for axis, size in enumerate(tensor.shape)]
        if unknown := {name for name in names if name} - ranges.keys():
            raise CompileError(f"input {tensor.name!r} has dimensions {sorted(unknown)} without a range; known are {sorted(ranges)}")
        shapes = [tuple(ranges[name][end] if name else size for name, size in zip(names, tensor.shape, strict=True)) for end in range(3)]
        profile.set_shape(tensor.name, *shapes)
    return profile


def _target(library: Any, config: Any, target: str) -> None:
    capabilities = {f"sm_{name[2:]}": value for name, value in library.ComputeCapability.__members__.items() if name.startswith("SM")}
    if target not in capabilities:
        choices = ", ".join(capabilities)
        raise CompileError(f"{title(library)} does not build for {target!r}, only for {choices}; use the full tensorrt on that GPU")
    config.num_compute_capabilities = 1
    config.set_compute_capability(capabilities[target], 0)


def _architecture_here() -> str | None:
    try:
        return gpu_architecture()
    except BackendUnavailable:
        return None


def builder_library(here: str | None) -> Any:
    """The full library where there is a GPU for it and it loads, else TensorRT for RTX."""
    usable = [name for name in installed() if here or name != FULL]
    if not usable:
        raise CompileError(f"no TensorRT builder can work here; {CURE}")
    reasons = []
    for name in usable:
        try:
            return load_library(name)
        except ImportError as error:
            reasons.append(str(error))
    raise CompileError("; ".join(reasons))
