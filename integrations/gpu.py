"""The NVIDIA GPU that the engines of a process share, without torch."""

import ctypes


def driver_finds_gpu() -> bool:
    """Whether NVIDIA's driver is there and shows this process a GPU, full or not."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
