"""The place of a backend's engine: made for the first probe, loaded, closed, and then made anew."""

import asyncio
import importlib
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Generic, TypeVar

from cluster.engines.engine import Batches, Engine, Queue
from cluster.engines.room import EngineRoom, Run, apart
from cluster.engines.skipped import kind_of, reason_of
from cluster.registry import resolve
from cluster.values import Availability

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
logger = logging.getLogger(__name__)


class EngineSlot(Generic[RequestT, AnswerT]):
    """The slot of one backend. Its methods are called one at a time, except `close`, after which none is called, and `get_availability`,
    which may be called beside any other.
    """

    def __init__(self, name: str, import_string: str, options: Mapping[str, Any], room: EngineRoom[RequestT, AnswerT]) -> None:
        self.engine: Engine[RequestT, AnswerT] | None = None
        self.loaded, self.loads = False, 0  # `loads`: how many have ended well
        self._name, self._import_string, self._options, self._room = name, import_string, options, room
        self._making = threading.Lock()
        self._holds = False  # a load was begun, whether or not it ended well: there is something to close

    def get_availability(self) -> Availability:
        """Whether the backend can serve here; never raises. For a thread: it imports the backend's module."""
        try:
            return _sound(self._made().backend.get_availability(self._room.bundle))
        except ImportError as error:
            return Availability.no(f"{self._import_string} cannot be imported: {error}")
        except Exception as error:  # noqa: BLE001 - the module, the constructor and the probe are the backend's code
            return Availability.because(error, f"its probe broke: {reason_of(error)}", f"its probe broke: {kind_of(error)}")
        except (SystemExit, asyncio.CancelledError) as error:  # of an event loop of its own: a thread cannot be cancelled
            return Availability.no(f"its probe broke: {reason_of(error)}")

    async def load(self, run: Run) -> None:
        """Make the engine ready to answer. Raises what the backend raises."""
        self._holds = True
        await run(lambda: self._made().backend.load(self._room.bundle))
        self.loaded, self.loads = True, self.loads + 1

    def unload(self, *, condemned: bool) -> Future[None] | None:
        """Have the engine closed in a thread of its own, which may hang; None where there is nothing to close. With `condemned` it is told
        before that it is given up because of a fault.
        """
        engine = self._vacated()
        return apart(lambda: self._close(engine, condemned=condemned)) if engine else None

    def close(self) -> None:
        """As `unload`, in this thread."""
        if engine := self._vacated():
            self._close(engine)

    def _made(self) -> Engine[RequestT, AnswerT]:
        if engine := self.engine:
            return engine
        importlib.invalidate_caches()  # a package may have been installed since the last probe
        backend = resolve(self._import_string)(**self._options)
        kind = Queue if hasattr(backend, "ainfer") else Batches
        with self._making:  # a probe and a load may both have come this far
            engine = self.engine = self.engine or kind(backend, self._room.rules, self._room.clock)
        return engine

    def _vacated(self) -> Engine[RequestT, AnswerT] | None:
        """Take the engine out of the slot, so that no call reaches it any more; returns it where it has to be closed."""
        engine, self.engine = self.engine, None
        held, self._holds, self.loaded = self._holds, False, False
        return engine if held else None

    def _close(self, engine: Engine[RequestT, AnswerT], *, condemned: bool = False) -> None:
        for name in ("condemn", "close") if condemned else ("close",):
            try:
                engine.optional(name)
            except (Exception, SystemExit, asyncio.CancelledError):  # a foreign engine may raise anything, and it is no longer needed
                logger.warning("backend %s broke while it was closed", self._name, exc_info=True)


def _sound(said: Availability) -> Availability:
    """What a probe said, its reasons as text; what makes no sense is a probe that broke."""
    if mistake := Availability.mistake_in(said):
        return Availability.no(f"its probe broke: {mistake}")
    return replace(said, reason=str(said.reason), told=str(said.told))
