"""The backend that is checked, and how the checks ask it: every answer is held against the stage's rules at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.bundle import Bundle
from cluster.checks.cases import Cases
from cluster.checks.report import Failed
from cluster.protocols import Backend
from cluster.registry import resolve


@dataclass
class Subject:
    """`limit_s`: how long a check may take. `backend` is there once it has been made; `unavailable`: why it cannot run here, as it
    said first.
    """

    import_string: str
    options: Mapping[str, Any]
    bundle: Bundle
    cases: Cases
    limit_s: float
    backend: Any = None
    loaded: bool = False
    unavailable: str = ""
    typical: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.typical = self.cases.typical()

    def make(self) -> Backend[Any, Any]:
        """A new instance of the backend, with the options."""
        made: Backend[Any, Any] = resolve(self.import_string)(**self.options)
        return made

    def infer(self, request: Any, what: str) -> Any:
        """The backend's answer to one request. Raises Failed where it makes no sense."""
        return self.checked(request, self.backend.infer(request), what)

    def batch(self, requests: Mapping[str, Any]) -> list[Any]:
        """The backend's answers to several requests. Raises Failed where one makes no sense, or their number differs."""
        answers = self.backend.batch_infer(list(requests.values()))
        if not isinstance(answers, list | tuple) or len(answers) != len(requests):
            given = f"{len(answers)} answers" if isinstance(answers, list | tuple) else f"a {type(answers).__name__}"
            raise Failed(f"batch_infer gave {given} to {len(requests)} requests; it gives a list with one for each, in the order asked")
        return [self.checked(request, answer, what) for (what, request), answer in zip(requests.items(), answers, strict=True)]

    def checked(self, request: Any, answer: Any, what: str) -> Any:
        """The answer as it is. Raises Failed where it makes no sense."""
        if problem := self.cases.rules.problem(request, answer) or self.cases.problem(request, answer):
            raise Failed(f"asked with {what}, it {problem}")
        return answer

    def same(self, expected: Any, answer: Any, what: str) -> None:
        """Raises Failed where two answers differ by more than the stage's tolerance."""
        if problem := self.cases.rules.disagreement(expected, answer) or self.cases.rules.disagreement(answer, expected):
            raise Failed(f"{what}: {problem}")

    def all_same(self, expected: Sequence[Any], answers: Sequence[Any], what: str) -> None:
        """As `same`, for each answer to a typical request."""
        for label, one, other in zip(self.typical, expected, answers, strict=True):
            self.same(one, other, f"{label}, {what}")
