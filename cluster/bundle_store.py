"""The versions of a model in one directory: written, published, opened, made current, and gone back to.

A version is written under a temporary name, flushed and renamed, so that a reader sees all of it or none of it.
"""

import re
import reprlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.bundle import (
    LEARNT,
    MANIFEST,
    OPTIONAL,
    REQUIRED,
    Artifact,
    BlendRecord,
    Bundle,
    DecoderRecord,
    FailedStep,
    FileRecord,
    Manifest,
    ModelRecord,
    RankerRecord,
    inside,
)
from cluster.checksums import sha256
from cluster.disk import flush, write_whole
from cluster.errors import BundleError
from cluster.file_lock import locked
from cluster.paths import is_unicode, own_name, own_path
from cluster.validation import problems

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
ABANDONED_S = 24 * 3600.0
"""A draft that has not changed for so long was left by a process that was killed."""
REMEMBERED = 20
"""How many versions that were current before are remembered, to go back to."""


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
            inside(self.path, file)
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

    def require_publishable(self) -> None:
        """Raises BundleError where the directory is itself a version of a model, or holds models and no version, or its path is no Unicode
        text, in which a manifest could not name the model.
        """
        if mistaken := self._no_models_directory():
            raise mistaken
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

    def _no_models_directory(self) -> BundleError | None:
        """The error that the directory is itself a version or, without one of its own, holds models; None where neither is."""
        if not (self.root / MANIFEST).is_file():
            models = sorted(pointer.parent.name for pointer in self.root.glob("*/current") if pointer.is_file())
            if not models or self.versions():
                return None
            told = f"holds those of {', '.join(models)}; give one of them, or {self.root / 'NAME'} for a new one"
            return BundleError(f"{self.root} is no model's directory, but {told}")
        path = own_path(self.root)
        published = f"give the model's directory, {path.parent}"
        cure = published if is_version_number(path.name) else f"run: genrec models publish {self.root} --model-dir DIRECTORY, and give that"
        return BundleError(f"{self.root} is a version of a model, not a model's directory; {cure}")

    def none_current(self) -> BundleError:
        """The error that no version is current, with the cure."""
        if there := self.versions():
            cure = f"run: genrec models promote {there[-1]} --model-dir {self.root}"
            return BundleError(f"{self.root} has {there}, and none is current; {cure}")
        if mistaken := self._no_models_directory():
            return mistaken
        return BundleError(f"no model has been published in {self.root}; run: genrec train DATASET --model-dir {self.root}")

    def open_last_good(self) -> tuple[Bundle, list[str]]:
        """The current version or, where it is refused, the first of `fallbacks` that verifies; and why each one before it was refused."""
        refused: list[str] = []
        try:
            candidates = [self.current()]
        except (BundleError, OSError) as error:
            refused.append(str(error))
            candidates = []
        candidates += [number for number in self.fallbacks() if number not in candidates]
        for number in candidates:
            try:
                return self.open(number), refused
            except (BundleError, OSError) as error:
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
            with self.changing():
                if since is None or self._here() == [since]:
                    self.promote(draft.version)

    @contextmanager
    def _drafted(self, model: ModelRecord) -> Iterator[Draft]:
        self.require_publishable()
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
            with self.changing():
                if self._here() == here and not draft.held_back:
                    self.promote(draft.version)

    @staticmethod
    def _copy(bundle: Bundle, draft: Draft) -> None:
        """Take over the model's own files and records."""
        for file in (*REQUIRED, *(file for file in (*OPTIONAL, LEARNT) if file in bundle.manifest.files)):
            draft.take(bundle, file)
        BundleStore._describe(bundle, draft)

    @staticmethod
    def _describe(bundle: Bundle, draft: Draft) -> None:
        draft.training, draft.quality = dict(bundle.manifest.training), dict(bundle.manifest.quality)
        draft.decoder, draft.blend, draft.ranker = bundle.manifest.decoder, bundle.manifest.blend, bundle.manifest.ranker

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A block that alone changes which version serves; others wait, also on other machines. A block in it would wait for ever."""
        with locked(self.root / ".rollout.lock"):
            yield

    def promote(self, version: int) -> None:
        """Make a published version the current one, atomically; what was current before is remembered for `roll_back`. Like that, it is
        called in a block of `changing`, where other processes may change the same.
        """
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
        others, the newest first. What was current before is left out where that cannot be read.
        """
        there, before = self.versions(), list[int]()
        with suppress(OSError):
            before = [number for number in reversed(self._numbers("previous")) if number in there]
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
            for path in (*draft.path.rglob("*"), draft.path):
                path.chmod(0o755 if path.is_dir() else 0o644)  # under any umask; and safetensors leaves its files to their owner alone
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
    bundle = Bundle(path, _read_manifest(inside(path, MANIFEST)))
    for file in REQUIRED:
        bundle.verified(file)
    return bundle


def is_version_number(name: str) -> bool:
    """Whether a directory of this name, in that of a model, is or may become a version."""
    return bool(_NUMBER.fullmatch(name))


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
        raise BundleError(f"{path} {_not_understood(error)}") from error


def _not_understood(error: ValidationError) -> str:
    """Why a file is no manifest, on one line. One of another format is told by that alone: what else is wrong with it follows from it."""
    if given := [one["input"] for one in error.errors() if one["loc"] == ("format",)]:
        known = Manifest.model_fields["format"].default
        return f"has format {reprlib.repr(given[0])}; this release knows {known}: update genrec, or serve another version"
    return f"is not a manifest this release understands: {problems(error)}; serve another version"
