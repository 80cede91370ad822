"""The framework controller of a stage whose replicas run an event loop: many requests walk its backends at the same time.

    request -> vllm        awaited, many at a time
            -> torch_beam  in a batch with others, in the engine thread

A controller that answers batches one after another would keep an engine with continuous batching waiting.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

from cluster.engines.concurrent_backend import ConcurrentBackend
from cluster.engines.controller import FrameworkController, Served
from cluster.engines.managed_backend import ManagedBackend
from cluster.engines.skipped import NoBackendAnswered, OutOfTime
from cluster.values import SkippedBackend

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")

Batched: TypeAlias = Callable[[str, RequestT], Awaitable[AnswerT | SkippedBackend]]
"""Puts a request into the next batch for the backend of that name; the code that runs the batch calls the controller's `answer_batch`."""


class ConcurrentController(FrameworkController[RequestT, AnswerT]):
    """Adds `serve` and `serve_stream` for the event loop, which wait for no lock. Only backends that a warm-up or a refresh has loaded are
    asked, so `refresh` must be called about once a second.
    """

    managed: ClassVar[type[ManagedBackend[Any, Any]]] = ConcurrentBackend

    async def serve(self, request: RequestT, batched: Batched[RequestT, AnswerT]) -> Served[AnswerT]:
        """The answer of the first backend that gives one. Raises NoBackendAnswered."""
        began, skipped = self._clock(), list[SkippedBackend]()
        for backend in self._asked(skipped):
            result = backend.unfit() or backend.declined(request) or await self._answer_of(backend, request, batched)
            if not isinstance(result, SkippedBackend):
                return self._served(result, backend, skipped, began)
            skipped.append(result)
        raise NoBackendAnswered(self.stage, tuple(skipped))

    async def serve_stream(
        self, request: RequestT, batched: Batched[RequestT, AnswerT], merge: Callable[[Sequence[AnswerT]], AnswerT]
    ) -> AsyncGenerator[AnswerT | Served[AnswerT], None]:
        """What is found as it is found, lastly the whole: `merge` makes it of one backend's pieces. Raises NoBackendAnswered.

        Where a backend breaks midway, all that the next one finds follows: the same may come twice.
        """
        began, skipped = self._clock(), list[SkippedBackend]()
        for backend in self._asked(skipped):
            pieces: list[AnswerT] = []
            async with aclosing(self._pieces_of(backend, request, batched)) as results:
                async for result in results:
                    if isinstance(result, SkippedBackend):
                        skipped.append(result)
                    else:
                        pieces.append(result)
                        yield result
            if not (skipped and skipped[-1].backend == backend.name):
                yield self._served(merge(pieces), backend, skipped, began)
                return
        raise NoBackendAnswered(self.stage, tuple(skipped))

    def answer_batch(self, name: str, requests: Sequence[RequestT]) -> Sequence[AnswerT | SkippedBackend]:
        """One backend's answers to a batch, as `call` would ask it: for a thread of the caller's own."""
        with self._turn:
            self._probe_when_due()
            return self._ask(self._backend(name), requests)

    def refresh(self) -> bool:
        """As always; before that, unload what died or broke, so that it is loaded anew."""
        for backend in self._concurrent():
            if not backend.loading and backend.lost():
                with self._turn:
                    backend.loading = True  # from now on no call touches it
                backend.unload()
                backend.loading = False
        return super().refresh()

    def queues(self) -> dict[str, dict[str, float]]:
        """What the loaded engines say of their queues, by backend."""
        return {backend.name: queue for backend in self._concurrent() if (queue := backend.queue())}

    def _asked(self, skipped: Sequence[SkippedBackend]) -> Iterator[ConcurrentBackend[RequestT, AnswerT]]:
        """The backends in the order they are asked, as long as there is time."""
        for backend in self._ranked():
            if not (skipped and isinstance(skipped[-1], OutOfTime)):
                yield cast(ConcurrentBackend[RequestT, AnswerT], backend)

    @staticmethod
    async def _answer_of(
        backend: ConcurrentBackend[RequestT, AnswerT], request: RequestT, batched: Batched[RequestT, AnswerT]
    ) -> AnswerT | SkippedBackend:
        return await (backend.answer_one(request) if backend.concurrent else batched(backend.name, request))

    async def _pieces_of(
        self, backend: ConcurrentBackend[RequestT, AnswerT], request: RequestT, batched: Batched[RequestT, AnswerT]
    ) -> AsyncGenerator[AnswerT | SkippedBackend, None]:
        if skipped := backend.unfit() or backend.declined(request):
            yield skipped
        elif not backend.streams:
            yield await self._answer_of(backend, request, batched)
        else:
            async with aclosing(backend.stream_one(request)) as pieces:
                async for piece in pieces:
                    yield piece

    def _served(
        self, answer: AnswerT, backend: ConcurrentBackend[RequestT, AnswerT], skipped: Sequence[SkippedBackend], began: float
    ) -> Served[AnswerT]:
        backend.fallbacks += bool(skipped)
        served = Served(answer, backend.name, tuple(skipped), (self._clock() - began) * 1e3)
        self._log_change([served])
        return served

    def _quick_to_load(self) -> Sequence[ManagedBackend[RequestT, AnswerT]]:
        """An engine with a queue of its own starts slowly: a refresh loads it, while the others serve already."""
        return [backend for backend in self._concurrent() if not backend.concurrent]

    def _obstacle(self, backend: ManagedBackend[RequestT, AnswerT]) -> SkippedBackend | None:
        return cast(ConcurrentBackend[RequestT, AnswerT], backend).unfit()

    def _concurrent(self) -> list[ConcurrentBackend[RequestT, AnswerT]]:
        return cast(list[ConcurrentBackend[RequestT, AnswerT]], self._ranked())
