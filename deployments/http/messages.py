"""The messages of the HTTP interface. Unknown fields, NaN and numbers out of range are refused with the field and the cure."""

import re
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from cluster.config import MOST_ENTRIES, MOST_REQUESTS, TENANT
from cluster.values import LARGEST_VALUE, LATEST_TIMESTAMP, Action, CacheTier, CacheUse, RecommendRequest, Strategy
from deployments.http.bodies import RecommendBody

_HALF_A_PAIR = re.compile("[\ud800-\udfff]")


def _as_text(value: Any) -> Any:
    """The id as text: 50 is taken as "50", as catalogues often number their items."""
    if not isinstance(value, str):
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not value.isascii() and _HALF_A_PAIR.search(value):
        raise ValueError("holds half of a surrogate pair, which is no Unicode text")
    return value


def _in_seconds(value: int) -> int:
    if value > LATEST_TIMESTAMP:
        raise ValueError(
            f"{value if value < 10**20 else 'it'} is after the year 2100; timestamps are whole seconds since 1970, not milliseconds"
        )
    return value


ItemId = Annotated[str, StringConstraints(min_length=1, max_length=256), BeforeValidator(_as_text)]
UserId = Annotated[str, StringConstraints(min_length=1, max_length=256), BeforeValidator(_as_text)]
Tenant = Annotated[str, StringConstraints(pattern=f"^{TENANT.pattern}$")]
TENANT_SAID = "the customer that the user belongs to, where several share a cluster. Default: the API key's tenant, or `default`"
Timestamp = Annotated[
    int,
    Field(ge=0, description="whole seconds since 1970, UTC", json_schema_extra={"maximum": LATEST_TIMESTAMP}),
    AfterValidator(_in_seconds),
]


ONE, SEVERAL = "(one of its kind)", "(several)"
"""Tags that tell a message about one thing from a message about several; no field has such a name, and no caller sees them."""
MOST_FIELDS = 100
"""The most fields of a message; beyond that, it is refused before its fields are looked at."""


def few_fields(value: Any) -> Any:
    """The value, unless it has too many fields: an error for each of a hundred thousand unknown ones would take a third of a second."""
    if isinstance(value, dict) and len(value) > MOST_FIELDS:
        raise ValueError(f"has {len(value)} fields; see /docs for the fields there are, and remove the others")
    return value


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, fields: Any) -> Any:
        return few_fields(fields)


class BehaviourIn(Message):
    """Something the user did."""

    item_id: ItemId
    timestamp: Timestamp
    action: Action = Action.VIEW
    value: float | None = Field(None, allow_inf_nan=False, ge=-LARGEST_VALUE, le=LARGEST_VALUE, description="a rating, price or dwell time")


# the first wrong entry of a list is told: a list of wrong entries would cost a message for each
Behaviours = Annotated[list[BehaviourIn], Field(max_length=MOST_ENTRIES, fail_fast=True)]
ItemIds = Annotated[list[ItemId], Field(max_length=MOST_ENTRIES, fail_fast=True)]


class SamplingIn(Message):
    """Draw the generated items, instead of searching for the most probable ones."""

    samples: int = Field(32, ge=1, le=1024, description="items drawn; the same one may be drawn twice")
    temperature: float = Field(
        1.0, ge=0, le=10, allow_inf_nan=False, description="0: always the most probable code; above 1: more surprising"
    )
    top_k: int = Field(0, ge=0, le=1_000_000, description="draw each code only from that many, the most probable; 0: from all")
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False, description="draw each code only from the fewest that hold this probability")
    seed: int | None = Field(None, ge=0, le=2**63 - 1, description="the same seed draws the same items; default: others each time")


