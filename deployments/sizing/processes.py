"""The processes that serve a configuration, and what each holds."""

from collections.abc import Iterator, Mapping
from typing import Any

from cluster.config import Settings
from cluster.errors import ConfigError
from cluster.stages import STAGES
from deployments.shown_items import MOST_ITEMS
from deployments.sizing.engines import Use, engine_process, libraries, library_parts, stage_parts
from deployments.sizing.model import Sizes
from deployments.sizing.parts import MIB, Part, Place, Plan, Process, present

BASES = {
    "gateway": (150 * MIB, 111 * MIB),
    "stage": (133 * MIB, 102 * MIB),
    "switchboard": (115 * MIB, 99 * MIB),
    "cache actor": (62 * MIB, 75 * MIB),
    "Ray and Serve": (830 * MIB, 1390 * MIB),
}
"""The memory of each kind of process that serves nothing yet, with Python, Ray and genrec loaded: (its own, what it shares with others,
mapped files above all). "Ray and Serve" are all processes of a head node together: raylet, GCS, dashboard, agents, controller, proxy,
HAProxy; the dashboard's processes share what they were forked with. Measured by benchmarks/size.py.
"""
SHOWN_USERS = 10_000
MOST_OF_AUTO = 100
"""Replicas of a deployment with `num_replicas: auto`, where nothing else is said: Serve's own default."""


def replicas(document: Mapping[str, Any], *, most: bool) -> dict[str, int]:
    """Deployment -> how many replicas the first application of a Serve config file starts with, or has at `most`. Raises ConfigError."""
    found = {}
    for one in document["applications"][0].get("deployments") or []:
        scaled, count = one.get("autoscaling_config") or {}, one.get("num_replicas")
        if count in (None, "auto"):
            first = scaled.get("initial_replicas") or scaled.get("min_replicas", 1)
            count = scaled.get("max_replicas", MOST_OF_AUTO if count else 1) if most else first
        if not isinstance(count, int):
            raise ConfigError(f"deployment {one.get('name')} has {count!r} replicas; give a number, or auto")
        found[str(one.get("name"))] = count
    return found


def plan_of(settings: Settings, sizes: Sizes, count: Mapping[str, int], use: Use, place: Place) -> Plan:
    """The processes that serve this configuration on one machine. `count`: deployment -> replicas, 1 where it is not named. `use`: of all
    replicas together: those of a stage share the users out among them, while each gateway meets them all.
    """
    return Plan(sizes.name, tuple(_processes(settings, sizes, count, use, place)))


def replica(role: str, settings: Settings, sizes: Sizes, use: Use, place: Place) -> Process:
    """One replica of the gateway or, where the stages are split, of a stage."""
    names = {name for stage in _stages(role, settings) for name in libraries(stage, settings, sizes, place)}
    base = _base("gateway" if role == "gateway" else "stage")
    return Process(role, 1, present([*base, *library_parts(names, place), *version_parts(role, settings, sizes, use, place)]))


def version_parts(role: str, settings: Settings, sizes: Sizes, use: Use, place: Place) -> Iterator[Part]:
    """The parts of a replica that another version of the model has once more while the process holds both; caches are among them."""
    if role == "gateway":
        yield from _gateway(settings, sizes, use)
    for stage in _stages(role, settings):
        yield from stage_parts(stage, settings, sizes, use, place)


def _stages(role: str, settings: Settings) -> list[str]:
    """The stages that have their engines in a replica of this role."""
    return [role] if role != "gateway" else list(STAGES) if settings.placement == "colocated" else []


def _processes(settings: Settings, sizes: Sizes, count: Mapping[str, int], use: Use, place: Place) -> Iterator[Process]:
    for role in ("gateway", *(STAGES if settings.placement == "split" else ())):
        number = count.get(role, 1)
        of_one = use if role == "gateway" else _shared_out(use, number)
        yield Process(role, number, replica(role, settings, sizes, of_one, place).parts)
    generators = count.get("generator" if settings.placement == "split" else "gateway", 1)
    if parts := engine_process(settings, sizes, place):
        yield Process("vLLM's engine", generators, present(parts))
    if settings.cache.enabled and settings.cache.l2 == "actors":
        budget = Part("kept answers (l2)", settings.cache.l2_shard_bytes, "filled", key="cache.l2_shard_bytes")
        yield Process("cache actor", settings.cache.most_shards, present([*_base("cache actor"), budget]))
    states = Part("users' states handed over", settings.encoder.handover.max_bytes, "filled", key="encoder.handover.max_bytes")
    yield Process("switchboard", 1, present([*_base("switchboard"), states]))
    if settings.zeromq is not None:
        requests = Part("requests", settings.zeromq.max_bytes, "passing", key="zeromq.max_bytes")
        yield Process("zeromq", 1, (*_base("switchboard"), requests))
    yield Process("Ray and Serve", 1, tuple(_base("Ray and Serve")))


def _gateway(settings: Settings, sizes: Sizes, use: Use) -> Iterator[Part]:
    cache, edge = settings.cache, settings.gateway
    yield Part("catalogue", sizes.catalogue_bytes)
    yield Part("item vectors", sizes.vector_bytes)
    yield Part("items' counts and first days", (8 + 8 + 4 + 4 + 4) * (sizes.items + 1))
    yield Part("items' JSON in answers", sizes.json_bytes, "filled")
    if edge.playground:
        yield Part("titles to search", sizes.items * (sizes.entry.title + 1 + 8 + 32), "filled", key="gateway.playground")
    if cache.enabled:
        yield Part("kept answers (l1)", cache.l1_bytes, "filled", key="cache.l1_bytes")
    if settings.events.enabled:
        users = SHOWN_USERS if use.users is None else min(SHOWN_USERS, use.users)
        yield Part("items shown lately", users * (MOST_ITEMS * 8 + 600), "filled")
    yield Part("requests' bodies", edge.max_held_bytes, "passing", key="gateway.max_held_bytes")


def _base(kind: str) -> Iterator[Part]:
    own, shared = BASES[kind]
    yield Part("Python, Ray and genrec", own)
    yield Part("Python, Ray and genrec", shared, "mapped")


def _shared_out(use: Use, number: int) -> Use:
    """The use of one of a stage's `number` replicas: each user's requests go to one replica, which keeps the user's state."""
    return use if use.users is None else Use(-(-use.users // max(1, number)), use.history)
