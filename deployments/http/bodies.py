"""The bodies of POST /v1/recommend, /v1/recommend:batch and /v1/rank as msgspec decodes them: the fast twins of messages.RecommendIn,
messages.RecommendBatchIn and ranking.RankIn.

msgspec is strict where pydantic converts: it refuses 50 as an item id and 1.0 as a timestamp. What a decoder here accepts, pydantic accepts
with the same meaning; what it refuses goes to pydantic, which converts it or says what is wrong.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from cluster.config import MOST_ENTRIES, MOST_REQUESTS, TENANT
from cluster.ranking import RankingRequest, Task
from cluster.values import Behaviour, CacheUse, Name, RecommendRequest, SamplingOptions, Strategy, Timestamp

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors of a decoder at a body that it does not accept."""
Tenant: TypeAlias = Annotated[str, Meta(pattern=rf"^{TENANT.pattern}\Z")]
Behaviours: TypeAlias = Annotated[tuple[Behaviour, ...], Meta(max_length=MOST_ENTRIES)]
Names: TypeAlias = Annotated[list[Name], Meta(max_length=MOST_ENTRIES)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Milliseconds: TypeAlias = Annotated[float, Meta(gt=0, le=600_000)]


class SamplingBody(Struct, gc=False, forbid_unknown_fields=True):
    """The twin of SamplingIn: draw the generated items, instead of searching for the most probable ones."""

    samples: Annotated[int, Meta(ge=1, le=1024)] = 32
    temperature: Annotated[float, Meta(ge=0, le=10)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None

    def to_value(self) -> SamplingOptions:
        return SamplingOptions(self.temperature, self.top_k, self.top_p, self.seed, self.samples)


class RecommendBody(Struct, forbid_unknown_fields=True):
    """The twin of RecommendIn: a user, the user's behaviours, and what may be recommended."""

    user_id: Name
    behaviours: Behaviours | None = None
    k: Annotated[int, Meta(ge=1)] = 10
    request_time: Timestamp | None = None
    exclude_seen: bool = True
    blocked: Names = []
    allowed: Names | None = None
    tenant: Tenant | None = None
    strategy: Strategy | None = None
    diversity: Share = 0.0
    freshness: Share = 0.0
    explain: bool = False
    deadline_ms: Milliseconds | None = None
    sampling: SamplingBody | None = None
    cache: CacheUse = "use"
    rank: bool | None = None

    def to_value(self, tenant: str, arrived: float | None) -> RecommendRequest:
        """The request. `tenant`: the one that the caller acts for; `arrived`: when the whole request was there, on this process's
        monotonic clock; without it, the request's time has not begun to run.
        """
        return RecommendRequest(
            user_id=self.user_id,
            behaviours=self.behaviours,
            k=self.k,
            request_time=self.request_time,
            exclude_seen=self.exclude_seen,
            blocked=frozenset(self.blocked),
            allowed=None if self.allowed is None else frozenset(self.allowed),
            tenant=tenant,
            strategy=self.strategy,
            diversity=self.diversity,
            freshness=self.freshness,
            explain=self.explain,
            deadline_ms=self.deadline_ms,
            sampling=None if self.sampling is None else self.sampling.to_value(),
            cache=self.cache,
            rank=self.rank,
            deadline=_deadline(self.deadline_ms, arrived),
        )


class RecommendBatchBody(Struct, forbid_unknown_fields=True):
    """The twin of RecommendBatchIn: several requests, answered in order."""

    requests: Annotated[list[RecommendBody], Meta(min_length=1, max_length=MOST_REQUESTS)]


class RankBody(Struct, forbid_unknown_fields=True):
    """The twin of RankIn: a user and the candidates to order for this user."""

    user_id: Name
    candidates: Annotated[list[Name], Meta(min_length=1, max_length=MOST_ENTRIES)]
    behaviours: Behaviours | None = None
    weights: Annotated[dict[Task, Annotated[float, Meta(ge=0, le=1_000_000)]], Meta(min_length=1)] | None = None
    request_time: Timestamp | None = None
    tenant: Tenant | None = None
    deadline_ms: Milliseconds | None = None

    def to_value(self, tenant: str, arrived: float | None) -> RankingRequest:
        """As RecommendBody's."""
        return RankingRequest(
            user_id=self.user_id,
            candidates=tuple(self.candidates),
            behaviours=self.behaviours,
            weights=self.weights,
            request_time=self.request_time,
            tenant=tenant,
            deadline_ms=self.deadline_ms,
            deadline=_deadline(self.deadline_ms, arrived),
        )


def _deadline(deadline_ms: float | None, arrived: float | None) -> float | None:
    return None if deadline_ms is None or arrived is None else arrived + deadline_ms / 1000
