"""genrec compile: turn a trained model into ONNX graphs and TensorRT engines, each checked against it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.bundle import Manifest
from cluster.bundle_store import BundleStore
from cluster.compilation import CompileOptions, Precision
from cluster.errors import CompileError, UnknownChoice
from deployments.cli.models import overtaken
from pipelines.compile import StepResult, compile_bundle

_TARGETS = ",".join(CompileOptions().targets)
_PRECISIONS = ",".join(CompileOptions().precisions)


def compile_(
    model_dir: Annotated[Path, typer.Option(help="Directory with the versions of one model, such as models/ml-1m.")],
    targets: Annotated[str, typer.Option(help="GPU architectures to build for; the full TensorRT builds for its own GPU only.")] = _TARGETS,
    precision: Annotated[str, typer.Option(help="Precisions to build: fp32, fp16, and int8 for CPUs.")] = _PRECISIONS,
    only: Annotated[
        str, typer.Option(help="Run only these compilers, such as onnx; what others made is kept, and engines for other GPUs.")
    ] = "",
) -> None:
    """Publish a version of the current model with compiled artifacts, and print what became of every step. Where no step made anything no
    version is published, and the status is 1.
    """
    console, store = Console(), BundleStore(model_dir)
    options = CompileOptions(targets=_split(targets), precisions=_precisions(precision))
    results: list[StepResult] = []
    with console.status("compiling") as status:

        def show(result: StepResult) -> None:
            results.append(result)
            status.update(f"compiling: {result.step} took {result.seconds:.1f} s")

        bundle, nothing = None, ""
        try:
            bundle = compile_bundle(store, options, only=_split(only), on_step=show)
        except CompileError as error:
            nothing = str(error)
    console.print(_table(f"{bundle.version}, compiled from version {bundle.manifest.compiled_from}" if bundle else nothing, results))
    for failed in (result for result in results if result.failure):
        console.print(f"[yellow]{failed.step}[/]: ", end="")
        console.print(failed.failure, markup=False)
    if bundle is None:
        raise typer.Exit(1)
    if told := _not_current(store, bundle.manifest):
        console.print(told, soft_wrap=True, markup=False)


def _not_current(store: BundleStore, made: Manifest) -> str:
    """Why the version that was made is not the current one; "" where it is."""
    if made.compiled_from is None or store.current() != made.compiled_from:
        return overtaken(store, made.version)
    cure = f"to serve this one all the same: genrec models promote {made.version} --model-dir {store.root}"
    return f"version {made.compiled_from} stays current: it has artifacts that {made.version} lacks, as steps failed; {cure}"


def _table(title: str, results: list[StepResult]) -> Table:
    unmeasured = any(result.artifact and not result.artifact.parity for result in results)
    table = Table(title=escape(title), caption="an engine without error figures has not run: its GPU is not here" if unmeasured else None)
    for column in ("step", "size", "max abs error", "same top 10", "seconds"):
        table.add_column(column, no_wrap=column == "step")
    for result in results:
        parity = result.artifact.parity if result.artifact else {}
        table.add_row(
            result.step,
            f"{result.size / 1e6:.2f} MB" if result.artifact else "[yellow]failed[/]",
            _error(parity),
            f"{parity['top10_agreement']:.1%}" if parity else "",
            f"{result.seconds:.1f}",
        )
    return table


def _error(parity: Mapping[str, float]) -> str:
    """The artifact's error for the table; for int8, which has no such figure, how alike its states are."""
    if "cosine" in parity:
        return f"cosine {parity['cosine']:.4f}"
    return f"{parity['max_abs_error']:.1e}" if parity else ""


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _precisions(text: str) -> tuple[Precision, ...]:
    for name in _split(text):
        if name not in get_args(Precision):
            raise UnknownChoice("precision", name, get_args(Precision))
    return cast("tuple[Precision, ...]", _split(text))
