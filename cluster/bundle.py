"""The model bundle: everything one version of a model needs to be served, in one directory that is never changed once published.

    models/ml-1m/
      current              the number of the version that serves; `previous`: those that did before; `newest`: the highest number given
      1/manifest.json      what this version is: checksums, model configuration, provenance, measured quality, artifacts
      1/weights.safetensors  1/catalogue.parquet  1/popularity.npy  1/item_vectors.npy  1/first_seen.npy
                                                                            (required: verified whenever the bundle is opened)
      1/ranker.safetensors                                                  (a model that ranks: verified by the backend that loads it)
      1/semantic_ids.npz  1/soft_prompt.safetensors  1/decoder/...          (a model that generates: verified by the backend that loads it)
      2/...                the same model with compiled artifacts           (derived: verified by the backend that loads them)

A version is written under a temporary name, flushed and renamed, so that a reader sees all of it or none of it.
"""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from secrets import token_hex
from stat import S_ISREG
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator

from cluster.catalogue_file import read_catalogue
from cluster.checksums import sha256
from cluster.dataset import Catalogue
from cluster.disk import flush, naming
from cluster.errors import BundleError
from cluster.ranking import RatingScale, Task
from cluster.semantic_ids import SemanticIds, read_semantic_ids
from cluster.values import FloatArray, Int64Array

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
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
ABANDONED_S = 24 * 3600.0
"""A draft that has not changed for so long was left by a process that was killed."""
REMEMBERED = 20
"""How many versions that were current before are remembered, to go back to."""
GENERATIVE = (SEMANTIC_IDS, SOFT_PROMPT, f"{DECODER}/config.json", f"{DECODER}/generation_config.json", f"{DECODER}/model.safetensors")
OPTIONAL = (*GENERATIVE, RANKER)


def _relative(name: str) -> str:
    """The name as it is. Raises ValueError where it may lead out of the version's directory, or could be written in a simpler way."""
    parts = PurePosixPath(name).parts
    if not parts or name != "/".join(parts) or ".." in parts or name.startswith("/") or "\\" in name or not name.isprintable():
        problem = f"{name!r} does not name a file inside the version's directory: no '..', no leading '/', no backslash"
        raise ValueError(f"{problem}; do not use this version, and ask where it comes from")
    return name


FileName = Annotated[str, AfterValidator(_relative)]
"""A file of a version, relative to its directory."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")  # null would not be read as the number it was


class FileRecord(_Record):
    """Size in bytes and sha256 of one file."""

    size: int
    sha256: str


class ModelRecord(_Record):
    """Which model family the weights belong to, and the configuration that builds it."""

    family: str
    config: dict[str, JsonValue]


class DecoderRecord(_Record):
    """How the decoder in `decoder/` (Hugging Face format) is prompted: with the encoder's last `prompt_length` states.

    `semantic_ids` is the version of the semantic IDs whose codes are its tokens.
    """

    family: str
    prompt_length: int = Field(ge=1)
    semantic_ids: str
    config: dict[str, JsonValue] = Field(default_factory=dict)


class BlendRecord(_Record):
    """The rule that merges retrieved and generated items, fitted on the validation events; see pipelines/blend.py."""

    weights: dict[str, float]
    fitted_on: str
    quality: dict[str, dict[str, float]] = Field(default_factory=dict, description="strategy -> metrics on the test events")


class RankerRecord(_Record):
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


class Artifact(_Record):
    """A compiled form of the model, checked against the model itself."""

    kind: Literal["onnx", "tensorrt"]
    graph: str = Field(description="which computation: encode, retrieve, append, rank, rank_append")
    file: FileName
    precision: Literal["fp32", "fp16", "int8"] = "fp32"
    target: str = Field(default="any", description="the GPU architecture, as sm_89")
    builder: str = Field(description="the package and version that made it")
    parity: dict[str, float] = Field(default_factory=dict, description="how far it is from the model; empty where it cannot run here")
    measured_on: str = Field(default="", description="the GPU that `parity` was measured on, as its driver names it")


class FailedStep(_Record):
    """A compile step that did not yield an artifact, and why."""

    step: str
    reason: str


class Manifest(_Record):
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
    def semantic_ids(self) -> SemanticIds:
        """The items' semantic IDs. Raises BundleError where this version has none or they are damaged."""
        self.decoder()
        return read_semantic_ids(self.verified(SEMANTIC_IDS))

    def decoder(self) -> DecoderRecord:
        """The record of the decoder. Raises BundleError where this version has none."""
        if self.manifest.decoder is None:
            raise BundleError(f"{self.version} has no decoder; run: genrec train DATASET --model-dir {self.path.parent}")
        return self.manifest.decoder

    def ranker(self) -> RankerRecord:
        """The record of the ranker. Raises BundleError where this version has none."""
        if self.manifest.ranker is None:
            raise BundleError(f"{self.version} has no ranker; run: genrec train DATASET --model-dir {self.path.parent}")
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

    def verified(self, file: str) -> Path:
        """The path of a file of this bundle once its checksum holds. Raises BundleError where it is missing or altered."""
        record = self.manifest.files.get(file)
        if record is None:
            cure = "it was published by an older genrec: train the model again" if file in REQUIRED else "use another version"
            raise BundleError(f"{self.path / MANIFEST} lists no file {file!r}; {cure}")
        try:
            path = _inside(self.path, file)
            self._verify(path, record)
        except OSError as error:
            raise BundleError(f"{self.path / file} cannot be read: {error}") from error
        return path

    def _verify(self, path: Path, record: FileRecord) -> None:
        size = _size(path)
        if size is None:
            own = str(path.relative_to(self.path)) in (*REQUIRED, *OPTIONAL)
            cure = "use another version" if own else f"run: genrec compile --model-dir {self.path.parent}"
            raise BundleError(f"{path} is missing; {cure}")
        if size != record.size:
            raise BundleError(f"{path} has {size} bytes, the manifest says {record.size}: it is cut off or was altered")
        if sha256(path) != record.sha256:
            raise BundleError(f"{path} does not match the checksum in the manifest: it was altered after it was published")


