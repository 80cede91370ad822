"""Compile a model: PyTorch -> ONNX -> engines, as a new version of it. What fails is left out and recorded; the model serves without it.
A version that lacks an artifact of the one before, as a step failed this time, is not made current.

A compiler's name in the registry is also the kind of its artifacts and the directory in the bundle that holds all its files.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cluster.bundle import Artifact, Bundle, FailedStep
from cluster.bundle_store import BundleStore, Draft
from cluster.checksums import sha256
from cluster.compilation import CompileOptions, Compiler, CompileStep, compile_command
from cluster.errors import CompileError, GenrecError
from cluster.registry import COMPILERS, choose


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step: an artifact of `size` bytes, or the reason why there is none."""

    step: str
    seconds: float
    artifact: Artifact | None = None
    size: int = 0
    failure: str = ""


def compile_bundle(
    store: BundleStore,
    options: CompileOptions,
    *,
    only: Sequence[str] = (),
    compilers: Mapping[str, str] = COMPILERS,
    on_step: Callable[[StepResult], None] = lambda _: None,
) -> Bundle:
    """Publish a version of the current model, or of the last good one, with new artifacts, and return it. It becomes current unless another
    version has meanwhile, or it lacks an artifact of the earlier one since the step that makes it failed, or it does not verify. `on_step`
    is called with each step's result, and with a failure for each earlier artifact that was to be kept, and does not verify or was built
    from a graph that is another one now.

    `only`: the compilers to run (default: all), in the order of `compilers`, as one may build on what another made; the artifacts of the
    other compilers are kept. Of an asked one only those for other targets are, or measured on their GPU where the new one could not be, and
    only where the graph that they were built from is in the new version as it was: none that run anywhere, of whatever precision. Raises
    UnknownChoice, and CompileError where no step makes anything: nothing is published then.
    """
    asked = {name: choose_compiler(compilers, name) for name in only or compilers}
    chosen = {name: asked[name] for name in compilers if name in asked}
    bundle, refused = store.open_last_good()
    since = None if refused else bundle.manifest.version  # what is current by now may be another one: opening reads gigabytes
    with store.recompile(bundle, since) as draft:
        made, failed = False, set[str]()
        for result in _outcomes(chosen, compilers.keys() - chosen.keys(), bundle, draft, options):
            record(draft, result)
            on_step(result)
            if result.artifact:
                made = True
            else:
                failed.add(result.step)
        if not made:
            raise CompileError(f"no step made anything, so no version is published beside {bundle.version}")
        draft.held_back = not refused and any(_failed(earlier, failed) for earlier in lost(bundle, draft))
    return store.open(draft.version)


def _outcomes(
    chosen: Mapping[str, Compiler | GenrecError], others: AbstractSet[str], bundle: Bundle, draft: Draft, options: CompileOptions
) -> Iterator[StepResult]:
    """Keep what the compilers `others` made, then run the chosen ones' steps."""
    for name in sorted(others):
        yield from keep(name, bundle, draft)
    for name, compiler in chosen.items():
        yield from results(name, compiler, bundle, draft, options)
        yield from keep_other_targets(name, bundle, draft)


def lost(bundle: Bundle, draft: Draft) -> list[Artifact]:
    """The bundle's artifacts that the draft has none in place of."""
    there = {artifact.file for artifact in draft.artifacts}
    return [artifact for artifact in bundle.manifest.artifacts if artifact.file not in there]


def _failed(artifact: Artifact, steps: AbstractSet[str]) -> bool:
    """Whether the step that makes this artifact is one of these, or its compiler could not begin."""
    return not steps.isdisjoint({artifact.kind, _step(artifact)})


def _step(artifact: Artifact) -> str:
    """The step that makes an artifact."""
    target = "" if artifact.target == "any" else f" {artifact.target}"
    return f"{artifact.kind} {artifact.graph} {artifact.precision}{target}"


def choose_compiler(compilers: Mapping[str, str], name: str) -> Compiler | GenrecError:
    """The compiler of that name or, where a package it needs is missing, the error to record. Raises UnknownChoice."""
    try:
        compiler: Compiler = choose("compiler", compilers, name)()
    except ImportError as error:
        return CompileError(f"{error}; install genrec with its extra cpu (on a GPU machine: gpu)")
    return compiler


def results(name: str, compiler: Compiler | GenrecError, bundle: Bundle, draft: Draft, options: CompileOptions) -> Iterator[StepResult]:
    """Run a compiler's steps one after the other; one that fails does not stop the next."""
    try:
        if isinstance(compiler, GenrecError):
            raise compiler
        steps = compiler.steps(bundle, draft, options)
    except GenrecError as error:
        yield StepResult(name, seconds=0.0, failure=str(error))
        return
    for step in steps:
        yield kept_if_measured(attempt(step, draft), bundle, draft)


