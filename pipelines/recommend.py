"""Recommend items: behaviours -> history -> nearest items and user state -> generated items -> blend -> rank -> rerank -> titled items.

    history      the request in catalogue indices
    retrieval    the encoder's nearest items and states; popular items where it gives none
    generation   the items that the decoder names for those states, or the reason why there are none
    blend        both lists as one
    scoring      the best items in the ranker's order
    answering    the answer's items: freshness and diversity, why each item, titles

Each of these is a file.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from cluster.bundle import Bundle
from cluster.errors import InvalidRequest
from cluster.traffic.budget import Budget, started
from cluster.values import AnswerPart, Recommendation, RecommendRequest, Strategy
from pipelines.answering import Answering, last_served
from pipelines.blend import BlendWeights, blend
from pipelines.candidates import Candidates
from pipelines.generation import Generate, Generation, Stream
from pipelines.history import ResolvedRequest, resolve
from pipelines.retrieval import Encode, Retrieval
from pipelines.scoring import Rank, Scoring

CHOICE = 3
"""How many generated items there are for each of the `k` that diversity or freshness choose, up to the pool."""
TRAIN_A_DECODER = "train a decoder: genrec train DATASET --model-dir MODEL"


class Plan(NamedTuple):
    """How one request is answered. `ranks`: the ranker orders the items; `pool` and `width`: how many are retrieved and generated."""

    strategy: Strategy
    ranks: bool
    pool: int
    width: int

    @property
    def generates(self) -> bool:
        """Whether a decoder is prompted with the user's states."""
        return self.strategy != "retrieval"

    def blends(self, generated: Candidates) -> bool:
        return self.strategy == "unified" and generated.served


