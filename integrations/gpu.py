"""The NVIDIA GPU that the engines of a process share, without torch."""

import ctypes
from threading import Lock

ONE_LOADS = Lock()
"""Held while an engine records CUDA graphs, or opens what may wait for all work on the GPU, which breaks a recording of another thread.
Nothing else is waited for meanwhile, and engines that serve do not take it.
"""


def driver_finds_gpu() -> bool:
    """Whether NVIDIA's driver is there and shows this process a GPU, full or not."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
