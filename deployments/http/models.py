"""/v1/models: which versions serve, and how a trial goes."""

from typing import Protocol

from fastapi import APIRouter
from pydantic import Field

from cluster.fleet.board import FleetStatus
from cluster.fleet.rollout import EndedTrial, Rollout, VersionFigures
from deployments.http.messages import Message


class VersionOut(Message):
    """A version that some process holds, or should."""

    version: int
    role: str = Field(description="stable, canary, ab or shadow; empty for one that is not needed any more")
    share: float | None = Field(description="of the users, where it is on trial")
    holders: dict[str, int] = Field(description="encoder, generator, ranker, gateway -> replicas that can serve it")
    obstacles: list[str] = Field(description="why some cannot, or not yet")
    gateways: int = Field(description="gateways that answer with it")
    requests: int = Field(description="answers computed since the trial began")
    degraded: int
    p95_ms: float | None
    overlap: float | None = Field(description="in the shadow: mean share of items that are the stable version's too")


class EndedTrialOut(Message):
    version: int
    kind: str
    outcome: str
    reason: str


class ModelsOut(Message):
    model_version: str = Field(description="the stable version")
    replicas: dict[str, int] = Field(description="encoder, generator, ranker, gateway -> replicas that live")
    versions: list[VersionOut]
    ended: list[EndedTrialOut] = Field(description="the latest trials, and how they ended")

    @classmethod
    def from_values(cls, name: str, rollout: Rollout, fleet: FleetStatus) -> "ModelsOut":
        known = sorted({*rollout.versions, *fleet.holders})
        return cls(
            model_version=f"{name}/{rollout.stable}",
            replicas=dict(fleet.processes),
            versions=[_version(one, rollout, fleet) for one in known],
            ended=[_ended(one) for one in rollout.ended],
        )


class ModelsService(Protocol):
    async def models(self) -> ModelsOut: ...


def model_routes(service: ModelsService) -> APIRouter:
    """Reading only: what serves is changed by `genrec models`, where the model's directory is."""
    routes = APIRouter(tags=["operation"])

    @routes.get("/v1/models")
    async def models() -> ModelsOut:
        """The versions that serve, how many replicas hold each, and what was measured of a trial."""
        return await service.models()

    return routes


def _version(version: int, rollout: Rollout, fleet: FleetStatus) -> VersionOut:
    trial = rollout.trial if rollout.trial and rollout.trial.version == version else None
    figures = fleet.figures.get(version, VersionFigures())
    return VersionOut(
        version=version,
        role="stable" if version == rollout.stable else trial.kind if trial else "",
        share=trial.share if trial else None,
        holders=dict(fleet.holders.get(version, {})),
        obstacles=list(fleet.obstacles.get(version, ())),
        gateways=fleet.used.get(version, 0),
        requests=figures.requests,
        degraded=figures.degraded,
        p95_ms=figures.latency.p95_ms,
        overlap=figures.overlap / figures.overlaps if figures.overlaps else None,
    )


def _ended(ended: EndedTrial) -> EndedTrialOut:
    return EndedTrialOut(version=ended.trial.version, kind=ended.trial.kind, outcome=ended.outcome, reason=ended.reason)
