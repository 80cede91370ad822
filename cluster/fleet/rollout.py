"""Which versions of a model serve: the stable one, and perhaps one on trial beside it.

    models/ml-1m/
      current          the stable version
      previous         what was stable before
      rollout.json     the trial, and how earlier ones ended

    promote(4)            4 is stable
    promote(4, trial)     4 is tried: on a share of the users (canary, ab), or in the shadow of the stable one's answers
    promote(3, trial)     where 3 is stable: the trial's flags are tried on a share of its users
    rollback(reason)      the trial ends, or what was stable before is stable again

Every process that serves reads both files; no other process has to be told, and no restart forgets it.
"""

import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.config import FlagSettings
from cluster.disk import write_whole
from cluster.engines.latency import LatencySummary, merge
from cluster.errors import BundleError

ROLLOUT = "rollout.json"
TrialKind: TypeAlias = Literal["canary", "ab", "shadow"]
Outcome: TypeAlias = Literal["promoted", "rolled back", "replaced"]
UNTRIED: Mapping[str, str] = {
    "hedge": "one call of an encoder carries several users' requests, and is sent twice or not; set it for all in the gateway's user_config"
}
"""Flag -> why it is not tried on some of the users."""
REMEMBERED = 20
FEWEST = 20
"""Of fewer requests no share means anything."""
Z_95 = 1.645
NOTHING = LatencySummary()
TIMED_FOR_S = 3600.0
"""A trial's latencies, and its figures `lately`, are those of the last one to two such windows: long enough for many answers on a small
share of few users.
"""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")  # null would not be read as the number it was


class Guard(_Record):
    """What ends a trial. Shares are compared with those of the stable version over the same time."""

    degraded_margin: float = Field(0.02, ge=0, le=1, description="by how much the share of degraded answers may be higher")
    latency_ratio: float = Field(1.5, ge=1, description="how many times as long the p95 of computed answers may be")
    latency_slack_ms: float = Field(10.0, ge=0, description="and so many milliseconds more")
    fewest_requests: int = Field(
        200, ge=FEWEST, description="requests of late (for latencies: timed, of each version) before they are judged"
    )
    least_overlap: float = Field(0.0, ge=0, le=1, description="shadow: mean share of items that both versions must have in common")


class Arm(NamedTuple):
    """Answers of a version that are measured together. `tried`: those of a trial, be it of the stable version with other flags."""

    version: int
    tried: bool = False


