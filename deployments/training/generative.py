"""The generative part of a version: a decoder for the encoder's states, and the blend of both lists.

The weights of the blend are fitted on the validation events by models that never saw them; a refit comes afterwards and keeps the weights.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from cluster.bundle import BlendRecord, Bundle
from cluster.bundle_store import Draft
from cluster.config import Settings
from cluster.dataset import Dataset
from deployments.training.plan import DecoderPlan
from deployments.training.publishing import publish
from integrations.decoder.files import save_decoder
from pipelines.blend import BlendWeights
from pipelines.fit_blend import fit, measure
from pipelines.generative_run import Lists, TrainedDecoder, serving_lists, train_decoder
from pipelines.ranking_metrics import up_to
from pipelines.sequence_models import TrainableModel
from pipelines.splits import TEST, VALIDATION
from pipelines.training_run import TrainedModel, TrainingRun, without_validation

if TYPE_CHECKING:
    from integrations.decoder.model import SemanticIdDecoder  # imports transformers, which a model without a decoder does not need

_SERVING = Settings()


@dataclass(frozen=True, eq=False)
class GenerativePart:
    """A decoder and the rule that blends it with its encoder, as they are published; and what they would have answered before the
    `validation` events, by models that never saw those, and before the `test` events.
    """

    plan: DecoderPlan
    decoder: TrainedDecoder
    blend: BlendRecord
    validation: Lists
    test: Lists

    def put(self, draft: Draft) -> None:
        """Put the decoder and the blend into a version that is being written."""
        save_decoder(cast("SemanticIdDecoder", self.decoder.decoder), draft)
        draft.blend = self.blend

    def described(self) -> dict[str, Any]:
        """The part's entry in the manifest's provenance."""
        ids = {**self.plan.ids.model_dump(mode="json"), **self.decoder.ids.as_json()}
        return {"options": self.plan.options.model_dump(mode="json"), "semantic_ids": ids, **self.decoder.course()}


def train_generative(run: TrainingRun, encoder: TrainedModel, plan: DecoderPlan, temperature: float) -> GenerativePart:
    """The decoder to publish with `encoder.model`, and the blend fitted and measured.

    `temperature` is that of the encoder's training, in which its cosines are log-probabilities.
    """
    decoder = train_decoder(run, encoder.validated, plan.sizes, plan.ids, plan.options)
    with _published(run, encoder.validated, decoder) as bundle:
        validation = served_lists(bundle, run.dataset, VALIDATION)
    weights, fitted_on = _fitted(validation, temperature) if plan.options.validate_every else _unfitted(temperature)
    if encoder.model is not encoder.validated:
        again = without_validation(plan.options, decoder.best)
        refitted = train_decoder(run, encoder.model, plan.sizes, plan.ids, again, phase="decoder refit")
        decoder = replace(refitted, best=decoder.best, epochs=decoder.epochs, seconds=decoder.seconds + refitted.seconds)
    with _published(run, encoder.model, decoder) as bundle:
        test = served_lists(bundle, run.dataset, TEST)
    quality = strategies_quality(weights, test)
    return GenerativePart(plan, decoder, weights.record(fitted_on, quality), validation, test)


def retrieved_lists(run: TrainingRun, encoder: TrainedModel) -> tuple[Lists, Lists]:
    """The lists that a model without a decoder would have answered before the validation and the test events, as in a GenerativePart."""
    with _published(run, encoder.validated) as bundle:
        validation = served_lists(bundle, run.dataset, VALIDATION)
    with _published(run, encoder.model) as bundle:
        return validation, served_lists(bundle, run.dataset, TEST)


def _fitted(lists: Lists, temperature: float) -> tuple[BlendWeights, str]:
    """The weights of the blend, and the name of the events on which they were fitted."""
    weights, _ = fit(lists.retrieved, lists.generated, lists.targets, temperature=temperature)
    return weights, f"the second-last events of {len(lists.targets)} users"


def _unfitted(temperature: float) -> tuple[BlendWeights, str]:
    return BlendWeights(temperature=temperature), "nothing: trained without validation"


def strategies_quality(weights: BlendWeights, lists: Lists) -> dict[str, Mapping[str, float]]:
    """The metrics of each strategy's lists. Of those with generated items, the metrics at cutoffs beyond their `reach` are left out."""
    quality = measure(weights, lists.retrieved, lists.generated, lists.targets)
    return {strategy: figures if strategy == "retrieval" else up_to(lists.reach, figures) for strategy, figures in quality.items()}


def served_lists(bundle: Bundle, dataset: Dataset, from_end: int) -> Lists:
    """The lists that the default configuration would have answered before the events that stand `from_end` from the end."""
    return serving_lists(bundle, dataset.interactions, from_end, beam=_SERVING.generator.beam, pool=_SERVING.gateway.pool)


@contextmanager
def _published(run: TrainingRun, encoder: TrainableModel, decoder: TrainedDecoder | None = None) -> Iterator[Bundle]:
    """A temporary bundle of these models, by which the serving backends are asked."""
    with TemporaryDirectory(prefix="genrec-") as directory:
        puts = [partial(save_decoder, cast("SemanticIdDecoder", decoder.decoder))] if decoder else []
        yield publish(Path(directory) / "unpublished", run.record, encoder, run.dataset, training={}, quality={}, puts=puts)
