"""vLLM's engine: AsyncLLM on a thread with an event loop of its own, in front of the engine's process.

any thread, any loop ──submit──► the engine's loop ──generate──► AsyncLLM ◄──ZeroMQ──► engine process
"""

import asyncio
import atexit
import gc
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.errors import BackendFailed, BackendUnavailable
from integrations.vllm.beam import Question
from integrations.vllm.library import load
from integrations.vllm.requests import EngineSettings, Statistics, Words, engine_args

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
GRACE_S = 5.0
"""How long the engine's process may take to end by itself. It has nothing to save."""
END_S = 60.0
"""How long the end of everything may take."""
logger = logging.getLogger(__name__)


class Engine:
    """A started engine. Everything may be called from any thread, except `generate`, which is called within work given to `submit`."""

    def __init__(self, decoder: Path, settings: EngineSettings) -> None:
        """Start the engine: some 15 seconds of a core. Raises BackendUnavailable where it does not start, and leaves no process behind."""
        self._async_llm = load("vllm.v1.engine.async_llm").AsyncLLM
        self._dead_error = load("vllm.v1.engine.exceptions").EngineDeadError
        self._words, self._statistics, self._ids = Words(), Statistics(), count()
        self._llm: Any = None
        self._processes: Sequence[Any] = ()
        self._working: set[asyncio.Task[Any]] = set()
        self._closed, self._closing = False, threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            asyncio.run_coroutine_threadsafe(self._start(decoder, settings), self._loop).result()
        except Exception as error:
            self.close()
            reason = f"{type(error).__name__}: {error}"
            raise BackendUnavailable(f"vLLM's engine did not start: {reason}; why stands in its log, on standard error") from error
        except BaseException:
            self.close()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run work on the engine's loop. Cancelling the future cancels the work too, and its requests to vLLM.

        The future fails as the work does, and with BackendFailed where the engine is closed meanwhile.
        """
        with self._closing:  # what is on the loop before `_end` is ended by it; what came later would never be run
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(self._guarded(work), self._loop)
        work.close()
        raise BackendFailed("vLLM is closed; it must be loaded again")

    async def generate(self, rows_TH: "torch.Tensor", question: Question, salt: str) -> Mapping[int, float]:
        """The log p of the most probable of the question's tokens, renormalised over all of these. Raises BackendFailed.

        Prompts with the same salt share the KV cache of their common rows.
        """
        prompt, sampling = self._words.prompt(rows_TH, question.suffix, salt), self._words.sampling(question)
        answer: Mapping[int, float] = {}
        try:
            async for output in self._llm.generate(prompt, sampling, f"{next(self._ids)}"):
                log_probs = output.outputs[0].logprobs
                answer = dict(zip(log_probs.token_ids, log_probs.logprobs, strict=True))
        except self._dead_error as error:
            raise BackendFailed("vLLM's engine process has died; it must be loaded again") from error
        except Exception as error:
            cause = error.__cause__ or error  # vLLM wraps what it did not expect
            raise BackendFailed(f"vLLM broke on a request: {type(cause).__name__}: {cause}") from error
        if len(answer) < question.best:
            raise BackendFailed(f"vLLM answered with {len(answer)} probabilities; the {question.best} greatest were asked for")
        return answer

    async def forget(self) -> None:
        """Drop all prompts' keys and values from the KV cache; requests that are being computed start again. Raises BackendFailed."""
        try:
            done = await self._llm.reset_prefix_cache(reset_running_requests=True)
        except Exception as error:
            raise BackendFailed(f"vLLM could not drop its prefix cache: {type(error).__name__}: {error}") from error
        if not done:
            raise BackendFailed("vLLM could not drop its prefix cache: parts of it are in use")

    def alive(self) -> bool:
        llm = self._llm
        return llm is not None and not llm.errored

    def queue(self) -> dict[str, float]:
        """The figures of VllmGenerator.queue."""
        llm, seen = self._llm, self._statistics
        unfinished = 0 if llm is None or llm.errored else int(llm.get_num_unfinished_requests())
        running = min(seen.running, unfinished)  # an engine that idles does not report that aborted requests have gone
        return {
            "running": running,
            "waiting": unfinished - running,
            "kv_cache_usage": seen.kv_cache_usage if unfinished else 0.0,
            "prefix_cache_queries": seen.prefix_cache_queries,
            "prefix_cache_hits": seen.prefix_cache_hits,
        }

    def close(self) -> None:
        """End the engine's process; work that still runs fails with BackendFailed. Takes a few seconds, and at most twice END_S."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(END_S)
        except TimeoutError:
            logger.error("vLLM did not end within %g s: its thread is left to itself, its process is killed", END_S)  # noqa: TRY400 - no more to tell
            for process in self._processes:
                process.kill()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_S)
        gc.collect()  # AsyncLLM stands in reference cycles, and complains where the interpreter ends before it

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _start(self, decoder: Path, settings: EngineSettings) -> None:
        """Make the AsyncLLM on the engine's loop, on which it begins its tasks. Nothing else is on the loop yet, so this may block it."""
        self._llm = self._async_llm.from_engine_args(engine_args(decoder, settings), stat_loggers=[self._statistics])
        self._processes = self._llm.engine_core.resources.engine_manager.processes

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._working.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._closed:
                raise BackendFailed("vLLM was closed while it answered") from None
            raise
        finally:
            self._working.discard(task)

    async def _end(self) -> None:
        await _cancel(set(self._working))
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown(timeout=GRACE_S)
            for process in self._processes:  # vLLM kills what is not gone by then, but does not wait for its end
                process.join()
        await _cancel(asyncio.all_tasks() - {asyncio.current_task()})
        await self._loop.shutdown_default_executor()


async def _cancel(tasks: set[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
