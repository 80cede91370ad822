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
    """The backend `first` is asked before all others, even where the order leaves it out; `suspects` after the others, until they have
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
        self.first: str | None = None
        self.suspects: frozenset[str] = frozenset()
        self.returning = returning
        self._stage, self._room = stage, room
        self._backends: dict[str, ManagedBackend[RequestT, AnswerT]] = {}
        self._backends = self._made(table, options)
        self._order, self.selection = self._checked_order(order, self._backends), _checked_selection(selection)

    def __iter__(self) -> Iterator[ManagedBackend[RequestT, AnswerT]]:
        """All backends of this moment, including those that the order leaves out."""
        return iter(list(self._backends.values()))

    def __contains__(self, backend: ManagedBackend[RequestT, AnswerT]) -> bool:
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
        if first := self._backends.get(self.first or ""):
            ranked = [first, *(backend for backend in ranked if backend is not first)]
        return ranked

    def ready(self) -> list[ManagedBackend[RequestT, AnswerT]]:
        """The loaded backends that may be asked, in order; including those that only a measurement excludes."""
        return [backend for name in self._order if (backend := self._backends[name]).loaded and not backend.why_not_measurable()]

    def change(self, **given: Unpack[Changes]) -> list[ManagedBackend[RequestT, AnswerT]]:
        """Change the given settings, all or none; returns the backends that are gone then."""
        backends = self._made(given["table"], given.get("options", {})) if "table" in given else self._backends
        new_order = self._checked_order(given.get("order", self._order), backends)
        new_selection = _checked_selection(given.get("selection", self.selection))
        switched = [(self._known(name, backends), on) for name, on in given.get("enabled", {}).items()]
        gone = [backend for name, backend in self._backends.items() if backends.get(name) is not backend]
        self._backends, self._order, self.selection = backends, new_order, new_selection
        self.returning = given.get("returning", self.returning)
        for backend, on in switched:
            backend.enabled = on
        return gone

    def _made(self, table: Mapping[str, str], options: Mapping[str, Mapping[str, Any]]) -> dict[str, ManagedBackend[RequestT, AnswerT]]:
        """A backend for each name of the table; an existing one with the same import string and options is kept."""
        backends = {}
        for name, path in table.items():
            backend, given = self._backends.get(name), dict(options.get(name, {}))
            if backend is None or (backend.import_string, backend.options) != (path, given):
                backend = ManagedBackend(name, path, self._room, given)
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


def _checked_selection(selection: Selection) -> Selection:
    if selection not in ("ordered", "fastest"):
        raise UnknownChoice("selection", selection, ("ordered", "fastest"))
    return selection
