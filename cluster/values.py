"""The values that travel between the parts: behaviours in, recommendations out.

Items have two names. Outside, an item is its catalogue id, a string. Inside, it is its catalogue index, an integer in 1..V;
index 0 is padding and never an item.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from cluster.errors import BackendUnavailable, GenrecError, InvalidRequest

ResultT = TypeVar("ResultT")
Int8Array: TypeAlias = npt.NDArray[np.int8]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Strategy: TypeAlias = Literal["unified", "retrieval", "generative"]
CacheUse: TypeAlias = Literal["use", "refresh", "bypass"]
CacheTier: TypeAlias = Literal["l1", "l2", "joined", "computed"]
LATEST_TIMESTAMP = 4_102_444_800
"""The latest timestamp of a request, in seconds: the year 2100."""
LARGEST_VALUE = 1e12
"""The largest value of a request's behaviour or event; its negative is the smallest."""
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Timestamp: TypeAlias = Annotated[int, Meta(ge=0, le=LATEST_TIMESTAMP)]


class Action(StrEnum):
    """What a user did with an item. The order of the members is their `code` in arrays and files: append, never reorder."""

    code: int

    def __new__(cls, word: str) -> Self:
        member = str.__new__(cls, word)
        member._value_, member.code = word, len(cls.__members__)
        return member

    VIEW = "view"
    CLICK = "click"
    LIKE = "like"
    DISLIKE = "dislike"
    SHARE = "share"
    CART = "cart"
    PURCHASE = "purchase"
    RATING = "rating"


ACTIONS = {action.value: action for action in Action}
"""Each action by its word, in a fifth of the time that `Action(word)` takes, which says what is wrong with an unknown one."""


