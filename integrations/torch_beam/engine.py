"""A loaded decoder that answers batches of requests: prompts -> groups that are computed alike -> search or draw -> items."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from cluster.bundle import DECODER, ITEM_VECTORS, SOFT_PROMPT, Bundle
from cluster.errors import BackendFailed, DeadlineExceeded
from cluster.trie import Trie, TrieView
from cluster.values import Generated, GenerateRequest
from integrations.decoder.files import load_soft_prompt
from integrations.decoder.published import verified_decoder
from integrations.hstu.state.eviction import PolicyName
from integrations.torch_beam.beam import Continues, Search, search
from integrations.torch_beam.continuations import Continuations
from integrations.torch_beam.drawing import Draw, draw
from integrations.torch_beam.llama import Llama
from integrations.torch_beam.logits_cache import LogitsCache
from integrations.torch_beam.prompts import KeptContinuations, KeptPrompts
from integrations.torch_beam.recall import Prompted, Recalled
from integrations.torch_beam.sampling import Sampler

Value = TypeVar("Value")
Kind: TypeAlias = tuple[bool, bool, int]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request, its view of the trie, its prompt's rows (T, H), and the prompt's digest where its logits are kept. Those of
    no user in particular are not: the controller's samples, which show how fast the engine is and whether it answers, would be recalled.
    """

    request: GenerateRequest
    view: TrieView
    rows: Tensor
    prompted: Prompted | None


class BeamEngine:
    """A bundle's decoder. Raises BundleError where it is damaged or of an unknown family, ConfigError at a budget that holds nothing.

    `cache_bytes` 0: no logits are recalled; `prompt_bytes` 0: no keys and values of prompts are kept.
    """

    def __init__(
        self,
        bundle: Bundle,
        dtype: str,
        cache_bytes: int,
        *,
        prompt_bytes: int = 0,
        prompt_policy: PolicyName = "lru",
        share_prompts: bool = False,
    ) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        directory = verified_decoder(bundle)
        self._prompt, self._ids = load_soft_prompt(bundle), bundle.semantic_ids
        self._longest_prompt = bundle.prompt_length
        self._llama = Llama.read(directory, self._longest_prompt + self._ids.levels, getattr(torch, dtype), device)
        self._model_hash = f"{bundle.manifest.files[f'{DECODER}/model.safetensors'].sha256}-{self._ids.version}-{dtype}"
        self._cache = LogitsCache(cache_bytes) if cache_bytes else None
        inputs = "-".join(bundle.manifest.files[name].sha256 for name in (SOFT_PROMPT, ITEM_VECTORS))
        model = f"{self._model_hash}-{inputs}"
        self._kept = KeptPrompts(self._llama, model, prompt_bytes, prompt_policy, share_users=share_prompts) if prompt_bytes else None
        self._sampler = Sampler()
        self._trie = Trie.of(self._ids)

    def answer(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """The answers in the order asked. Raises BackendFailed at an invalid prompt, DeadlineExceeded once all deadlines are past."""
        in_time = _waiting([request.deadline for request in requests])
        in_time()
        jobs = self._jobs(requests)
        answers: list[Generated] = [Generated(np.empty(0, np.int32), np.empty(0, np.float32))] * len(jobs)
        feasible = [index for index, job in enumerate(jobs) if job.view.items and job.request.k > 0]
        for alike in _grouped(feasible, lambda index: self._kind(jobs[index])):
            for index, generated in zip(alike, self._run([jobs[index] for index in alike], in_time), strict=True):
                answers[index] = generated
        return answers

    def forget(self, tenant: str, user: str) -> int:
        """Drop what is kept of the user; returns how many rows and entries. Logits are kept without their users, so all of them go."""
        return (self._kept.forget(tenant, user) if self._kept else 0) + self._forget_logits()

    def forget_tenant(self, tenant: str) -> int:
        """As `forget`, for all users of a tenant."""
        return (self._kept.forget_tenant(tenant) if self._kept else 0) + self._forget_logits()

    def forget_everything(self) -> int:
        """As `forget`, for all users."""
        return (self._kept.clear() if self._kept else 0) + self._forget_logits()

    def kept(self) -> dict[str, float]:
        """The statistics of kept prompts, and of kept logits: `logits_entries`, `logits_used_bytes`, `logits_hits`, `logits_misses`."""
        prompts = self._kept.statistics() if self._kept else {}
        if not self._cache:
            return prompts
        now = asdict(self._cache.statistics())
        return prompts | {f"logits_{name}": float(now[name]) for name in ("entries", "used_bytes", "hits", "misses")}

    def _forget_logits(self) -> int:
        self._sampler.buffers.clear()  # the last draw may be theirs
        return self._cache.clear() if self._cache else 0

    def _jobs(self, requests: Sequence[GenerateRequest]) -> list[Job]:
        if longest := max((len(one.state) for one in requests if len(one.state) > self._longest_prompt), default=0):
            raise BackendFailed(f"a prompt has {longest} states; this decoder takes the latest {self._longest_prompt}")
        prompts = self._prompt.of([request.state for request in requests])
        return [
            Job(request, self._trie.view(request.among, request.blocked), rows, self._prompted(request, rows))
            for request, rows in zip(requests, prompts, strict=True)
        ]

    def _prompted(self, request: GenerateRequest, rows: Tensor) -> Prompted | None:
        keeps = self._cache and request.user_id
        return Prompted.of(self._model_hash, request.tenant, rows, request.user_id) if keeps else None

    def _kind(self, job: Job) -> Kind:
        """The kind of a job; jobs of one kind are computed in one batch: searches or draws, with new or known prompts, of widths within a
        factor of two, as the widest sets the size of all.
        """
        known = self._cache is not None and job.prompted is not None and job.prompted.prefix(np.zeros((1, 0), np.int64)) in self._cache
        return job.request.sampling is not None, known, job.request.width.bit_length()

    def _run(self, jobs: Sequence[Job], in_time: Callable[[], None]) -> list[Generated]:
        model = self._continuations(jobs)
        if self._cache:
            model = Recalled(model, self._cache, [job.prompted for job in jobs])
        if jobs[0].request.sampling is None:
            searches = [Search(job.view, job.request.beam, job.request.k) for job in jobs]
            return search(searches, self._ids, model, in_time)
        draws = [Draw(job.view, job.request.k, job.request.sampling) for job in jobs if job.request.sampling]
        return draw(draws, self._ids, model, self._sampler, in_time)

    def _continuations(self, jobs: Sequence[Job]) -> Continues:
        prompts, widest = [job.rows for job in jobs], max(job.request.width for job in jobs)
        if not self._kept:
            return Continuations(self._llama, self._ids, prompts, widest)
        return KeptContinuations(self._llama, self._ids, prompts, widest, self._kept, [job.request for job in jobs])


def _grouped(values: Sequence[Value], key: Callable[[Value], Kind]) -> Iterator[list[Value]]:
    keyed = sorted(((key(value), place) for place, value in enumerate(values)))
    for _, members in groupby(keyed, lambda pair: pair[0]):
        yield [values[place] for _, place in members]


def _waiting(deadlines: Sequence[float | None]) -> Callable[[], None]:
    """A check that raises DeadlineExceeded once all deadlines are past; a batch never fails because of one late request."""
    given = [deadline for deadline in deadlines if deadline is not None]
    last = max(given) if given and len(given) == len(deadlines) else None

    def in_time() -> None:
        if last is not None and (late_s := time.monotonic() - last) >= 0:
            raise DeadlineExceeded(f"the deadline was {late_s * 1e3:.0f} ms ago; allow more time, a narrower beam or a smaller batch")

    return in_time
