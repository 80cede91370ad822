"""Recommend items: behaviours -> history -> nearest items and user state -> generated items -> blend -> rerank -> titled items.

    history      the request in catalogue indices
    retrieval    the encoder's nearest items and states; popular items where it gives none
    generation   the items that the decoder names for those states, or the reason why there are none
    blend        both lists as one
    rerank       freshness and diversity
    explain      why each item

Each of these is a file.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace

from cluster.bundle import Bundle
from cluster.errors import InvalidRequest
from cluster.values import AnswerPart, Recommendation, RecommendRequest, ScoredItem, Strategy
from pipelines.blend import BlendWeights, blend
from pipelines.candidates import Candidates
from pipelines.explain import explain, most_similar
from pipelines.generation import Generate, Generation, Stream
from pipelines.history import Wishes, understand
from pipelines.rerank import recency, rerank
from pipelines.retrieval import Encode, Retrieval


class Recommender:
    """One model version's way from a request to an answer. `encode`, `generate` and `stream` are its stages: in this process, or across
    the cluster; `generate` is None where the model has no decoder.

    `beam`: how many items are generated at least; `pool`: how many blend, diversity and freshness choose from;
    `generation_deadline_s`: what the generator may take before the retrieved items are the answer. Raises BundleError at a damaged blend.
    """

    def __init__(
        self,
        bundle: Bundle,
        encode: Encode,
        generate: Generate | None = None,
        stream: Stream | None = None,
        *,
        beam: int = 20,
        pool: int = 500,
        generation_deadline_s: float = 5.0,
    ) -> None:
        self._catalogue, self._version, self._pool = bundle.catalogue, bundle.version, pool
        self._vectors, self._first_seen = bundle.item_vectors, bundle.first_seen
        self._retrieval = Retrieval(bundle, encode)
        self._generation = Generation(bundle, generate, stream, beam=beam, pool=pool, deadline_s=generation_deadline_s)
        self._weights = BlendWeights.of(bundle.manifest.blend)

    @property
    def version(self) -> str:
        """Of the model whose answers these are."""
        return self._version

    async def recommend(self, request: RecommendRequest) -> Recommendation:
        """The answer to one request. Raises InvalidRequest; never an error because an engine broke."""
        *_, answer = [part async for part in self._parts(request, streaming=False)]
        assert isinstance(answer, Recommendation)
        return answer

    def stream(self, request: RecommendRequest) -> AsyncGenerator[AnswerPart, None]:
        """The same answer as the last part; before it each stage's report, once it has answered, and its items, as they are found.

        Of the retrieved items the first `k` come, best first, unless only generated ones are asked for. No item comes twice from a stage.
        Only the answer is final: an item that came before need not be in it. InvalidRequest is raised in place of the first part.
        """
        return self._parts(request, streaming=True)

    async def _parts(self, request: RecommendRequest, *, streaming: bool) -> AsyncGenerator[AnswerPart, None]:
        strategy, wishes = self._strategy(request), understand(request, self._catalogue)

        retrieved = await self._retrieval.find(wishes, self._pool_for(request, strategy))
        lists = [retrieved]
        yield retrieved.report
        if strategy != "generative":
            for item in self._titled(retrieved.at(slice(request.k))):
                yield item

        if strategy != "retrieval":
            async with aclosing(self._generation.find(retrieved, wishes, request, streaming=streaming)) as found:
                async for part in found:
                    for item in () if part.complete else self._titled(part):
                        yield item
            lists.append(part)  # the last one is complete
            yield part.report

        if strategy == "unified" and lists[-1].served:
            lists.append(blend(retrieved, lists[-1], self._weights))
            yield lists[-1].report

        chosen = self._reranked(lists, wishes, request)
        reports, degraded = tuple(one.report for one in lists), any(one.degraded for one in lists)
        items = self._explained(chosen, lists, wishes, request) if request.explain else tuple(self._titled(chosen))
        yield Recommendation(request.user_id, items, reports, self._version, degraded, wishes.unknown_items)

    def _strategy(self, request: RecommendRequest) -> Strategy:
        strategy = request.strategy or ("unified" if self._generation.available else "retrieval")
        if strategy == "retrieval" and request.sampling:
            cure = "leave sampling out, or ask for strategy unified or generative"
            raise InvalidRequest("sampling", f"draws generated items, and strategy retrieval generates none; {cure}")
        if strategy == "generative" and not self._generation.available:
            cure = "leave strategy out, or train a decoder: genrec train DATASET --model-dir MODEL"
            raise InvalidRequest("strategy", f"generative needs a decoder, and {self._version} has none; {cure}")
        return strategy

    def _pool_for(self, request: RecommendRequest, strategy: Strategy) -> int:
        """How many items to retrieve: no more than are asked for where nothing chooses among them."""
        chosen_from = strategy == "unified" or request.diversity or request.freshness or request.explain
        return max(request.k, self._pool) if chosen_from else request.k

    def _reranked(self, lists: list[Candidates], wishes: Wishes, request: RecommendRequest) -> Candidates:
        """The answer's items, out of the last list that somebody served: blended, else generated, else retrieved."""
        ranking = [one for one in lists if one.served][-1]
        return rerank(
            ranking,
            request.k,
            diversity=request.diversity,
            freshness=request.freshness,
            vectors_VD=self._vectors,
            first_seen_V=self._first_seen,
            now=wishes.sequence.request_time,
        )

    def _explained(self, chosen: Candidates, lists: list[Candidates], wishes: Wishes, request: RecommendRequest) -> tuple[ScoredItem, ...]:
        similar = most_similar(chosen.items, wishes.sequence.items, self._vectors, self._catalogue)
        fresh = recency(self._first_seen[chosen.items], wishes.sequence.request_time) if request.freshness else None
        reasons = explain(chosen.items, lists, similar, fresh)
        return tuple(replace(item, explanation=reason) for item, reason in zip(self._titled(chosen), reasons, strict=True))

    def _titled(self, candidates: Candidates) -> Iterator[ScoredItem]:
        pairs = zip(candidates.items.tolist(), candidates.scores.tolist(), strict=True)
        return (ScoredItem(self._catalogue[index], score, candidates.report.stage) for index, score in pairs)
