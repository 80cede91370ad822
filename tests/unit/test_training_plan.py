"""What is to be trained: sizes of a model, parts that agree with each other, and the options that a command makes of both."""

from types import SimpleNamespace
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from cluster.errors import ConfigError, UnknownChoice
from deployments.cli.fields import Fields, with_fields
from deployments.training.plan import DecoderPlan, ModelPlan, TrainingPlan
from deployments.training.version import train_version
from pipelines.generative_run import IdOptions
from pipelines.train import TrainOptions
from pipelines.train_decoder import DecoderOptions
from pipelines.train_ranker import RankerOptions
from pipelines.training_run import RunOptions, new_model


def test_a_head_of_an_hstu_is_its_share_of_the_width_unless_said_otherwise():
    assert ModelPlan(dim=50, heads=2, max_history=20).record(12).config == {
        "dim": 50, "layers": 2, "heads": 2, "max_history": 20, "max_length": 31, "attention_dim": 25, "linear_dim": 25, "dropout": 0.2,
        "items": 12,
    }  # fmt: skip
    assert ModelPlan(head_dim=8).record(12).config["attention_dim"] == 8
    assert ModelPlan(window_step=1).record(12).config["window_step"] == 1
    assert ModelPlan(family="sasrec", dim=16).record(12).config["feedforward_dim"] == 16


@pytest.mark.parametrize(
    ("family", "sizes", "told"),
    [
        ("hstu", {"heads": 0}, "heads = 0"),
        ("hstu", {"dim": 0, "heads": 0}, "dim = 0"),
        ("sasrec", {"heads": 0}, "heads = 0"),
    ],
)
def test_a_size_of_0_is_refused_by_name_and_not_taken_for_the_default(family, sizes, told):
    with pytest.raises(ConfigError, match=f"not a configuration of {family}: .*{told}"):
        new_model(ModelPlan(family=family, **sizes).record(12), seed=0)


def test_decoder_and_ranker_learn_with_the_encoders_seed_and_windows_and_validate_where_it_does():
    encoder = TrainOptions(seed=7, window="latest", validate_every=0)
    plan = TrainingPlan(encoder=encoder, decoder=DecoderPlan(options=DecoderOptions(epochs=3)), ranker=RankerOptions()).aligned()
    for options in (plan.decoder.options, plan.ranker):
        assert (options.seed, options.window, options.validate_every) == (7, "latest", 0)
    assert plan.decoder.options.epochs == 3
    assert TrainingPlan(encoder=encoder).aligned() == TrainingPlan(encoder=encoder)


def test_the_ranker_takes_no_more_users_at_once_than_the_encoder_may():
    for encoder, ranker in ((4, 4), (64, RankerOptions().batch_users)):
        plan = TrainingPlan(encoder=TrainOptions(batch_users=encoder), ranker=RankerOptions()).aligned()
        assert plan.ranker.batch_users == ranker


def test_a_decoder_of_an_unknown_size_is_refused_before_anything_is_trained():
    with pytest.raises(UnknownChoice, match="choose from base, none, tiny"):
        DecoderPlan("huge")
    with pytest.raises(ConfigError, match="--prompt-length 0: a decoder is prompted with at least one state"):
        DecoderPlan(prompt_length=0)
    many = SimpleNamespace(catalogue=range(100_000))
    with pytest.raises(ConfigError, match="100,000 codes a level are more than 65,536; give fewer, or more levels than 2"):
        train_version(TrainingPlan(decoder=DecoderPlan(ids=IdOptions(levels=2))), many, RunOptions(), None)


app = typer.Typer()


@app.command()
@with_fields
def learn(
    *,
    model: Annotated[ModelPlan, Fields(("head_dim", "max_history"))],
    encoder: Annotated[TrainOptions, Fields(("epochs", "loss", "seen_as_negatives"))],
    device: Annotated[str, typer.Option()] = "cpu",
    decoder: Annotated[DecoderOptions, Fields(("epochs", "batch_windows"), prefix="decoder_")],
) -> None:
    typer.echo(f"{encoder.epochs} {encoder.loss} {encoder.seen_as_negatives} {device} {decoder.epochs} {decoder.batch_windows}")


def learnt(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False).stdout.strip()


def test_a_field_is_an_option_with_its_default_and_its_groups_prefix():
    assert learnt() == "100 auto True cpu 20 32"
    options = ["--epochs", 3, "--no-seen-as-negatives", "--decoder-epochs", 4, "--decoder-batch", 8, "--device", "cuda"]
    assert learnt(*options) == "3 auto False cuda 4 8"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--head-dim", 0], "--head-dim 0: Input should be greater than or equal to 1"),
        (["--max-history", 100_000_000], "--max-history 100000000: Input should be less than or equal to 16384"),
        (["--loss", "none"], "--loss none: Input should be 'auto', 'full' or 'sampled'"),
        (["--decoder-batch", 0], "--decoder-batch 0: Input should be greater than or equal to 1"),
    ],
)
def test_what_a_field_refuses_is_told_of_the_option(arguments, told):
    with pytest.raises(ConfigError, match=told):
        learnt(*arguments)