class Behaviour(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One event of a user. `timestamp` is in whole seconds since 1970, UTC; `value` is the rating, price or dwell time, if any.

    A request's JSON is decoded straight into these; the limits in the annotations are checked then, and only then.
    """

    item_id: Name
    timestamp: Timestamp
    action: Action = Action.VIEW
    value: Annotated[float, Meta(ge=-LARGEST_VALUE, le=LARGEST_VALUE)] | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """A catalogue entry; `attributes` are the other columns of the item table."""

    item_id: str
    title: str
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can run here, and if not, why and what to do. It is not `certain` where a file could not be read just now, as over
    a network, or a GPU is full: that is no reason to unload an engine that is loaded. `told`: what callers read in place of the reason,
    where that is for operators alone; "" where they read the reason.
    """

    ok: bool
    reason: str = ""
    certain: bool = True
    told: str = ""

    @classmethod
    def yes(cls) -> "Availability":
        return cls(ok=True)

    @classmethod
    def no(cls, reason: str) -> "Availability":
        return cls(ok=False, reason=reason)

    @classmethod
    def because(cls, error: Exception, problem: str = "", told: str = "") -> "Availability":
        """Not available: for the reason that the error gives, or in the words of `problem`; to callers in those of `told`, or what they may
        read of the error.
        """
        causes = [error]
        while isinstance(cause := causes[-1].__cause__, Exception):
            causes.append(cause)
        told = told or (error.told if isinstance(error, GenrecError) else type(error).__name__)
        return cls(ok=False, reason=problem or str(error), certain=not any(isinstance(one, OSError) for one in causes), told=told)

    def require(self) -> None:
        """Raises BackendUnavailable, for the reason that stands here, where it is not available."""
        if not self.ok:
            raise BackendUnavailable(self.reason, told=self.told)

    @staticmethod
    def mistake_in(said: object) -> str:
        """Why what `get_availability` returned says neither yes nor no; empty where it does."""
        if not isinstance(said, Availability):
            return f"get_availability returned a {type(said).__name__}, not an Availability"
        if not isinstance(said.ok, bool):
            return f"get_availability returned an Availability with ok={said.ok!r}, not True or False"
        return ""


class UserSequence(Struct, frozen=True, eq=False):
    """A user's behaviours with items the catalogue knows, oldest first, as arrays of one length L. Encoders are given L >= 1.

    `items`: catalogue indices, `timestamps`: seconds since 1970, `actions`: `Action.code`, `values`: NaN where there is none.
    `request_time` is the moment the next item is asked for, in the same seconds; HSTU's last row needs it.
    """

    items: Int32Array
    timestamps: Int64Array
    actions: Int8Array
    values: FloatArray
    request_time: int

    def __len__(self) -> int:
        return len(self.items)


class EncodeRequest(Struct, frozen=True, eq=False):
    """Encode one user and retrieve the `top_n` nearest items, out of all of them or only out of `among` (catalogue indices); fewer where
    there are no more. `states`: whether the answer is to have them, as a decoder's prompt takes them: several kilobytes on the way.

    The sequence is that of `user_id` of `tenant`: an encoder may keep what it computed for them. "" is no user in particular.
    `deadline`: in seconds on this process's monotonic clock, when the request is given up. `model_version`: the `Bundle.identity` of the
    version that has the catalogue of these indices; "" where that is known to be the encoder's. `attempt`: of how many replicas the request
    was asked before; `asked`: which ones, a list that all copies of the request share in the process that asks.
    """

    sequence: UserSequence
    top_n: int
    among: Int32Array | None = None
    user_id: str = ""
    tenant: str = "default"
    deadline: float | None = None
    model_version: str = ""
    attempt: int = 0
    asked: list[str] = []  # of msgspec's: a list of its own for each request
    states: bool = True


class Encoded(Struct, frozen=True, eq=False):
    """`state`: the user's L2-normalised vector (D,); `items`, `scores`: nearest catalogue indices and cosines, best first, at most
    `top_n`, (N,) each.

    `states`: the states after each of the latest events, oldest first, as many as the decoder's prompt takes or the history has, (T, D);
    the last of them is `state`. None where they were not asked for, and from a backend that gives `state` alone.
    """

    state: FloatArray
    items: Int32Array
    scores: FloatArray
    states: FloatArray | None = None


class SkippedBackend(Struct, frozen=True):
    """A backend that was asked or considered before the one that answered, and why it did not serve.

    `failed` says that it broke, now or so recently that its breaker is open; otherwise it is absent here, switched
    off, or the caller's time was over.
    """

    backend: str
    reason: str
    failed: bool = False


class StageReport(Struct, frozen=True):
    """The backend that served a stage, how long it took, and the ones that were passed over."""

    stage: str
    backend: str
    duration_ms: float
    fallback_from: tuple[SkippedBackend, ...] = ()


class StageAnswer(Struct, Generic[ResultT], frozen=True, eq=False):
    """A stage's result for one request. `model_version`: the `Bundle.identity` of the version that gave it: in another one its indices mean
    nothing.
    """

    result: ResultT
    report: StageReport
    model_version: str


class UserState(Struct, frozen=True, eq=False):
    """The input of a decoder's prompt: the encoder's states (T, D) after the latest T events, oldest first, and these events."""

    states: FloatArray
    sequence: UserSequence

    def __len__(self) -> int:
        return len(self.states)


class SamplingOptions(Struct, frozen=True):
    """Draw items instead of searching for the most probable ones: `samples` paths, each code drawn from the decoder's distribution.

    `temperature` 0 takes the most probable code; `top_k` 0 means all; `top_p` keeps the fewest codes that hold that much probability.
    The same `seed` draws the same; None draws anew each time.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    samples: int = 32

    def __post_init__(self) -> None:
        """Raises InvalidRequest, with the field's name, at a value outside its range."""
        if not isinstance(self.samples, int) or self.samples < 1:
            raise InvalidRequest("sampling.samples", f"must be a whole number from 1 on, not {self.samples}")
        if not 0 <= self.temperature < float("inf"):
            raise InvalidRequest("sampling.temperature", f"must be 0 (greedy) or a positive finite number, not {self.temperature}")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise InvalidRequest("sampling.top_k", f"must be 0 (all tokens) or a whole number of them, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest("sampling.top_p", f"must be greater than 0 and at most 1 (all of the mass), not {self.top_p}")
        if self.seed is not None and not (isinstance(self.seed, int) and 0 <= self.seed < 2**64):
            raise InvalidRequest("sampling.seed", f"must be none or a whole number within 0..2**64 - 1, not {self.seed}")


class GenerateRequest(Struct, frozen=True, eq=False):
    """Generate the `k` most probable items by following `beam` paths, out of all items or only `among`, never one of `blocked`
    (catalogue indices).

    `deadline`: in seconds on this process's monotonic clock, when the request is given up. `tenant` and `user_id` (its user, "" for no user
    in particular) keep cached prompts apart. With `sampling`, items are drawn, and the `k` most probable of those drawn are the answer.
    `model_version` ("" where the catalogue is known to be the generator's), `attempt`, `asked`: as an EncodeRequest's.
    """

    state: UserState
    k: int
    beam: int
    blocked: Int32Array
    among: Int32Array | None = None
    deadline: float | None = None
    tenant: str = "default"
    sampling: SamplingOptions | None = None
    model_version: str = ""
    user_id: str = ""
    attempt: int = 0
    asked: list[str] = []  # of msgspec's: a list of its own for each request

    @property
    def width(self) -> int:
        """The most paths that are followed at a time."""
        return self.sampling.samples if self.sampling else self.beam


class Generated(Struct, frozen=True, eq=False):
    """Catalogue indices, most probable first, and the logarithm of each one's probability among the items that might be named."""

    items: Int32Array
    log_probs: FloatArray


GeneratedPart: TypeAlias = Generated | StageAnswer[Generated]
"""A part of a streamed generation: items as they are found, or lastly the whole."""


@dataclass(frozen=True, slots=True)
class Together:
    """Requests of one stage for one version of the model, of users that have one home, in one call; each with the seconds it may take."""

    requests: tuple[tuple[Any, float], ...]

    @property
    def model_version(self) -> str:
        version: str = self.requests[0][0].model_version
        return version


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Of requests of a Together, by their places in it: each its answer, the reason why there is none, or Raised. `spread_s`: seconds
    from the call's first outcome to the last of these. `apart`: the engine takes each request by itself, so that any of them may take
    far longer than the others.
    """

    by_place: Sequence[tuple[int, Any]]
    spread_s: float = 0.0
    apart: bool = False


class RecommendRequest(Struct, frozen=True):
    """What the caller asks for: `k` items for a user with these behaviours, as of `request_time` (seconds; default: now).

    `behaviours` None: those that are stored of the user; an empty tuple: the user has none.
    `exclude_seen` leaves out the items of `behaviours`, `blocked` the items that it names; with `allowed`, no other items are recommended.
    `tenant` is the customer that the user belongs to, where several share a cluster.
    `strategy`: the encoder's nearest items (retrieval), the decoder's most probable ones (generative) or both lists blended (unified);
    None is unified where the model has a decoder and retrieval where it has none. `sampling` draws the generated items.
    `deadline_ms` is the time for the whole answer, and `deadline` the moment when it is over, in seconds on this process's monotonic clock:
    a stage that has found nothing by then is replaced by the next in the order of degradation. Without a `deadline`, the time runs from
    when the pipeline is asked.
    `rank`: whether the ranker orders the best of what was found; None: where training has measured that answers are better so.
    `diversity` and `freshness`, both 0 to 1, say how much items unlike each other, and items new to the catalogue, are preferred.
    `cache`: take a kept answer where there is one (use), compute it and keep that (refresh), or compute it and keep nothing (bypass).
    """

    user_id: str
    behaviours: tuple[Behaviour, ...] | None = None
    k: int = 10
    request_time: int | None = None
    exclude_seen: bool = True
    blocked: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None
    tenant: str = "default"
    strategy: Strategy | None = None
    diversity: float = 0.0
    freshness: float = 0.0
    explain: bool = False
    deadline_ms: float | None = None
    sampling: SamplingOptions | None = None
    cache: CacheUse = "use"
    deadline: float | None = None
    rank: bool | None = None


class SimilarItem(Struct, frozen=True):
    """An item of the user's history, and the cosine of its vector and the recommended item's."""

    item: Item
    similarity: float


class Explanation(Struct, frozen=True):
    """Why an item was recommended: the score that each stage gave it, None where the stage did not find it or was not asked.

    `retrieval`: its cosine with the user's state; `generation`: the logarithm of its probability; `blended`: both combined;
    `ranking`: the ranker's score; `popularity`: its share of all events; `freshness`: 1 for an item first met now, half of it for each
    half-life since. `similar`: the items of the history that are most like it, the most similar first.
    """

    retrieval: float | None = None
    generation: float | None = None
    blended: float | None = None
    ranking: float | None = None
    popularity: float | None = None
    freshness: float | None = None
    similar: tuple[SimilarItem, ...] = ()


class ScoredItem(Struct, frozen=True):
    """A recommended item, and the score that `stage` gave it: a cosine (encode), a log-probability (generate), the two combined (blend),
    what showing it is worth (rank) or a share of all events (popularity).

    Scores do not compare across backends or answers. They order the items of one answer, until diversity or freshness reorder them.
    """

    item: Item
    score: float
    stage: str = ""
    explanation: Explanation | None = None


class CacheReport(Struct, frozen=True):
    """Where an answer came from: this gateway's memory (l1), the cluster's (l2), another request's computation that was joined, or its own.

    `age_s`: seconds since it was computed; `stale`: it is past its time, and being computed anew for the next caller.
    """

    tier: CacheTier
    age_s: float = 0.0
    stale: bool = False


class Recommendation(Struct, frozen=True):
    """The answer to one request, best item first, with its provenance.

    `degraded`: an engine that should have served broke and another took its place, or none served the stage: retrieved items instead of
    generated ones, the user's last good answer or popular items instead of retrieved ones; or the history could not be read.
    `unknown_items`: item ids of the request that the catalogue does not hold; they were left out of account.
    `cache`: None where no kept answer was looked for.
    """

    user_id: str
    items: Sequence[ScoredItem]
    stages: tuple[StageReport, ...]
    model_version: str
    degraded: bool
    unknown_items: tuple[str, ...] = ()
    cache: CacheReport | None = None


AnswerPart: TypeAlias = StageReport | ScoredItem | Sequence[ScoredItem] | Recommendation
"""A part of a streamed answer: a stage's report, an item or several as they are found, or lastly the whole."""
