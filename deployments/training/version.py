"""Train a version of a model: encoder -> decoder and blend -> ranker -> bundle."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.bundle import Bundle
from cluster.dataset import Dataset
from cluster.errors import ConfigError
from deployments.training.generative import GenerativePart, retrieved_lists, train_generative
from deployments.training.plan import TrainingPlan
from deployments.training.publishing import publish
from deployments.training.ranking import RankingPart, train_ranking
from pipelines.assign_ids import codes_a_level
from pipelines.blend import BlendWeights
from pipelines.train_ranker import RankerOptions
from pipelines.training_run import Observer, RunOptions, TrainedModel, TrainingRun, train_model

KEPT_BLEND, NO_LAST_STAGE = "the blend keeps its default weights", "the ranker is not the last stage of recommendations"
"""What becomes of these parts where nothing is validated."""


@dataclass(frozen=True, eq=False)
class TrainedVersion:
    """All parts of a version that a run has trained, not published yet."""

    run: TrainingRun
    plan: TrainingPlan
    encoder: TrainedModel
    generative: GenerativePart | None
    ranking: RankingPart | None

    def publish(self, model_dir: Path, origin: Mapping[str, Any] | None = None) -> Bundle:
        """Publish the new current version of the model in `model_dir`; `origin`: where the data came from, for the manifest."""
        parts = [part for part in (self.generative, self.ranking) if part]
        training, quality = {**(origin or {}), **self._training()}, self.encoder.quality
        puts = [part.put for part in parts]
        return publish(model_dir, self.run.record, self.encoder.model, self.run.dataset, training=training, quality=quality, puts=puts)

    def _training(self) -> dict[str, Any]:
        """The manifest's provenance."""
        parts = {"decoder": self.generative, "ranker": self.ranking}
        return {
            "options": self.plan.encoder.model_dump(mode="json"),
            "refit": self.run.options.refit,
            **self.encoder.course(),
            **{name: part.described() for name, part in parts.items() if part},
        }


def train_version(plan: TrainingPlan, dataset: Dataset, options: RunOptions, observer: Observer) -> TrainedVersion:
    """Train and measure every part of the plan.

    Raises ConfigError where the sizes do not fit or a refit is asked for without validation, DataError where there is nothing to learn from
    or nothing to resume.
    """
    if options.refit and not plan.encoder.validate_every:
        raise ConfigError("--refit trains for as many epochs as validation chose, and --validate-every 0 has none; leave one of them out")
    plan = plan.aligned()
    if plan.decoder:  # before hours of training, not after
        codes_a_level(len(dataset.catalogue), plan.decoder.ids.levels, plan.decoder.ids.codes)
    run = TrainingRun(plan.model.record(len(dataset.catalogue)), dataset, options, observer)
    lost = [what for part, what in ((plan.decoder, KEPT_BLEND), (plan.ranker, NO_LAST_STAGE)) if part]
    if lost and not plan.encoder.validate_every:
        observer.note(f"without validation {' and '.join(lost)}; a refit (--refit) learns the validation events, too, after they decided")
    encoder = train_model(run, plan.encoder)
    generative = train_generative(run, encoder, plan.decoder, plan.encoder.temperature) if plan.decoder else None
    ranking = _ranking(run, encoder, generative, plan.ranker) if plan.ranker else None
    return TrainedVersion(run, plan, encoder, generative, ranking)


def _ranking(run: TrainingRun, encoder: TrainedModel, generative: GenerativePart | None, options: RankerOptions) -> RankingPart:
    lists = (generative.validation, generative.test) if generative else retrieved_lists(run, encoder)
    return train_ranking(run, encoder, lists, BlendWeights.of(generative.blend if generative else None), options)