class Trial(_Record):
    """`version` is tried on the `share` of users whose hash falls to it: the same users as long as it lasts.

    canary: a guarded first step before promotion; ab: the same, meant to last; shadow: those users are answered by the stable version, the
    tried one computes the same beside it, and only the comparison is kept.

    `flags` are tried with it. A trial of the stable version is one of its flags alone.
    """

    version: int = Field(ge=1)
    kind: TrialKind = "canary"
    flags: dict[str, Any] = Field({}, description="what the users of the share are served with in place of the gateway's flags")
    share: float = Field(gt=0, le=1)
    guard: Guard = Guard()
    began: float = Field(0.0, description="seconds since 1970")
    beside: int = Field(0, description="the version that was stable then")

    @field_validator("flags")
    @classmethod
    def _flags_can_be_tried(cls, flags: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        choices = sorted(FlagSettings.model_fields.keys() - UNTRIED.keys())
        for name in flags:
            if name in UNTRIED:
                raise ValueError(f"{name} cannot be tried on a share of the users: {UNTRIED[name]}")
            if name not in choices:
                raise ValueError(f"unknown flag {name!r}; choose from {', '.join(choices)}")
        if flags and info.data.get("kind") == "shadow":
            raise ValueError("a shadow answers no user, and flags are what users are served with; try them as a canary or ab")
        try:
            return FlagSettings.model_validate(flags).model_dump(include=set(flags))
        except ValidationError as error:
            refused = (f"{one['loc'][0]} = {one['input']!r}: {one['msg']}" for one in error.errors())
            raise ValueError("; ".join(refused)) from error

    @property
    def name(self) -> str:
        """A name that no other trial has."""
        return f"{self.version}@{self.began:.3f}"

    @property
    def tried(self) -> str:
        """The version, and the flags, that are tried."""
        return with_flags(self.version, self.flags)

    @property
    def arm(self) -> Arm:
        return Arm(self.version, tried=True)

    def includes(self, tenant: str, user: str) -> bool:
        """Whether a user belongs to the share; independent of every other trial's."""
        digest = blake2b(f"{self.name}\0{tenant}\0{user}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest) < self.share * 2**64


def with_flags(what: object, flags: Mapping[str, Any]) -> str:
    """What is served, with its flags: ``4`` or ``4 with cache=false``."""
    return f"{what} with {said_flags(flags)}" if flags else str(what)


def said_flags(flags: Mapping[str, Any]) -> str:
    """Flags as an operator gives them: ``cache=false, strategy=retrieval``."""
    return ", ".join(f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in flags.items())


class EndedTrial(_Record):
    """How a trial ended: promoted, or rolled back, and why."""

    trial: Trial
    outcome: Outcome
    reason: str
    ended: float


class _Kept(_Record):
    """The content of rollout.json."""

    trial: Trial | None = None
    ended: list[EndedTrial] = []


class Rollout(_Record):
    """Which versions serve. `previous`: the versions that were stable before, the latest last."""

    stable: int = Field(ge=1)
    trial: Trial | None = None
    previous: list[int] = []
    ended: list[EndedTrial] = []

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that have to be loaded, the stable one first."""
        return tuple(dict.fromkeys((self.stable, self.trial.version))) if self.trial else (self.stable,)

    @property
    def period(self) -> str:
        """A name for the time of one trial beside one stable version, within which figures can be compared; "" where nothing is tried."""
        return f"{self.trial.name}/{self.stable}" if self.trial else ""

    def rolled_back_since(self, before: "Rollout") -> set[int]:
        """The versions that served by an earlier rollout and were given up since, without a stable one that another has followed: by that,
        gateways answer until every replica has the next.
        """
        gone = set(before.versions).difference(self.versions)
        return gone if len(self.previous) < len(before.previous) else gone - {before.stable}

    def standing(self, version: int) -> tuple[bool, bool]:
        """For sorting versions by which gateways may answer: the stable one comes first, the one on trial last."""
        return version != self.stable, self.trial is not None and version == self.trial.version

    def trial_for(self, tenant: str, user: str) -> Trial | None:
        """The trial that a user is served under."""
        trial = self.trial
        return trial if trial and trial.kind != "shadow" and trial.includes(tenant, user) else None


@dataclass(frozen=True, slots=True)
class VersionFigures:
    """The figures of an arm: over all its answers where flags are tried, else over those that were computed. `overlaps`: how many answers
    of a shadow were compared with the stable version's; `overlap`: the sum of their shares of items in common. `lately`: the same counts of
    the last one to two hours alone, in which an outage shows after any number of good answers.
    """

    requests: int = 0
    degraded: int = 0
    latency: LatencySummary = NOTHING
    overlaps: int = 0
    overlap: float = 0.0
    lately: "VersionFigures | None" = None

    def __add__(self, other: "VersionFigures") -> "VersionFigures":
        counts = self.requests + other.requests, self.degraded + other.degraded
        latency, overlaps = merge((self.latency, other.latency)), self.overlaps + other.overlaps
        lately = self.lately + other.lately if self.lately and other.lately else self.lately or other.lately
        return VersionFigures(*counts, latency, overlaps, self.overlap + other.overlap, lately)


def judge(guard: Guard, stable: VersionFigures, tried: VersionFigures, *, alone: bool = False) -> str:
    """Why the trial has to end by its figures since it began or by those of late, "" where it may go on. `alone`: all users take part, so
    that there is nothing to compare it with.
    """
    usual = stable.degraded / stable.requests if stable.requests else 0.0
    enough = tried.requests >= FEWEST and (alone or stable.requests >= FEWEST)
    if enough and (least := least_share(tried.degraded, tried.requests)) > usual + guard.degraded_margin:
        return f"{tried.degraded} of {tried.requests} answers are degraded (at least {least:.1%}), of the stable version {usual:.1%}"
    if (why := _too_slow(guard, stable, tried) or _too_different(guard, tried)) or tried.lately is None:
        return why
    if tried.lately.requests < guard.fewest_requests:  # of so many hours, one would have a few bad answers by chance
        return ""
    why = judge(guard, stable.lately or VersionFigures(), tried.lately, alone=alone)
    return f"of late, {why}" if why else ""


def least_share(count: int, of: int) -> float:
    """The lower end of Wilson's interval for the share `count` / `of`: the true share is lower in one case of twenty."""
    share, z2 = count / of, Z_95**2
    spread = Z_95 * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    return max(0.0, (share + z2 / (2 * of) - spread) / (1 + z2 / of))


def _too_slow(guard: Guard, stable: VersionFigures, tried: VersionFigures) -> str:
    ours, usual = tried.latency.p95_ms, stable.latency.p95_ms
    timed = min(sum(stable.latency.buckets), sum(tried.latency.buckets))  # streams are not, and a percentile is of the latest calls
    if ours is None or usual is None or timed < guard.fewest_requests:
        return ""
    limit = guard.latency_ratio * usual + guard.latency_slack_ms
    return f"p95 is {ours:.1f} ms, more than {limit:.1f} ms; the stable version's is {usual:.1f} ms" if ours > limit else ""


def _too_different(guard: Guard, tried: VersionFigures) -> str:
    if tried.overlaps < FEWEST or (mean := tried.overlap / tried.overlaps) >= guard.least_overlap:
        return ""
    return f"of {tried.overlaps} answers, {mean:.1%} of the items are the stable version's too; {guard.least_overlap:.1%} should be"


class RolloutStore:
    """The rollout of the models in `store`. Reading takes no lock; changes take turns, also those of several machines."""

    def __init__(self, store: BundleStore, clock: Callable[[], float] = time.time) -> None:
        self.store, self._clock = store, clock

    def read(self) -> Rollout:
        """The rollout as it is now. Raises BundleError where no version is current, or rollout.json cannot be understood."""
        stable = self.store.current()
        if stable is None:
            raise self.store.none_current()
        kept, previous = self._kept(), self.store.previous()
        trial = None if kept.trial and _is_over(kept.trial, [*previous, stable]) else kept.trial
        return Rollout(stable=stable, trial=trial, previous=previous, ended=kept.ended)

    def promote(self, version: int, trial: Trial | None = None) -> Rollout:
        """Make a verified version the stable one, or begin its trial; a trial that was going on ends. Raises BundleError."""
        _require_decoder(self.store.open(version), trial)
        if trial is None and self.store.current() is None:  # as of a model whose first version was made elsewhere
            self.store.promote(version)
            return self.read()
        with self._changing() as before:
            if trial is not None:
                self._write(self._began(before, trial))
                return self.read()
            outcome: Outcome = "promoted" if before.trial and before.trial.version == version else "replaced"
            self.store.promote(version)
            self._write(self._ended(before, outcome, f"{version} was promoted"))
            return self.read()

    def rollback(self, reason: str) -> Rollout:
        """End the trial or, where there is none, go back to the stable version before. Raises BundleError where there is none."""
        with self._changing() as before:
            if before.trial is not None:
                self._write(self._ended(before, "rolled back", reason))
            else:
                self._write(before)  # without a trial of the version that is left: that trial was over while the version was stable
                self.store.roll_back()
            return self.read()

    def end(self, trial: Trial, reason: str) -> None:
        """Roll back this trial and no other; does nothing where it has ended already."""
        with self._changing() as before:
            if before.trial == trial:
                self._write(self._ended(before, "rolled back", reason))

    def _began(self, before: Rollout, trial: Trial) -> Rollout:
        if trial.version == before.stable and not trial.flags:
            others = f"try another of {self.store.versions()}, or this one with other flags"
            raise BundleError(f"version {trial.version} is the stable one already; {others}")
        ended = self._ended(before, "replaced", f"a trial of {trial.tried} began")
        return ended.model_copy(update={"trial": trial.model_copy(update={"began": self._clock(), "beside": before.stable})})

    def _ended(self, before: Rollout, outcome: Outcome, reason: str) -> Rollout:
        if before.trial is None:
            return before
        record = EndedTrial(trial=before.trial, outcome=outcome, reason=reason, ended=self._clock())
        return before.model_copy(update={"trial": None, "ended": [*before.ended, record][-REMEMBERED:]})

    @contextmanager
    def _changing(self) -> Iterator[Rollout]:
        self.read()  # a directory without a model has no place for a lock, either
        with _opened(self.store.root / ".rollout.lock") as lock:
            _lock(lock)
            yield self.read()

    def _kept(self) -> _Kept:
        path = self.store.root / ROLLOUT
        try:
            return _Kept.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return _Kept()
        except (OSError, ValidationError) as error:
            why = "; ".join(_refused(error)) if isinstance(error, ValidationError) else error
            raise BundleError(f"{path} cannot be understood: {why}; delete it to serve the current version alone") from error

    def _write(self, rollout: Rollout) -> None:
        write_whole(self.store.root / ROLLOUT, _Kept(trial=rollout.trial, ended=rollout.ended).model_dump_json(indent=2))


def _refused(error: ValidationError) -> Iterator[str]:
    for one in error.errors(include_url=False):
        place = ".".join(map(str, one["loc"]))
        yield f"{place}: {one['msg']}" if place else one["msg"]


def _opened(lock: Path) -> IO[bytes]:
    """The file of a lock, made where it is missing; one that only another user may write is opened to be read, which most file systems lock
    as well.
    """
    if not lock.exists():
        _make(lock)
    try:
        return lock.open("ab")
    except PermissionError:
        return lock.open("rb")


def _make(lock: Path) -> None:
    """Make the file of a lock so that all may write it that may write its directory, also where root makes it."""
    directory = lock.parent.stat()
    with suppress(FileExistsError), lock.open("xb") as made:
        for owner, group in ((-1, directory.st_gid), (directory.st_uid, -1)):
            with suppress(OSError):  # a file is for root to give away, and a group is for its members to set
                os.fchown(made.fileno(), owner, group)
        os.fchmod(made.fileno(), 0o644 | directory.st_mode & 0o222)


def _lock(file: IO[bytes]) -> None:
    """Wait until the lock is this process's. Raises BundleError where its file system, as NFS, locks only what the process may write."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        cure = f"have its owner, or root, run: chmod a+w {file.name}"
        raise BundleError(f"{file.name} is another user's, and its file system locks only files that one may write; {cure}") from error


def _is_over(trial: Trial, stable: list[int]) -> bool:
    """Whether the version on trial has become stable, if only for a while, other than by `promote`; where flags alone are tried, whether
    any other version has. `stable`: the versions that were stable, the latest last.
    """
    began = max((place for place, version in enumerate(stable) if version == trial.beside), default=-1)
    since = stable[began + 1 :]
    return bool(since) if trial.version == trial.beside else trial.version in since


def _require_decoder(bundle: Bundle, trial: Trial | None) -> None:
    strategy = trial.flags.get("strategy") if trial else None
    if strategy in ("unified", "generative") and bundle.manifest.decoder is None:
        raise BundleError(f"{bundle.version} has no decoder, and cannot be tried with strategy={strategy}; choose retrieval, or train one")
