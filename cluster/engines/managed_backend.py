"""One backend under the controller's care: switched on or off, probed, loaded when first needed, called, measured, stopped when it breaks.

Only what a backend's own code raises is caught here (a foreign engine may raise anything); an error of ours passes through.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from cluster.bundle import Bundle
from cluster.engines.breaker import Breaker, BreakerSettings, BreakerState
from cluster.engines.forgetting import forget, kept
from cluster.engines.latency import LatencyRecorder, LatencySummary
from cluster.engines.skipped import OutOfTime, has_failed, reason_of
from cluster.engines.stage_rules import StageRules
from cluster.errors import DeadlineExceeded
from cluster.protocols import Backend
from cluster.registry import resolve
from cluster.values import Availability, SkippedBackend

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
LOADING = "is being loaded"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendSnapshot:
    """One backend as its replica sees it.

    `calls` counts requests, `failures` those it broke on, `fallbacks` those it answered after a preferred backend was passed over.
    `rank` is its place in the order (0 is asked first), None where the order leaves it out. `reason` says why it would not be asked now.
    `kept` is what it says it keeps of users, empty where it says nothing.
    """

    name: str
    import_string: str
    available: bool
    reason: str
    enabled: bool
    rank: int | None
    loaded: bool
    breaker: BreakerState
    last_error: str
    calls: int
    failures: int
    fallbacks: int
    latency: LatencySummary
    kept: Mapping[str, float] = field(default_factory=dict)


class ManagedBackend(Generic[RequestT, AnswerT]):
    """`answer` and `probe` belong to one thread at a time; `enabled` may be set and `snapshot` taken from any."""

    def __init__(
        self,
        name: str,
        import_string: str,
        *,
        bundle: Bundle,
        rules: StageRules[RequestT, AnswerT],
        breaker: BreakerSettings,
        retries: int,
        clock: Callable[[], float],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.import_string, self.options = name, import_string, dict(options or {})
        self.enabled = True
        self.loading = False  # set by the code that calls `load` beside the calls; until it is unset no other code touches the engine
        self.availability = Availability.no("not probed yet")
        self.exclusion = ""
        self.measured_ms: float | None = None
        self.suspected: Callable[[], bool] = lambda: False  # whether one failure is enough to open its breaker
        self.breaker = Breaker(breaker)
        self.last_error = ""
        self.calls = self.failures = self.fallbacks = 0
        self._bundle, self._rules, self._retries, self._clock = bundle, rules, retries, clock
        self._backend: Backend[RequestT, AnswerT] | None = None
        self._loaded, self._counting = False, True
        self._broken_calls = 0  # of the engine, since `answer` was last asked
        self._holds = False  # a load was begun, whether or not it ended well: there is something to close
        self._known_good: RequestT | None = None
        self._latency, self._latency_lock = LatencyRecorder(clock()), threading.Lock()

    @property
    def loaded(self) -> bool:
        return self._loaded

    @property
    def proven(self) -> bool:
        """Whether it has answered a user's request here."""
        return self.calls > self.failures

    def obstacle(self) -> SkippedBackend | None:
        """Why it must not be asked now; None where it may."""
        if not self.enabled:
            return self._skipped("switched off by the operator")
        if not self.availability.ok:
            return self._skipped(self.availability.reason)
        if self.loading:
            return self.unready()
        if self.exclusion:
            return self._skipped(self.exclusion)
        if self.breaker.state(now := self._clock()) is BreakerState.OPEN:
            return self._skipped(f"{self.last_error}; next trial in {self.breaker.wait_s(now):.1f} s", failed=True)
        return None

    def unready(self) -> SkippedBackend:
        """That it waits to be loaded, anew if it broke."""
        if self.breaker.state(self._clock()) is BreakerState.CLOSED:
            return self._skipped(LOADING)
        return self._skipped(f"{self.last_error}; it is being loaded again", failed=True)

    def probe(self) -> Availability:
        """Ask again whether it can run here. One that was repaired starts afresh: newly loaded, its failures forgotten."""
        was_available, self.availability = self.availability.ok, self._get_availability()
        if was_available and not self.availability.ok:
            self.unload()
        if not was_available and self.availability.ok:
            self.breaker = self.breaker.succeeded()
        return self.availability

    def answer(self, requests: Sequence[RequestT]) -> list[AnswerT | SkippedBackend]:
        """For each request an answer, or why there is none, in the order asked.

        Where a whole batch breaks, a request that it answered before tells whether the backend is broken or the batch is poisoned; a
        poisoned batch is halved until the requests at fault stand alone. A poisoned request never counts against the breaker of a backend
        that answers others; every call of a broken one does, also that by which it is found out.
        """
        results = self._answer(requests)
        self.calls += len(requests)
        self.failures += sum(has_failed(result) for result in results)
        return results

    def rehearse(self, samples: Sequence[RequestT]) -> Sequence[AnswerT | SkippedBackend]:
        """The same with requests that no user made: neither calls nor latencies are counted."""
        with self._uncounted():
            return self._answer(samples)

    def load(self) -> bool:
        """Make it ready to answer; whether it is. A failed load opens the breaker at once."""
        if self._loaded:
            return True
        self._holds = True
        try:
            self._made().load(self._bundle)
        except Exception as error:  # noqa: BLE001 - any error of an engine while it loads is a reason to ask the next one
            self._note(f"could not be loaded: {reason_of(error)}", error)
            self._open(at_once=True)
        else:
            self._loaded = True
        return self._loaded

    def unload(self) -> None:
        backend, self._backend = self._backend, None
        held, self._holds = self._holds, False
        self._loaded, self._known_good, self.measured_ms, self.exclusion = False, None, None, ""
        if backend is None or not held:
            return
        try:
            backend.close()
        except Exception:  # a foreign engine may raise anything, and it is no longer needed
            logger.warning("backend %s broke while it was closed", self.name, exc_info=True)

    def snapshot(self, rank: int | None, obstacle: SkippedBackend | None) -> BackendSnapshot:
        with self._latency_lock:
            latency = self._latency.summary(self._clock())
        return BackendSnapshot(
            self.name,
            self.import_string,
            self.availability.ok,
            obstacle.reason if obstacle else "",
            self.enabled,
            rank,
            self._loaded,
            self.breaker.state(self._clock()),
            self.last_error,
            self.calls,
            self.failures,
            self.fallbacks,
            latency,
            self.kept(),
        )

    def forget(self, tenant: str | None, user: str | None) -> int:
        """See cluster.forgetting; as `answer`, it belongs to one thread at a time.

        One that breaks over it is unloaded, and with it goes all that it keeps; it is loaded again as any that is not.
        """
        if not self._loaded or self.loading:  # a load starts with nothing
            return 0
        try:
            return forget(self._backend, tenant, user)
        except Exception as error:  # noqa: BLE001 - a foreign engine may raise anything, and what it keeps has to go
            self._note(f"could not forget a user and was unloaded: {reason_of(error)}", error)
            self.unload()
            return 0

    def kept(self) -> dict[str, float]:
        """What it says it keeps of users; empty where it says nothing."""
        try:
            return kept(self._backend) if self._loaded and not self.loading else {}
        except Exception as error:  # noqa: BLE001 - a foreign engine may raise anything
            self._note(f"broke when asked what it keeps of users: {reason_of(error)}", error)
            return {}

    def _get_availability(self) -> Availability:
        try:
            return self._made().get_availability(self._bundle)
        except ImportError as error:
            return Availability.no(f"{self.import_string} cannot be imported: {error}")
        except Exception as error:  # noqa: BLE001 - the module, the constructor and the probe are the backend's code
            return Availability.no(f"its probe broke: {reason_of(error)}")

    def _made(self) -> Backend[RequestT, AnswerT]:
        if self._backend is None:
            importlib.invalidate_caches()  # a package may have been installed since the last probe
            self._backend = resolve(self.import_string)(**self.options)
        return self._backend

    def _answer(self, requests: Sequence[RequestT]) -> list[AnswerT | SkippedBackend]:
        on_trial = self.breaker.state(self._clock()) is BreakerState.HALF_OPEN
        if not self.load():
            return [self._skipped(self.last_error, failed=True)] * len(requests)
        self._broken_calls = 0
        results = self._attempt(requests)
        if _any_answer(results):
            self._judge(sound=True)
            return results
        if _all_out_of_time(results):  # one may have been late for all: alone, the others are not; none of it speaks against the backend
            return results if len(requests) == 1 else self._answer_in_parts(requests, results)
        proven = self._answers_known_good()
        if proven or (proven is None and not on_trial):
            results = self._answer_in_parts(requests, results)
        self._judge(sound=bool(proven) or _any_answer(results))
        return results

    def _attempt(self, requests: Sequence[RequestT]) -> list[AnswerT | SkippedBackend]:
        """One call of the engine, counted where nothing comes of it."""
        results = self._called(requests)
        self._broken_calls += all(map(has_failed, results))
        return results

    def _called(self, requests: Sequence[RequestT]) -> list[AnswerT | SkippedBackend]:
        """One call of the engine, measured, its answers checked."""
        began = self._clock()
        try:
            answers = self._made().batch_infer(requests)
        except DeadlineExceeded as error:
            return [self._late(error)] * len(requests)
        except Exception as error:  # noqa: BLE001 - any error of an engine is a reason to ask the next one
            return [self._note(f"broke: {reason_of(error)}", error)] * len(requests)
        if not isinstance(answers, list | tuple) or len(answers) != len(requests):
            given = f"{len(answers)} answers" if isinstance(answers, list | tuple) else f"a {type(answers).__name__}"
            return [self._note(f"returned {given} for {len(requests)} requests")] * len(requests)
        results = [self._checked(request, answer) for request, answer in zip(requests, answers, strict=True)]
        self._record(self._clock() - began, requests, results)
        return results

    def _checked(self, request: RequestT, answer: AnswerT) -> AnswerT | SkippedBackend:
        if isinstance(answer, DeadlineExceeded):  # what a backend gives for the late ones of a batch
            return self._late(answer)
        problem = self._rules.nonsense(request, answer)
        return self._note(problem) if problem else answer

    def _record(self, duration_s: float, requests: Sequence[RequestT], results: Sequence[AnswerT | SkippedBackend]) -> None:
        answered = [index for index, result in enumerate(results) if not isinstance(result, SkippedBackend)]
        if answered:
            self._known_good = requests[answered[-1]]
        if answered and self._counting:
            with self._latency_lock:
                self._latency.record(duration_s * 1e3, self._clock(), len(answered))

    def _answers_known_good(self) -> bool | None:
        """Whether it still answers a request that it answered before; None where there is no such request."""
        with self._uncounted():
            return None if self._known_good is None else _any_answer(self._attempt([self._known_good]))

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        before, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = before

    def _answer_in_parts(self, requests: Sequence[RequestT], results: Sequence[AnswerT | SkippedBackend]) -> list[AnswerT | SkippedBackend]:
        """Try both halves of a broken batch, the halves of those that break, and so on.

        Finding one bad request among n takes log2(n) broken calls, rounded up. The search ends with the first broken call beyond `retries`
        times that many; until then, parts without a bad request are answered.
        """
        found, broken_calls = list(results), 0
        allowed = self._retries * max(1, (len(requests) - 1).bit_length())
        parts = _halves(range(len(requests))) if allowed else []
        while parts and broken_calls <= allowed:
            part = parts.pop()
            answers = self._attempt([requests[index] for index in part])
            for index, answer in zip(part, answers, strict=True):
                found[index] = answer
            if not _any_answer(answers):
                broken_calls += 1
                parts += _halves(part) if len(part) > 1 else []
        return found

    def _judge(self, *, sound: bool) -> None:
        if sound:
            self.breaker = self.breaker.succeeded()
        else:
            self._open(calls=max(1, self._broken_calls))

    def _open(self, *, calls: int = 1, at_once: bool = False) -> None:
        """Count broken calls; where that opens the breaker, unload, so that the next trial starts from a fresh load."""
        now = self._clock()
        self.breaker = self.breaker.failed(now, calls=calls, at_once=at_once or self.suspected())
        if self.breaker.state(now) is BreakerState.OPEN:
            self.unload()

    def _note(self, reason: str, error: Exception | None = None) -> SkippedBackend:
        if reason != self.last_error:
            logger.warning("backend %s %s", self.name, reason, exc_info=error)
        self.last_error = reason
        return self._skipped(reason, failed=True)

    def _late(self, error: DeadlineExceeded) -> OutOfTime:
        return OutOfTime(self.name, f"{error}")

    def _skipped(self, reason: str, *, failed: bool = False) -> SkippedBackend:
        return SkippedBackend(self.name, reason, failed)


def _any_answer(results: Sequence[object]) -> bool:
    return any(not isinstance(result, SkippedBackend) for result in results)


def _all_out_of_time(results: Sequence[object]) -> bool:
    return bool(results) and all(isinstance(result, OutOfTime) for result in results)


def _halves(part: range) -> list[range]:
    middle = len(part) // 2
    return [half for half in (part[:middle], part[middle:]) if half]
