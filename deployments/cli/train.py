"""`genrec train`: dataset -> sequence model -> semantic IDs and decoder -> blend -> published bundle."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from cluster.bundle import ModelRecord
from cluster.dataset import Dataset
from cluster.registry import MODELS
from deployments.cli.as_options import as_options
from deployments.cli.dataset_options import READ_AS, DatasetOptions, described, open_dataset, with_dataset_options
from deployments.cli.evaluate import print_quality, print_strategies
from deployments.cli.generative import NO_DECODER, DecoderPlan, GenerativePart, preset, retrieved_lists, train_generative
from deployments.cli.pretrained import export_pretrained
from deployments.cli.publishing import publish
from deployments.cli.ranking import RankingPart, train_ranking
from deployments.cli.training_progress import TrainingProgress
from integrations.decoder.config import PRESETS
from integrations.hstu.model_parameter_calculator import model_size
from integrations.hstu.sequence_model import SequenceModel
from pipelines.blend import BlendWeights
from pipelines.generative_run import IdOptions
from pipelines.train import TrainOptions
from pipelines.train_decoder import DecoderOptions
from pipelines.train_ranker import RankerOptions
from pipelines.training_run import Observer, RunOptions, TrainedModel, forget_checkpoints, train_model

_DEFAULT, _DECODER, _IDS, _RANKER = TrainOptions(), DecoderOptions(), IdOptions(), RankerOptions()
_WINDOW_MARGIN = 11
"""How much longer than the history the constant N is, as in the published configurations (200 -> 211)."""


@with_dataset_options
def train(
    dataset: DatasetOptions,
    *,
    model_dir: Annotated[Path | None, typer.Option(help="where versions are published (default: models/DATASET)")] = None,
    family: Annotated[str, typer.Option(help=f"one of {', '.join(MODELS)}")] = "hstu",
    dim: Annotated[int, typer.Option(help="width of the embeddings")] = 50,
    layers: Annotated[int, typer.Option()] = 2,
    heads: Annotated[int, typer.Option()] = 1,
    head_dim: Annotated[int | None, typer.Option(help="HSTU: width of a head (default: dim / heads)")] = None,
    max_history: Annotated[int, typer.Option(help="how many of a user's latest events the model sees")] = 200,
    dropout: Annotated[float, typer.Option()] = 0.2,
    epochs: Annotated[int, typer.Option(help="at most, and the end of the learning-rate schedule")] = _DEFAULT.epochs,
    batch_users: Annotated[int, typer.Option(help="users in a batch")] = _DEFAULT.batch_users,
    learning_rate: Annotated[float, typer.Option()] = _DEFAULT.learning_rate,
    schedule: Annotated[str, typer.Option(help="cosine or constant learning rate")] = _DEFAULT.schedule,
    loss: Annotated[str, typer.Option(help="softmax over the whole catalogue (full), over drawn items (sampled), or auto")] = _DEFAULT.loss,
    negatives: Annotated[int, typer.Option(help="items drawn for each event by the sampled loss")] = _DEFAULT.negatives,
    seen_as_negatives: Annotated[
        bool, typer.Option(help="without, items a user has seen are no wrong answers")
    ] = _DEFAULT.seen_as_negatives,
    window: Annotated[str, typer.Option(help="random: long histories give other windows too; latest: only the last")] = _DEFAULT.window,
    validate_every: Annotated[int, typer.Option(help="epochs between validations; 0: none")] = _DEFAULT.validate_every,
    patience: Annotated[int, typer.Option(help="validations without a better one before it stops")] = _DEFAULT.patience,
    seed: Annotated[int, typer.Option()] = _DEFAULT.seed,
    refit: Annotated[bool, typer.Option(help="train anew with the validation events learnt too, as long as validation chose")] = False,
    compile_: Annotated[bool, typer.Option("--compile", help="torch.compile: slow to start, then several times faster")] = False,
    decoder: Annotated[str, typer.Option(help=f"size of the semantic-ID decoder: {', '.join(PRESETS)} or {NO_DECODER}")] = "tiny",
    decoder_epochs: Annotated[int, typer.Option(help="at most, and the end of its learning-rate schedule")] = _DECODER.epochs,
    decoder_learning_rate: Annotated[float, typer.Option()] = _DECODER.learning_rate,
    decoder_batch: Annotated[int, typer.Option(help="windows of the prompt's length in a batch")] = _DECODER.batch_windows,
    decoder_precision: Annotated[str, typer.Option(help="fp32, or bf16 where the processor multiplies it faster")] = _DECODER.precision,
    prompt_length: Annotated[int, typer.Option(help="the encoder's latest states that prompt the decoder; 32s fill vLLM's blocks")] = 64,
    levels: Annotated[int, typer.Option(help="codes in a semantic ID")] = _IDS.levels,
    codes: Annotated[int | None, typer.Option(help="different codes a level (default: enough for two cells an item)")] = _IDS.codes,
    title_weight: Annotated[float, typer.Option(help="share of titles in what semantic IDs are clustered by, 0 to 1")] = _IDS.title_weight,
    ranker: Annotated[bool, typer.Option(help="train a ranker of given candidates, as large as the encoder, too")] = True,
    ranker_epochs: Annotated[int, typer.Option(help="at most, and the end of its learning-rate schedule")] = _RANKER.epochs,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    export: Annotated[Path | None, typer.Option(help="write the weights and model.json here too, without the catalogue")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on where an interrupted run of the same options stopped")] = False,
) -> None:
    """Train a sequence model, on its states a decoder of semantic IDs, and from its weights a ranker; fit the blend of the lists, measure
    and publish them all.
    """
    data = open_dataset(dataset)
    sizes = {"dim": dim, "layers": layers, "heads": heads, "max_history": max_history, "max_length": max_history + _WINDOW_MARGIN}
    config = {**sizes, **_widths(family, dim, heads, head_dim), "dropout": dropout, "items": len(data.catalogue)}
    record = ModelRecord(family=family, config=config)
    options = _options(
        epochs=epochs, batch_users=batch_users, learning_rate=learning_rate, schedule=schedule, loss=loss, negatives=negatives,
        seen_as_negatives=seen_as_negatives, window=window, validate_every=validate_every, patience=patience, seed=seed, compile=compile_,
    )  # fmt: skip
    target = model_dir or Path("models") / data.name
    plan = _decoder_plan(
        decoder, options, prompt_length=prompt_length, epochs=decoder_epochs, learning_rate=decoder_learning_rate,
        batch_windows=decoder_batch, precision=decoder_precision, levels=levels, codes=codes, title_weight=title_weight,
    )  # fmt: skip
    ranker_options = _ranker_options(options, epochs=ranker_epochs)
    run = RunOptions(refit=refit, device=device, checkpoint=target / ".training", resume=resume)
    with TrainingProgress() as progress:
        trained = train_model(record, data, options, run, progress)
        generative = train_generative(trained, record, data, plan, run=run, observer=progress) if plan else None
        ranking = _ranking(trained, record, data, generative, ranker_options, run, progress) if ranker else None
    training = {READ_AS: described(dataset), **_training(options, run, trained)}
    if plan and generative:
        training["decoder"] = generative.described(plan)
    if ranking:
        training["ranker"] = ranking.described(ranker_options)
    puts = [part.put for part in (generative, ranking) if part]
    bundle = publish(target, record, trained.model, data, training=training, quality=trained.quality, puts=puts)
    forget_checkpoints(run)
    if export:
        export_pretrained(bundle, export, shlex.join(["genrec", *sys.argv[1:]]))
    title = f"{bundle.version}, {data.interactions.users} users' last events"
    print_strategies(bundle.manifest.blend.quality, title) if bundle.manifest.blend else print_quality(trained.quality, title)
    if ranking:
        typer.echo(ranking.told())
    typer.echo(f"published {bundle.path}: {_size(cast(SequenceModel, trained.model))}", err=True)


def _size(model: SequenceModel) -> str:
    size = model_size(model.config)
    history = f"{size.encode_flops / 1e6:,.0f} MFLOP and {size.kv_bytes / 1e3:,.0f} kB of keys and values"
    return f"{size.parameters:,} parameters ({size.weight_bytes / 1e6:.1f} MB), a history of {model.config.max_history} takes {history}"


def _widths(family: str, dim: int, heads: int, head_dim: int | None) -> dict[str, int]:
    if family != "hstu":
        return {"feedforward_dim": dim}
    width = head_dim or max(1, dim // heads)
    return {"attention_dim": width, "linear_dim": width}


def _options(**given: Any) -> TrainOptions:
    with as_options():
        return TrainOptions.model_validate(given)


def _decoder_plan(
    decoder: str, encoder: TrainOptions, *, prompt_length: int, levels: int, codes: int | None, title_weight: float, **given: Any
) -> DecoderPlan | None:
    """None where no decoder is wanted. Seed, windows and whether there is validation are as for the encoder."""
    if decoder == NO_DECODER:
        return None
    shared = {"seed": encoder.seed, "window": encoder.window, "validate_every": 1 if encoder.validate_every else 0}
    with as_options("decoder-"):
        options = DecoderOptions.model_validate({**given, **shared})
    with as_options():
        ids = IdOptions(levels=levels, codes=codes, title_weight=title_weight)
    return DecoderPlan({**preset(decoder), "prompt_length": prompt_length}, ids, options, encoder.temperature)


def _ranker_options(encoder: TrainOptions, **given: Any) -> RankerOptions:
    """Seed, windows and whether there is validation are as for the encoder."""
    shared = {"seed": encoder.seed, "window": encoder.window, "validate_every": 1 if encoder.validate_every else 0}
    with as_options("ranker-"):
        return RankerOptions.model_validate({**given, **shared})


def _ranking(  # noqa: PLR0917 - what the run has made so far, in its order
    trained: TrainedModel,
    record: ModelRecord,
    dataset: Dataset,
    generative: GenerativePart | None,
    options: RankerOptions,
    run: RunOptions,
    observer: Observer,
) -> RankingPart:
    lists = (generative.validation, generative.test) if generative else retrieved_lists(trained, record, dataset)
    weights = BlendWeights.of(generative.blend if generative else None)
    return train_ranking(trained, record, dataset, lists, weights, options, run=run, observer=observer)


def _training(options: TrainOptions, run: RunOptions, trained: TrainedModel) -> dict[str, Any]:
    return {
        "options": options.model_dump(mode="json"),
        "refit": run.refit,
        "epochs": trained.epochs,
        "best_epoch": trained.best.epoch,
        "validation": trained.best.validation,
        "seconds": round(trained.seconds, 1),
    }
