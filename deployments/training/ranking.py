"""The ranking part of a version, trained with it or for an existing version.

Whether the ranker orders recommendations is decided on the validation events, by models that never saw them; a refit comes afterwards.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from cluster.bundle import RANKER, Bundle, RankerRecord
from cluster.bundle_store import BundleStore, Draft
from cluster.config import Settings
from cluster.dataset import Dataset
from deployments.training.generative import served_lists, strategies_quality
from deployments.training.new_items import grown_ranker, without_added
from deployments.training.provenance import RANKED, was_validated
from integrations.hstu.ranker import HSTURanker
from integrations.hstu.ranking_engine import GRAPHS
from integrations.hstu.weights import load_ranker, save_weights
from pipelines.blend import BlendWeights
from pipelines.compile import record, take_over
from pipelines.evaluate_ranker import MeasuredRanker
from pipelines.fit_blend import CRITERION, Quality
from pipelines.generative_run import Lists
from pipelines.new_items import resemblance
from pipelines.ranker_run import TrainedRanker, improves, last_stage_quality, train_ranker
from pipelines.ranking_metrics import up_to
from pipelines.splits import TEST, VALIDATION, learnt_events
from pipelines.train_ranker import RankerOptions
from pipelines.training_run import TrainedModel, TrainingRun, without_validation

_RANK_POOL = Settings().gateway.rank_pool


@dataclass(frozen=True, eq=False)
class RankingPart:
    """A ranker to be published, and the quality of recommendations without and with it, on the test events and, where that decided whether
    it is the last stage, on the validation events.
    """

    options: RankerOptions
    trained: TrainedRanker
    last_stage: Quality
    validated: Quality | None = None

    def put(self, draft: Draft) -> None:
        """Put the ranker into a version that is being written."""
        save_weights(self.trained.ranker.state_dict(), draft.path / RANKER)
        draft.ranker = self.trained.record

    def described(self) -> dict[str, Any]:
        """The part's entry in the manifest's provenance."""
        recommendations = {name: dict(figures) for name, figures in self.last_stage.items()}
        return {"options": self.options.model_dump(mode="json"), **self.trained.course(), "recommendations": recommendations}

    def told(self) -> str:
        """The outcome as a line of text."""
        serves = "it is their last stage" if self.trained.record.last_stage else "it ranks given candidates only"
        quality = ", ".join(f"{name} {value:.3f}" for name, value in self.trained.record.quality.items())
        tested = f"{CRITERION} of recommendations {_compared(self.last_stage)}"
        decided = f"; on the validation events, which decide, {_compared(self.validated)}" if self.validated else ""
        return f"ranker: {quality}; {tested}{decided}: {serves}"


def train_ranking(
    run: TrainingRun, encoder: TrainedModel, lists: tuple[Lists, Lists], weights: BlendWeights, options: RankerOptions
) -> RankingPart:
    """The ranker to publish with `encoder.model`. `lists`: the recommendations before the validation and before the test events."""
    validation, test = lists
    ranker = train_ranker(run, encoder.validated, options)
    validated = _measured(ranker.ranker, ranker.record, validation, weights) if options.validate_every else None
    if encoder.model is not encoder.validated:
        refitted = train_ranker(run, encoder.model, without_validation(options, ranker.best), "ranker refit")
        ranker = replace(refitted, best=ranker.best, epochs=ranker.epochs, seconds=ranker.seconds + refitted.seconds)
    return _part(options, ranker, test, weights, validated)


def train_ranking_of(bundle: Bundle, run: TrainingRun, options: RankerOptions, *, last_stage: bool | None = None) -> RankingPart:
    """A ranker for an existing version, trained on the items of its training, which are those of the run's data set; those that were
    added since are placed among them. `last_stage`: whether it orders recommendations; None: if that makes them better on the validation
    events, and the version has not learnt those.
    """
    learnt = not was_validated(bundle)
    weights = BlendWeights.of(bundle.manifest.blend)
    if learnt:
        options = options.model_copy(update={"validate_every": 0})
    sizes, encoder = without_added(bundle)
    ranker = train_ranker(replace(run, record=sizes), encoder, options)
    if bundle.added_items:
        events = learnt_events(run.dataset.interactions, options.held_out_events)
        known = np.flatnonzero(events.popularity(len(run.dataset.catalogue)))
        alike = resemblance(bundle.catalogue, len(run.dataset.catalogue), known)
        grown, ranked = grown_ranker(cast("HSTURanker", ranker.ranker), ranker.record, alike)
        ranker = replace(ranker, ranker=grown, record=ranked)
    decides = last_stage is None and not learnt
    validated = _measured(ranker.ranker, ranker.record, served_lists(bundle, run.dataset, VALIDATION), weights) if decides else None
    return _part(options, ranker, served_lists(bundle, run.dataset, TEST), weights, validated, last_stage=bool(last_stage))


def publish_ranking(bundle: Bundle, part: RankingPart) -> Bundle:
    """Publish the version with this ranker as the model's next one, which becomes current where `bundle` still is.

    It has the encoder's compiled artifacts, as the encoder is the same, and none of the ranker; one that does not verify is left out, and
    noted as a failed step.
    """
    store = BundleStore(bundle.path.parent)
    with store.recompile(bundle, since=bundle.manifest.version) as draft:
        part.put(draft)
        draft.training["ranker"] = part.described()
        draft.compiled_from = None
        draft.failed_steps += [one for one in bundle.manifest.failed_steps if set(GRAPHS).isdisjoint(one.step.split())]
        for failure in take_over([one for one in bundle.manifest.artifacts if one.graph not in GRAPHS], bundle, draft):
            record(draft, failure)
    return store.open(draft.version)


def measure_strategies(bundle: Bundle, dataset: Dataset, from_end: int) -> Quality:
    """The metrics of each strategy's lists, blended by the weights in the manifest, and of the `RANKED` ones where the ranker is the last
    stage. Empty where a request gets what the encoder alone finds.
    """
    ranker = bundle.manifest.ranker
    last_stage = ranker if ranker and ranker.last_stage else None
    if not (bundle.manifest.decoder or last_stage):
        return {}
    weights, lists = BlendWeights.of(bundle.manifest.blend), served_lists(bundle, dataset, from_end)
    strategies = strategies_quality(weights, lists)
    if not bundle.manifest.decoder:
        strategies = {"retrieval": strategies["retrieval"]}
    if last_stage:
        strategies[RANKED] = _measured(load_ranker(bundle), last_stage, lists, weights)["ranked"]
    return strategies


def _part(
    options: RankerOptions,
    ranker: TrainedRanker,
    test: Lists,
    weights: BlendWeights,
    validated: Quality | None,
    *,
    last_stage: bool = False,
) -> RankingPart:
    """The part. Its ranker is the last stage where it improves what was `validated`, or where `last_stage` says so."""
    last_stage = improves(validated) if validated else last_stage
    ranker = replace(ranker, record=ranker.record.model_copy(update={"last_stage": last_stage}))
    return RankingPart(options, ranker, _measured(ranker.ranker, ranker.record, test, weights), validated)


def _compared(quality: Quality) -> str:
    return f"{quality['found'][CRITERION]:.4f} without it, {quality['ranked'][CRITERION]:.4f} with it"


def _measured(ranker: MeasuredRanker, record: RankerRecord, lists: Lists, weights: BlendWeights) -> Quality:
    """As `last_stage_quality`, without the metrics at cutoffs beyond the `reach` of the lists, and beyond what is ranked of them: for a
    request of more items, more are generated and ranked.
    """
    quality = last_stage_quality(ranker, record, lists, weights, rank_pool=_RANK_POOL)
    found, ranked = (up_to(lists.reach, quality[name]) for name in ("found", "ranked"))
    return {"found": found, "ranked": up_to(_RANK_POOL, ranked)}
