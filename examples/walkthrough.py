"""From a table of events to recommendations, explained and ranked, in this process: no Ray, no server. Run it whole, or cell by cell.

python examples/walkthrough.py        # in under two minutes on two cores; leaves nothing behind
"""

# %% A table of what users did, and one of items. Yours may be CSV or Parquet, with other column names (genrec train --help).
import asyncio
import csv
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cluster.values import Encoded, StageAnswer

KINDS = ("Comedy", "Western", "Mystery", "Musical")
folder = tempfile.TemporaryDirectory()
here, rng = Path(folder.name), np.random.default_rng(7)


def write(name: str, header: str, rows: Iterable[Iterable[object]]) -> Path:
    with (here / name).open("w", newline="") as file:
        csv.writer(file).writerows([header.split(","), *rows])
    return here / name


films = [(str(number), f"{KINDS[number % 4]} no. {number // 4 + 1}") for number in range(48)]
events = []
for user in range(240):  # each user has a favourite kind, and now and then watches something else
    watched = [4 * rng.integers(12) + (user % 4 if rng.random() < 0.9 else rng.integers(4)) for _ in range(rng.integers(8, 14))]
    events += [(f"user-{user}", film, 1_700_000_000 + 3600 * hour + user) for hour, film in enumerate(watched)]
table = write("events.csv", "user_id,item_id,timestamp", events)
titles = write("films.csv", "item_id,title", films)

# %% Read it. What cannot be understood is refused by file, line and column.
from integrations.datasets.options import ReadOptions  # noqa: E402 - a notebook imports where it needs to
from integrations.datasets.table import read_table  # noqa: E402

data = read_table(table, ReadOptions(items=titles))
print(f"{data.interactions.users} users, {len(data.catalogue)} items, {len(data.interactions)} events")

# %% Train an HSTU on all but each user's last two events; the second last chooses the epoch, the last measures. A plan may also have
# a decoder of semantic IDs, for generated items, and a ranker, for what users would do with given ones; without them, one stage serves.
from deployments.training.plan import ModelPlan, TrainingPlan  # noqa: E402
from deployments.training.progress import TrainingProgress  # noqa: E402
from deployments.training.version import train_version  # noqa: E402
from pipelines.train import TrainOptions  # noqa: E402
from pipelines.training_run import RunOptions  # noqa: E402

plan = TrainingPlan(
    ModelPlan(dim=32, layers=1, max_history=14), TrainOptions(epochs=16, batch_users=16, learning_rate=3e-3, validate_every=4)
)
with TrainingProgress() as progress:
    trained = train_version(plan, data, RunOptions(device="cpu"), progress)
print(f"HR@10 of the last events: {trained.encoder.quality['hr@10']:.2f}; by chance it would be {10 / len(data.catalogue):.2f}")

# %% Publish a version, and compile its graphs. Engines for GPUs would be built for each of `targets`.
from cluster.bundle_store import BundleStore  # noqa: E402
from cluster.compilation import CompileOptions  # noqa: E402
from pipelines.compile import compile_bundle  # noqa: E402

store = BundleStore(here / "model")
trained.publish(store.root)
bundle = compile_bundle(store, CompileOptions(targets=(), precisions=("fp32",)))
print(f"{bundle.version}: {', '.join(f'{one.kind} {one.graph}' for one in bundle.manifest.artifacts)}")

# %% Open it: a framework controller asks the first engine of its order that works here, and says why not the others.
from cluster.config import Settings  # noqa: E402
from cluster.engines.controller import FrameworkController  # noqa: E402
from cluster.engines.stage_rules import encoder_rules  # noqa: E402
from cluster.values import EncodeRequest, StageReport  # noqa: E402

encoder = FrameworkController.configured(Settings().encoder, bundle, encoder_rules(len(bundle.catalogue)))


async def encode(request: EncodeRequest, within_s: float) -> StageAnswer[Encoded]:  # noqa: ARG001 - in this process no call waits for a network
    served = await encoder.call_one(request)
    return StageAnswer(served.answer, StageReport("encode", served.backend, served.duration_ms, served.fallback_from), bundle.identity)


# %% Recommend to a user after three westerns, and say why.
from cluster.values import Behaviour, RecommendRequest  # noqa: E402
from pipelines.recommend import Recommender  # noqa: E402

recommender = Recommender(bundle, encode)
westerns = [item.item_id for item in bundle.catalogue.items if item.title.startswith("Western")]
seen = tuple(Behaviour(item_id, 1_700_100_000 + 3600 * hour) for hour, item_id in enumerate(westerns[:3]))
answer = asyncio.run(recommender.recommend(RecommendRequest("ada", seen, k=5, request_time=1_700_200_000, explain=True)))
for report in answer.stages:
    print(f"{report.stage}: {report.backend} in {report.duration_ms:.1f} ms")
    print(*(f"  not {skipped.backend}: {skipped.reason}" for skipped in report.fallback_from), sep="\n")
for scored in answer.items:
    why = scored.explanation
    assert why is not None
    print(f"recommended: {scored.item.title:15} {scored.score:.3f}   near {', '.join(near.item.title for near in why.similar)}")

# %% Put candidates of your own into the same user's order: by how near they are to the user's state, as there is no ranker.
from cluster.ranking import RankingRequest  # noqa: E402
from pipelines.rank import CandidateRanker  # noqa: E402
from pipelines.stored_history import StoredHistories  # noqa: E402

order = CandidateRanker(bundle, StoredHistories(None, 100), encode, None, deadline_s=5.0, ranking_deadline_s=5.0)
candidates = tuple(item.item_id for item in bundle.catalogue.items[32:40])
ranking = asyncio.run(order.rank(RankingRequest("ada", candidates, seen, request_time=1_700_200_000)))
for ranked in ranking.items:
    print(f"ranked: {ranked.item.title:15} {ranked.score:.3f}")

# %% Leave nothing behind. To serve a model that stays: genrec train, then genrec serve, or `LocalServe` of deployments.cli.local_serve.
encoder.close()
folder.cleanup()
