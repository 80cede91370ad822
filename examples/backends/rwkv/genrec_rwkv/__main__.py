"""`python -m genrec_rwkv train`: weights for the semantic IDs of a model, from any data that genrec reads."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.bundle_store import BundleStore
from cluster.errors import GenrecError
from deployments.cli.dataset_options import DATASET, open_dataset
from deployments.cli.fields import with_fields
from deployments.training.dataset_options import DatasetOptions
from genrec_rwkv.train import Options, save, train

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="A generator of genrec that is a recurrent network.")
_DEFAULT = Options()


@app.callback()
def genrec_rwkv() -> None:
    """Keep the name of the one command on the command line."""


@app.command("train")
@with_fields
def train_command(
    dataset: Annotated[DatasetOptions, DATASET],
    *,
    model_dir: Annotated[Path, typer.Option(help="the model whose semantic IDs it is to name, as models/ml-100k")],
    out: Annotated[Path, typer.Option(help="the file to write, as models/ml-100k.rwkv.safetensors: beside the model, not in it")],
    version: Annotated[int | None, typer.Option(help="which of the model's versions (default: the current one)")] = None,
    channels: Annotated[int, typer.Option(min=1)] = _DEFAULT.channels,
    layers: Annotated[int, typer.Option(min=1)] = _DEFAULT.layers,
    epochs: Annotated[int, typer.Option(min=1)] = _DEFAULT.epochs,
    learning_rate: Annotated[float, typer.Option()] = _DEFAULT.learning_rate,
    seed: Annotated[int, typer.Option()] = _DEFAULT.seed,
) -> None:
    """Train on a dataset's histories; each user's last event is held out."""
    bundle = BundleStore(model_dir).open(version)
    options = Options(channels=channels, layers=layers, epochs=epochs, learning_rate=learning_rate, seed=seed)
    model = train(bundle, open_dataset(dataset), options, _report)
    save(model, bundle, out)
    typer.echo(f"{sum(weight.numel() for weight in model.parameters()):,} weights for {bundle.version} written to {out}")


def _report(epoch: int, loss: float, held_out: float) -> None:
    typer.echo(f"epoch {epoch:3}: {loss:.3f} nats a code, {held_out:.3f} of the held-out events")


if __name__ == "__main__":
    try:
        app(prog_name="python -m genrec_rwkv")
    except GenrecError as error:
        sys.exit(f"genrec_rwkv: {error}")
