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

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from cluster.bundle import Bundle, Record
from cluster.bundle_store import BundleStore
from cluster.config import FlagSettings
from cluster.disk import write_whole
from cluster.errors import BundleError
from cluster.fleet.trial_guard import Guard
from cluster.validation import problems

ROLLOUT = "rollout.json"
TrialKind: TypeAlias = Literal["canary", "ab", "shadow"]
Outcome: TypeAlias = Literal["promoted", "rolled back", "replaced"]
UNTRIED: Mapping[str, str] = {
    "hedge": "one call of an encoder carries several users' requests, and is sent twice or not; set it for all in the gateway's user_config"
}
"""Flag -> why it is not tried on some of the users."""
REMEMBERED = 20


class Arm(NamedTuple):
    """Answers of a version that are measured together. `tried`: those of a trial, be it of the stable version with other flags."""

    version: int
    tried: bool = False


class Trial(Record):
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


class EndedTrial(Record):
    """How a trial ended: promoted, or rolled back, and why."""

    trial: Trial
    outcome: Outcome
    reason: str
    ended: float


class _Kept(Record):
    """The content of rollout.json."""

    trial: Trial | None = None
    ended: list[EndedTrial] = Field(default_factory=list)


class Rollout(Record):
    """Which versions serve. `previous`: the versions that were stable before, the latest last."""

    stable: int = Field(ge=1)
    trial: Trial | None = None
    previous: list[int] = Field(default_factory=list)
    ended: list[EndedTrial] = Field(default_factory=list)

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

    def without(self, ended: str) -> "Rollout":
        """The rollout where the trial of this name has ended."""
        return self.model_copy(update={"trial": None}) if self.trial is not None and self.trial.name == ended else self

    def standing(self, version: int) -> tuple[bool, bool]:
        """For sorting versions by which gateways may answer: the stable one comes first, the one on trial last."""
        return version != self.stable, self.trial is not None and version == self.trial.version

    def answers_users(self, version: int) -> bool:
        """Whether a user may be answered by this version: it is or was the stable one, or is on trial and no shadow. One that was given up,
        or tried and not promoted, may be held for a while, but answers users only where nothing else can.
        """
        on_trial = self.trial is not None and self.trial.kind != "shadow" and version == self.trial.version
        return on_trial or version in (self.stable, *self.previous)

    def trial_for(self, tenant: str, user: str) -> Trial | None:
        """The trial that a user is served under."""
        trial = self.trial
        return trial if trial and trial.kind != "shadow" and trial.includes(tenant, user) else None


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
            with self.store.changing():
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

    def rollback(self, reason: str, seen: Rollout | None = None) -> Rollout:
        """End the trial or, where there is none, go back to the stable version before. Raises BundleError where there is none, and where
        other versions serve than in the rollout that was `seen`: the guard, or another operator, was first.
        """
        with self._changing() as before:
            if seen is not None and (seen.stable, seen.trial) != (before.stable, before.trial):
                cure = f"if version {before.versions[-1]} should not serve, run it again"
                raise BundleError(f"nothing was rolled back: meanwhile {_changed(seen, before)}; {cure}")
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
        with self.store.changing():
            yield self.read()

    def _kept(self) -> _Kept:
        path = self.store.root / ROLLOUT
        try:
            return _Kept.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return _Kept()
        except (OSError, ValidationError) as error:
            why = problems(error) if isinstance(error, ValidationError) else error
            raise BundleError(f"{path} cannot be understood: {why}; delete it to serve the current version alone") from error

    def _write(self, rollout: Rollout) -> None:
        write_whole(self.store.root / ROLLOUT, _Kept(trial=rollout.trial, ended=rollout.ended).model_dump_json(indent=2))


def _changed(seen: Rollout, now: Rollout) -> str:
    """What has become of a rollout that was seen, since when other versions serve."""
    if ended := [one for one in now.ended if one.trial == seen.trial]:
        return f"the {ended[-1].trial.kind} of {ended[-1].trial.tried} was {ended[-1].outcome}: {ended[-1].reason}"
    if now.stable != seen.stable or now.trial is None:
        return f"version {now.stable} became stable"
    return f"the {now.trial.kind} of {now.trial.tried} began"


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