class RecommendIn(Message):
    """A user, the user's behaviours, and what may be recommended."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "user_id": "196",
                    "behaviours": [
                        {"item_id": "50", "timestamp": 881250949, "action": "rating", "value": 5},
                        {"item_id": "181", "timestamp": 881251100, "action": "rating", "value": 4},
                    ],
                    "k": 10,
                },
                {
                    "user_id": "196",
                    "behaviours": [{"item_id": "50", "timestamp": 881250949, "action": "rating", "value": 5}],
                    "k": 10,
                    "strategy": "unified",
                    "diversity": 0.3,
                    "freshness": 0.1,
                    "explain": True,
                    "deadline_ms": 200,
                    "sampling": {"samples": 64, "temperature": 0.8, "top_p": 0.95, "seed": 7},
                },
            ]
        }
    )

    user_id: UserId
    behaviours: Behaviours | None = Field(
        None, description="in any order; an empty list is answered with what is popular. Default: what is stored of the user (/v1/events)"
    )
    k: int = Field(10, ge=1, description="how many items")
    request_time: Timestamp | None = Field(None, description="the moment to recommend for; default: now")
    exclude_seen: bool = Field(True, description="leave out the items in `behaviours`")
    blocked: ItemIds = Field([], description="items that must not be recommended")
    allowed: ItemIds | None = Field(None, description="if given, only these items may be recommended")
    tenant: Tenant | None = Field(None, description=TENANT_SAID)
    strategy: Strategy | None = Field(
        None,
        description="retrieval: the items nearest to the user's state; generative: those that the decoder names; unified: both lists "
        "blended. Default: unified where the model has a decoder, else retrieval",
    )
    diversity: float = Field(0, ge=0, le=1, allow_inf_nan=False, description="0: by score alone; 1: as unlike each other as can be")
    freshness: float = Field(0, ge=0, le=1, allow_inf_nan=False, description="how much items that are new to the catalogue are preferred")
    explain: bool = Field(False, description="say of each item what every stage gave it and which items of the history it is like")
    deadline_ms: float | None = Field(
        None,
        gt=0,
        le=600_000,
        allow_inf_nan=False,
        description="time for the whole answer, from when the whole request is there; what a stage has not found by then is left out: "
        "retrieved items stand in for generated ones, the user's last good answer, where it is kept, or popular items for retrieved ones",
    )
    sampling: SamplingIn | None = Field(
        None,
        description="draw the generated items; the same one may be drawn twice, so fewer than `k` may come back; not with strategy "
        "retrieval. Default: search for the most probable ones",
    )
    cache: CacheUse = Field(
        "use", description="use: a kept answer, where there is one; refresh: compute it and keep that; bypass: compute it and keep nothing"
    )
    rank: bool | None = Field(
        None,
        description="have the ranker order the best of what was found. Default: where training has measured that this is better",
    )

    def to_value(self, tenant: str = "default", arrived: float | None = None) -> RecommendRequest:
        """See RecommendBody.to_value."""
        return msgspec.convert(self.model_dump(exclude_unset=True), RecommendBody).to_value(tenant, arrived)


class RecommendBatchIn(Message):
    """Several requests, answered in order."""

    requests: list[RecommendIn] = Field(min_length=1, max_length=MOST_REQUESTS, fail_fast=True)


class ItemOut(Message):
    item_id: str
    title: str
    attributes: dict[str, str]


class SimilarOut(Message):
    """An item of the user's history."""

    item_id: str
    title: str
    similarity: float = Field(description="cosine of its vector and the recommended item's")


class ExplanationOut(Message):
    """Why an item was recommended: what each stage gave it, null where the stage did not find it or was not asked."""

    retrieval: float | None = Field(description="cosine of its vector and the user's state")
    generation: float | None = Field(description="logarithm of the probability with which the decoder names it")
    blended: float | None = Field(description="both combined, on a logarithmic scale")
    ranking: float | None = Field(description="the ranker's score: what showing it is worth")
    popularity: float | None = Field(description="its share of all events")
    freshness: float | None = Field(description="1 where it was first met just now, half of it for each half-life since")
    similar: list[SimilarOut] = Field(description="the items of the history it is most like, the most similar first")


class ScoredItemOut(ItemOut):
    score: float = Field(
        description="what `stage` gave it: a cosine (encode), a log-probability (generate), both combined (blend), what showing it is "
        "worth (rank) or a share of all events (popularity). Orders the items of this answer, unless diversity or freshness reorder them; "
        "not comparable across answers"
    )
    stage: str = Field(description="the stage that gave the score")
    explanation: ExplanationOut | None = Field(None, description="given where `explain` asks for it")


