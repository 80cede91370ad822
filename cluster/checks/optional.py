"""Checks of the optional methods that a backend has; see cluster.protocols."""

import asyncio
from collections.abc import Mapping
from typing import Any

from cluster.checks.report import Failed, Skipped
from cluster.checks.subject import Subject
from cluster.engines.engine import ended
from cluster.engines.forgetting import FORGETTING

ADA, BOB = "ada", "bob"
HERE, ELSEWHERE = "tenant-a", "tenant-b"
NOTHING_KEPT = "it has neither kept nor forget: it keeps nothing of users"


def answers_many_at_a_time(subject: Subject) -> None:
    if not hasattr(subject.backend, "ainfer"):
        raise Skipped("it has no ainfer: it is given a batch at a time")
    alone = [subject.infer(request, what) for what, request in subject.typical.items()]
    answers = asyncio.run(_all(subject, list(subject.typical.values()) * 4))
    for start in range(0, len(answers), len(alone)):
        subject.all_same(alone, answers[start : start + len(alone)], "by infer, and by one of 28 calls of ainfer at a time")


async def _all(subject: Subject, requests: list[Any]) -> list[Any]:
    return await asyncio.gather(*(subject.backend.ainfer(request) for request in requests))


def streams_what_makes_sense(subject: Subject) -> None:
    if not hasattr(subject.backend, "astream"):
        raise Skipped("it has no astream: it answers at once")
    what, request = next(iter(subject.typical.items()))
    rules, pieces = subject.cases.rules, asyncio.run(_pieces(subject, request))
    problems = [rules.nonsense(request, piece) for piece in pieces]
    if problem := next(filter(None, problems), "") or rules.lacking(request, pieces):
        raise Failed(f"asked with {what} as a stream, it {problem}")


async def _pieces(subject: Subject, request: Any) -> list[Any]:
    async with ended(subject.backend.astream(request)) as pieces:
        found = [piece async for piece in pieces]
    if not found:
        raise Failed("astream yielded nothing; its pieces together are the answer")
    return found


def says_how_it_is(subject: Subject) -> None:
    """`alive`, `queue` and `declines`, where it has them."""
    present = [name for name in ("alive", "queue", "declines") if hasattr(subject.backend, name)]
    if not present:
        raise Skipped("it has none of alive, queue and declines")
    if "alive" in present and subject.backend.alive() is not True:
        raise Failed("alive() is not True though it is loaded: it would be loaded anew at once")
    if "queue" in present:
        _figures(subject.backend.queue(), "queue")
    if "declines" in present and not isinstance(said := subject.backend.declines(next(iter(subject.typical.values()))), str):
        raise Failed(f"declines returned a {type(said).__name__}, not a reason, or '' where it takes the request")


def _figures(given: Any, method: str) -> Mapping[str, float]:
    if not isinstance(given, Mapping) or not all(isinstance(value, int | float) for value in given.values()):
        raise Failed(f"{method}() gave {given!r}, not names and numbers")
    return given


def does_not_mix_up_users(subject: Subject) -> None:
    """A request's user changes no answer: also not after another user, or the same name at another tenant, had another history."""
    without_user = subject.batch(subject.typical)
    for user, tenant in ((ADA, HERE), (ADA, ELSEWHERE), (BOB, HERE)):
        theirs = {what: subject.cases.of(request, user, tenant) for what, request in subject.typical.items()}
        one_by_one = [subject.infer(request, what) for what, request in theirs.items()]
        subject.all_same(without_user, one_by_one, f"asked without a user and for {user} of {tenant}, which had other histories before")
        subject.all_same(without_user, subject.batch(theirs), f"asked without a user and, in a batch, for {user} of {tenant}")


def forgets_users(subject: Subject) -> None:
    """Erasures count what they erase, and leave answers as they were."""
    backend = subject.backend
    has = [name for name in (*FORGETTING, "kept") if hasattr(backend, name)]
    if not has:
        raise Skipped(NOTHING_KEPT)
    if has == ["kept"]:
        raise Skipped("it has kept, but no way to forget: it is unloaded at each erasure")
    before = _ask_for_all(subject)
    if hasattr(backend, "forget"):
        _erased_once(lambda: backend.forget(HERE, ADA), "forget")
    if hasattr(backend, "forget_tenant"):
        _erased_once(lambda: backend.forget_tenant(HERE), "forget_tenant")
    if hasattr(backend, "forget_everything"):
        _erased_once(backend.forget_everything, "forget_everything")
        _holds_no_user(subject)
    subject.all_same(before, _ask_for_all(subject), "before and after an erasure")


def _ask_for_all(subject: Subject) -> list[Any]:
    for user, tenant in ((BOB, HERE), (ADA, ELSEWHERE)):
        subject.batch({what: subject.cases.of(request, user, tenant) for what, request in subject.typical.items()})
    return subject.batch({what: subject.cases.of(request, ADA, HERE) for what, request in subject.typical.items()})


def _erased_once(erase: Any, name: str) -> None:
    for turn in ("first", "second"):
        count = erase()
        if not isinstance(count, int):
            raise Failed(f"{name} returned {count!r}, not how many states, rows or entries it erased")
        if turn == "second" and count:
            raise Failed(f"{name} erased {count} more when it was called again with nothing asked in between: the first left something")


def _holds_no_user(subject: Subject) -> None:
    if not hasattr(subject.backend, "kept"):
        return
    figures = _figures(subject.backend.kept() or {}, "kept")
    if left := {name: figures[name] for name in ("users", "rows") if figures.get(name)}:
        raise Failed(f"after forget_everything, kept() still counts {left}")


def erases_one_user_only(subject: Subject) -> None:
    """The erasure of one user lowers the number of users in `kept` by one: the same name at another tenant stays."""
    if not (hasattr(subject.backend, "forget") and hasattr(subject.backend, "kept")):
        raise Skipped("it has not both forget and kept")
    _ask_for_all(subject)
    before = _figures(subject.backend.kept() or {}, "kept").get("users")
    if not before:
        raise Skipped("kept() counts no users")
    subject.backend.forget(HERE, ADA)
    after = _figures(subject.backend.kept(), "kept")["users"]
    if before - after != 1:
        raise Failed(f"it kept {before:g} users, and {after:g} after {ADA} of {HERE} was erased; {before - 1:g} should be left")


def hands_users_over(subject: Subject) -> None:
    """Answers are the same after states were handed over whole, and after each was cut in half on its way."""
    backend = subject.backend
    has = [name for name in ("hand_over", "take_over") if hasattr(backend, name)]
    if not has:
        raise Skipped("it has neither hand_over nor take_over: what it keeps of users ends with its replica")
    if len(has) == 1 or not hasattr(backend, "forget_everything"):
        raise Failed(f"it has {has[0]}, which takes hand_over, take_over and forget_everything together")
    before = _ask_for_all(subject)
    states = list(backend.hand_over())
    for part, what in ((1, "was handed over"), (2, "was cut in half on its way")):
        backend.forget_everything()
        for tenant, user, data in states:
            _taken(backend, (tenant, user, data[: len(data) // part]), whole=part == 1)
        subject.all_same(before, _ask_for_all(subject), f"before and after what it keeps of users {what}")


def _taken(backend: Any, state: tuple[str, str, bytes], *, whole: bool) -> None:
    try:
        taken = backend.take_over(*state)
    except Exception:
        if whole:
            raise
        return
    if not isinstance(taken, int):
        raise Failed(f"take_over returned {taken!r}, not how many bytes of memory that takes")