def kept_if_measured(made: StepResult, bundle: Bundle, draft: Draft) -> StepResult:
    """The result or, where it is an artifact that could not run here and the earlier one of its name was measured on its GPU and built from
    the same graph, that one, taken over. An earlier one that does not verify, or is of another release of the same library, is replaced.
    """
    new = made.artifact
    if new is None or new.measured_on:
        return made
    for old in bundle.manifest.artifacts:
        outdated = old.builder != new.builder and old.builder.partition(" ")[0] == new.builder.partition(" ")[0]
        if old.file == new.file and old.measured_on and not outdated and _same_graph(old, bundle, draft):
            kept = attempt(CompileStep(made.step, partial(_take, old, bundle, draft)), draft)
            return kept if kept.artifact else made
    return made


def attempt(step: CompileStep, draft: Draft) -> StepResult:
    """Run a step; where it fails, remove the files that it left behind."""
    before, start = files(draft), time.perf_counter()
    try:
        artifact = step.run()
    except GenrecError as error:
        for file in files(draft) - before:
            file.unlink()
        return StepResult(step.name, time.perf_counter() - start, failure=str(error))
    return StepResult(step.name, time.perf_counter() - start, artifact, (draft.path / artifact.file).stat().st_size)


def record(draft: Draft, result: StepResult) -> None:
    """Note the step's outcome in the draft, for the manifest."""
    if result.artifact:
        draft.artifacts.append(result.artifact)
    else:
        draft.failed_steps.append(FailedStep(step=result.step, reason=result.failure))


def keep(name: str, bundle: Bundle, draft: Draft) -> list[StepResult]:
    """Take over the earlier artifacts of the compiler `name`, and the notes of its steps that failed. Returns failures as `take_over`."""
    draft.failed_steps += [failed for failed in bundle.manifest.failed_steps if failed.step.split()[0] == name]
    return take_over([artifact for artifact in bundle.manifest.artifacts if artifact.kind == name], bundle, draft)


def keep_other_targets(name: str, bundle: Bundle, draft: Draft) -> list[StepResult]:
    """Take over the earlier artifacts of the compiler `name` for targets that its steps did not try now: those of other machines. Returns
    failures as `take_over`, and one for each artifact of a graph that has changed; those of graphs that are not made any more are left out.
    """
    tried = {artifact.target for artifact in draft.artifacts if artifact.kind == name}
    tried |= {failed.step.split()[-1] for failed in draft.failed_steps if failed.step.split()[0] == name}
    others = [one for one in bundle.manifest.artifacts if one.kind == name and one.target not in {"any", *tried}]
    same = [artifact for artifact in others if _same_graph(artifact, bundle, draft)]
    stale = [artifact for artifact in others if artifact not in same and _graph(artifact, draft)]
    cure = f"once this version is promoted, run where that GPU is: {compile_command(bundle)} --only {name}"
    failure = f"it was built from an earlier graph; {cure}"
    return [*take_over(same, bundle, draft), *(StepResult(_step(artifact), 0.0, failure=failure) for artifact in stale)]


def take_over(artifacts: Sequence[Artifact], bundle: Bundle, draft: Draft) -> list[StepResult]:
    """Take over the artifacts that verify. Returns, for each other one, a failure of the step that made it."""
    kept = [attempt(CompileStep(_step(artifact), partial(_take, artifact, bundle, draft)), draft) for artifact in artifacts]
    draft.artifacts += [result.artifact for result in kept if result.artifact]
    return [result for result in kept if result.failure]


def _take(artifact: Artifact, bundle: Bundle, draft: Draft) -> Artifact:
    """Take over the artifact's files. Raises BundleError."""
    for file in (artifact.file, *(file for file in bundle.manifest.files if file.startswith(f"{artifact.file}."))):
        draft.take(bundle, file)
    return artifact


def _same_graph(artifact: Artifact, bundle: Bundle, draft: Draft) -> bool:
    """Whether the draft has the ONNX graph of the artifact's computation and precision with the bytes that it has in the bundle."""
    if (graph := _graph(artifact, draft)) is None:
        return False
    there = {str(file.relative_to(draft.path)): file for file in files(draft)}
    now = {name: sha256(file) for name, file in there.items() if _of_graph(name, graph)}
    return now == {file: record.sha256 for file, record in bundle.manifest.files.items() if _of_graph(file, graph)}


def _graph(artifact: Artifact, draft: Draft) -> str | None:
    """The draft's ONNX file of the artifact's computation and precision; None where it has none."""
    described = ("onnx", artifact.graph, artifact.precision)
    return next((one.file for one in draft.artifacts if (one.kind, one.graph, one.precision) == described), None)


def _of_graph(file: str, graph: str) -> bool:
    """Whether it is the graph's file, or one of the weights that are kept outside it."""
    return file == graph or file.startswith(f"{graph}.")


def files(draft: Draft) -> set[Path]:
    return {path for path in draft.path.rglob("*") if path.is_file()}
