"""The generative part of `genrec train`: a decoder for the encoder's states, and the blend of both lists.

The weights of the blend are fitted on the validation events by models that never saw them; a refit comes afterwards and keeps the weights.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from cluster.bundle import BlendRecord, Bundle, Draft, ModelRecord
from cluster.config import Settings
from cluster.dataset import Dataset
from cluster.errors import ConfigError, UnknownChoice
from deployments.cli.publishing import publish
from integrations.decoder.config import PRESETS
from integrations.decoder.files import save_decoder
from pipelines.blend import BlendWeights
from pipelines.fit_blend import Quality, fit, measure
from pipelines.generative_run import IdOptions, Lists, TrainedDecoder, serving_lists, train_decoder
from pipelines.sequence_models import TrainableModel
from pipelines.splits import TEST, VALIDATION
from pipelines.train_decoder import DecoderOptions
from pipelines.training_run import Observer, RunOptions, TrainedModel

if TYPE_CHECKING:
    from integrations.decoder.model import SemanticIdDecoder  # imports transformers, which a model without a decoder does not need

NO_DECODER = "none"
_SERVING = Settings()


@dataclass(frozen=True)
class DecoderPlan:
    """What decoder to train. `temperature` is that of the encoder's training, in which its cosines are log-probabilities."""

    sizes: Mapping[str, Any]
    ids: IdOptions
    options: DecoderOptions
    temperature: float


@dataclass(frozen=True, eq=False)
class GenerativePart:
    """A decoder and the rule that blends it with its encoder, as they are published; and what they would have answered before the
    `validation` events, by models that never saw those, and before the `test` events.
    """

    decoder: TrainedDecoder
    blend: BlendRecord
    validation: Lists
    test: Lists

    def put(self, draft: Draft) -> None:
        """Into a version that is being written."""
        save_decoder(cast("SemanticIdDecoder", self.decoder.decoder), draft)
        draft.blend = self.blend

    def described(self, plan: DecoderPlan) -> dict[str, Any]:
        """For the manifest's provenance."""
        return {
            "options": plan.options.model_dump(mode="json"),
            "semantic_ids": {**plan.ids.model_dump(mode="json"), **self.decoder.ids.as_json()},
            "epochs": self.decoder.epochs,
            "best_epoch": self.decoder.best.epoch,
            "validation": self.decoder.best.validation,
            "seconds": round(self.decoder.seconds, 1),
        }


def preset(name: str) -> Mapping[str, int]:
    """The sizes of that name. Raises UnknownChoice, and ConfigError where the package that trains it is missing."""
    if name not in PRESETS:
        raise UnknownChoice("decoder", name, [*PRESETS, NO_DECODER])
    if find_spec("transformers") is None:
        raise ConfigError(f"--decoder {name}: transformers is not installed; run: pip install 'genrec[cpu]', or train with --decoder none")
    return PRESETS[name]


def train_generative(
    trained: TrainedModel, record: ModelRecord, dataset: Dataset, plan: DecoderPlan, *, run: RunOptions, observer: Observer
) -> GenerativePart:
    """The decoder to publish with `trained.model`, and the blend fitted and measured."""
    decoder = _decoder(trained.validated, dataset, plan, plan.options, run, observer, "decoder")
    with _published(record, trained.validated, dataset, decoder) as bundle:
        validation = served_lists(bundle, dataset, VALIDATION)
    weights, fitted_on = _fitted(validation, plan)
    if trained.model is not trained.validated:
        again = plan.options.model_copy(update={"validate_every": 0, "stop_after": decoder.best.epoch})
        refitted = _decoder(trained.model, dataset, plan, again, run, observer, "decoder refit")
        decoder = TrainedDecoder(refitted.decoder, refitted.ids, decoder.best, decoder.epochs, decoder.seconds + refitted.seconds)
    with _published(record, trained.model, dataset, decoder) as bundle:
        test = served_lists(bundle, dataset, TEST)
    quality = measure(weights, test.retrieved, test.generated, test.targets)
    return GenerativePart(decoder, weights.record(fitted_on, quality), validation, test)


def retrieved_lists(trained: TrainedModel, record: ModelRecord, dataset: Dataset) -> tuple[Lists, Lists]:
    """What a model without a decoder would have answered before the validation and the test events, as a GenerativePart has it."""
    with _published(record, trained.validated, dataset) as bundle:
        validation = served_lists(bundle, dataset, VALIDATION)
    with _published(record, trained.model, dataset) as bundle:
        return validation, served_lists(bundle, dataset, TEST)


def _decoder(  # noqa: PLR0917 - `train_decoder`'s own
    encoder: TrainableModel, dataset: Dataset, plan: DecoderPlan, options: DecoderOptions, run: RunOptions, observer: Observer, phase: str
) -> TrainedDecoder:
    return train_decoder(encoder, dataset, plan.sizes, plan.ids, options, run=run, observer=observer, phase=phase)


def _fitted(lists: Lists, plan: DecoderPlan) -> tuple[BlendWeights, str]:
    """The weights, and on what they were fitted."""
    if not plan.options.validate_every:
        return BlendWeights(temperature=plan.temperature), "nothing: trained without validation"
    weights, _ = fit(lists.retrieved, lists.generated, lists.targets, temperature=plan.temperature)
    return weights, f"the second-last events of {len(lists.targets)} users"


def measure_strategies(bundle: Bundle, dataset: Dataset, from_end: int, weights: BlendWeights | None = None) -> Quality:
    """The quality of each strategy, blended by `weights` or, without them, by those in the manifest."""
    lists = served_lists(bundle, dataset, from_end)
    return measure(weights or BlendWeights.of(bundle.manifest.blend), lists.retrieved, lists.generated, lists.targets)


def served_lists(bundle: Bundle, dataset: Dataset, from_end: int) -> Lists:
    """What the default configuration would have answered before the events that stand `from_end` from the end."""
    return serving_lists(bundle, dataset.interactions, from_end, beam=_SERVING.generator.beam, pool=_SERVING.gateway.pool)


@contextmanager
def _published(record: ModelRecord, encoder: TrainableModel, dataset: Dataset, decoder: TrainedDecoder | None = None) -> Iterator[Bundle]:
    """A bundle for as long as it takes to ask the serving backends."""
    with TemporaryDirectory(prefix="genrec-") as directory:
        puts = [partial(save_decoder, cast("SemanticIdDecoder", decoder.decoder))] if decoder else []
        yield publish(Path(directory) / "unpublished", record, encoder, dataset, training={}, quality={}, puts=puts)
