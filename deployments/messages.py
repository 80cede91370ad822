"""The messages of the HTTP interface. Unknown fields, NaN and numbers out of range are refused with the field and the cure."""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from cluster.values import Action, Behaviour, Recommendation, RecommendRequest

LATEST_TIMESTAMP = 4_102_444_800  # the year 2100, in seconds


def _as_text(value: Any) -> Any:
    """Catalogues often number their items: 50 is taken as "50"."""
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("holds half of a surrogate pair, which is no Unicode text")
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _in_seconds(value: int) -> int:
    if value > LATEST_TIMESTAMP:
        raise ValueError(f"{value} is after the year 2100; timestamps are whole seconds since 1970, not milliseconds")
    return value


ItemId = Annotated[str, BeforeValidator(_as_text), StringConstraints(min_length=1, max_length=256)]
UserId = Annotated[str, BeforeValidator(_as_text), StringConstraints(min_length=1, max_length=256)]
Timestamp = Annotated[int, AfterValidator(_in_seconds), Field(ge=0, description="whole seconds since 1970, UTC")]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BehaviourIn(Message):
    """Something the user did."""

    item_id: ItemId
    timestamp: Timestamp
    action: Action = Action.VIEW
    value: float | None = Field(None, allow_inf_nan=False, ge=-1e12, le=1e12, description="a rating, price or dwell time")

    def to_value(self) -> Behaviour:
        return Behaviour(self.item_id, self.timestamp, self.action, self.value)


class RecommendIn(Message):
    """Who asks, what they did, and what may be recommended."""

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
                }
            ]
        }
    )

    user_id: UserId
    behaviours: list[BehaviourIn] = Field([], description="in any order; an empty list is answered with what is popular")
    k: int = Field(10, ge=1, description="how many items")
    request_time: Timestamp | None = Field(None, description="the moment to recommend for; default: now")
    exclude_seen: bool = Field(True, description="leave out the items in `behaviours`")
    blocked: list[ItemId] = Field([], description="items that must not be recommended")
    allowed: list[ItemId] | None = Field(None, description="if given, only these items may be recommended")
    tenant: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = Field(
        "default", description="whose request it is, where customers share a cluster; it does not change the answer"
    )

    def to_value(self) -> RecommendRequest:
        return RecommendRequest(
            user_id=self.user_id,
            behaviours=tuple(behaviour.to_value() for behaviour in self.behaviours),
            k=self.k,
            request_time=self.request_time,
            exclude_seen=self.exclude_seen,
            blocked=frozenset(self.blocked),
            allowed=None if self.allowed is None else frozenset(self.allowed),
            tenant=self.tenant,
        )


class RecommendBatchIn(Message):
    """Several requests, answered in order."""

    requests: list[RecommendIn] = Field(min_length=1)


class ItemOut(Message):
    item_id: str
    title: str
    attributes: dict[str, str]


class ScoredItemOut(ItemOut):
    score: float = Field(description="orders the items of this answer; not comparable across answers")


class SkippedOut(Message):
    backend: str
    reason: str
    failed: bool = Field(description="it broke, now or lately; otherwise it is absent or switched off")


class StageOut(Message):
    """Who served a stage, and who was passed over."""

    stage: str
    backend: str
    duration_ms: float
    fallback_from: list[SkippedOut]


class RecommendOut(Message):
    user_id: str
    items: list[ScoredItemOut]
    stages: list[StageOut]
    degraded: bool = Field(description="an engine that should have served broke, and another took its place")
    model_version: str
    unknown_items: list[str] = Field(description="item ids of the request that the catalogue does not hold")

    @classmethod
    def from_value(cls, answer: Recommendation) -> Self:
        return cls(
            user_id=answer.user_id,
            items=[
                ScoredItemOut(item_id=s.item.item_id, title=s.item.title, attributes=dict(s.item.attributes), score=s.score)
                for s in answer.items
            ],
            stages=[
                StageOut(
                    stage=stage.stage,
                    backend=stage.backend,
                    duration_ms=round(stage.duration_ms, 3),
                    fallback_from=[SkippedOut(backend=s.backend, reason=s.reason, failed=s.failed) for s in stage.fallback_from],
                )
                for stage in answer.stages
            ],
            degraded=answer.degraded,
            model_version=answer.model_version,
            unknown_items=list(answer.unknown_items),
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
    available_on: int = Field(description="replicas that could run it")
    reasons: list[str] = Field(description="why it would not be asked now, where it would not")
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
    explanations: list[str] = Field(description="who serves, and why those before it do not")
    backends: list[BackendOut]


class BackendsOut(Message):
    model_version: str
    stages: list[StageOperationOut]


class SwitchOut(Message):
    """What a switch did."""

    stage: str
    name: str
    enabled: bool
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
