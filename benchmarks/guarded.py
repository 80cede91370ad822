"""Cases that may crash, hang or spoil a device: the others have their rows when one of them does.

The cases of a group run in a child process that sends a row as each of them ends. A case that fails may leave the device unusable for its
whole process, as an illegal access does in CUDA: the cases after it get a new process. So do those after one that ended the process or
took too long; its row says so.
"""

import faulthandler
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["ok", "failed", "not run"]
START_S = 300.0
"""How long a child may take to import what it needs and to list its cases."""


class NotHere(Exception):
    """A case cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Label:
    """Which case it is."""

    what: str
    sizes: str = ""
    dtype: str = ""

    def __str__(self) -> str:
        return " | ".join(part for part in (self.what, self.sizes, self.dtype) if part)


@dataclass(frozen=True)
class Finding:
    """What a case measured. An error above its limit, or one that is NaN, has failed."""

    error: float | None = None
    limit: float | None = None
    ms: float | None = None
    eager_ms: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.error is None or self.limit is None or self.error <= self.limit


@dataclass(frozen=True)
class Case:
    label: Label
    run: Callable[[], Finding]


@dataclass(frozen=True)
class Row:
    """How a case ended; `note` says why it failed or was not run."""

    label: Label
    verdict: Verdict
    finding: Finding = Finding()
    note: str = ""


@dataclass(frozen=True)
class Group:
    """`cases`, as `package.module:function`, takes `options` and returns Cases; it is imported in the child process only.

    Those with the text `only` in their label run.
    """

    name: str
    cases: str
    options: Mapping[str, Any] = field(default_factory=dict)
    only: str = ""


class _Ended(Exception):
    """A child sends no more rows; the message says why."""


def run(groups: Iterable[Group], limit_s: float) -> Iterator[Row]:
    """A row a case, in their order, or one for a group that could not start. A case may take `limit_s`."""
    for group in groups:
        yield from _rows(group, limit_s)


def alone(cases: str, options: Mapping[str, Any], label: str) -> Row:
    """The row of the one case with this label, which runs in this process. Raises ValueError where there is none."""
    for case in _listed(cases, options):
        if str(case.label) == label:
            return _row(case)
    raise ValueError(f"{cases} has no case {label!r}")


def _rows(group: Group, limit_s: float) -> Iterator[Row]:
    labels: Sequence[Label] = [Label(group.name)]
    listed, done = False, 0
    while done < len(labels):
        with closing(_Child(group, done)) as child:
            try:
                labels, listed = child.receive(START_S), True
                while done < len(labels):
                    row = child.receive(limit_s)
                    done += 1
                    yield row
                    if row.verdict == "failed":
                        break
            except _Ended as ended:
                yield Row(labels[done], "failed", note=str(ended) if listed else f"could not start: {ended}")
                done += 1


class _Child:
    def __init__(self, group: Group, skip: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._receiving, sending = context.Pipe(duplex=False)
        self._process = context.Process(target=_send_rows, args=(sending, group, skip))
        self._process.start()
        sending.close()

    def receive(self, limit_s: float) -> Any:
        """The next message. Raises _Ended where there is none in time."""
        if not self._receiving.poll(limit_s):
            raise _Ended(f"took longer than {limit_s:g} s")
        try:
            message = self._receiving.recv()
        except EOFError:
            self._process.join()
            raise _Ended(_exit(self._process.exitcode or 0)) from None
        if isinstance(message, _Ended):
            raise message
        return message

    def close(self) -> None:
        """A child that has sent all its rows has nothing left to do."""
        self._receiving.close()
        self._process.kill()
        self._process.join()


def _exit(code: int) -> str:
    return f"the process died of {signal.Signals(-code).name}" if code < 0 else f"the process ended with status {code}"


def _send_rows(sending: Connection, group: Group, skip: int) -> None:
    """What a child does."""
    faulthandler.enable()
    try:
        cases = [case for case in _listed(group.cases, group.options) if group.only in str(case.label)]
    except Exception as error:  # noqa: BLE001 - its row says what it was
        sending.send(_Ended(_said(error)))
        return
    sending.send([case.label for case in cases])
    for case in cases[skip:]:
        sending.send(_row(case))


def _listed(cases: str, options: Mapping[str, Any]) -> Iterable[Case]:
    module, _, function = cases.partition(":")
    made: Iterable[Case] = getattr(import_module(module), function)(**options)
    return made


def _row(case: Case) -> Row:
    try:
        finding = case.run()
    except NotHere as error:
        return Row(case.label, "not run", note=str(error))
    except Exception as error:  # noqa: BLE001 - its row says what it was
        return Row(case.label, "failed", note=_said(error))
    return Row(case.label, "ok" if finding.holds else "failed", finding, finding.note)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
