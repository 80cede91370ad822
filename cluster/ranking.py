"""Ranking given candidates: the tasks that a ranker predicts, its requests and its answers.

Outside, candidates are item ids and the answer is an order; inside, they are catalogue indices and the answer is a table of predictions.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from cluster.values import Behaviour, FloatArray, Int32Array, Item, StageReport, UserSequence


class Task(StrEnum):
    """What a ranker may predict of a user and an item. All tasks but the first are predicted for a user that has turned to the item.

    The order of the members is that of a ranker's columns: append, never reorder.
    """

    CLICK = "click"
    LIKE = "like"
    RATING = "rating"
    SHARE = "share"
    CART = "cart"
    PURCHASE = "purchase"


class RatingScale(BaseModel):
    """The scale of the ratings that a ranker learnt from; its input is (rating - mean) / deviation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    low: float = 0.0
    high: float = 1.0
    mean: float = 0.5
    deviation: float = Field(default=1.0, gt=0)


class RankRequest(Struct, frozen=True, eq=False):
    """Predict what this user does with each of the `candidates` (catalogue indices, (C,)), each independently of the others.

    A history of 0 events is allowed. The other fields are those of an EncodeRequest.
    """

    sequence: UserSequence
    candidates: Int32Array
    user_id: str = ""
    tenant: str = "default"
    deadline: float | None = None
    model_version: str = ""
    attempt: int = 0
    asked: list[str] = []


class Ranked(Struct, frozen=True, eq=False):
    """`predictions` (C, T): a row for each candidate in the order asked, a column for each task of the model: probabilities, but for
    `rating` the expected rating in the data's own unit.
    """

    predictions: FloatArray


class RankingRequest(Struct, frozen=True):
    """What the caller asks for: these `candidates` (item ids) in the order in which this user would want them.

    `weights`: task -> how much it counts; None: as the model's training chose. The other fields are those of a RecommendRequest.
    """

    user_id: str
    candidates: tuple[str, ...]
    behaviours: tuple[Behaviour, ...] | None = None
    weights: Mapping[Task, float] | None = None
    request_time: int | None = None
    tenant: str = "default"
    deadline_ms: float | None = None
    deadline: float | None = None


class RankedItem(Struct, frozen=True):
    """A candidate and its score: the predictions combined by the weights. Where no ranker answered, there are no `predictions`, and the
    score is a cosine or a share of all events.
    """

    item: Item
    score: float
    predictions: Mapping[str, float] = msgspec.field(default_factory=dict)


class Ranking(Struct, frozen=True):
    """The answer to one request, best candidate first. `unknown_items`: ids that the catalogue does not hold, candidates among them."""

    user_id: str
    items: tuple[RankedItem, ...]
    stages: tuple[StageReport, ...]
    model_version: str
    degraded: bool
    unknown_items: tuple[str, ...] = ()
