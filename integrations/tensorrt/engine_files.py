"""Which of a bundle's engines can serve here, and its load, which first checks that it answers as the model does."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.bundle import Artifact, Bundle
from cluster.compilation import Precision, compile_command, unavailable, why_missing
from cluster.errors import BackendUnavailable, CompileError
from integrations.tensorrt.device import gpu_architecture, gpu_name
from integrations.tensorrt.library import CURE, how_to_install, installed, installed_version, load_library

if TYPE_CHECKING:
    from integrations.tensorrt.engine import Engine

REFUSED: dict[tuple[str, str], str] = {}
"""Why an engine is refused on a GPU, by its file's sha256 and the GPU's name: in a later load it would only be found wrong once more."""


def engine_of(bundle: Bundle, graph: str, precisions: Sequence[Precision]) -> Artifact:
    """The engine of a graph to serve here. The cheapest checks come first: packages, the bundle, the GPU, and only then the architecture.

    Raises BackendUnavailable or BundleError.
    """
    libraries = installed()
    if not libraries:
        raise BackendUnavailable(f"TensorRT is not installed; {CURE}")
    engines = [a for a in bundle.manifest.artifacts if (a.kind, a.graph) == ("tensorrt", graph)]
    if not engines:
        raise unavailable(bundle, why_missing(bundle, "tensorrt", graph))
    if not any((bundle.path / engine.file).is_file() for engine in engines):
        bundle.verified(engines[0].file)
    engine = _fitting(bundle, engines, gpu_architecture(), precisions)
    _require_builder(engine, libraries, bundle)
    bundle.verified(engine.file)
    if reason := REFUSED.get(_here(bundle, engine)):
        raise unavailable(bundle, reason)
    return engine


def checked_engine(bundle: Bundle, artifact: Artifact) -> "Engine":
    """The engine, once it is known to answer as the model does. Raises ImportError, BackendUnavailable, BundleError or CompileError."""
    library = load_library(artifact.builder.split()[0])
    from integrations.tensorrt.engine import Engine  # noqa: PLC0415 - imports torch, which availability must not cost

    engine = Engine(library, bundle.path / artifact.file)
    if artifact.measured_on != gpu_name():
        from integrations.tensorrt.parity import measure_here  # noqa: PLC0415

        try:
            measure_here(engine, bundle, artifact)
        except CompileError as error:
            reason = f"{artifact.file}, built without this GPU and first checked here, is refused: {error}"
            if error.__cause__ is None:  # what breaks an engine may pass, as a lack of memory; a wrong answer stays wrong
                REFUSED[_here(bundle, artifact)] = reason
            raise CompileError(reason) from error
    return engine


def _here(bundle: Bundle, engine: Artifact) -> tuple[str, str]:
    return bundle.manifest.files[engine.file].sha256, gpu_name()


def _fitting(bundle: Bundle, engines: Sequence[Artifact], architecture: str, precisions: Sequence[Precision]) -> Artifact:
    """The engine for this architecture. Raises BackendUnavailable where there is none."""
    for precision in precisions:
        for engine in engines:
            if (engine.target, engine.precision) == (architecture, precision):
                return engine
    there = ", ".join(f"{engine.target} {engine.precision}" for engine in engines)
    wanted = [f"tensorrt {engines[0].graph} {precision} {architecture}" for precision in precisions]
    failed = next((step for step in bundle.manifest.failed_steps if step.step in wanted), None)
    cure = f"run on this machine: {_rebuild(bundle)}"
    because = f"the step {failed.step!r} failed: {failed.reason}" if failed else cure
    asked = f"{architecture} {'/'.join(precisions)}"
    raise unavailable(bundle, f"{bundle.version} has engines for {there}, none for this GPU, {asked}; {because}")


def _require_builder(engine: Artifact, libraries: Sequence[str], bundle: Bundle) -> None:
    """Raises BackendUnavailable unless the library that built the engine is here in that very version: no other one loads it."""
    library, _, version = engine.builder.partition(" ")
    if library not in libraries:
        cure = f"{how_to_install(library, version)}, or build engines on this machine: {_rebuild(bundle)}"
        raise unavailable(bundle, f"{engine.file} was built by {engine.builder}, which is not installed; {cure}")
    if (here := installed_version(library)) not in {"", version}:
        cure = f"run on this machine: {_rebuild(bundle)}"
        raise unavailable(bundle, f"{engine.file} was built by {engine.builder}, and {here} is installed, which does not load it; {cure}")


def _rebuild(bundle: Bundle) -> str:
    return f"{compile_command(bundle)} --only tensorrt"
