"""How much memory the processes here may have together: the machine's, or less where a cgroup, as of a container, limits them."""

from collections.abc import Iterator
from pathlib import Path

V2_LIMITS = {"memory.max": "memory", "memory.swap.max": "swap"}
V1_LIMITS = {"memory.limit_in_bytes": "memory", "memory.memsw.limit_in_bytes": "both"}
"""The files of a cgroup, and what each limits."""


def memory_limit(root: Path = Path("/")) -> int | None:
    """The limit in bytes, swap space included; None where the system does not tell. `root`: the directory of its /proc and /sys."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        known = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        memory, swap = known["MemTotal"], known.get("SwapTotal", 0)
        most = {"memory": memory, "swap": swap, "both": memory + swap}
        for what, limit in _limits(root):
            most[what] = min(most[what], limit)
        return min(most["memory"] + most["swap"], most["both"])
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _limits(root: Path) -> Iterator[tuple[str, int]]:
    """What this process's cgroup and the groups around it limit (memory, swap or both together), and to how many bytes; a container may see
    its own group as the outermost.
    """
    for line in (root / "proc/self/cgroup").read_text().splitlines() if (root / "proc/self/cgroup").is_file() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, files = root / "sys/fs/cgroup", V2_LIMITS
        elif "memory" in controllers.split(","):
            mount, files = root / "sys/fs/cgroup/memory", V1_LIMITS
        else:
            continue
        group = mount / path.strip("/")
        for directory in (group, *group.parents):
            for file, what in files.items():
                if (directory / file).is_file() and (text := (directory / file).read_text().strip()) != "max":
                    yield what, int(text)
            if directory == mount:
                break
