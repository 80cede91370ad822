"""How a training run is shown: a bar on a terminal, a line an epoch elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipelines.epochs import EpochReport

SHOWN = {"hr@10": "hr@10", "ndcg@10": "ndcg@10", "loss": "validation loss"}


class TrainingProgress:
    """An Observer of a run, to be used in a `with` block."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        figures = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}")
        hidden = not self.console.is_terminal
        self.progress = Progress(*figures, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console, disable=hidden)
        self.task = self.progress.add_task("", total=None, figures="")
        self.done = 0

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()

    def note(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def phase(self, name: str, epochs: int, done: int) -> None:
        self.done = done
        self.progress.update(self.task, description=name, total=epochs, completed=done, figures="")
        if self.progress.disable:
            self.console.print(f"{name}: {epochs - done} epochs at most", highlight=False)

    def batch(self, share: float) -> None:
        self.progress.update(self.task, completed=self.done + share)

    def epoch(self, report: EpochReport) -> None:
        self.done = report.epoch
        validation = "".join(f"  {shown} {report.validation[name]:.4f}" for name, shown in SHOWN.items() if name in report.validation)
        figures = f"epoch {report.epoch}  loss {report.loss:.4f}{validation}"
        self.progress.update(self.task, completed=report.epoch, figures=figures)
        if self.progress.disable:
            self.console.print(f"{figures}  {report.seconds:.1f} s", highlight=False)
