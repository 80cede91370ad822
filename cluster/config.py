"""The configuration: one tree, every default in it. `genrec config` prints it resolved; ``ray_config.yaml`` holds it under ``args``."""

import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster import registry
from cluster.breaker import BreakerSettings
from cluster.errors import ConfigError


class Section(BaseModel):
    """A part of the tree: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class BatchingSettings(Section):
    """How requests that wait for an engine are joined. A batch starts as soon as the engine is free and one of the limits is reached."""

    max_requests: int = Field(32, ge=1, le=4096, description="requests in one batch, at most")
    max_tokens: int = Field(
        8192,
        ge=1,
        description="padded rows in one batch (longest x requests), at most; rows: behaviours, or a prompt and its paths' codes",
    )
    max_wait_ms: float = Field(2.0, ge=0, le=1000, description="how long the first request of a batch waits for company")


class StageSettings(Section):
    """What can change while the system runs, without a restart: a stage's ``user_config``."""

    order: list[str] = Field(min_length=1, description="backends, first choice first")
    selection: Literal["ordered", "fastest"] = Field("ordered", description="ordered: as listed; fastest: as measured at warm-up")
    disabled: list[str] = Field([], description="backends that are switched off")

    @model_validator(mode="after")
    def _names_are_consistent(self) -> Self:
        if twice := [name for name, count in Counter(self.order).items() if count > 1]:
            raise ValueError(f"order names {', '.join(twice)} more than once")
        if strangers := sorted(set(self.disabled) - set(self.order)):
            raise ValueError(f"disabled names {', '.join(strangers)}, which order ({', '.join(self.order)}) does not")
        return self


class EngineSettings(StageSettings):
    """A stage that engines serve."""

    stage_name: ClassVar[str]

    backends: dict[str, str] = Field({}, description="backends of your own: name -> 'module:Class'")
    options: dict[str, dict[str, Any]] = Field({}, description="keyword arguments of backends' constructors: name -> {argument: value}")
    batching: BatchingSettings = BatchingSettings()
    breaker: BreakerSettings = BreakerSettings()
    probe_interval_s: float = Field(5.0, gt=0, description="how often an unavailable backend is looked at again")
    retries: int = Field(2, ge=0, description="effort to find the bad requests of a batch that broke, before the next backend has it whole")

    @model_validator(mode="after")
    def _import_strings_are_well_formed(self) -> Self:
        if wrong := [text for text in self.backends.values() if not re.fullmatch(r"[\w.]+:\w+", text)]:
            raise ValueError(f"backends names {wrong[0]!r}, which is not of the form 'module:Class'")
        return self

    @model_validator(mode="after")
    def _order_is_registered(self) -> Self:
        stage, known = self.stage_name, registry.backends(self.stage_name, self.backends)
        if strangers := [name for name in self.order if name not in known]:
            raise ValueError(f"order names {', '.join(strangers)}, but no such {stage} is registered; there are {', '.join(sorted(known))}")
        if strangers := sorted(set(self.options) - set(known)):
            raise ValueError(f"options names {', '.join(strangers)}, but no such {stage} is registered")
        return self

    def stage(self) -> StageSettings:
        """The part that can change at run time."""
        return StageSettings(order=self.order, selection=self.selection, disabled=self.disabled)


class EncoderSettings(EngineSettings):
    """The encoder stage: history -> user state and nearest items."""

    stage_name = "encoder"

    order: list[str] = Field(["tensorrt", "onnxruntime", "torch"], min_length=1, description="backends, first choice first")


class GeneratorSettings(EngineSettings):
    """The generator stage: user state -> items by their semantic IDs. It serves only a model that has a decoder."""

    stage_name = "generator"

    order: list[str] = Field(["vllm", "torch_beam"], min_length=1, description="backends, first choice first")
    beam: int = Field(
        20,
        ge=1,
        le=256,
        description="paths kept at each level of the semantic IDs: items one request generates, at least. "
        "A larger k widens it, up to gateway.max_k, and so do diversity and freshness, up to gateway.pool",
    )


class GatewaySettings(Section):
    """The HTTP edge. Limits are answered with 422 and the field that exceeds them."""

    max_k: int = Field(1000, ge=1, description="items one request may ask for")
    max_behaviours: int = Field(10_000, ge=1, description="behaviours one request may carry")
    max_listed_items: int = Field(10_000, ge=1, description="item ids `blocked` or `allowed` may list")
    max_batch: int = Field(256, ge=1, description="requests in one call of /v1/recommend:batch")
    max_body_bytes: int = Field(16 * 2**20, ge=1024, description="size of a request's body")
    deadline_s: float = Field(5.0, gt=0, description="how long the encoder may take before popularity answers instead")
    generation_deadline_s: float = Field(5.0, gt=0, description="how long the generator may take before the retrieved items are the answer")
    pool: int = Field(500, ge=1, description="items that the blend, diversity and freshness choose from")
    max_events: int = Field(1000, ge=1, description="events one call of /v1/events may carry")


