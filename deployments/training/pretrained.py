"""A trained model without its data: weights and their description, to be published together with the data set once that is fetched.

Such a directory holds weights.safetensors and model.json, which has family, configuration, the command that makes the model again, quality,
provenance and a digest of the item order. A model that generates also has its decoder, soft prompt and semantic IDs there.
"""

import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from cluster.bundle import (
    GENERATIVE,
    MANIFEST,
    OPTIONAL,
    RANKER,
    WEIGHTS,
    BlendRecord,
    Bundle,
    DecoderRecord,
    FileName,
    ModelRecord,
    RankerRecord,
)
from cluster.bundle_store import Draft, is_version_number
from cluster.checksums import sha256
from cluster.dataset import Dataset
from cluster.errors import BundleError, ConfigError, DataError
from deployments.training.provenance import READ_AS, item_order_sha256
from deployments.training.publishing import publish
from integrations.hstu.weights import build_model, load_weights

DESCRIPTION = "model.json"


class Pretrained(BaseModel):
    """The content of model.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelRecord
    command: str = Field(description="makes these weights again")
    quality: dict[str, float]
    training: dict[str, JsonValue]
    decoder: DecoderRecord | None = None
    blend: BlendRecord | None = None
    ranker: RankerRecord | None = None
    sha256: dict[FileName, str] = Field({}, description="of each file; exports of earlier releases tell none")

    @property
    def files(self) -> tuple[str, ...]:
        """The model's files beside the weights."""
        return (*(GENERATIVE if self.decoder else ()), *((RANKER,) if self.ranker else ()))

    @property
    def item_order_sha256(self) -> str:
        return str(self.training["item_order_sha256"])


def require_exportable(directory: Path, model_dir: Path | None = None) -> None:
    """Make the directory of an export, to be called before a long training. `model_dir`: where its model is to be published.

    Raises ConfigError where it is a published version, of which an export would replace the files, or bears the number of one to come,
    OSError where it cannot be written.
    """
    if (directory / MANIFEST).exists():
        raise ConfigError(f"{directory} is a published version of a model, which an export would destroy; name another directory")
    path = directory.resolve()
    among_versions = (path.parent / "current").exists() or (model_dir is not None and path.parent == model_dir.resolve())
    if among_versions and is_version_number(path.name):
        raise ConfigError(f"{directory} is the place of a version of the model, which an export would take; name another directory")
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory).close()


def export_pretrained(bundle: Bundle, directory: Path, command: str) -> None:
    """Write a bundle's weights and description, without its catalogue, into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = {name: getattr(bundle.manifest, name) for name in ("model", "quality", "decoder", "blend", "ranker")}
    training = {name: value for name, value in bundle.manifest.training.items() if name != READ_AS}  # it names paths of this machine
    described = Pretrained(command=command, training=training, **kept)
    for file in OPTIONAL:
        (directory / file).unlink(missing_ok=True)  # of an earlier export
    for file in (WEIGHTS, *described.files):
        (directory / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(bundle.verified(file), directory / file)
    told = described.model_copy(update={"sha256": {file: bundle.manifest.files[file].sha256 for file in (WEIGHTS, *described.files)}})
    (directory / DESCRIPTION).write_text(told.model_dump_json(indent=2) + "\n")


def publish_pretrained(directory: Path, dataset: Dataset, model_dir: Path, read_as: Mapping[str, JsonValue] | None = None) -> Bundle:
    """Publish exported weights with the data set they were trained on. `read_as`: the options that it was read by, as
    `DatasetOptions.described` has them, for commands that read it again.

    Raises DataError where the data set's items are others or in another order, BundleError where the export is broken.
    """
    described = read_pretrained(directory)
    if item_order_sha256(dataset.catalogue) != described.item_order_sha256:
        raise DataError(f"{directory} was trained on other items than {dataset.source} has; train a model: genrec train {dataset.name}")
    _require_unaltered(directory, described)
    model = build_model(described.model)
    load_weights(model, directory / WEIGHTS)
    training: dict[str, Any] = {**described.training, "pretrained": True, **({READ_AS: dict(read_as)} if read_as else {})}
    put = partial(_put_optional, directory, described)
    return publish(model_dir, described.model, model, dataset, training=training, quality=described.quality, puts=[put])


def _require_unaltered(directory: Path, described: Pretrained) -> None:
    for file, digest in described.sha256.items():
        try:
            found = sha256(directory / file)
        except OSError as error:
            raise BundleError(f"{directory / file} cannot be read: {error}") from error
        if found != digest:
            raise BundleError(f"{directory / file} does not match its checksum in {DESCRIPTION}: it was altered; copy the export again")


def _put_optional(directory: Path, described: Pretrained, draft: Draft) -> None:
    """Put the decoder and the ranker, where there are any, into the draft. Raises BundleError where a file of theirs cannot be read."""
    for file in described.files:
        (draft.path / file).parent.mkdir(exist_ok=True)
        try:
            shutil.copyfile(directory / file, draft.path / file)
        except OSError as error:
            raise BundleError(f"{directory / file} cannot be read: {error}") from error
    draft.decoder, draft.blend, draft.ranker = described.decoder, described.blend, described.ranker


def read_pretrained(directory: Path) -> Pretrained:
    """The description of an export. Raises BundleError where there is none."""
    path = directory / DESCRIPTION
    try:
        return Pretrained.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise BundleError(f"{path} does not describe a pre-trained model: {error}") from error
