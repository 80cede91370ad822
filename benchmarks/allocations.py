"""Counts what numpy allocates for the data of arrays: a memory handler (NEP 49) sees each request, also for arrays that are gone when a
call returns, which a snapshot of tracemalloc would not show; `check` says whether both see the same where all stays alive.

Not counted: Python's objects, torch's own memory, and numpy's buffers within a ufunc.
"""

import ctypes
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

CACHED_BELOW = 1024
"""Bytes; what is smaller numpy serves from a cache of its own, so that only the others reach the system's allocator."""
_pointer = ctypes.c_void_p
_size = ctypes.c_size_t
_libc, _python = ctypes.CDLL(None), ctypes.pythonapi
_Malloc = ctypes.CFUNCTYPE(_pointer, _pointer, _size)
_TwoSizes = ctypes.CFUNCTYPE(_pointer, _pointer, _size, _size)
_Realloc = ctypes.CFUNCTYPE(_pointer, _pointer, _pointer, _size)
_Free = ctypes.CFUNCTYPE(None, _pointer, _pointer, _size)
SET_HANDLER = 304
"""Where numpy's table of C functions has PyDataMem_SetHandler, since 1.22 (numpy/__multiarray_api.h)."""


class _Handler(ctypes.Structure):
    """PyDataMem_Handler of numpy/ndarraytypes.h."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", _pointer),
        ("malloc", _Malloc),
        ("calloc", _TwoSizes),
        ("realloc", _Realloc),
        ("free", _Free),
    )


class AllocationCounter:
    """Sees every request of numpy for an array's data, in bytes, and serves it by the C library. One for the life of the process."""

    def __init__(self) -> None:
        for name, result, takes in (
            ("malloc", _pointer, [_size]),
            ("calloc", _pointer, [_size, _size]),
            ("realloc", _pointer, [_pointer, _size]),
            ("free", None, [_pointer]),
        ):
            function = getattr(_libc, name)
            function.restype, function.argtypes = result, takes
        self._sizes: list[int] = []
        self._alive = 0
        self._handler = _Handler(
            b"counting", 1, None, _Malloc(self._malloc), _TwoSizes(self._calloc), _Realloc(self._realloc), _Free(self._free)
        )
        self._capsule, self._set = self._capsule_of(self._handler), self._setter()

    @contextmanager
    def counting(self) -> Iterator[list[int]]:
        """The sizes, which are there at the end of the block.

        Raises RuntimeError where something that was allocated within it is alive then: it would not be work of the calls alone.
        """
        self._sizes = []
        before = self._set(self._capsule)
        try:
            yield self._sizes
        finally:
            self._set(before)
        if self._alive:
            raise RuntimeError(f"{self._alive} of {len(self._sizes)} arrays are still alive; a pool has grown, so warm up for longer")

    def check(self) -> None:
        """Raises RuntimeError unless tracemalloc, which only knows what is alive, sees the same arrays."""
        tracemalloc.start()
        with self.counting() as sizes:
            arrays = [np.zeros((100, 100)), np.empty(5000, np.int8), np.arange(3000)]
            taken = tracemalloc.take_snapshot()
            arrays.clear()
        tracemalloc.stop()
        numpys = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
        traced = sorted(trace.size for trace in taken.filter_traces([numpys]).traces if trace.size >= CACHED_BELOW)
        if traced != sorted(size for size in sizes if size >= CACHED_BELOW):
            raise RuntimeError(f"numpy {np.__version__} asked for {sorted(sizes)} bytes and tracemalloc saw {traced}: counting is broken")

    def _malloc(self, _: object, size: int) -> int | None:
        return self._counted(size, _libc.malloc(size))

    def _calloc(self, _: object, count: int, size: int) -> int | None:
        return self._counted(count * size, _libc.calloc(count, size))

    def _realloc(self, _: object, memory: int | None, size: int) -> int | None:
        self._alive -= memory is not None
        return self._counted(size, _libc.realloc(memory, size))

    def _free(self, _: object, memory: int | None, _size: int) -> None:
        self._alive -= memory is not None
        _libc.free(memory)

    def _counted(self, size: int, memory: int | None) -> int | None:
        self._sizes.append(size)
        self._alive += 1
        return memory

    def _capsule_of(self, handler: _Handler) -> object:
        _python.PyCapsule_New.restype, _python.PyCapsule_New.argtypes = ctypes.py_object, [_pointer, ctypes.c_char_p, _pointer]
        self._name = ctypes.c_char_p(b"mem_handler")  # the capsule points to it
        return _python.PyCapsule_New(ctypes.addressof(handler), self._name, None)

    def _setter(self) -> Callable[[object], object]:
        _python.PyCapsule_GetPointer.restype, _python.PyCapsule_GetPointer.argtypes = _pointer, [ctypes.py_object, ctypes.c_char_p]
        api: Any = import_module("numpy._core._multiarray_umath")._ARRAY_API  # noqa: SLF001 - where numpy has its C API
        functions = ctypes.cast(_python.PyCapsule_GetPointer(api, None), ctypes.POINTER(_pointer))
        return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(functions[SET_HANDLER] or 0)


def minor_faults() -> int:
    """Of this thread, since it began."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