class SkippedOut(Message):
    backend: str
    reason: str
    failed: bool = Field(description="it broke, now or lately; otherwise it is absent or switched off, or the time was over")


class StageOut(Message):
    """The backend that served a stage, and those that were passed over."""

    stage: str = Field(
        description="history (a stored one), encode, generate, blend, rank, cached (the user's last good answer) or popularity"
    )
    backend: str = Field(description="`none` if no backend served it; fallback_from says why")
    duration_ms: float
    fallback_from: list[SkippedOut]


class CacheReportOut(Message):
    """Where the answer came from."""

    tier: CacheTier = Field(description="l1: this gateway's memory; l2: the cluster's; joined: a computation already under way; computed")
    age_s: float = Field(description="seconds since it was computed")
    stale: bool = Field(description="past its time; it is computed anew for the next request")


class RecommendOut(Message):
    user_id: str
    items: list[ScoredItemOut] = Field(description="best first")
    stages: list[StageOut]
    degraded: bool = Field(
        description="an engine that should have served broke and another took its place, or none served a stage: retrieved items stand in "
        "for generated ones, the user's last good answer or popular items for retrieved ones"
    )
    model_version: str
    unknown_items: list[str] = Field(description="item ids of the request that the catalogue does not hold")
    cache: CacheReportOut | None = Field(
        description="null where no kept answer was looked for; `stages` are of the computation in any case"
    )


class RecommendBatchOut(Message):
    answers: list[RecommendOut]


class BackendOut(Message):
    """One backend, over all replicas of its stage."""

    name: str
    import_string: str
    enabled: bool
    rank: int | None = Field(description="its place in the order, 0 is asked first; null where the order leaves it out")
    replicas: int
    available_on: int = Field(description="replicas that could run it; 0 where the order leaves it out, and none has looked")
    reasons: list[str] = Field(description="why it would not be asked now, where it would not, or its predecessor answers in its place")
    breakers: dict[str, int] = Field(description="breaker state -> replicas")
    last_errors: list[str]
    calls: int = Field(description="requests it was asked")
    failures: int = Field(description="requests it broke on")
    fallbacks: int = Field(description="requests it answered after a preferred backend was passed over")
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    throughput_per_s: float


class StageOperationOut(Message):
    stage: str
    replicas: int = Field(description="replicas that reported within the last seconds")
    explanations: list[str] = Field(description="the backend that serves, and why those before it do not")
    backends: list[BackendOut]


class BackendsOut(Message):
    model_version: str
    stages: list[StageOperationOut]


class GatewayOut(Message):
    """What one gateway replica has under way."""

    gateway: str = Field(description="which gateway replica, by a name that it has drawn at its start")
    running: int
    waiting: int = Field(description="requests that wait for a place")
    places: int = Field(description="requests that may run at a time, just now")
    entries: int = Field(0, description="entries of batches that run or wait")
    refused: dict[int, int] = Field(description="HTTP status -> requests turned away since the start, with HAProxy's for full gateways")
    stored: dict[str, int] = Field({}, description="route -> requests since the start that store events, read or erase them")
    failed: dict[str, int] = Field({}, description="route -> those of `stored` that ended in a 5xx that is no refusal")


class SwitchOut(Message):
    """What a switch did."""

    stage: str
    name: str
    enabled: bool
    first: bool = Field(description="it is asked before all others of its stage")
    applied: bool = Field(description="every live replica has taken it; otherwise they will with their next report")


class StageReadyOut(Message):
    stage: str
    ready: bool
    detail: str


class ReadyOut(Message):
    ready: bool
    model_version: str
    stages: list[StageReadyOut]


class FieldProblem(Message):
    """One thing that is wrong with a request."""

    field: str = Field(examples=["behaviours[3].timestamp"])
    problem: str
    value: str = Field("", description="what was sent, cut short")


class Problem(Message):
    """An error, as in RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str
    errors: list[FieldProblem] = []
