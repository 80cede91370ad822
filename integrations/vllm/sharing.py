"""The engines of this process, shared between versions of the model that have the same decoder.

    version 1 ── lease ──► engine ◄── lease ── version 2        an engine ends with its last lease

vLLM starts slowly and takes all its memory at once. A version that is only compiled anew has the decoder of the one before, and needs no
engine of its own.
"""

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, Protocol, TypeVar


class Startable(Protocol):
    """The interface of a shared engine: `Engine`, or a fake in tests."""

    def alive(self) -> bool: ...
    def queue(self) -> Mapping[str, float]: ...
    def close(self) -> None: ...


EngineT = TypeVar("EngineT", bound=Startable)


class Lease(Generic[EngineT]):
    """A holder's part in an engine, until `release`; `engine` is started."""

    def __init__(self, share: "_Share[EngineT]", engine: EngineT) -> None:
        self._share, self.engine = share, engine

    @property
    def first(self) -> bool:
        """Whether this holder has had the engine for longest: it alone reports the engine's figures, so that they count once."""
        return self._share.leases[:1] == [self]

    @property
    def told(self) -> Mapping[str, float]:
        """The engine's `queue` when the previous `first` holder left: what it has reported."""
        return self._share.told

    @property
    def answers(self) -> int:
        """Requests of all holders that the engine has answered."""
        return self._share.answers

    def answered(self) -> None:
        """To be called where the engine computes, after each answer."""
        self._share.answers += 1

    def alive(self) -> bool:
        return not self._share.condemned and self.engine.alive()

    def condemn(self) -> None:
        """Give the engine up as broken: its other holders find it lost, and the next `take` starts another."""
        self._share.condemned = True

    def release(self) -> None:
        """Give the lease back; the engine ends with the last one. May be called again, without effect."""
        self._share.release(self)


class SharedEngines(Generic[EngineT]):
    """Everything may be called from any thread."""

    def __init__(self) -> None:
        self._shares: dict[Hashable, _Share[EngineT]] = {}
        self._lock = threading.Lock()

    def take(self, key: Hashable, start: Callable[[], EngineT]) -> Lease[EngineT]:
        """A lease of the key's engine, which runs, is just being started, or is started now. Raises what `start` raises."""
        with self._lock:
            share = self._shares.get(key)
            if share is None or not share.usable:
                share = self._shares[key] = _Share()
        return share.take(start)

    def runs(self, key: Hashable) -> bool:
        """Whether the key's engine has holders and lives, or is being started or ended."""
        with self._lock:
            share = self._shares.get(key)
        return share is not None and share.runs


class _Share(Generic[EngineT]):
    """One engine and its holders; after its last holder has gone, the next starts another."""

    def __init__(self) -> None:
        self.leases: list[Lease[EngineT]] = []
        self.told: Mapping[str, float] = {}
        self.condemned, self.answers = False, 0
        self._engine: EngineT | None = None
        self._changing = threading.Lock()

    @property
    def usable(self) -> bool:
        """Whether the engine lives, or is being started."""
        engine = self._engine
        return not self.condemned and (engine is None or engine.alive())

    @property
    def runs(self) -> bool:
        return self.usable and (self._engine is not None or self._changing.locked())

    def take(self, start: Callable[[], EngineT]) -> Lease[EngineT]:
        with self._changing:  # a second holder waits until the first has started it, or tries itself where that failed
            if self._engine is None:
                self._engine = start()
            lease = Lease(self, self._engine)
            self.leases.append(lease)
            return lease

    def release(self, lease: Lease[EngineT]) -> None:
        with self._changing:
            if lease not in self.leases:
                return
            if lease.first:  # before it has gone, and the next one tells
                self.told = lease.engine.queue() if len(self.leases) > 1 else {}
            self.leases.remove(lease)
            ended, self._engine = (None, self._engine) if self.leases else (self._engine, None)
            if ended is not None:
                ended.close()
