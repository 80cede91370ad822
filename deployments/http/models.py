"""/v1/models: which versions serve, and how a trial goes."""

from typing import Any, Protocol

from fastapi import APIRouter
from pydantic import Field

from cluster.fleet.board import FleetStatus
from cluster.fleet.rollout import Arm, EndedTrial, Rollout, Trial
from cluster.fleet.trial_guard import VersionFigures
from deployments.http.messages import Message


class VersionOut(Message):
    """A version that some process holds, or should hold. Where flags alone are tried, the stable version has a second row for their
    figures.
    """

    version: int
    role: str = Field(description="stable, canary, ab or shadow; empty for one that is not needed any more")
    share: float | None = Field(description="of the users, where it is on trial")
    flags: dict[str, Any] = Field({}, description="what these users are served with in place of the gateway's flags")
    holders: dict[str, int] = Field(description="encoder, generator, ranker, gateway -> replicas that can serve it")
    obstacles: list[str] = Field(description="why some cannot, or not yet")
    gateways: int = Field(description="gateways that answer with it")
    requests: int = Field(description="answers computed since the trial began; in a trial of flags those from a cache too")
    degraded: int
    p95_ms: float | None
    overlap: float | None = Field(description="in the shadow: mean share of items that are the stable version's too")


class EndedTrialOut(Message):
    version: int
    kind: str
    flags: dict[str, Any] = Field({})
    outcome: str
    reason: str


class ModelsOut(Message):
    model_version: str = Field(description="the stable version")
    replicas: dict[str, int] = Field(description="encoder, generator, ranker, gateway -> replicas that live")
    versions: list[VersionOut]
    ended: list[EndedTrialOut] = Field(description="the latest trials, and how they ended")

    @classmethod
    def from_values(cls, name: str, rollout: Rollout, fleet: FleetStatus) -> "ModelsOut":
        trial, known = rollout.trial, sorted({*rollout.versions, *fleet.holders})
        rows = [(one, trial if trial and trial.version == one != rollout.stable else None) for one in known]
        if trial and trial.version == rollout.stable:
            rows.append((rollout.stable, trial))
        return cls(
            model_version=f"{name}/{rollout.stable}",
            replicas=dict(fleet.processes),
            versions=[_version(one, tried, rollout, fleet) for one, tried in rows],
            ended=[_ended(one) for one in rollout.ended],
        )


class ModelsService(Protocol):
    async def models(self) -> ModelsOut: ...


def model_routes(service: ModelsService) -> APIRouter:
    """Routes that only read: which version serves is changed by `genrec models`, where the model's directory is."""
    routes = APIRouter(tags=["operation"])

    @routes.get("/v1/models")
    async def models() -> ModelsOut:
        """The versions that serve, how many replicas hold each, and what was measured of a trial."""
        return await service.models()

    return routes


def _version(version: int, trial: Trial | None, rollout: Rollout, fleet: FleetStatus) -> VersionOut:
    figures = fleet.figures.get(Arm(version, tried=trial is not None), VersionFigures())
    return VersionOut(
        version=version,
        role=trial.kind if trial else "stable" if version == rollout.stable else "",
        share=trial.share if trial else None,
        flags=trial.flags if trial else {},
        holders=dict(fleet.holders.get(version, {})),
        obstacles=list(fleet.obstacles.get(version, ())),
        gateways=fleet.used.get(version, 0),
        requests=figures.requests,
        degraded=figures.degraded,
        p95_ms=figures.timed.p95_ms,
        overlap=figures.overlap / figures.overlaps if figures.overlaps else None,
    )


def _ended(ended: EndedTrial) -> EndedTrialOut:
    trial = ended.trial
    return EndedTrialOut(version=trial.version, kind=trial.kind, flags=trial.flags, outcome=ended.outcome, reason=ended.reason)