class Draft:
    """A version being written: put files under `path`, fill in the fields, and leave the `with` block to publish it. `version`: its number,
    once it is published. `held_back`: it is published without becoming the current one.
    """

    def __init__(self, path: Path, name: str, model: ModelRecord) -> None:
        self.path, self.name, self.model = path, name, model
        self.training: dict[str, Any] = {}
        self.quality: dict[str, float] = {}
        self.decoder: DecoderRecord | None = None
        self.blend: BlendRecord | None = None
        self.ranker: RankerRecord | None = None
        self.artifacts: list[Artifact] = []
        self.failed_steps: list[FailedStep] = []
        self.compiled_from: int | None = None
        self.version: int | None = None
        self.held_back = False

    def take(self, bundle: Bundle, file: str) -> None:
        """Take over a file of a bundle once its checksum holds. A copy, no hard link: versions must not be damaged together."""
        verified = bundle.verified(file)
        (self.path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(verified, self.path / file)

    def manifest(self, version: int) -> Manifest:
        """The manifest of what stands in the directory now. Raises BundleError where a required file is missing."""
        present = sorted(str(file.relative_to(self.path)) for file in self.path.rglob("*") if file.is_file())
        for file in present:
            _inside(self.path, file)
        if missing := [file for file in REQUIRED if file not in present]:
            raise BundleError(f"cannot publish {self.name}/{version} without {', '.join(missing)}")
        return Manifest(
            name=self.name,
            version=version,
            created=datetime.now(UTC),
            model=self.model,
            files={file: FileRecord(size=(self.path / file).stat().st_size, sha256=sha256(self.path / file)) for file in present},
            training=self.training,
            quality=self.quality,
            decoder=self.decoder,
            blend=self.blend,
            ranker=self.ranker,
            artifacts=self.artifacts,
            failed_steps=self.failed_steps,
            compiled_from=self.compiled_from,
        )


class BundleStore:
    """All versions of one model, in `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def name(self) -> str:
        """The name of the model: that of its directory, also where that is given as `.`"""
        return own_name(self.root)

    def require_nameable(self) -> None:
        """Raises BundleError where the directory's path is no Unicode text, in which a manifest could not name the model."""
        if not is_unicode(f"{self.root}{self.name}"):
            cure = "a model's manifest could not name it; give another directory"
            raise BundleError(f"the model's directory {str(self.root)!a} is no Unicode text, and {cure}")

    def versions(self) -> list[int]:
        """The published versions, oldest first."""
        if not self.root.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.root.iterdir() if is_version_number(entry.name) and entry.is_dir())

    def current(self) -> int | None:
        """The version that serves, or None where nothing has been published."""
        pointer = self.root / "current"
        if not pointer.is_file():
            return None
        text = pointer.read_text(errors="replace").strip()
        if not _NUMBER.fullmatch(text):
            raise BundleError(f"{pointer} holds {text!r}, not a version number; write one of {self.versions()}")
        return int(text)

    def open(self, version: int | None = None) -> Bundle:
        """A verified version, by default the current one. Raises BundleError that says what is wrong."""
        number = version if version is not None else self.current()
        if number is None:
            raise self.none_current()
        bundle = verified_version(self.root / str(number))
        if (held := bundle.manifest.version) != number:
            cure = f"to have it under a number of its own, run: genrec models publish {bundle.path} --model-dir {self.root}"
            raise BundleError(f"{bundle.path} holds version {held}, copied, renamed or reached by a link; {cure}")
        return bundle

    def none_current(self) -> BundleError:
        """The error that no version is current, with the cure."""
        if there := self.versions():
            cure = f"run: genrec models promote {there[-1]} --model-dir {self.root}"
            return BundleError(f"{self.root} has {there}, and none is current; {cure}")
        return BundleError(f"no model has been published in {self.root}; run: genrec train DATASET --model-dir {self.root}")

    def open_last_good(self) -> tuple[Bundle, list[str]]:
        """The current version or, where it is refused, the first of `fallbacks` that verifies; and why each one before it was refused."""
        refused: list[str] = []
        try:
            candidates = [self.current()]
        except BundleError as error:
            refused.append(str(error))
            candidates = []
        candidates += [number for number in self.fallbacks() if number not in candidates]
        for number in candidates:
            try:
                return self.open(number), refused
            except BundleError as error:
                refused.append(str(error))
        raise BundleError(f"no version in {self.root} can be served: " + "; ".join(refused))

    @contextmanager
    def publish(self, model: ModelRecord, since: int | None = None) -> Iterator[Draft]:
        """Write a new version and make it the current one; nothing is visible unless the block ends well. `since`: the version that the new
        one was made from; the new one then becomes current only if that version still is.

        Raises BundleError where the disk does not take it.
        """
        with self._drafted(model) as draft:
            yield draft
            draft.version = self._commit(draft)
            if since is None or self._here() == [since]:
                self.promote(draft.version)

    @contextmanager
    def _drafted(self, model: ModelRecord) -> Iterator[Draft]:
        self.require_nameable()
        self.root.mkdir(parents=True, exist_ok=True)
        self._clear()
        draft = Draft(Path(tempfile.mkdtemp(prefix=".draft-", dir=self.root)), self.name, model)
        try:
            yield draft
        except OSError as error:
            if error.filename is None:  # a file that was open already: the message does not say which
                raise BundleError(f"a version cannot be written in {self.root}: {error}; is the disk full? make room") from error
            raise
        finally:
            shutil.rmtree(draft.path, ignore_errors=True)

    def _clear(self) -> None:
        """Remove drafts of processes that were killed."""
        for draft in self.root.glob(".draft-*"):
            with suppress(OSError):  # it was removed, or published, meanwhile
                if time.time() - max(entry.lstat().st_mtime for entry in (draft, *draft.rglob("*"))) > ABANDONED_S:
                    shutil.rmtree(draft)

    def adopt(self, bundle: Bundle) -> int:
        """Publish a whole version that was made elsewhere, without making it current; returns its number here. Raises BundleError."""
        with self._drafted(bundle.manifest.model) as draft:
            for file in bundle.manifest.files:
                draft.take(bundle, file)
            self._describe(bundle, draft)
            draft.artifacts, draft.failed_steps = list(bundle.manifest.artifacts), list(bundle.manifest.failed_steps)
            return self._commit(draft)

    @contextmanager
    def recompile(self, bundle: Bundle, since: int | None = None) -> Iterator[Draft]:
        """Publish a version with the same model and new artifacts: required files are copied, derived ones start empty. It becomes the
        current one unless it is held back, or another version has become current meanwhile, by a training or a rollback. `since`: the
        version that was current when the work began, by default the one that is now.
        """
        here = self._here() if since is None else [since]
        with self._drafted(bundle.manifest.model) as draft:
            self._copy(bundle, draft)
            draft.compiled_from = bundle.manifest.version
            yield draft
            draft.version = self._commit(draft)
            if self._here() == here and not draft.held_back:
                self.promote(draft.version)

    @staticmethod
    def _copy(bundle: Bundle, draft: Draft) -> None:
        """Take over the model's own files and records."""
        for file in (*REQUIRED, *(file for file in OPTIONAL if file in bundle.manifest.files)):
            draft.take(bundle, file)
        BundleStore._describe(bundle, draft)

    @staticmethod
    def _describe(bundle: Bundle, draft: Draft) -> None:
        draft.training, draft.quality = dict(bundle.manifest.training), dict(bundle.manifest.quality)
        draft.decoder, draft.blend, draft.ranker = bundle.manifest.decoder, bundle.manifest.blend, bundle.manifest.ranker

    def promote(self, version: int) -> None:
        """Make a published version the current one, atomically; what was current before is remembered for `roll_back`."""
        if version not in self.versions():
            raise BundleError(f"{self.root} has no version {version}; it has {self.versions()}")
        self._write_previous([*self.previous(), *self._here()][-REMEMBERED:])
        self._point_at(version)

    def roll_back(self) -> int:
        """Go back to the version before the current one, and return it. Raises BundleError where there is none, or it does not verify."""
        if not (before := self.previous()):
            raise BundleError(f"{self.root} has no earlier version to go back to; promote one of {self.versions()}")
        *earlier, last = before
        self.open(last)
        self._point_at(last)
        self._write_previous(earlier)
        return last

    def previous(self) -> list[int]:
        """The versions that were current before, the latest last."""
        before, here = self._numbers("previous"), self._here()
        while before and before[-1:] == here:
            before.pop()
        return before

    def fallbacks(self) -> list[int]:
        """What may serve in place of a current version that is damaged: the versions that were current before, the latest first, then the
        others, the newest first.
        """
        there = self.versions()
        before = [number for number in reversed(self.previous()) if number in there]
        return list(dict.fromkeys((*before, *reversed(there))))

    def _here(self) -> list[int]:
        """The current version in a list, which is empty where there is none or the pointer cannot be read."""
        try:
            current = self.current()
        except BundleError:
            return []
        return [] if current is None else [current]

    def _numbers(self, name: str) -> list[int]:
        """The versions' numbers that a file beside the versions lists; none where it is missing."""
        file = self.root / name
        return [int(line) for line in file.read_text(errors="replace").split() if _NUMBER.fullmatch(line)] if file.is_file() else []

    def _write_previous(self, versions: list[int]) -> None:
        write_whole(self.root / "previous", "".join(f"{version}\n" for version in versions))

    def _point_at(self, version: int) -> None:
        write_whole(self.root / "current", f"{version}\n")

    def _unused(self) -> int:
        """A number that no version has, nor one had that was deleted: processes may hold that still."""
        return max((*self.versions(), *self._here(), *self.previous(), *self._numbers("newest")), default=0) + 1

    def _commit(self, draft: Draft) -> int:
        while True:
            version = self._unused()
            write_whole(self.root / "newest", f"{version}\n")
            manifest = draft.path / MANIFEST
            manifest.write_text(draft.manifest(version).model_dump_json(indent=2))
            draft.path.chmod(0o755)
            for path in (*draft.path.rglob("*"), draft.path):
                if path.is_file():
                    path.chmod(manifest.stat().st_mode)  # safetensors leaves its files to their owner alone
                flush(path)
            try:
                draft.path.rename(self.root / str(version))
            except OSError:
                taken = self.root / str(version)
                if not taken.exists():
                    raise
                if not taken.is_dir():
                    raise BundleError(f"{taken} is no version and stands in the place of one; move it away") from None
                manifest.unlink()  # another process published this number first: take the next
            else:
                flush(self.root)
                return version


