"""Checks of a loaded backend's answers."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
from msgspec.structs import replace

from cluster.checks.report import Failed, Skipped
from cluster.checks.subject import Subject
from cluster.checks.worker import Worker
from cluster.errors import DeadlineExceeded


def answers_one_by_one_as_a_batch_of_one(subject: Subject) -> None:
    for what, request in subject.typical.items():
        (batched,) = subject.batch({what: request})
        subject.same(subject.infer(request, what), batched, f"{what}, by infer and by batch_infer of one")


def answers_in_the_order_asked(subject: Subject) -> None:
    alone = [subject.infer(request, what) for what, request in subject.typical.items()]
    together = subject.batch(subject.typical)
    problems = [_problem(subject, one, other) for one, other in zip(alone, together, strict=True)]
    if not any(problems):
        return
    whats, place = list(subject.typical), next(index for index, problem in enumerate(problems) if problem)
    others = [what for what, one in zip(whats, alone, strict=True) if not _problem(subject, one, together[place])]
    hint = f"; it is the answer to {others[0]}: answers must come in the order asked" if others else ""
    raise Failed(f"{whats[place]}, in a batch and alone: {problems[place]}{hint}")


def _problem(subject: Subject, one: Any, other: Any) -> str:
    return subject.cases.rules.disagreement(one, other)


def answers_large_batches(subject: Subject) -> None:
    many = {f"{what} ({copy})": request for copy in range(10) for what, request in subject.typical.items()}
    answers = subject.batch(many)
    for start in (0, len(answers) - len(subject.typical)):
        subject.all_same(subject.batch(subject.typical), answers[start : start + len(subject.typical)], "in a batch of 70 and of 7")


def answers_an_empty_batch_with_nothing(subject: Subject) -> None:
    if len(answers := subject.backend.batch_infer([])):
        raise Failed(f"batch_infer([]) gave {len(answers)} answers")


def leaves_earlier_answers_as_they_were(subject: Subject) -> None:
    (first, request), *_ = subject.typical.items()
    answer = subject.infer(request, first)
    before = _copy(answer)
    for what, other in subject.typical.items():
        subject.infer(other, what)
    for name, array in before.items():
        if not np.array_equal(array, getattr(answer, name)):
            raise Failed(f"the {name} of an answer changed while the next was computed: they share memory; give out a copy")


def _copy(answer: Any) -> dict[str, Any]:
    arrays = {name: getattr(answer, name) for name in answer.__slots__}
    return {name: array.copy() for name, array in arrays.items() if isinstance(array, np.ndarray)}


def answers_with_sense(subject: Subject, what: str, request: Any) -> None:
    subject.infer(request, what)


def keeps_restricted_and_other_requests_apart(subject: Subject) -> None:
    if not (restricted := subject.cases.restricted()):
        raise Skipped("the requests of this stage have no restrictions")
    mixed = {key: value for pair in zip(restricted.items(), subject.typical.items(), strict=False) for key, value in pair}
    for (what, request), answer in zip(mixed.items(), subject.batch(mixed), strict=True):
        subject.same(subject.infer(request, what), answer, f"{what}, alone and in a batch with other restrictions")


def survives(subject: Subject, what: str, request: Any) -> None:
    good, asked = next(iter(subject.typical.items()))
    before = subject.infer(asked, good)
    try:
        answer = subject.backend.infer(request)
    except Exception:  # noqa: BLE001 - refusing it with any error is right
        answer = None
    if answer is not None and (problem := subject.cases.rules.nonsense(request, answer)):
        raise Failed(f"asked with {what}, it neither raised an error nor made sense: it {problem}")
    subject.same(before, subject.infer(asked, good), f"after {what}, the next request")


def draws_or_declines(subject: Subject, what: str, request: Any) -> None:
    declines = getattr(subject.backend, "declines", None)
    if reason := declines(request) if declines else "":
        raise Skipped(f"it declines: {reason}")
    first = subject.infer(request, what)
    subject.same(first, subject.infer(request, what), f"{what}, twice with the same seed")


def gives_up_what_is_late(subject: Subject) -> None:
    """A late request gets an error or an answer soon; a backend that hangs meets the check's time limit."""
    good, asked = next(iter(subject.typical.items()))
    before, late = subject.infer(asked, good), replace(asked, deadline=time.monotonic() - 1)
    with suppress(DeadlineExceeded):
        subject.infer(late, "a deadline in the past")
    _one_late_of_two(subject, late, asked)
    in_time = replace(asked, deadline=time.monotonic() + subject.limit_s)
    subject.same(before, subject.infer(in_time, "a deadline to come"), "after a late request, the next one")


def _one_late_of_two(subject: Subject, late: Any, asked: Any) -> None:
    try:
        answers = subject.backend.batch_infer([late, asked])
    except DeadlineExceeded:
        return
    if len(answers) != 2:
        raise Failed(f"gave {len(answers)} answers to a batch of a late request and another; DeadlineExceeded takes the late one's place")
    for request, answer in zip((late, asked), answers, strict=True):
        if not (request is late and isinstance(answer, DeadlineExceeded)):
            subject.checked(request, answer, "one late request in a batch of two")


def answers_from_other_threads(subject: Subject) -> None:
    here = subject.batch(subject.typical)
    for _ in range(2):
        other = Worker()
        try:
            answers = other.call(lambda: subject.batch(subject.typical), subject.limit_s)
        finally:
            other.close()
        subject.all_same(here, answers, "from another thread than the one that loaded it")


def answers_after_close_and_load(subject: Subject) -> None:
    before = subject.batch(subject.typical)
    subject.loaded = False
    subject.backend.close()
    subject.backend.load(subject.bundle)
    subject.loaded = True
    subject.all_same(before, subject.batch(subject.typical), "before it was closed and after it was loaded again")


def leaves_a_second_one_alone(subject: Subject) -> None:
    """Closing one instance leaves another: two live side by side while a new version of the model is loaded."""
    before, other = subject.batch(subject.typical), subject.make()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(other.load, subject.bundle).result()
        thread.submit(other.close).result()
    subject.all_same(before, subject.batch(subject.typical), "after another one of it was loaded and closed")
