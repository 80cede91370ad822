"""The interface of a backend.

A backend is a class whose constructor needs nothing, so that a table of import strings is enough to make one; what it takes besides can be
given under `options` in the configuration.
It need not inherit from anything here: having the methods is enough.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

from cluster.bundle import Bundle
from cluster.values import Availability

RequestT = TypeVar("RequestT", contravariant=True)  # noqa: PLC0105 - the T says enough
AnswerT = TypeVar("AnswerT")


@runtime_checkable
class Backend(Protocol[RequestT, AnswerT]):
    """One engine that can serve a stage.

    `get_availability` answers, cheaply and before any load, whether the engine can serve this bundle here and if not, why and what to do;
    it never raises. `load` makes it ready to answer (raises BackendUnavailable). `infer` and `batch_infer` are called from one thread at
    a time and raise BackendFailed, or any exception, where the engine breaks; `batch_infer` answers in the order asked. `close` frees
    what `load` took.
    """

    def get_availability(self, bundle: Bundle) -> Availability: ...
    def load(self, bundle: Bundle) -> None: ...
    def infer(self, request: RequestT) -> AnswerT: ...
    def batch_infer(self, requests: Sequence[RequestT]) -> list[AnswerT]: ...
    def close(self) -> None: ...
