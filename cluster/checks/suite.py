"""Run the checks over one backend of a stage, one after another in a thread of their own.

    report = check("my_package.encoder:MyEncoder", "encoder", bundle)

A check that fails does not end the run. A check that hangs does, since a backend is asked by one thread at a time.
"""

import asyncio
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.bundle import Bundle
from cluster.checks import answers, before_load, optional
from cluster.checks.cases import Cases
from cluster.checks.encoder_cases import EncoderCases
from cluster.checks.generator_cases import GeneratorCases
from cluster.checks.ranker_cases import RankerCases
from cluster.checks.report import Failed, Outcome, Report, Result, Skipped
from cluster.checks.subject import Subject
from cluster.checks.worker import Stuck, Worker
from cluster.engines.skipped import reason_of
from cluster.errors import GenrecError, UnknownChoice

CASES: Mapping[str, Callable[[Bundle], Cases]] = {"encoder": EncoderCases, "generator": GeneratorCases, "ranker": RankerCases}
LIMIT_S = 60.0
_OTHERS = ("site-packages", "/cluster/checks/", "<")
"""Parts of the paths of traceback frames that are not the backend's own."""


@dataclass(frozen=True, slots=True)
class Check:
    """`loaded`: whether the check asks a loaded backend. `limits`: how many times the limit the check may take."""

    name: str
    run: Callable[[Subject], None]
    loaded: bool = True
    limits: int = 1


NEEDED = (
    Check("is made without arguments", before_load.is_made_without_arguments, loaded=False),
    Check("has the methods of a backend", before_load.has_the_methods, loaded=False),
    Check("says whether it can serve", before_load.says_whether_it_can_serve, loaded=False),
)
BEFORE = (
    *NEEDED,
    Check("says so cheaply", before_load.says_so_cheaply, loaded=False),
    Check("does not raise where a model's files are gone", before_load.does_not_raise_where_files_are_gone, loaded=False),
)
LOADED = (
    Check("answers one by one as a batch of one", answers.answers_one_by_one_as_a_batch_of_one),
    Check("answers a batch in the order asked, each as alone", answers.answers_in_the_order_asked),
    Check("answers large batches", answers.answers_large_batches),
    Check("answers an empty batch with nothing", answers.answers_an_empty_batch_with_nothing),
    Check("leaves earlier answers as they were", answers.leaves_earlier_answers_as_they_were),
    Check("keeps restricted and other requests apart", answers.keeps_restricted_and_other_requests_apart),
    Check("gives up what is late, or answers it", answers.gives_up_what_is_late),
    Check("answers from other threads", answers.answers_from_other_threads),
    Check("answers many at a time", optional.answers_many_at_a_time),
    Check("streams what makes sense", optional.streams_what_makes_sense),
    Check("says how it is", optional.says_how_it_is),
    Check("does not mix up users", optional.does_not_mix_up_users),
    Check("forgets users", optional.forgets_users),
    Check("erases one user only", optional.erases_one_user_only),
    Check("hands users over", optional.hands_users_over),
    Check("leaves a second one of it alone", answers.leaves_a_second_one_alone),
    Check("answers the same after close and load", answers.answers_after_close_and_load),
)
CLOSES = Check("closes", lambda subject: subject.backend.close())


def check(import_string: str, stage: str, bundle: Bundle, *, options: Mapping[str, Any] | None = None, limit_s: float = LIMIT_S) -> Report:
    """All checks of the stage. `limit_s`: how long one may take, the load excepted, which may take ten times that.

    Raises UnknownChoice at an unknown stage.
    """
    if stage not in CASES:
        raise UnknownChoice("stage", stage, CASES)
    subject = Subject(import_string, options or {}, bundle, CASES[stage](bundle), limit_s)
    run = _Run(subject)
    run.all(BEFORE)
    unavailable = run.unavailable()
    if not unavailable and run.fit:
        run.all(checks_of(subject.cases))
    run.close()
    return Report(import_string, stage, bundle.version, unavailable, tuple(run.outcomes))


def checks_of(cases: Cases) -> Iterator[Check]:
    """The load and the checks after it: one for each request that the stage's cases name, and those of every stage."""
    yield Check("loads", before_load.loads, loaded=False, limits=10)
    for what, request in cases.edges().items():
        yield Check(f"answers {what}", partial(answers.answers_with_sense, what=what, request=request))
    for what, request in cases.restricted().items():
        yield Check(f"respects {what}", partial(answers.answers_with_sense, what=what, request=request))
    for what, request in cases.strangers().items():
        yield Check(f"survives {what}", partial(answers.survives, what=what, request=request))
    for what, request in cases.optional().items():
        yield Check(f"answers or declines {what}", partial(answers.draws_or_declines, what=what, request=request))
    yield from LOADED


class _Run:
    def __init__(self, subject: Subject) -> None:
        self.outcomes: list[Outcome] = []
        self._subject, self._worker, self._stuck_in = subject, Worker(), ""

    @property
    def fit(self) -> bool:
        """Whether there is anything to load: without a class, its methods or an availability the other checks say nothing."""
        return all(outcome.result is Result.PASSED for outcome in self.outcomes[: len(NEEDED)])

    def unavailable(self) -> str:
        """Why the backend cannot serve here, "" where it can."""
        return self._subject.unavailable if self.fit else ""

    def all(self, checks: Iterator[Check] | tuple[Check, ...]) -> None:
        for one in checks:
            self.outcomes.append(self._outcome(one))

    def close(self) -> None:
        if self._subject.loaded:
            self.all((CLOSES,))
        self._worker.close()

    def _outcome(self, one: Check) -> Outcome:
        began = time.perf_counter()
        result, reason = self._ran(one)
        return Outcome(one.name, result, reason, time.perf_counter() - began)

    def _ran(self, one: Check) -> tuple[Result, str]:
        if obstacle := self._obstacle(one):
            return Result.SKIPPED, obstacle
        try:
            self._worker.call(lambda: one.run(self._subject), self._subject.limit_s * one.limits)
        except Skipped as skipped:
            return Result.SKIPPED, str(skipped)
        except Failed as failed:
            return Result.FAILED, str(failed)
        except Stuck as stuck:
            self._stuck_in = one.name
            return Result.FAILED, f"it {stuck}: it hangs, or is very slow"
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - any error of a foreign engine is what it found
            return Result.FAILED, f"it raised {_told(error)}"
        return Result.PASSED, ""

    def _obstacle(self, one: Check) -> str:
        """Why a check is not run; "" where it is."""
        if self._stuck_in:
            return f"it is still busy with {self._stuck_in!r}"
        if self._subject.backend is None and one is not NEEDED[0]:
            return "it could not be made"
        return "it is not loaded" if one.loaded and not self._subject.loaded else ""


def _told(error: BaseException) -> str:
    """What was raised, and where; of our own errors, which speak for themselves, only the message."""
    if isinstance(error, GenrecError):
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in _OTHERS)]
    return f"{reason_of(error)} ({own[-1].filename}:{own[-1].lineno})" if own else reason_of(error)
