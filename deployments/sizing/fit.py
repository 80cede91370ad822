"""Refuse, before it is loaded, what cannot fit into memory: otherwise the system kills a process later, in the middle of its work.

Only a configuration that certainly does not fit is refused: its memory at the start is more than all memory of the machine, by more than
predictions are off; or what a single setting keeps is. Memory that other programs use now may be free by then, and counts as free. A GPU's
memory is not checked here: an engine that does not fit refuses by itself, and the next one serves.
"""

import dataclasses
import logging
from collections.abc import Iterable, Iterator

from cluster.bundle import Bundle
from cluster.config import Settings
from cluster.errors import BundleError, ConfigError
from cluster.machine import memory_limit
from cluster.stages import StageName
from deployments.sizing.engines import Use
from deployments.sizing.model import Entry, Sizes, sampled_entry, sizes_of
from deployments.sizing.parts import Part, Place, Plan, Process
from deployments.sizing.processes import plan_of, replica, version_parts
from deployments.telemetry.gpus import any_gpu

TOLERANCE = 0.15
"""How far a prediction may be off the measured memory, as a share of that; benchmarks/size.py compares them."""
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
logger = logging.getLogger("ray.serve")


def require_all_fit(settings: Settings, bundle: Bundle, count: dict[str, int], room: int | None = None) -> None:
    """Raises ConfigError where the processes of this configuration do not fit on this machine together. `room`: memory in bytes, by default
    the machine's.
    """
    if sizes := _sizes(bundle, sampled=True):
        _require(plan_of(settings, sizes, count, Use(), here()), settings, room)


def require_replica_fits(
    settings: Settings, bundle: Bundle, role: StageName | str, room: int | None = None, *, beside: Iterable[Bundle] = ()
) -> None:
    """Raises ConfigError where one replica does not fit on this machine with what it is to load, `beside` the versions that it holds: other
    processes may be elsewhere.
    """
    role = "gateway" if settings.placement == "colocated" else role
    sampled = role == "gateway"
    if sizes := _sizes(bundle, sampled=sampled):
        held = [of for other in beside if (of := _sizes(other, sampled=sampled))]
        whole = replica(role, settings, sizes, Use(), here())
        more = [part for of in held for part in _at_start(version_parts(role, settings, of, Use(), here()), of.name)]
        name = " beside ".join(of.name for of in (sizes, *held))
        _require(Plan(name, (dataclasses.replace(whole, parts=(*whole.parts, *more)),)), settings, room)


def here() -> Place:
    """The device on which engines compute on this machine."""
    return "gpu" if any_gpu() else "host"


def unfit(plan: Plan, room: int) -> str:
    """Why the plan cannot fit into so many bytes, and what to do; "" where it may."""
    needed = plan.bytes("start")
    if needed > room * (1 + TOLERANCE):
        most = "; ".join(map(_described, plan.largest("start")))
        return (
            f"{plan.model} takes {said(needed)} of memory as soon as it serves, and there are {said(room)}. The most: {most}. "
            "Take a larger machine or a smaller model, fewer engines in `order`, or fewer replicas"
        )
    stores = [(process, part) for process in plan.processes if process.count for part in process.parts if _is_store(part)]
    if too_large := [(process, part) for process, part in stores if part.bytes > room]:
        process, part = max(too_large, key=lambda store: store[1].bytes)
        return f"{part.key} has {process.name} keep {said(part.bytes)}, and there are {said(room)} of memory; lower it"
    return ""


def said(count: int) -> str:
    """A number of bytes as text, also in a larger unit."""
    scale = min(len(UNITS) - 1, max(0, (count.bit_length() - 1) // 10))
    return f"{count:,} bytes" + (f" ({count / 1024**scale:.1f} {UNITS[scale]})" if scale else "")


def _sizes(bundle: Bundle, *, sampled: bool) -> Sizes | None:
    """The sizes of a bundle's model; None where its family is none of genrec's, which only its own backends know. `sampled`: with the bytes
    of its own items, for a process that holds the catalogue; where they cannot be read, as of a version that was deleted, those of usual
    items: whether a version can be loaded is for its load to say.
    """
    try:
        sizes = sizes_of(bundle)
    except BundleError:
        return None
    return dataclasses.replace(sizes, entry=_entry(bundle)) if sampled else sizes


def _entry(bundle: Bundle) -> Entry:
    from pyarrow import ArrowException  # noqa: PLC0415 - a stage's replica is sized without it

    try:
        return sampled_entry(bundle)
    except (OSError, ArrowException, ValueError, KeyError) as error:
        logger.warning("the items of %s cannot be read, and count as usual ones in what it takes of memory: %s", bundle.version, error)
        return Entry()


def _at_start(parts: Iterable[Part], version: str) -> Iterator[Part]:
    """The parts of a version that are taken as soon as it serves, with its name."""
    return (dataclasses.replace(part, name=f"{part.name} of {version}") for part in parts if part.when == "start")


def _require(plan: Plan, settings: Settings, room: int | None) -> None:
    room = memory_limit() if room is None else room
    if room is None or not (problem := unfit(plan, room)):
        return
    if settings.memory_check == "refuse":
        raise ConfigError(f"{problem}; `genrec size` lists every part, and memory_check: warn has it tried all the same")
    logger.warning("memory_check: warn: %s", problem)


def _is_store(part: Part) -> bool:
    """Whether it is host memory that a single setting lets fill up."""
    return bool(part.key) and part.place == "host" and part.when == "filled"


def _described(held: tuple[Process, Part]) -> str:
    process, part = held
    times = f"{process.count} times " if process.count > 1 else ""
    return f"{process.name}: {part.name}, {times}{said(part.bytes)}"
