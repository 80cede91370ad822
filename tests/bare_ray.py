"""A Ray in the process of the tests, without Serve."""

import gc
import warnings

import psutil
import ray

from deployments.cli.local_cluster import START_TRIES, TOO_SLOW

CPUS = 2


class BareRay:
    def start(self) -> None:
        """Start it where it does not run. Raises what `ray.init` raises."""
        for left in reversed(range(START_TRIES)):
            if ray.is_initialized() or _started(last=not left):
                return

    def end(self) -> None:
        if ray.is_initialized():
            ray.shutdown()


def _started(*, last: bool) -> bool:
    """Whether it runs now. Where the node was too slow, its processes are ended, which Ray has forgotten."""
    ours = psutil.Process()
    before = set(ours.children())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of those processes, as the error goes that holds them or is collected
        try:
            ray.init(address="local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
        except Exception as error:
            if last or TOO_SLOW not in str(error):
                raise
        else:
            return True
        gc.collect()
    for left_over in set(ours.children()) - before:
        left_over.kill()
    return False
