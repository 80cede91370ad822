"""How much memory the processes here may have together: the machine's, or less where a cgroup, as of a container, limits them."""

from collections.abc import Iterator
from pathlib import Path

V2_LIMIT, V1_LIMIT = "memory.max", "memory.limit_in_bytes"


def memory_limit(root: Path = Path("/")) -> int | None:
    """The limit in bytes, swap space included; None where the system does not tell. `root`: the directory of its /proc and /sys."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        known = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return min([known["MemTotal"], *_limits(root)]) + known.get("SwapTotal", 0)
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _limits(root: Path) -> Iterator[int]:
    """The memory limits of this process's cgroup and of the groups around it; a container may see its own group as the outermost."""
    for line in (root / "proc/self/cgroup").read_text().splitlines() if (root / "proc/self/cgroup").is_file() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, file = root / "sys/fs/cgroup", V2_LIMIT
        elif "memory" in controllers.split(","):
            mount, file = root / "sys/fs/cgroup/memory", V1_LIMIT
        else:
            continue
        group = mount / path.strip("/")
        for directory in (group, *group.parents):
            if (directory / file).is_file() and (text := (directory / file).read_text().strip()) != "max":
                yield int(text)
            if directory == mount:
                break
