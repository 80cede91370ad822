"""The model bundle: everything one version of a model needs to be served, in one directory that is never changed once published.

    models/ml-1m/
      current              the number of the version that serves; `previous`: those that did before; `newest`: the highest number given
      1/manifest.json      what this version is: checksums, model configuration, provenance, measured quality, artifacts
      1/weights.safetensors  1/catalogue.parquet  1/popularity.npy  1/item_vectors.npy  1/first_seen.npy
                                                                            (required: verified whenever the bundle is opened)
      1/learnt.npy                                                          (which items `genrec add-items` compares new ones with)
      1/ranker.safetensors                                                  (a model that ranks: verified by the backend that loads it)
      1/semantic_ids.npz  1/soft_prompt.safetensors  1/decoder/...          (a model that generates: verified by the backend that loads it)
      2/...                the same model with compiled artifacts           (derived: verified by the backend that loads them)

Versions are published, opened and made current by cluster.bundle_store.
"""

import os
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, field_validator

from cluster.catalogue_file import read_catalogue
from cluster.checksums import sha256
from cluster.dataset import Catalogue
from cluster.errors import BundleError
from cluster.ranking import RatingScale, Task
from cluster.semantic_ids import SemanticIds, read_semantic_ids
from cluster.values import BoolArray, FloatArray, Int64Array

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
CATALOGUE = "catalogue.parquet"
POPULARITY = "popularity.npy"
ITEM_VECTORS = "item_vectors.npy"
FIRST_SEEN = "first_seen.npy"
REQUIRED = (WEIGHTS, CATALOGUE, POPULARITY, ITEM_VECTORS, FIRST_SEEN)

SEMANTIC_IDS = "semantic_ids.npz"
SOFT_PROMPT = "soft_prompt.safetensors"
DECODER = "decoder"
RANKER = "ranker.safetensors"
GENERATIVE = (SEMANTIC_IDS, SOFT_PROMPT, f"{DECODER}/config.json", f"{DECODER}/generation_config.json", f"{DECODER}/model.safetensors")
OPTIONAL = (*GENERATIVE, RANKER)
LEARNT = "learnt.npy"


def _relative(name: str) -> str:
    """The name as it is. Raises ValueError where it may lead out of the version's directory, or could be written in a simpler way."""
    parts = PurePosixPath(name).parts
    if not parts or name != "/".join(parts) or ".." in parts or name.startswith("/") or "\\" in name or not name.isprintable():
        problem = f"{name!r} does not name a file inside the version's directory: no '..', no leading '/', no backslash"
        raise ValueError(f"{problem}; do not use this version, and ask where it comes from")
    return name


FileName = Annotated[str, AfterValidator(_relative)]
"""A file of a version, relative to its directory."""


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")  # null would not be read as the number it was


class FileRecord(Record):
    """Size in bytes and sha256 of one file."""

    size: int
    sha256: str


class ModelRecord(Record):
    """Which model family the weights belong to, and the configuration that builds it."""

    family: str
    config: dict[str, JsonValue]


class DecoderRecord(Record):
    """How the decoder in `decoder/` (Hugging Face format) is prompted: with the encoder's last `prompt_length` states.

    `semantic_ids` is the version of the semantic IDs whose codes are its tokens.
    """

    family: str
    prompt_length: int = Field(ge=1)
    semantic_ids: str
    config: dict[str, JsonValue] = Field(default_factory=dict)


class BlendRecord(Record):
    """The rule that merges retrieved and generated items, fitted on the validation events; see pipelines/blend.py."""

    weights: dict[str, float]
    fitted_on: str
    quality: dict[str, dict[str, float]] = Field(default_factory=dict, description="strategy -> metrics on the test events")


class RankerRecord(Record):
    """The model in `ranker.safetensors`, which predicts `tasks` of given candidates.

    `weights`: task -> how much it counts where a request does not say. `last_stage`: whether the ranker orders recommendations too, unless
    a request says otherwise: training has measured that this makes them better.
    """

    family: str
    config: dict[str, JsonValue]
    tasks: tuple[Task, ...] = Field(min_length=1)
    rating: RatingScale = RatingScale()
    weights: dict[Task, float] = Field(default_factory=lambda: {Task.CLICK: 1.0})
    last_stage: bool = False
    quality: dict[str, float] = Field(default_factory=dict, description="metrics on the test events")

    @field_validator("tasks")
    @classmethod
    def _clicks_are_among_them(cls, tasks: tuple[Task, ...]) -> tuple[Task, ...]:
        if Task.CLICK not in tasks:
            raise ValueError(
                f"a ranker has to predict {Task.CLICK.value}, by which every score is multiplied; it predicts {', '.join(tasks)}"
            )
        return tasks


