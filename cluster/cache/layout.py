"""How many shards share the keys. Every gateway and every shard follows the latest layout that it has heard of.

switchboard -> Layout -> gateways -> shards: each gives away the entries that another one owns by it
"""

from dataclasses import dataclass
from typing import NamedTuple


class Layout(NamedTuple):
    """The shards numbered 0 to `owners` - 1 own the keys. The greater of two layouts is the later one."""

    number: int = 0
    owners: int = 1

    def names(self, name: str) -> list[str]:
        return shard_names(self.owners, name)


@dataclass(frozen=True, slots=True)
class ShardsSeen:
    """The shards as a gateway sees them. `busy`: the share of a core that each uses, added up; `moving`: entries are on their way, or the
    layout is not known to all.
    """

    layout: Layout
    busy: float = 0.0
    moving: bool = True


def shard_names(shards: int, name: str) -> list[str]:
    return [f"{name}-{index}" for index in range(shards)]
