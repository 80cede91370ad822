"""Why a backend did not answer a request, and the error where none of a stage's did."""

from collections.abc import Iterable, Sequence
from typing import TypeGuard, TypeVar

from cluster.errors import BackendError, BackendFailed, DeadlineExceeded, GenrecError
from cluster.values import SkippedBackend

AnswerT = TypeVar("AnswerT")


class OutOfTime(SkippedBackend, frozen=True):
    """The caller's time was over before this backend had answered: no fault of its own, and no time is left to ask the next one."""


class Declined(SkippedBackend, frozen=True):
    """The backend serves no such request, whichever replica is asked."""


class NothingKnown(SkippedBackend, frozen=True):
    """The stage was not asked, as nothing is known of the user by which it could answer."""


class NoBackendAnswered(BackendFailed):
    """Every backend of the stage was passed over or broke on this request; `skipped` says why."""

    def __init__(self, stage: str, skipped: tuple[SkippedBackend, ...]) -> None:
        self.stage, self.skipped = stage, skipped
        super().__init__(f"no {stage} could answer ({reasons(skipped)})")

    def __reduce__(self) -> tuple[type["NoBackendAnswered"], tuple[str, tuple[SkippedBackend, ...]]]:
        return type(self), (self.stage, self.skipped)


def passed_over(name: str, error: BackendError) -> SkippedBackend:
    """Why the backend, stage or store of this name was passed over, by the error that it raised."""
    return OutOfTime(name, kind_of(error)) if isinstance(error, DeadlineExceeded) else SkippedBackend(name, kind_of(error), failed=True)


def out_of_time(skipped: Sequence[SkippedBackend]) -> bool:
    """Whether the caller's time was over at the last of these, so that asking further is of no use."""
    return bool(skipped) and isinstance(skipped[-1], OutOfTime)


def declined(skipped: Sequence[SkippedBackend]) -> bool:
    """Whether all of these declined the request, so that another replica's would, too."""
    return bool(skipped) and all(isinstance(one, Declined) for one in skipped)


def has_failed(result: object) -> bool:
    """Whether a backend's result is no answer, through the backend's own fault."""
    return isinstance(result, SkippedBackend) and not isinstance(result, OutOfTime)


def any_answer(results: Iterable[object]) -> bool:
    return any(not isinstance(result, SkippedBackend) for result in results)


def all_answered(results: Sequence[AnswerT | SkippedBackend]) -> TypeGuard[Sequence[AnswerT]]:
    return not any(isinstance(result, SkippedBackend) for result in results)


def reasons(skipped: Iterable[SkippedBackend]) -> str:
    """The reasons on one line: ``tensorrt: no NVIDIA GPU is here; onnxruntime: switched off``."""
    return "; ".join(f"{one.backend}: {one.reason}" for one in skipped)


def reason_of(error: BaseException) -> str:
    """An error as it stands in a reason: genrec's own errors without the name of their class."""
    return f"{error}" if isinstance(error, GenrecError) else f"{type(error).__name__}: {error}"


def kind_of(error: Exception) -> str:
    """An error as other callers may see it: without the text of a foreign one, which may quote the request that met it, and of one of
    genrec's without what is for operators alone.
    """
    return (error.told or f"{error}") if isinstance(error, GenrecError) else type(error).__name__
