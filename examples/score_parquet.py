"""Recommend for every user of a Parquet file, without a server: Ray Data feeds actors, each of which holds the model's engines.

    python examples/score_parquet.py USERS OUT --model-dir models/ml-100k [--k 10] [--strategy retrieval] [--actors 2]

    USERS (a file or directory), either a row a user:    user_id, item_ids: list, timestamps: list [, actions: list, values: list]
                                 or a row an event:      user_id, item_id, timestamp [, action, value]       (grouped by user first)
    OUT (a directory of Parquet): user_id, item_ids, scores, best first, and `degraded`: an engine broke; popular items may stand in

Timestamps are whole seconds since 1970; an id or an event that no request could have ends the job, and the error names its user. The
answers are those of /v1/recommend for the same history and request time: the same pipeline asks the same framework controllers, which
batch the users of a block. pip install 'ray[data]'; on a cluster, `ray job submit` it where all nodes have genrec and see the model's
directory. The decoder's engine is torch_beam, as vllm's needs a process beside each actor.
"""

import argparse
import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from msgspec import convert

import cluster.values  # for its Name, which Ray could not pickle with this file if it were imported by name
from cluster.bundle_store import BundleStore
from cluster.config import parse
from cluster.errors import InvalidRequest
from cluster.ranking import Ranked, RankRequest
from cluster.values import (
    LATEST_TIMESTAMP,
    Behaviour,
    Encoded,
    EncodeRequest,
    Generated,
    GenerateRequest,
    Recommendation,
    RecommendRequest,
    StageAnswer,
)
from deployments.replicas.encoder import EncoderModel
from deployments.replicas.generator import GeneratorModel
from deployments.replicas.ranker import RankerModel
from pipelines.recommend import Recommender

WITHIN_S = 600.0
"""For a stage: no user waits for a single answer, so that an engine may take its time before popular items stand in."""
SETTINGS = {"generator": {"order": ["torch_beam"]}}
ANSWERS = pa.schema(
    [("user_id", pa.string()), ("item_ids", pa.list_(pa.string())), ("scores", pa.list_(pa.float32())), ("degraded", pa.bool_())]
)


class InProcess:
    """One model with its engines in this process: what a gateway and its stages' replicas hold between them."""

    def __init__(self, model_dir: Path) -> None:
        settings, bundle = parse({**SETTINGS, "model_dir": str(model_dir)}), BundleStore(model_dir).open()
        self._encoder = EncoderModel(settings, bundle)
        self._generator = GeneratorModel(settings, bundle) if bundle.manifest.decoder else None
        self._ranker = RankerModel(settings, bundle) if bundle.manifest.ranker else None
        self._recommender = Recommender(
            bundle,
            self._encode,
            self._generate if self._generator else None,
            rank=self._rank if self._ranker else None,
            beam=settings.generator.beam,
            pool=settings.gateway.pool,
            rank_pool=settings.gateway.rank_pool,
            deadline_s=WITHIN_S,
            generation_deadline_s=WITHIN_S,
            ranking_deadline_s=WITHIN_S,
        )

    async def warm_up(self) -> None:
        for stage in (self._encoder, self._generator, self._ranker):
            if stage is not None:
                print(await stage.warm_up())

    async def recommend(self, requests: list[RecommendRequest]) -> list[Recommendation]:
        """Asked all at once, so that each stage joins them into batches."""
        return await asyncio.gather(*map(self._answer, requests))

    async def _answer(self, request: RecommendRequest) -> Recommendation:
        with told_with(request.user_id):
            return await self._recommender.recommend(request)

    async def _encode(self, request: EncodeRequest, within_s: float) -> StageAnswer[Encoded]:  # noqa: ARG002 - see WITHIN_S
        return await self._encoder.answer(request)

    async def _generate(self, request: GenerateRequest, within_s: float) -> StageAnswer[Generated]:  # noqa: ARG002
        assert self._generator is not None
        return await self._generator.answer(request)

    async def _rank(self, request: RankRequest, within_s: float) -> StageAnswer[Ranked]:  # noqa: ARG002
        assert self._ranker is not None
        return await self._ranker.answer(request)


class Scorer:
    """What each actor runs: a block of users in, their answers out."""

    def __init__(self, model_dir: Path, options: dict[str, Any]) -> None:
        self._options, self._model, self._runner = options, InProcess(model_dir), asyncio.Runner()
        self._runner.run(self._model.warm_up())

    def close(self) -> None:
        self._runner.close()

    __del__ = close

    def __call__(self, users: pa.Table) -> pa.Table:
        requests = [request_of(row, self._options) for row in users.to_pylist()]
        return table_of(self._runner.run(self._model.recommend(requests)))