class CacheSettings(Section):
    """Answers that are kept: l1 in each gateway replica, l2 for the whole cluster. What is kept is versioned by model and history."""

    enabled: bool = Field(True, description="false: every answer is computed")
    policy: Literal["s3fifo", "lru", "lfu", "fifo", "arc"] = Field("s3fifo", description="which answers make room for new ones")
    l1_bytes: int = Field(64 * 2**20, ge=2**16, description="memory of l1 in each gateway replica")
    l2: Literal["actors", "redis", "off"] = Field("actors", description="actors: named detached Ray actors; redis: a server")
    l2_shards: int = Field(1, ge=1, le=256, description="cache actors; each is a process of one core at most")
    l2_shard_bytes: int = Field(256 * 2**20, ge=2**16, description="memory of a cache actor")
    l2_deadline_ms: float = Field(20.0, gt=0, le=1000, description="a cache that has not answered by then counts as a miss")
    redis_url: str | None = Field(None, description="such as redis://host:6379/0")
    ttl_s: float = Field(60.0, gt=0, description="how long an answer is fresh, give or take a tenth")
    stale_s: float = Field(300.0, ge=0, description="how long after that it is still given, while it is computed anew")
    negative_ttl_s: float = Field(1.0, gt=0, description="how long a degraded answer is kept")
    minimum_hit_rate: float = Field(0.05, ge=0, lt=1, description="below it, what was not asked for lately is not kept; 0: never mind")
    tenant_share: float = Field(1.0, gt=0, le=1, description="of a cache's memory, what one tenant may take at most")
    hot_per_minute: float = Field(6.0, gt=0, description="an answer asked for more often is computed anew before its time is over")

    @model_validator(mode="after")
    def _redis_has_a_url(self) -> Self:
        if (self.l2 == "redis") != (self.redis_url is not None):
            raise ValueError("l2: redis and redis_url belong together: give both, as l2: redis, redis_url: redis://host:6379/0, or neither")
        return self


class EventSettings(Section):
    """What users do, as it happens: the event store, where requests that name only a user find the user's history."""

    enabled: bool = Field(True, description="false: every request brings its behaviours")
    url: str | None = Field(
        None, description="postgresql://user@host/database, or sqlite:///file for one machine; default: events.db in the model's directory"
    )
    read_deadline_ms: float = Field(500.0, gt=0, le=60_000, description="a history that is not there by then is taken for an empty one")
    anticipate: bool = Field(True, description="after an event, compute the user's next answer in the background")
    anticipate_after_s: float = Field(0.05, ge=0, le=60, description="how long to wait for further events of the user before that")


class Settings(Section):
    """Everything genrec can be told."""

    model_dir: Path = Field(Path("models/ml-100k"), description="the model's directory: versions, and which is current")
    version: int | None = Field(None, ge=1, description="the version to serve; default: the current one, or the last one that verifies")
    encoder: EncoderSettings = EncoderSettings()
    generator: GeneratorSettings = GeneratorSettings()
    gateway: GatewaySettings = GatewaySettings()
    cache: CacheSettings = CacheSettings()
    events: EventSettings = EventSettings()

    @property
    def event_store_url(self) -> str:
        """Where events are stored; a file by its absolute path."""
        scheme, separator, file = (self.events.url or f"sqlite:///{self.model_dir / 'events.db'}").partition("sqlite:///")
        return f"{separator}{Path(file).absolute()}" if separator else scheme

    def engines(self, stage: str) -> EngineSettings:
        """The settings of the stage of that name."""
        engines: EngineSettings = getattr(self, stage)
        return engines


def parse(tree: dict[str, Any], source: str = "configuration") -> Settings:
    """Settings from a plain tree. Raises ConfigError that names each wrong key, its value and the rule."""
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc'])) or 'top level'} = {e['input']!r}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{source}: " + "; ".join(problems)) from error


def read(path: Path) -> Settings:
    """Settings from the first application's ``args`` in a Serve config file such as ``ray_config.yaml``."""
    application = read_document(path)["applications"][0]
    settings = parse(application.get("args") or {}, str(path))
    for deployment in application.get("deployments") or []:
        stage, changes = deployment.get("name"), deployment.get("user_config")
        if stage in {"encoder", "generator"} and changes:
            parse({stage: {**settings.engines(stage).model_dump(mode="json"), **changes}}, f"{path}: user_config of the {stage}")
    return settings


def read_document(path: Path) -> dict[str, Any]:
    """A whole Serve config file, which has one application at least. Raises ConfigError."""
    try:
        document = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of a Serve config file such as ray_config.yaml") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    match document:
        case {"applications": [dict(), *_]}:
            return dict(document)
        case _:
            raise ConfigError(f"{path} is not a Serve config file: it has no `applications: [{{name: ..., args: ...}}]`")
