"""`genrec train`: dataset -> sequence model -> semantic IDs and decoder -> blend -> ranker -> published bundle."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from cluster.bundle_store import BundleStore
from deployments.cli.dataset_options import DATASET, open_dataset, tell_without_events
from deployments.cli.evaluate import measured_on, print_quality, print_strategies
from deployments.cli.fields import Fields, with_fields
from deployments.training.dataset_options import DatasetOptions
from deployments.training.plan import NO_DECODER, DecoderPlan, ModelPlan, TrainingPlan
from deployments.training.pretrained import export_pretrained, require_exportable
from deployments.training.progress import TrainingProgress
from deployments.training.provenance import READ_AS, recorded_strategies
from deployments.training.version import train_version
from integrations.decoder.config import PRESETS
from integrations.hstu.config import HSTUConfig
from integrations.hstu.model_parameter_calculator import model_size
from integrations.hstu.sequence_model import SequenceModel
from pipelines.generative_run import IdOptions
from pipelines.splits import TEST
from pipelines.train import TrainOptions
from pipelines.train_decoder import DecoderOptions
from pipelines.train_ranker import RankerOptions
from pipelines.training_run import RunOptions, alone, forget_checkpoints, saved_epochs

MODEL = Fields(("family", "dim", "layers", "heads", "head_dim", "max_history", "window_step", "dropout"))
LEARNING = Fields(
    ("epochs", "batch_users", "learning_rate", "schedule", "loss", "negatives", "seen_as_negatives", "window", "validate_every",
     "patience", "seed", "compile"),
    declared={"compile": typer.Option("--compile", help=TrainOptions.model_fields["compile"].description)},
)  # fmt: skip


@with_fields
def train(
    dataset: Annotated[DatasetOptions, DATASET],
    *,
    model_dir: Annotated[Path | None, typer.Option(help="where versions are published (default: models/DATASET)")] = None,
    model: Annotated[ModelPlan, MODEL],
    encoder: Annotated[TrainOptions, LEARNING],
    refit: Annotated[bool, typer.Option(help="train anew with the validation events learnt too, as long as validation chose")] = False,
    decoder: Annotated[str, typer.Option(help=f"size of the semantic-ID decoder: {', '.join(PRESETS)} or {NO_DECODER}")] = "tiny",
    decoding: Annotated[DecoderOptions, Fields(("epochs", "learning_rate", "batch_windows", "precision"), prefix="decoder_")],
    prompt_length: Annotated[int, typer.Option(help="the encoder's latest states that prompt the decoder; 32s fill vLLM's blocks")] = 64,
    ids: Annotated[IdOptions, Fields(("levels", "codes", "title_weight"))],
    ranker: Annotated[bool, typer.Option(help="train a ranker of given candidates, as large as the encoder, too")] = True,
    ranking: Annotated[RankerOptions, Fields(("epochs",), prefix="ranker_")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    export: Annotated[Path | None, typer.Option(help="write the weights and model.json here too, without the catalogue")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on where an interrupted run of the same options stopped")] = False,
) -> None:
    """Train a sequence model, on its states a decoder of semantic IDs, and from its weights a ranker; fit the blend of the lists, measure
    and publish them all.
    """
    decoding_plan = None if decoder == NO_DECODER else DecoderPlan(decoder, prompt_length, ids, decoding)
    plan = TrainingPlan(model, encoder, decoding_plan, ranking if ranker else None)
    if export:
        models = model_dir or Path("models") / export.resolve().parent.name  # whatever the data set will be called
        require_exportable(export, models)  # before hours of training, not after, as the next one
    data = open_dataset(dataset)
    held_out_events = TEST if refit else encoder.held_out_events
    tell_without_events(data, held_out_events=held_out_events, max_history=model.max_history, window=encoder.window)
    target = model_dir or Path("models") / data.name
    BundleStore(target).require_publishable()
    run = RunOptions(refit=refit, device=device, checkpoint=target / ".training", resume=resume)
    with alone(run):
        if not resume and (saved := saved_epochs(run)):
            told = ", ".join(f"{phase}: epoch {epoch}" for phase, epoch in saved.items())
            typer.echo(f"an interrupted run is here ({told}); --resume goes on from it, without that it is gone after an epoch", err=True)
        with TrainingProgress() as progress:
            trained = train_version(plan, data, run, progress)
        bundle = trained.publish(target, {READ_AS: dataset.described()})
        forget_checkpoints(run)
    strategies = recorded_strategies(bundle.manifest)
    title = measured_on(bundle, data, drawn=True)
    print_strategies(strategies, title) if strategies else print_quality(bundle.manifest.quality, title)
    if trained.ranking:
        typer.echo(trained.ranking.told())
    typer.echo(f"published {bundle.path}: {_size(cast(SequenceModel, trained.encoder.model))}", err=True)
    if export:
        export_pretrained(bundle, export, shlex.join(["genrec", *sys.argv[1:]]))


def _size(model: SequenceModel) -> str:
    size = model_size(model.config)
    kept = f" and {size.kv_bytes / 1e3:,.0f} kB of keys and values" if isinstance(model.config, HSTUConfig) else ""
    history = f"a history of {model.config.max_history} takes {size.encode_flops / 1e6:,.0f} MFLOP{kept}"
    return f"{size.parameters:,} parameters ({size.weight_bytes / 1e6:.1f} MB), {history}"