def verified_version(path: Path) -> Bundle:
    """The verified version in a directory, which may be named by another number than the version's, as a copy is. Raises BundleError that
    says what is wrong.
    """
    bundle = Bundle(path, _read_manifest(_inside(path, MANIFEST)))
    for file in REQUIRED:
        bundle.verified(file)
    return bundle


def _inside(directory: Path, file: str) -> Path:
    """The path of a version's file. Raises BundleError where a link stands in its place, or on the way to it."""
    path = directory / file
    if os.path.realpath(path) != f"{os.path.realpath(directory)}/{file}":
        raise BundleError(f"{path} is reached by a link; put the file itself there (cp -rL), or use another version")
    return path


def _size(path: Path) -> int | None:
    """A file's size in bytes; None where there is no such file. Raises OSError where that cannot be told."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if S_ISREG(found.st_mode) else None


def _read_manifest(path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        if not path.parent.exists():
            store, version = BundleStore(path.parent.parent), path.parent.name
            raise BundleError(f"{store.root} has no version {version}; it has {store.versions()}") from None
        raise BundleError(f"{path} is missing: this version was never completely written; use another one") from None
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        raise BundleError(f"{path} is not a manifest this release understands: {error}") from error


def own_path(path: Path) -> Path:
    """The path; for `.` and `..` that of the directory that they stand for."""
    return path if path.name not in ("", "..") else path.resolve()


def own_name(path: Path) -> str:
    """The last part of `own_path`."""
    return own_path(path).name


def is_version_number(name: str) -> bool:
    """Whether a directory of this name, in that of a model, is or may become a version."""
    return bool(_NUMBER.fullmatch(name))


def is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8. The name of a file may be any bytes: Python reads some as halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that readers see the old text or the new."""
    draft = path.with_name(f".{path.name}-{token_hex(8)}")  # of machines that share the directory, two may have a process of one number
    try:
        with naming(path):
            with draft.open("x") as file:
                file.write(text)
            flush(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    flush(path.parent)
