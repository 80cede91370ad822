"""What NVIDIA's library says of the GPUs that this process may use."""

import logging
import os
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from cluster import metrics as m
from cluster.metrics import Meter

T = TypeVar("T")
logger = logging.getLogger("ray.serve")
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpus:
    """`library`: pynvml, initialised. An error is logged once while it lasts, and each report asks anew: a driver may come back."""

    def __init__(self, library: Any) -> None:
        self._library, self._failing = library, False

    def show(self, meter: Meter) -> None:
        try:
            for gpu, device in self.visible():
                memory = self._library.nvmlDeviceGetMemoryInfo(device)
                meter.set(m.GPU_USED, float(memory.used), gpu=gpu)
                meter.set(m.GPU_MEMORY, float(memory.total), gpu=gpu)
                meter.set(m.GPU_BUSY, self._library.nvmlDeviceGetUtilizationRates(device).gpu / 100, gpu=gpu)
        except self._library.NVMLError as error:
            if not self._failing:
                logger.warning("the GPUs cannot be watched; they are asked again at each report: %s", error)
            self._failing = True
        else:
            self._failing = False

    def visible(self) -> Iterator[tuple[str, Any]]:
        """(number on the node, handle) of each GPU that CUDA_VISIBLE_DEVICES names, up to the first wrong name; unset, of all GPUs."""
        count = self._library.nvmlDeviceGetCount()
        named = os.environ.get(VISIBLE)
        for name in map(str, range(count)) if named is None else map(str.strip, named.split(",")):
            if name.isdecimal() and int(name) < count:
                yield name, self._library.nvmlDeviceGetHandleByIndex(int(name))
            elif name.startswith("GPU-"):
                device = self._library.nvmlDeviceGetHandleByUUID(name)
                yield str(self._library.nvmlDeviceGetIndex(device)), device
            else:
                return


@cache
def nvml() -> Any | None:
    """NVIDIA's library, initialised; None without the package nvidia-ml-py or without a driver."""
    try:
        library = import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return library


def any_gpu() -> bool:
    """Whether this process may use a GPU."""
    return _asked(lambda gpus: next(gpus, None) is not None, otherwise=False)


@cache
def warn_of_the_first_gpu(assigned: tuple[str, ...]) -> None:
    """Log, once in a process, that Ray has assigned no GPU to its replica though there are several, of which engines take the first."""
    if not assigned and (count := _count()) > 1:
        logger.warning(
            "Ray assigns this replica no GPU (num_gpus in its ray_actor_options) and hides none: it computes on the first of %d, as does "
            "every replica like it",
            count,
        )


def _count() -> int:
    """How many GPUs this process may use; 0 where one of them cannot be asked."""
    return _asked(lambda gpus: sum(1 for _ in gpus), otherwise=0)


def _asked(of: Callable[[Iterator[tuple[str, Any]]], T], otherwise: T) -> T:
    """What is so of the GPUs that this process may use; `otherwise` without a driver, or where it fails."""
    if (library := nvml()) is None:
        return otherwise
    try:
        return of(Gpus(library).visible())
    except library.NVMLError:
        return otherwise
