"""A Ray in this process, without Serve."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import ray

TRIES = 4
TOO_SLOW = "timed out during startup"
"""What ray.init says where a node took longer than half a minute, which cannot be changed and a busy machine may need."""


@contextmanager
def bare_ray(cpus: int) -> Iterator[None]:
    """Raises what `ray.init` raises."""
    for left in reversed(range(TRIES)):
        if _started(cpus, last=not left):
            break
    try:
        yield
    finally:
        ray.shutdown()


def _started(cpus: int, *, last: bool) -> bool:
    try:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    except Exception as error:
        if last or TOO_SLOW not in str(error):
            raise
    else:
        return True
    with warnings.catch_warnings():  # the processes of that node are ended with this one; Ray has forgotten them
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    return False
