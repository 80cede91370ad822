"""The NVIDIA GPU that the engines of a process share, without torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from cluster.errors import BackendFailed

LONGEST_WAIT_S = 20.0
"""How long a load waits for another: less than the controller waits for one load before it begins the next."""
_one_loads = Lock()


@contextmanager
def alone_on_the_gpu() -> Iterator[None]:
    """A block in which an engine records CUDA graphs, or opens what may wait for all work on the GPU, which breaks a recording of another
    thread. Engines that serve need none. Raises BackendFailed where another load of this process goes on for LONGEST_WAIT_S: it may hang.
    """
    if not _one_loads.acquire(timeout=LONGEST_WAIT_S):
        raise BackendFailed(f"another engine of this process has been loading onto the GPU for {LONGEST_WAIT_S:.0f} s; this one is later")
    try:
        yield
    finally:
        _one_loads.release()
