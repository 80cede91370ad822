"""The decoder on vLLM: one request for each path and level, all users' requests together, and blocks that prompts share computed once."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import count
from math import ceil, exp
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cluster.bundle import DECODER, Bundle
from cluster.errors import BackendFailed, BundleError, DeadlineExceeded, UnknownChoice
from cluster.options import whole
from cluster.trie import Trie
from cluster.values import Availability, Generated, GenerateRequest, UserState
from integrations.decoder.published import decoder_config, verified_decoder
from integrations.vllm import library
from integrations.vllm.beam import Ask, BestSoFar, Found, Path, Question, best, search, together
from integrations.vllm.requests import BLOCK, EngineSettings
from integrations.vllm.sharing import Lease, SharedEngines

if TYPE_CHECKING:
    import torch

    from integrations.decoder.config import DecoderConfig
    from integrations.vllm.engine import Engine

AUTO = "auto"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROBABILITY_TOLERANCE = 0.05
T = TypeVar("T")
FORGET_WITHIN_S = 5.0
USERS_AT_ONCE = 4
"""How many users with wide beams vLLM computes together, at least: one that wants a thousand items must not fill its queue."""
ENGINES: "SharedEngines[Engine]" = SharedEngines()
"""The engines of this process, by the digests of the decoder's files and the settings that vLLM runs with."""
UNNAMED = count()
"""A number for each request without a user."""
NO_QUEUE = {"running": 0.0, "waiting": 0.0, "kv_cache_usage": 0.0, "prefix_cache_queries": 0.0, "prefix_cache_hits": 0.0}
COUNTS = ("prefix_cache_queries", "prefix_cache_hits")
"""The figures of a queue that are totals since the engine's start."""


