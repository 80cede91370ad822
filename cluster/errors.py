"""Every error that genrec raises for others to catch, and which arrow of the data flow it belongs to.

    rows -> dataset -> training -> bundle -> compile -> engine -> request -> answer
      |       |                      |          |         |         |
      |       UnknownChoice          |          |         |         InvalidRequest   (the caller's input: 422)
      DataError                      |          |         BackendError              (no answer here: ask the next backend)
                                     |          CompileError                         (this artifact is not to be trusted)
                                     BundleError                                     (files missing, altered or half-written)

    GenrecError
    ├── ConfigError
    ├── UnknownChoice
    ├── DataError
    ├── BundleError
    ├── CompileError
    ├── InvalidRequest
    └── BackendError
        ├── BackendUnavailable     cannot run here
        │   └── ModelGone          a replica without the version asked for
        ├── BackendFailed          broke on this call
        │   └── NoBackendAnswered  none of a stage's backends answered, each with its reason (cluster/engines/skipped.py)
        └── DeadlineExceeded       the time was over; no fault of the backend

A message says what happened, with which value, and what to do. Where it names what is for operators alone, as an address or a file, `told`
is the text for callers (cluster/engines/skipped.py: `kind_of`). deployments/http/problems.py makes HTTP of them.
"""

from collections.abc import Iterable


class GenrecError(Exception):
    """Base of all errors that carry a message meant for the person at the other end. `told`: what callers read in its place; "" where they
    read the message.
    """

    told = ""

    def __init__(self, *message: object, told: str = "") -> None:
        super().__init__(*message)
        if told:
            self.told = told


class ConfigError(GenrecError):
    """The configuration contradicts itself or names something that is not there."""


class UnknownChoice(GenrecError):
    """A name that is not in the table it was looked up in."""

    def __init__(self, what: str, name: str, choices: Iterable[str]) -> None:
        self.what, self.name, self.choices = what, name, sorted(choices)
        super().__init__(f"unknown {what} {name!r}; choose from {', '.join(self.choices) or '(none registered)'}")

    def __reduce__(self) -> tuple[type["UnknownChoice"], tuple[str, str, list[str]]]:
        return type(self), (self.what, self.name, self.choices)


class DataError(GenrecError):
    """A dataset, file or row that cannot be read as what it should be."""


class BundleError(GenrecError):
    """A model bundle that is missing, altered or incomplete. The message names its files."""

    told = "files of the model are missing, altered or incomplete"


class CompileError(GenrecError):
    """An export or engine build failed, or its result disagrees with the model."""


class InvalidRequest(GenrecError):
    """A request that cannot be answered as asked; `field` names the offending part (such as ``behaviours[3].timestamp``)."""

    def __init__(self, field: str, problem: str) -> None:
        self.field, self.problem = field, problem
        super().__init__(f"{field}: {problem}")

    def __reduce__(self) -> tuple[type["InvalidRequest"], tuple[str, str]]:
        return type(self), (self.field, self.problem)


class BackendError(GenrecError):
    """A backend could not answer; the controller asks the next one."""


class BackendUnavailable(BackendError):
    """The backend cannot run here, for the reason given (a package, a device or an artifact is missing)."""


class ModelGone(BackendUnavailable):
    """The replica does not hold the version that it was asked for; another version has to answer."""


class BackendFailed(BackendError):
    """The backend runs here but broke on this call."""


class DeadlineExceeded(BackendError):
    """The caller's time was over before the answer was ready; no fault of the backend."""
