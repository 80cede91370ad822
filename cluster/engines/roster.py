"""The backends of a stage, and the order in which they are asked."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, Self, TypeVar

from cluster import registry
from cluster.config import EngineSettings
from cluster.engines.managed_backend import ManagedBackend
from cluster.engines.room import EngineRoom
from cluster.errors import ConfigError, UnknownChoice

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
Selection = Literal["ordered", "fastest"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a stage's settings say of its backends, which can change while it serves.

    `table` names every backend (name -> import string), `order` those that may serve, most wanted first, of which the `disabled` are
    switched off. `selection` "fastest" reorders them by their speed; `returning`: the share of returning users that it reckons with; None:
    the share that is seen. `options`: the keyword arguments of the backends' constructors, by backend.
    """

    table: Mapping[str, str]
    order: Sequence[str]
    disabled: Collection[str] = ()
    selection: Selection = "ordered"
    returning: float | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: EngineSettings) -> Self:
        table = registry.backends(settings.stage_name, settings.backends)
        return cls(table, settings.in_order(), settings.disabled, settings.selection, settings.returning, settings.options)


class Roster(Generic[RequestT, AnswerT]):
    """The backend `preferred` is asked before all others, even where the order leaves it out; `suspects` after the others, until they have
    answered here. Raises UnknownChoice or ConfigError where the choice's order does not fit its table.
    """

    def __init__(self, stage: str, room: EngineRoom[RequestT, AnswerT], choice: Choice) -> None:
        self.preferred: str | None = None
        self.suspects: frozenset[str] = frozenset()
        self._stage, self._room = stage, room
        self._stand_in: ManagedBackend[RequestT, AnswerT] | None = None
        self._backends: dict[str, ManagedBackend[RequestT, AnswerT]] = {}
        self._take(choice)

    def __iter__(self) -> Iterator[ManagedBackend[RequestT, AnswerT]]:
        """All backends of this moment, including those that the order leaves out, and one that stands in for its successor."""
        return iter([*([self._stand_in] if self._stand_in else ()), *self._backends.values()])

    def configured(self, backend: ManagedBackend[RequestT, AnswerT]) -> bool:
        """Whether it is of the present table; False for a stand-in."""
        return self._backends.get(backend.name) is backend

    def named(self, name: str) -> ManagedBackend[RequestT, AnswerT]:
        self._require(name, self._backends)
        return self._backends[name]

    def ranked(self) -> list[ManagedBackend[RequestT, AnswerT]]:
        """The backends that may serve, in the order in which they are asked."""
        ranked = [self._backends[name] for name in self.choice.order]
        if self.choice.selection == "fastest":
            ranked.sort(key=lambda backend: float("inf") if (measured := backend.measured_ms) is None else measured)
        if suspects := self.suspects:
            ranked.sort(key=lambda backend: backend.name in suspects and not backend.proven)
        if first := self._backends.get(self.preferred or ""):
            ranked = [first, *(backend for backend in ranked if backend is not first)]
        return ranked

    def asked(self) -> list[ManagedBackend[RequestT, AnswerT]]:
        """As `ranked`, but with the one that stands in for its successor in the successor's place, until that is loaded."""
        return [self.stand_in_for(one) or one for one in self.ranked()]

    def stand_in_for(self, successor: ManagedBackend[RequestT, AnswerT]) -> ManagedBackend[RequestT, AnswerT] | None:
        """The backend that is asked in its successor's place; None where the successor is asked itself."""
        old = self._stand_in
        if old is None or not old.loaded or old.name != successor.name:
            return None
        return old if successor.enabled and not _serves(successor) else None

    def relieve(self) -> ManagedBackend[RequestT, AnswerT] | None:
        """End the standing in, and return that backend, once a backend of the order serves or it was unloaded itself; else None."""
        old = self._stand_in
        if old is None or (old.loaded and not any(map(_serves, self.ranked()))):
            return None
        self._stand_in = None
        return old

    def ready(self) -> list[ManagedBackend[RequestT, AnswerT]]:
        """The loaded backends that may be asked, in order, one that stands in for its successor in that one's place; including those that
        only a measurement excludes.
        """
        ordered = [self.stand_in_for(one) or one for one in (self._backends[name] for name in self.choice.order)]
        return [backend for backend in ordered if backend.loaded and not backend.why_not_measurable()]

    def change(self, choice: Choice) -> list[ManagedBackend[RequestT, AnswerT]]:
        """Follow another choice, wholly or not at all; returns the backends that are gone then. Raises UnknownChoice and ConfigError.

        Where no backend of the order is loaded then, one that is gone stands in for its successor until one is. An engine with a queue of
        its own does not: it may take all the memory there is.
        """
        present = list(self)
        self._take(choice)
        gone = [backend for backend in present if not self.configured(backend)]
        self._stand_in = self._standing_in(gone)
        return [backend for backend in gone if backend is not self._stand_in]

    def _take(self, choice: Choice) -> None:
        """Make the backends that are new, and switch those of the order on or off; nothing where the choice is wrong."""
        order = choice.order
        for name in order:
            self._require(name, choice.table)
        if not order or len(set(order)) != len(order):
            raise ConfigError(f"the order of {self._stage} backends is {list(order)}; name each backend that may serve once, at least one")
        if choice.selection not in ("ordered", "fastest"):
            raise UnknownChoice("selection", choice.selection, ("ordered", "fastest"))
        self._backends, self.choice = self._made(choice.table, choice.options), choice
        for name in order:
            self._backends[name].enabled = name not in choice.disabled

    def _standing_in(self, gone: Sequence[ManagedBackend[RequestT, AnswerT]]) -> ManagedBackend[RequestT, AnswerT] | None:
        ranked = self.ranked()
        if self._room.loads_on_demand or any(map(_serves, ranked)):
            return None
        serve = {one.name: one for one in gone if _serves(one) and not one.queued}
        return next((serve[one.name] for one in ranked if one.enabled and one.name in serve), None)

    def _made(self, table: Mapping[str, str], options: Mapping[str, Mapping[str, Any]]) -> dict[str, ManagedBackend[RequestT, AnswerT]]:
        """A backend for each name of the table; one that there is with the same import string and options is kept."""
        backends = {}
        for name, path in table.items():
            wanted = (name, path, dict(options.get(name, {})))
            there = (one for one in self if (one.name, one.import_string, one.options) == wanted)
            if (backend := next(there, None)) is None:
                backend = ManagedBackend(name, path, self._room, wanted[-1])
                backend.health.suspected = partial(self._is_suspect, backend)
            backends[name] = backend
        return backends

    def _is_suspect(self, backend: ManagedBackend[RequestT, AnswerT]) -> bool:
        others = (other for other in self.ranked() if other is not backend)
        return backend.name in self.suspects and any(other.why_not_callable() is None for other in others)

    def _require(self, name: str, known: Collection[str]) -> None:
        if name not in known:
            raise UnknownChoice(self._stage, name, known)


def _serves(backend: ManagedBackend[Any, Any]) -> bool:
    """Whether it is loaded and may be asked."""
    return backend.loaded and backend.why_not_callable() is None