@contextmanager
def told_with(user_id: Any) -> Iterator[None]:
    """Name the user in a ValueError of what is wrong with one, which ends the whole job."""
    try:
        yield
    except (InvalidRequest, ValueError) as error:
        raise ValueError(f"user {user_id!r}: {error}") from error


def request_of(row: dict[str, Any], options: dict[str, Any]) -> RecommendRequest:
    """A user's row as a request. Raises ValueError, with the user, where its lists differ in length or no request could have its id or one
    of its events.
    """
    user_id = as_text(row["user_id"])
    with told_with(user_id):
        return RecommendRequest(convert(user_id, cluster.values.Name), behaviours(row), **options)


def as_text(given: Any) -> Any:
    """An id that is a whole number, as text; any other as it is."""
    return str(given) if isinstance(given, int) and not isinstance(given, bool) else given


def behaviours(row: dict[str, Any]) -> tuple[Behaviour, ...]:
    """A row's events. Raises ValueError where its lists differ in length or no request could have an event; `$[2]` is the third."""
    items, timestamps = row["item_ids"] or [], row["timestamps"] or []  # a user without events may have no list
    actions, values = row.get("actions") or ["view"] * len(items), row.get("values") or [None] * len(items)
    events = []
    for item, timestamp, action, value in zip(items, timestamps, actions, values, strict=True):
        # pandas writes a column of whole numbers, some of which are missing, as floats
        seconds = int(timestamp) if isinstance(timestamp, float) and timestamp.is_integer() else timestamp
        if isinstance(seconds, int) and seconds > LATEST_TIMESTAMP:
            raise ValueError(f"timestamp {seconds} is after the year 2100; timestamps are whole seconds, not milliseconds")
        events.append({"item_id": as_text(item), "timestamp": seconds, "action": action or "view", "value": value})
    return convert(events, tuple[Behaviour, ...])


def table_of(answers: list[Recommendation]) -> pa.Table:
    rows = [
        {
            "user_id": answer.user_id,
            "item_ids": [scored.item.item_id for scored in answer.items],
            "scores": [scored.score for scored in answer.items],
            "degraded": answer.degraded,
        }
        for answer in answers
    ]
    return pa.Table.from_pylist(rows, ANSWERS)


def history_of(events: pa.Table) -> pa.Table:
    """One user's events as a row."""
    lists = {"item_id": "item_ids", "timestamp": "timestamps", "action": "actions", "value": "values"}
    found = {many: [events[one].to_pylist()] for one, many in lists.items() if one in events.column_names}
    return pa.table({"user_id": events["user_id"][:1], **found})


def score(users: str, out: str, model_dir: Path, options: dict[str, Any], *, actors: int, cpus: float, partitions: int | None) -> None:
    rows = ray.data.read_parquet(users)
    if "item_ids" not in rows.schema().names:
        rows = rows.groupby("user_id", num_partitions=partitions).map_groups(history_of, batch_format="pyarrow")
    arguments = (model_dir.absolute(), options)
    compute = ray.data.ActorPoolStrategy(size=actors)
    answers = rows.map_batches(
        Scorer, fn_constructor_args=arguments, batch_format="pyarrow", batch_size=256, compute=compute, num_cpus=cpus
    )
    answers.write_parquet(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("users")
    parser.add_argument("out")
    parser.add_argument("--model-dir", type=Path, default=Path("models/ml-100k"))
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--strategy", choices=["unified", "retrieval", "generative"], help="default: unified where there is a decoder")
    parser.add_argument("--request-time", type=int, help="the moment to recommend for; default: now, or a user's last event if later")
    parser.add_argument("--actors", type=int, default=1, help="each holds the engines once")
    parser.add_argument("--cpus", type=float, default=1, help="of each actor")
    parser.add_argument("--partitions", type=int, help="users are grouped in; default: Ray Data's, for large files")
    given = parser.parse_args()
    options = {"k": given.k, "strategy": given.strategy, "request_time": given.request_time}
    ray.init(include_dashboard=False)  # of a Ray for this program alone, which starts sooner without; a cluster of RAY_ADDRESS has its own
    score(given.users, given.out, given.model_dir, options, actors=given.actors, cpus=given.cpus, partitions=given.partitions)


if __name__ == "__main__":
    main()
