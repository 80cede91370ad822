"""Compile a model while it is served: in a process of its own, with the lowest priority on this machine.

    with CompiledBeside(Path("models/ml-100k")) as compiling:
        ...
        compiling.under_way

Once the compiled version is published, the service takes it up like any other.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape

from cluster.bundle_store import BundleStore
from cluster.compilation import CompileOptions
from cluster.errors import GenrecError
from pipelines.compile import StepResult, compile_bundle

OPTIONS = CompileOptions(targets=("sm_89",), precisions=("fp32",))
STOP_WITHIN_S = 10.0
console = Console(highlight=False)


class CompiledBeside:
    """Compiles within the block, and prints the outcome of each step; a failure is printed and has no other effect."""

    def __init__(self, model_dir: Path) -> None:
        self._command = compile_command(model_dir)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is None:
            return
        if self.under_way:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_WITHIN_S)
        self._process.kill()
        self._process.wait()

    @property
    def under_way(self) -> bool:
        return self._process is not None and self._process.poll() is None


def compile_command(model_dir: Path) -> list[str]:
    """The command that compiles the model, in this environment's Python."""
    return [sys.executable, "-m", "deployments.cli.compiling", str(model_dir)]


def main(model_dir: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.nice(19)
    try:
        compile_bundle(BundleStore(model_dir), OPTIONS, on_step=_tell)
    except GenrecError as error:
        console.print(f"[yellow]nothing was compiled[/]: {escape(str(error))}", soft_wrap=True)
    except KeyboardInterrupt:
        console.print("compiling was stopped")


def _tell(result: StepResult) -> None:
    outcome = f"{result.size / 1e6:.1f} MB" if result.artifact else f"[yellow]left out[/]: {escape(result.failure)}"
    console.print(f"[bold]built[/]  {escape(result.step)}: {outcome} ({result.seconds:.1f} s)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