class VllmGenerator:
    """Beam search over vLLM, in a process of its own, which generators with the same decoder and options share.

    Its options stand in ray_config.yaml under generator.options.vllm:

    `dtype`: float32, bfloat16, float16, or auto: bfloat16 on a GPU that multiplies it, else float32. `kv_cache_bytes`: the memory that
    holds what was computed of prompts. `max_num_seqs`: requests computed together, of which a user makes up to `beam` at a time, and at
    most a quarter of them all. `compile`: through torch.compile, which makes the start half a minute longer. `gpu_memory_share`: how much
    of a GPU's memory must be free at the start, 0 to 1. `patience_s`: how long a request without a deadline may take before the engine
    counts as stuck. `prefix_caching`: blocks of a prompt are computed once for all paths, and a user's for as long as they are kept;
    false only to measure what that is worth.

    `ainfer`, `astream`, `alive` and `queue` may be called from any thread and event loop, many at a time.
    """

    def __init__(
        self,
        dtype: str = AUTO,
        kv_cache_bytes: int = 256 * 2**20,
        max_num_seqs: int = 256,
        compile: bool = False,  # noqa: A002 - the name of the option
        *,
        gpu_memory_share: float = 0.3,
        patience_s: float = 60.0,
        prefix_caching: bool = True,
    ) -> None:
        if dtype not in {AUTO, *BYTES}:
            raise UnknownChoice("dtype of vllm", dtype, (AUTO, *BYTES))
        self._asked_dtype, self._kv_cache_bytes = dtype, whole("kv_cache_bytes", kv_cache_bytes)
        self._max_num_seqs = whole("max_num_seqs", max_num_seqs)
        self._compile, self._gpu_memory_share, self._patience_s = compile, gpu_memory_share, patience_s
        self._prefix_caching = prefix_caching
        self._lease: Lease[Engine] | None = None
        self._engine_failed = False  # at the last request that was put to it

    @cached_property
    def _dtype(self) -> str:
        """The number format asked for; `auto` avoids float32 on a GPU, which vLLM computes as TF32 there, or refuses."""
        if self._asked_dtype != AUTO:
            return self._asked_dtype
        from integrations.hstu.kernels.gpu import usable_gpu  # noqa: PLC0415 - imports torch, which a process that reads options need not do

        return "bfloat16" if usable_gpu("bfloat16").ok else "float32"

    def get_availability(self, bundle: Bundle) -> Availability:
        if problem := library.obstacle():
            return Availability.no(problem)
        try:
            verified_decoder(bundle)
            config = decoder_config(bundle)
        except BundleError as error:
            return Availability.because(error)
        if library.needs_gpu() and (reason := _no_gpu()):
            return Availability.no(reason)
        block = 2 * BLOCK * config.hidden * config.layers * BYTES[self._dtype]
        needed = block * (1 + ceil((config.prompt_length + config.levels) / BLOCK))  # vLLM keeps one block for itself
        if self._kv_cache_bytes < needed:
            return Availability.no(f"kv_cache_bytes ({self._kv_cache_bytes}) holds no whole prompt of this decoder; {needed} are needed")
        starts = library.needs_gpu() and self._lease is None and not ENGINES.runs(self._key(bundle, config))
        if starts and (reason := self._gpu_is_full()):
            return Availability(ok=False, reason=reason, certain=False)  # it may be free a moment later
        return Availability.yes()

    def load(self, bundle: Bundle) -> None:
        """Start an engine, or share a running one with the same decoder and settings, and have it answer one request.

        Raises BackendUnavailable, BackendFailed; no engine is left behind then.
        """
        self.get_availability(bundle).require()
        self.close()
        import torch  # noqa: PLC0415

        from integrations.decoder.files import load_soft_prompt  # noqa: PLC0415
        from integrations.vllm.engine import Engine  # noqa: PLC0415

        config = decoder_config(bundle)
        self._soft_prompt, self._longest = load_soft_prompt(bundle), config.prompt_length
        self._trie, self._version, self._torch = Trie.of(bundle.semantic_ids), bundle.version, torch
        key = self._key(bundle, config)
        decoder = verified_decoder(bundle)
        self._engine_failed = False
        self._lease = lease = ENGINES.take(key, lambda: Engine(decoder, key[1]))
        try:
            self._try_out(lease.engine, config)
        except BaseException:
            lease.condemn()
            self.close()
            raise

    def declines(self, request: GenerateRequest) -> str:
        """Why this backend never takes the request; "" where it does."""
        return "sampling is served by torch_beam" if request.sampling else ""

    def infer(self, request: GenerateRequest) -> Generated:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """All at once, answered in order. The first error is raised: BackendFailed, DeadlineExceeded."""
        return self._run(together(self._answer(request) for request in requests))

    async def ainfer(self, request: GenerateRequest) -> Generated:
        """One answer, beside the engine's other work. Cancelling it ends its requests to the engine."""
        return await asyncio.wrap_future(self._submit(self._answer(request)))

    async def astream(self, request: GenerateRequest) -> AsyncIterator[Generated]:
        """Items as they are found, each once. What is found at a time is one piece, best first; the pieces are in no order.

        What is yielded is among the `k` best found by then, so that the `k` best of all that was yielded are the answer. Raises as
        `ainfer` does; items that came before an error are sound.
        """
        pieces, so_far, loop = asyncio.Queue[list[Path]](), BestSoFar(request.k), asyncio.get_running_loop()
        fresh = list[Path]()

        def found(paths: list[Path]) -> None:
            if not fresh:  # each piece costs its readers as much as the request's lists are long: what is found at a time is one
                asyncio.get_running_loop().call_soon(tell)
            fresh.extend(paths)

        def tell() -> None:
            good = so_far.add(best(fresh, request.k))
            fresh.clear()
            if good:
                loop.call_soon_threadsafe(pieces.put_nowait, good)

        work = self._submit(self._answer(request, found))
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(pieces.put_nowait, []))
        try:
            while paths := await pieces.get():
                yield self._generated(paths)
            await asyncio.wrap_future(work)
        finally:
            work.cancel()

    def alive(self) -> bool:
        """Whether it is loaded and its engine's process lives."""
        return self._lease is not None and self._lease.alive()

    def condemn(self) -> None:
        """Give the engine up for all that share it, where it failed the last request put to it; else the fault is this version's own."""
        if self._engine_failed and (lease := self._lease):
            lease.condemn()

    def queue(self) -> dict[str, float]:
        """`running`, `waiting`: requests to the engine, of which a user makes one a path and level; `kv_cache_usage`: 0 to 1;
        `prefix_cache_queries`, `prefix_cache_hits`: rows of prompts that were looked up, and found. Of generators that share an engine,
        only the one that has had it for longest tells its figures, and counts on from where the one before it left; others tell zeros.
        """
        lease = self._lease
        if not (lease and lease.first):
            return dict(NO_QUEUE)
        told = lease.told
        return {name: figure - told.get(name, 0.0) if name in COUNTS else figure for name, figure in lease.engine.queue().items()}

    def forget_everything(self) -> int:
        """Drop what is computed of all prompts, which vLLM keeps without their users; 0, as vLLM counts none. Raises BackendFailed."""
        if (lease := self._lease) is not None:
            try:
                self._run(asyncio.wait_for(lease.engine.forget(), FORGET_WITHIN_S))
            except TimeoutError:
                lease.condemn()
                raise BackendFailed(f"vLLM did not drop its prefix cache within {FORGET_WITHIN_S:g} s") from None
            except BackendFailed:
                lease.condemn()  # others that share the engine share what it has not dropped
                raise
        return 0

    def kept(self) -> dict[str, float]:
        """`asked_rows` of prompts were looked up, and `hit_rows` found, as `queue` has it."""
        figures = self.queue()
        return {"asked_rows": figures["prefix_cache_queries"], "hit_rows": figures["prefix_cache_hits"]}

    def close(self) -> None:
        lease, self._lease = self._lease, None
        if lease:
            lease.release()

    async def _answer(self, request: GenerateRequest, found: Found | None = None) -> Generated:
        if problem := self.declines(request):
            raise BackendFailed(f"vllm does not take this request: {problem}")
        return self._generated(await self._within(request.deadline, self._found(request, found)))

    async def _found(self, request: GenerateRequest, found: Found | None) -> list[Path]:
        view = await asyncio.to_thread(self._trie.view, request.among, request.blocked)
        ask = await self._asker(request)
        if (lease := self._lease) is None:
            raise BackendFailed("vllm was closed while it answered")
        before = lease.answers
        try:
            paths = await search(view, request.beam, request.k, ask, found)
        except BaseException:  # given up at its deadline, too: the engine is stuck, unless it has answered another request meanwhile
            self._engine_failed = lease.answers == before
            raise
        self._engine_failed = False
        lease.answered()
        return paths

    async def _asker(self, request: GenerateRequest) -> Ask:
        """The function that asks the engine about this request's user. What vLLM has computed is shared only within one tenant, version and
        set of IDs, there between prompts with blocks of rows that are equal bit for bit, and without a user only within the request: a
        sample that is timed is computed each time.
        """
        engine, rows = self._engine, await asyncio.to_thread(self._rows, request.state)
        salt = f"{request.tenant}:{self._version}:{self._trie.version}" + ("" if request.user_id else f":{next(UNNAMED)}")
        if engine is None:
            raise BackendFailed("vllm was closed while it answered")

        places = asyncio.Semaphore(max(1, self._max_num_seqs // USERS_AT_ONCE))

        async def ask(question: Question) -> Mapping[int, float]:
            async with places:
                return await engine.generate(rows, question, salt)

        return ask

    def _rows(self, user: UserState) -> "torch.Tensor":
        """The user's soft prompt (T, H). Raises BackendFailed where it is too long or not finite: the engine would end for all requests."""
        if len(user) > self._longest:
            raise BackendFailed(f"a prompt has {len(user)} events; this decoder takes {self._longest} at most")
        (rows,) = self._soft_prompt.of([user])
        rows = rows.to(getattr(self._torch, self._dtype))
        if not rows.isfinite().all():
            raise BackendFailed(f"a prompt's states are so large that its rows are infinite in {self._dtype}")
        return rows

    async def _within(self, deadline: float | None, work: Coroutine[Any, Any, T]) -> T:
        """The work's result. Raises DeadlineExceeded at the deadline, or, without one, BackendFailed after `patience_s`."""
        left = self._patience_s if deadline is None else deadline - time.monotonic()
        if left <= 0:
            work.close()
            raise DeadlineExceeded(f"the deadline had passed {-left:.3f} s before vllm began")
        try:
            async with asyncio.timeout(left):
                return await work
        except TimeoutError:
            if deadline is None:
                raise BackendFailed(f"vllm gave no answer within {left:g} s (patience_s)") from None
            raise DeadlineExceeded(f"vllm had no answer at the deadline, {left:.3f} s after it began") from None

    def _key(self, bundle: Bundle, config: "DecoderConfig") -> tuple[tuple[str, ...], EngineSettings]:
        """What generators have in common that share an engine."""
        settings = EngineSettings(
            dtype=self._dtype,
            kv_cache_bytes=self._kv_cache_bytes,
            max_num_seqs=self._max_num_seqs,
            compile=self._compile,
            gpu_memory_share=self._gpu_memory_share,
            prefix_caching=self._prefix_caching,
            rows=config.prompt_length + config.levels,
        )
        return _digests(bundle), settings

    def _gpu_is_full(self) -> str:
        """Why an engine would not start on the GPU as it is now, which vLLM finds only in a process of its own; "" where it may."""
        import torch  # noqa: PLC0415 - as in `_no_gpu`

        try:
            if torch.cuda.get_device_properties().is_integrated:  # what the system caches counts as taken there, and vLLM counts otherwise
                return ""
            free, total = torch.cuda.mem_get_info()
        except RuntimeError as error:  # it is so full that this process has no room on it
            return f"the GPU cannot be asked for its free memory: {error}"
        needed = ceil(total * self._gpu_memory_share)
        if free >= needed:
            return ""
        share = f"gpu_memory_share ({self._gpu_memory_share:g}) of them"
        return f"{free:,} of the GPU's {total:,} bytes are free; an engine needs {needed:,}, {share}: lower it, or free memory"

    @property
    def _engine(self) -> "Engine | None":
        lease = self._lease
        return lease.engine if lease else None

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        if (engine := self._engine) is None:
            work.close()
            raise BackendFailed("vllm is not loaded")
        return engine.submit(work)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # where this thread was interrupted

    def _try_out(self, engine: "Engine", config: "DecoderConfig") -> None:
        """Have the engine answer one request: with some widths of heads it loads, but cannot compute. Raises BackendFailed."""
        rows = self._torch.zeros(config.prompt_length, config.hidden, dtype=getattr(self._torch, self._dtype))
        question = Question((1,) * (config.levels - 1), list(range(1, config.vocabulary)), config.vocabulary - 1)
        answer = self._run(self._within(None, engine.generate(rows, question, "probe")))
        if not abs(sum(map(exp, answer.values())) - 1) < PROBABILITY_TOLERANCE:
            raise BackendFailed(f"vllm's probabilities of all tokens sum to {sum(map(exp, answer.values()))}, not to 1")

    def _generated(self, paths: Sequence[Path]) -> Generated:
        items = self._trie.items[np.array([path.node for path in paths], np.int64)]
        return Generated(items, np.array([path.score for path in paths], np.float32))


def _digests(bundle: Bundle) -> tuple[str, ...]:
    """The digests of the decoder's files, equal in all versions that have the same decoder."""
    return tuple(record.sha256 for file, record in sorted(bundle.manifest.files.items()) if file.startswith(f"{DECODER}/"))


def _no_gpu() -> str:
    """Why no GPU can be used here; "" where one can."""
    import torch  # noqa: PLC0415 - seconds, spent only once the cheaper questions are answered

    from integrations.hstu.kernels.gpu import without_gpu  # noqa: PLC0415 - imports torch

    return "" if torch.cuda.is_available() else without_gpu()