class Artifact(Record):
    """A compiled form of the model, checked against the model itself."""

    kind: Literal["onnx", "tensorrt"]
    graph: str = Field(description="which computation: encode, retrieve, append, rank, rank_append")
    file: FileName
    precision: Literal["fp32", "fp16", "int8"] = "fp32"
    target: str = Field(default="any", description="the GPU architecture, as sm_89")
    builder: str = Field(description="the package and version that made it")
    parity: dict[str, float] = Field(default_factory=dict, description="how far it is from the model; empty where it cannot run here")
    measured_on: str = Field(default="", description="the GPU that `parity` was measured on, as its driver names it")


class FailedStep(Record):
    """A compile step that did not yield an artifact, and why."""

    step: str
    reason: str


class Manifest(Record):
    """The content of manifest.json. Unknown keys are refused, so a manifest of a later format is never half understood."""

    format: Literal[1] = 1
    name: str
    version: int
    created: datetime
    model: ModelRecord
    files: dict[FileName, FileRecord]
    training: dict[str, JsonValue] = Field(default_factory=dict, description="provenance: dataset, seed, epochs, versions")
    quality: dict[str, float] = Field(default_factory=dict, description="metrics measured after training, such as hr@10")
    decoder: DecoderRecord | None = None
    blend: BlendRecord | None = None
    ranker: RankerRecord | None = None
    artifacts: list[Artifact] = Field(default_factory=list)
    failed_steps: list[FailedStep] = Field(default_factory=list)
    compiled_from: int | None = None

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that serve the model."""
        optional = {"generator": self.decoder, "ranker": self.ranker}
        return "encoder", *(stage for stage, record in optional.items() if record is not None)


@dataclass(frozen=True)
class Bundle:
    """A published version whose required files have been verified."""

    path: Path
    manifest: Manifest

    @property
    def version(self) -> str:
        """The version's name in answers, as ``ml-1m/3``."""
        return f"{self.manifest.name}/{self.manifest.version}"

    @cached_property
    def digest(self) -> str:
        """A digest that differs from that of every other version, even of one with the same name and number."""
        return blake2b(self.manifest.model_dump_json().encode(), digest_size=16).hexdigest()

    @cached_property
    def identity(self) -> str:
        """The version's name between gateways and stages, as ``ml-1m/3@0f1e2d3c4b5a6978``: in another directory a version of the same name
        and number has another catalogue.
        """
        return f"{self.version}@{self.digest[:16]}"

    @property
    def prompt_length(self) -> int:
        """How many of the encoder's latest states the decoder is prompted with, 0 where there is no decoder."""
        return self.manifest.decoder.prompt_length if self.manifest.decoder else 0

    @cached_property
    def catalogue(self) -> Catalogue:
        return read_catalogue(self.path / CATALOGUE)

    @property
    def has_catalogue(self) -> bool:
        """Whether the catalogue has been read: its file may be gone by now."""
        return "catalogue" in self.__dict__

    @cached_property
    def items(self) -> int:
        """V, how many items the catalogue holds, without reading the catalogue."""
        return len(np.load(self.path / POPULARITY, mmap_mode="r")) - 1

    @cached_property
    def popularity(self) -> Int64Array:
        """Events per catalogue index in the training data, (V + 1,)."""
        counts: Int64Array = np.load(self.path / POPULARITY)
        return counts

    @cached_property
    def item_vectors(self) -> FloatArray:
        """L2-normalised item vectors (V + 1, D); row 0 is zeros."""
        vectors: FloatArray = np.load(self.path / ITEM_VECTORS)
        return vectors

    @cached_property
    def first_seen(self) -> Int64Array:
        """When each item was first met in the training data, in seconds since 1970, 0 where never, (V + 1,)."""
        times: Int64Array = np.load(self.path / FIRST_SEEN)
        return times

    @cached_property
    def learnt(self) -> BoolArray:
        """Whether an item's vectors say which users like it, (V + 1,): the training has learnt an event of it, or it was placed among such
        items since; where the version does not record that, whether it had events or was added since.
        """
        learnt: BoolArray
        if LEARNT in self.manifest.files:
            learnt = np.load(self.verified(LEARNT))
        else:
            learnt = self.popularity > 0
            learnt[len(learnt) - self.added_items :] = True
        return learnt

    @property
    def added_items(self) -> int:
        """How many items, the last of the catalogue, were added since the training."""
        return int(self.manifest.training.get("added_items", 0))  # type: ignore[arg-type]  # JSON; written by new_items.py

    @cached_property
    def semantic_ids(self) -> SemanticIds:
        """The items' semantic IDs. Raises BundleError where this version has none or they are damaged."""
        self.decoder()
        return read_semantic_ids(self.verified(SEMANTIC_IDS))

    def decoder(self) -> DecoderRecord:
        """The record of the decoder. Raises BundleError where this version has none."""
        if self.manifest.decoder is None:
            raise self._unfit(f"{self.version} has no decoder; run: genrec train DATASET --model-dir {self.path.parent}")
        return self.manifest.decoder

    def ranker(self) -> RankerRecord:
        """The record of the ranker. Raises BundleError where this version has none."""
        if self.manifest.ranker is None:
            raise self._unfit(f"{self.version} has no ranker; run: genrec train DATASET --model-dir {self.path.parent}")
        return self.manifest.ranker

    def verify_generative(self) -> None:
        """Raises BundleError where this version has no decoder, or a file of the generative stage is missing or altered."""
        self.decoder()
        for file in GENERATIVE:
            self.verified(file)

    def artifact(self, kind: str, graph: str, *, precision: str = "fp32") -> Artifact | None:
        """The artifact of that description that holds on any machine, or None where this version was compiled without one."""
        wanted = (kind, graph, "any", precision)
        return next((a for a in self.manifest.artifacts if (a.kind, a.graph, a.target, a.precision) == wanted), None)

    def told(self, reason: str) -> str:
        """The reason as callers read it: files by their names in this version, commands without the model's directory."""
        return reason.replace(f" --model-dir {self.path.parent}", "").replace(f"{self.path}/", "")

    def verified(self, file: str) -> Path:
        """The path of a file of this bundle once its checksum holds. Raises BundleError where it is missing or altered."""
        record = self.manifest.files.get(file)
        if record is None:
            cure = "it was published by an older genrec: train the model again" if file in REQUIRED else "use another version"
            raise self._unfit(f"{self.path / MANIFEST} lists no file {file!r}; {cure}")
        try:
            path = inside(self.path, file)
            self._verify(path, record)
        except OSError as error:
            told = f"{file} cannot be read: {error.strerror or type(error).__name__}"
            raise BundleError(f"{self.path / file} cannot be read: {error}", told=told) from error
        return path

    def _unfit(self, reason: str) -> BundleError:
        return BundleError(reason, told=self.told(reason))

    def _verify(self, path: Path, record: FileRecord) -> None:
        size = _size(path)
        if size is None:
            own = str(path.relative_to(self.path)) in (*REQUIRED, *OPTIONAL, LEARNT)
            cure = "use another version" if own else f"run: genrec compile --model-dir {self.path.parent}"
            raise self._unfit(f"{path} is missing; {cure}")
        if size != record.size:
            raise self._unfit(f"{path} has {size} bytes, the manifest says {record.size}: it is cut off or was altered")
        if sha256(path) != record.sha256:
            raise self._unfit(f"{path} does not match the checksum in the manifest: it was altered after it was published")


def inside(directory: Path, file: str) -> Path:
    """The path of a version's file. Raises BundleError where a link stands in its place, or on the way to it."""
    path = directory / file
    if os.path.realpath(path) != f"{os.path.realpath(directory)}/{file}":
        problem = "is reached by a link; put the file itself there (cp -rL), or use another version"
        raise BundleError(f"{path} {problem}", told=f"{file} {problem}")
    return path


def _size(path: Path) -> int | None:
    """A file's size in bytes; None where there is no such file. Raises OSError where that cannot be told."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if S_ISREG(found.st_mode) else None
