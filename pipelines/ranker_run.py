"""From a trained encoder to a ranker that serves: the tasks that the events can teach, the training, which begins with the encoder's
weights, and whether recommendations are better with the ranker as their last stage.
"""

from dataclasses import dataclass

import numpy as np
import torch
from pydantic import JsonValue

from cluster.bundle import ModelRecord, RankerRecord
from cluster.dataset import Interactions
from cluster.ranking import RatingScale
from cluster.registry import RANKERS, choose
from cluster.values import Int32Array
from pipelines.blend import BlendWeights, Evidence
from pipelines.epochs import chosen_device
from pipelines.evaluate_ranker import MeasuredRanker, known_figures, ranker_quality
from pipelines.fit_blend import CRITERION, Quality, places
from pipelines.generative_run import Lists
from pipelines.ranking_labels import ratings, tasks_of
from pipelines.ranking_metrics import ranking_metrics
from pipelines.scoring import combined
from pipelines.sequence_models import TrainableModel
from pipelines.splits import TEST, learnt_events
from pipelines.train_ranker import RankerOptions, RankerTrainer, TrainableRanker
from pipelines.training_run import Trained, TrainingRun

FAMILY = "hstu"


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainedRanker(Trained):
    """A finished ranker and its record, with its quality on the test events."""

    ranker: TrainableRanker
    record: RankerRecord


def train_ranker(run: TrainingRun, encoder: TrainableModel, options: RankerOptions, phase: str = "ranker") -> TrainedRanker:
    """Train on all but each user's last two events, or with `validate_every=0` the last, beginning with the encoder's weights."""
    interactions, device = run.dataset.interactions, run.options.device
    record = ranker_record(run.record, learnt_events(interactions, options.held_out_events))
    trainer = RankerTrainer(new_ranker(record, encoder, options.seed), interactions, options, device=device)
    trainer.identity = {"ranker": record.model_dump(mode="json")}
    run.fit(trainer, phase)
    quality = ranker_quality(trainer.ranker, interactions, from_end=TEST, device=torch.device(chosen_device(device)))
    ranker, record = trainer.ranker.to(torch.device("cpu")), record.model_copy(update={"quality": known_figures(quality)})
    return TrainedRanker(best=trainer.best, epochs=trainer.epoch, seconds=trainer.seconds, ranker=ranker, record=record)


def ranker_record(model: ModelRecord, interactions: Interactions) -> RankerRecord:
    """The record of a ranker as large as the encoder, for the tasks that these events can teach."""
    rated = ratings(interactions.actions, interactions.values)
    rated = rated[np.isfinite(rated)]
    scale = RatingScale()
    if len(rated):  # also where they are too few to be predicted: what is a like, and what the ranker is given, goes by it
        deviation = rated.std(dtype=np.float64) or scale.deviation
        figures = {"low": rated.min(), "high": rated.max(), "mean": rated.mean(dtype=np.float64), "deviation": deviation}
        scale = RatingScale(**{name: float(figure) for name, figure in figures.items()})
    return RankerRecord(family=FAMILY, config=_sizes(model), tasks=tasks_of(interactions), rating=scale)


def new_ranker(record: RankerRecord, encoder: TrainableModel, seed: int) -> TrainableRanker:
    """A ranker with first weights drawn from the seed, and the encoder's where they fit."""
    family = choose("ranker family", RANKERS, record.family)
    torch.manual_seed(seed)
    ranker: TrainableRanker = family(family.config_type.of(record))
    ranker.start_from(encoder.state_dict())
    return ranker


def last_stage_quality(ranker: MeasuredRanker, record: RankerRecord, lists: Lists, weights: BlendWeights, *, rank_pool: int) -> Quality:
    """The metrics of pipelines/ranking_metrics.py of what is recommended without (`found`) and with (`ranked`) the ranker as last stage."""
    ordered: dict[str, list[Int32Array]] = {"found": [], "ranked": []}
    with torch.inference_mode():
        for example, retrieved, generated in zip(lists.examples, lists.retrieved, lists.generated, strict=True):
            evidence = Evidence.of((retrieved.items, retrieved.scores), (generated.items, generated.log_probs), weights.temperature)
            found = evidence.items[np.argsort(-evidence.scores(weights), kind="stable")]
            pool = found[:rank_pool]
            predictions = ranker.after(example.history, torch.from_numpy(pool.astype(np.int64))).numpy()
            scores = combined(predictions, record, record.weights)
            ordered["found"].append(found)
            ordered["ranked"].append(pool[np.argsort(-scores, kind="stable")])
    targets = [example.target for example in lists.examples]
    return {name: ranking_metrics(places(items, targets)) for name, items in ordered.items()}


def improves(quality: Quality) -> bool:
    """Whether the ranker makes recommendations better."""
    return quality["ranked"][CRITERION] > quality["found"][CRITERION]


def _sizes(model: ModelRecord) -> dict[str, JsonValue]:
    """The encoder's sizes under the keys of a ranker's configuration."""
    config = model.config
    width = max(1, int(str(config.get("dim", 50))) // int(str(config.get("heads", 1))))
    names = ("items", "dim", "layers", "heads", "max_history", "max_length", "window_step", "dropout", "time_buckets")
    return {
        **{name: config[name] for name in names if name in config},
        **{name: config.get(name, width) for name in ("attention_dim", "linear_dim")},
    }
