"""Whether a file lies on a disk that several machines share: SQLite's locks and its shared memory hold for the programs of one machine."""

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
_SHARED = re.compile(r"nfs4?|cifs|smb3|smbfs|ceph|lustre|gpfs|beegfs|afs|fuse\..+")


def network_file_system(path: Path) -> str:
    """The kind of network file system that the file lies on, as `nfs4`; empty where it is none, or the system does not say."""
    try:
        mounts = [line.partition(" - ") for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return ""
    kinds = {_unescaped(mount.split()[4]): file_system.split()[0] for mount, _, file_system in mounts}  # a later one hides an earlier
    kind = next((kinds[place] for place in map(str, path.resolve().parents) if place in kinds), "")
    return kind if _SHARED.fullmatch(kind) else ""


def _unescaped(name: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), name)
