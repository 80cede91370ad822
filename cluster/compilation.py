"""What a compiler is: a list of steps, each of which puts one artifact of a model into a bundle or says why it can't."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from cluster.bundle import Artifact, Bundle
from cluster.bundle_store import Draft
from cluster.errors import BackendUnavailable

Precision: TypeAlias = Literal["fp32", "fp16", "int8"]


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """`targets`: GPU architectures to build engines for (the full TensorRT builds only for this machine's GPU). `precisions`: those to
    make; int8 only on request.
    """

    targets: tuple[str, ...] = ("sm_80", "sm_86", "sm_89", "sm_120")
    precisions: tuple[Precision, ...] = ("fp32", "fp16")


@dataclass(frozen=True, slots=True)
class CompileStep:
    """`run` leaves a file in the draft and describes it. Raises CompileError; what it left behind is then dropped."""

    name: str
    run: Callable[[], Artifact]


class Compiler(Protocol):
    """A class whose constructor takes nothing. Its steps run in order; later ones find earlier ones' artifacts in `draft.artifacts`."""

    def steps(self, bundle: Bundle, draft: Draft, options: CompileOptions) -> Sequence[CompileStep]: ...


def artifact_file(artifact: Artifact, bundle: Bundle) -> Path:
    """The artifact's file, verified together with the files beside it that carry on its name (weights kept outside a graph).

    Raises BundleError where one is missing or altered.
    """
    for file in bundle.manifest.files:
        if file.startswith(f"{artifact.file}."):
            bundle.verified(file)
    return bundle.verified(artifact.file)


def compile_command(bundle: Bundle, precision: Precision = "fp32") -> str:
    """The command that compiles this version's model, also in this precision."""
    usual = CompileOptions().precisions
    asked = "" if precision in usual else f" --precision {','.join((*usual, precision))}"
    return f"genrec compile --model-dir {bundle.path.parent}{asked}"


def why_missing(bundle: Bundle, kind: str, graph: str, precision: Precision = "fp32") -> str:
    """Why this version has no such artifact: the step or compiler that failed, or the command to run where none was."""
    step, form = (f"{kind} {graph}", "") if precision == "fp32" else (f"{kind} {graph} {precision}", f" in {precision}")
    failed = next((s for s in bundle.manifest.failed_steps if s.step == kind or f"{s.step} ".startswith(f"{step} ")), None)
    because = f"the step {failed.step!r} failed: {failed.reason}" if failed else f"run: {compile_command(bundle, precision)}"
    return f"{bundle.version} has no {kind} artifact {graph!r}{form}; {because}"


def unavailable(bundle: Bundle, reason: str) -> BackendUnavailable:
    """The error of a backend that cannot use an artifact of this version; its callers read the reason without the model's directory."""
    return BackendUnavailable(reason, told=bundle.told(reason))
