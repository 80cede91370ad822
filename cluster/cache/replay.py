"""Replay a trace of accesses against policies: the hit rate that each cache would have had."""

import gzip
import io
import json
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.cache.policy import POLICIES, make_policy
from cluster.errors import DataError


@dataclass(frozen=True, slots=True)
class Result:
    """`size`: as it was asked for; `capacity`: in keys; `hit_rate`: 0..1 over all accesses, each key's first one included."""

    policy: str
    size: str
    capacity: int
    hit_rate: float


def replay(trace: Iterable[Hashable], sizes: Sequence[str], policies: Sequence[str] = tuple(POLICIES)) -> list[Result]:
    """Every policy at every size, in that order. Every key weighs 1, and an access that misses admits its key.

    A size is a share of the trace's distinct keys ("1%") or a number of keys ("5000"). Raises DataError at an empty trace or a size that
    is neither, UnknownChoice at an unknown policy.
    """
    accesses = list(trace)
    if not accesses:
        raise DataError("the trace has no accesses; give one key a line")
    if not sizes or not policies:
        raise DataError(f"nothing to replay: {len(sizes)} sizes, {len(policies)} policies; give at least one of each")
    distinct = len(set(accesses))
    capacities = {size: parse_size(size, distinct) for size in sizes}
    return [
        Result(policy, size, capacity, hit_rate(accesses, policy, capacity))
        for policy in dict.fromkeys(policies)
        for size, capacity in capacities.items()
    ]


def hit_rate(accesses: Sequence[Hashable], policy_name: str, capacity: int) -> float:
    """The hit rate of a policy in a cache that is empty at first."""
    policy = make_policy(policy_name, capacity)
    hits = 0
    for key in accesses:
        if key in policy:
            policy.touch(key)
            hits += 1
        else:
            policy.admit(key, 1)
    return hits / len(accesses)


def parse_size(size: str, distinct: int) -> int:
    """A size for `replay` as a number of keys; a share that is less than one key counts as one. Raises DataError."""
    share = size.strip().endswith("%")
    try:
        number = float(size.strip().removesuffix("%")) if share else int(size)
    except ValueError:
        number = 0
    if not (0 < number <= 100 if share else number >= 1):
        raise DataError(f"cache size {size!r} is neither a share of the distinct keys, 0 to 100 and a %, nor a number of keys from 1 on")
    return max(1, int(number / 100 * distinct)) if share else int(number)


def read_trace(path: Path) -> list[Hashable]:
    """The accesses of a trace file, in order; plain or gzipped, as its content says.

    Either one key a line, or JSON lines with `hash_ids` (the Mooncake format, FAST 2025), each of which is one access. Empty lines are
    passed over. Raises DataError with the line.
    """
    try:
        accesses: list[Hashable] = [access for number, line in enumerate(_lines(path), 1) for access in _accesses(line, f"{path}:{number}")]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"trace {path} cannot be read: {error}") from error
    if not accesses:
        raise DataError(f"trace {path} has no accesses; give one key a line, or JSON lines with hash_ids")
    return accesses


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        with io.TextIOWrapper(gzip.open(file) if gzipped else file, encoding="utf-8-sig") as text:
            yield from text


def _accesses(line: str, where: str) -> Iterable[Hashable]:
    key = line.strip()
    if not key.startswith("{"):
        return (key,) if key else ()
    try:
        hash_ids = json.loads(key)["hash_ids"]
    except (ValueError, KeyError) as error:
        raise DataError(f"{where}: {key[:60]!r} is no JSON object with hash_ids, as the traces of Mooncake have ({error!r})") from error
    if not isinstance(hash_ids, list) or not all(isinstance(one, int | str) for one in hash_ids):
        raise DataError(f"{where}: hash_ids must be a list of numbers or strings, not {str(hash_ids)[:60]}")
    return hash_ids
