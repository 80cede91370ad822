"""The backends of a stage, and the order in which they are asked."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack

from cluster.engines.managed_backend import ManagedBackend
from cluster.engines.room import EngineRoom
from cluster.errors import ConfigError, UnknownChoice

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
Selection = Literal["ordered", "fastest"]


class Changes(TypedDict, total=False):
    """The settings of a controller that can change while it serves; those left out stay. `options` go with a `table`."""

    order: Sequence[str]
    enabled: Mapping[str, bool]
    selection: Selection
    returning: float | None
    table: Mapping[str, str]
    options: Mapping[str, Mapping[str, Any]]


class Roster(Generic[RequestT, AnswerT]):
    """The backend `preferred` is asked before all others, even where the order leaves it out; `suspects` after the others, until they have
    answered here. `returning`: the share of returning users that "fastest" reckons with; None: the share that is seen.
    Raises UnknownChoice or ConfigError where the order does not fit the table.
    """

    def __init__(
        self,
        stage: str,
        room: EngineRoom[RequestT, AnswerT],
        table: Mapping[str, str],
        order: Sequence[str],
        *,
        selection: Selection,
        returning: float | None,
        options: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.preferred: str | None = None
        self.suspects: frozenset[str] = frozenset()
        self.returning = returning
        self._stage, self._room = stage, room
        self._stand_in: ManagedBackend[RequestT, AnswerT] | None = None
        self._backends: dict[str, ManagedBackend[RequestT, AnswerT]] = {}
        self._backends = self._made(table, options)
        self._order, self.selection = self._checked_order(order, self._backends), _checked_selection(selection)

    def __iter__(self) -> Iterator[ManagedBackend[RequestT, AnswerT]]:
        """All backends of this moment, including those that the order leaves out, and one that stands in for its successor."""
        return iter([*([self._stand_in] if self._stand_in else ()), *self._backends.values()])

    def configured(self, backend: ManagedBackend[RequestT, AnswerT]) -> bool:
        """Whether it is of the present table; False for a stand-in."""
        return self._backends.get(backend.name) is backend

    def named(self, name: str) -> ManagedBackend[RequestT, AnswerT]:
        return self._known(name, self._backends)

    def ranked(self) -> list[ManagedBackend[RequestT, AnswerT]]:
        """The backends that may serve, in the order in which they are asked."""
        ranked = [self._backends[name] for name in self._order]
        if self.selection == "fastest":
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
        ordered = [self.stand_in_for(one) or one for one in (self._backends[name] for name in self._order)]
        return [backend for backend in ordered if backend.loaded and not backend.why_not_measurable()]

    def change(self, **given: Unpack[Changes]) -> list[ManagedBackend[RequestT, AnswerT]]:
        """Change the given settings, all or none; returns the backends that are gone then. Raises UnknownChoice and ConfigError.

        Where no backend of the order is loaded then, one that is gone stands in for its successor until one is. An engine with a queue of
        its own does not: it may take all the memory there is.
        """
        present = list(self)
        self._backends, self._order, self.selection, switched = self._changed(given)
        self.returning = given.get("returning", self.returning)
        for backend, on in switched:
            backend.enabled = on
        gone = [backend for backend in present if not self.configured(backend)]
        self._stand_in = self._standing_in(gone)
        return [backend for backend in gone if backend is not self._stand_in]

    def _changed(
        self, given: Changes
    ) -> tuple[
        dict[str, ManagedBackend[RequestT, AnswerT]], tuple[str, ...], Selection, list[tuple[ManagedBackend[RequestT, AnswerT], bool]]
    ]:
        """Backends, order, selection and switches by the given settings."""
        backends = self._made(given["table"], given.get("options", {})) if "table" in given else self._backends
        order = self._checked_order(given.get("order", self._order), backends)
        switched = [(self._known(name, backends), on) for name, on in given.get("enabled", {}).items()]
        return backends, order, _checked_selection(given.get("selection", self.selection)), switched

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

    def _known(self, name: str, backends: Mapping[str, ManagedBackend[RequestT, AnswerT]]) -> ManagedBackend[RequestT, AnswerT]:
        if name not in backends:
            raise UnknownChoice(self._stage, name, backends)
        return backends[name]

    def _checked_order(self, order: Sequence[str], backends: Mapping[str, ManagedBackend[RequestT, AnswerT]]) -> tuple[str, ...]:
        for name in order:
            self._known(name, backends)
        if not order or len(set(order)) != len(order):
            raise ConfigError(f"the order of {self._stage} backends is {list(order)}; name each backend that may serve once, at least one")
        return tuple(order)


def _serves(backend: ManagedBackend[Any, Any]) -> bool:
    """Whether it is loaded and may be asked."""
    return backend.loaded and backend.why_not_callable() is None


def _checked_selection(selection: Selection) -> Selection:
    if selection not in ("ordered", "fastest"):
        raise UnknownChoice("selection", selection, ("ordered", "fastest"))
    return selection