class Recommender:
    """The pipeline of one version of the model. `encode`, `generate`, `stream` and `rank` ask its stages, in this process or another one;
    `generate` is None without a decoder, `rank` without a ranker.

    `beam`: least number of items to generate. `pool`: items from which blend, diversity and freshness choose. `rank_pool`: items that the
    ranker orders. `deadline_s`: time of the encoder, after which popular items are retrieved; `generation_deadline_s`: of the generator,
    after which the retrieved items are the answer; `ranking_deadline_s`: of the ranker, after which the order stays as it is. Each gets no
    more than a request's own deadline leaves. Raises BundleError if the model's blend is damaged.
    """

    def __init__(
        self,
        bundle: Bundle,
        encode: Encode,
        generate: Generate | None = None,
        stream: Stream | None = None,
        rank: Rank | None = None,
        *,
        beam: int = 20,
        pool: int = 500,
        rank_pool: int = 100,
        deadline_s: float = 5.0,
        generation_deadline_s: float = 5.0,
        ranking_deadline_s: float = 2.0,
    ) -> None:
        self._catalogue, self._version = bundle.catalogue, bundle.version
        self._beam, self._pool, self._rank_pool = beam, pool, rank_pool
        self._retrieval = Retrieval(bundle, encode, deadline_s=deadline_s)
        self._generation = Generation(bundle, generate, stream, deadline_s=generation_deadline_s)
        self._weights = BlendWeights.of(bundle.manifest.blend)
        self._scoring = Scoring(bundle, rank, deadline_s=ranking_deadline_s)
        self._answering = Answering(bundle)

    async def recommend(self, request: RecommendRequest) -> Recommendation:
        """The answer to one request. Raises InvalidRequest. A failing engine degrades the answer and raises nothing."""
        plan = self._plan_of(request)
        resolved, budget = resolve(request, self._catalogue), Budget(started(request).deadline)

        retrieved = await self._retrieval.find(resolved, plan.pool, budget, states=plan.generates)
        lists = [retrieved]
        if plan.generates:
            lists.append(generated := await self._generation.complete(retrieved, resolved, plan.width, budget))
            if plan.blends(generated):
                lists.append(blend(retrieved, generated, self._weights))
        if plan.ranks:
            lists.append(await self._ranked(lists, resolved, budget))
        return await self._answering.answer(lists, resolved, budget)

    async def stream(self, request: RecommendRequest) -> AsyncGenerator[AnswerPart, None]:
        """Each stage's report as soon as it has answered, items as they are found, those of a moment together, and lastly the same answer
        as `recommend`'s.

        The first `k` retrieved items come best first, unless the strategy is generative. A stage yields no item twice. Only the answer is
        final: it need not hold the items before it. InvalidRequest is raised in place of the first part.
        """
        plan = self._plan_of(request)
        resolved, budget = resolve(request, self._catalogue), Budget(started(request).deadline)

        retrieved = await self._retrieval.find(resolved, plan.pool, budget, states=plan.generates)
        lists = [retrieved]
        yield retrieved.report
        if plan.strategy != "generative" and (items := self._answering.titled(retrieved.at(slice(request.k)))):
            yield items
        if plan.generates:
            async with aclosing(self._generation.stream(retrieved, resolved, plan.width, budget)) as found:
                async for part in found:
                    if part.complete:
                        generated = part
                    elif items := self._answering.titled(part):
                        yield items
            lists.append(generated)
            yield generated.report
            if plan.blends(generated):
                lists.append(blended := blend(retrieved, generated, self._weights))
                yield blended.report
        if plan.ranks:
            lists.append(ranked := await self._ranked(lists, resolved, budget))
            yield ranked.report
        yield await self._answering.answer(lists, resolved, budget)

    def check(self, request: RecommendRequest) -> None:
        """Raises InvalidRequest if this model cannot serve the request's options."""
        self._plan_of(request)

    def _plan_of(self, request: RecommendRequest) -> Plan:
        strategy, ranks = self._strategy(request), self._ranks(request)
        pool, width = self._pool_for(request, strategy, ranks=ranks), self._width_for(request, strategy, ranks=ranks)
        return Plan(strategy, ranks, pool, width)

    def _strategy(self, request: RecommendRequest) -> Strategy:
        strategy = request.strategy or ("unified" if self._generation.available else "retrieval")
        if request.sampling and not self._generation.available:
            cure = f"leave sampling out, or {TRAIN_A_DECODER}"
            raise InvalidRequest("sampling", f"draws generated items, and {self._version} has no decoder; {cure}")
        if request.sampling and strategy == "retrieval":
            cure = "leave sampling out, or ask for strategy unified or generative"
            raise InvalidRequest("sampling", f"draws generated items, and strategy retrieval generates none; {cure}")
        if strategy == "generative" and not self._generation.available:
            cure = f"leave strategy out, or {TRAIN_A_DECODER}"
            raise InvalidRequest("strategy", f"generative needs a decoder, and {self._version} has none; {cure}")
        return strategy

    def _ranks(self, request: RecommendRequest) -> bool:
        if request.rank and not self._scoring.tasks:
            cure = "leave rank out, or train a ranker: genrec train DATASET --model-dir MODEL"
            raise InvalidRequest("rank", f"needs a ranker, and {self._version} has none; {cure}")
        return self._scoring.last_stage if request.rank is None else request.rank

    def _pool_for(self, request: RecommendRequest, strategy: Strategy, *, ranks: bool) -> int:
        """How many items to retrieve: `k`, or more if a later step chooses among them."""
        if strategy == "unified" or request.diversity or request.freshness or request.explain:
            return max(request.k, self._pool)
        return max(request.k, self._rank_pool) if ranks else request.k

    def _width_for(self, request: RecommendRequest, strategy: Strategy, *, ranks: bool) -> int:
        """How many items to generate: the beam's width, as a blend uses all it can get, or `k` if that is more; still more where diversity,
        freshness or the ranker choose among generated items alone.
        """
        alone = strategy == "generative"
        choice = min(CHOICE * request.k, self._pool) if alone and (request.diversity or request.freshness) else 0
        return min(max(self._beam, request.k, choice, self._rank_pool if alone and ranks else 0), len(self._catalogue))

    async def _ranked(self, lists: list[Candidates], resolved: ResolvedRequest, budget: Budget) -> Candidates:
        best = last_served(lists).at(slice(max(resolved.request.k, self._rank_pool)))
        return (await self._scoring.score(best.items, resolved, budget)).candidates
