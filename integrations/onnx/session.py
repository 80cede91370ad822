"""ONNX Runtime sessions, opened the same way for serving and for the parity gate."""

import logging
import os
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from integrations.gpu import alone_on_the_gpu

_LOG = logging.getLogger(__name__)
_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_WANTED = {_CUDA: {"use_tf32": 0}, _CPU: {}}  # TF32, on by default, is too coarse for the fp32 gate


def open_session(graph: Path, threads: int | None = None) -> Any:
    """An onnxruntime.InferenceSession on the first GPU where this build of ONNX Runtime can use one, else on the CPU.
    Raises RuntimeError where the graph does not load or a GPU has no room for it, now or in a later call: nothing goes on on the CPU then;
    BackendFailed where another engine loads onto the GPU for long.

    `threads` defaults to OMP_NUM_THREADS, which Ray sets to a replica's share of the machine, and else to all cores. Threads that wait do
    not spin: spinning gains nothing at these sizes and nearly doubles the latency of a neighbouring session.
    """
    import onnxruntime  # noqa: PLC0415 - a quarter of a second that processes serving another engine don't spend

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or threads_granted()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors are raised; its warnings are notes on shapes
    providers = [provider for provider in _WANTED if provider in onnxruntime.get_available_providers()]
    if _CUDA in providers and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # the CUDA and cuDNN of pip packages, which the loader does not find by itself

    def opened(names: list[str]) -> Any:
        asked = [(name, _WANTED[name]) for name in names]
        with alone_on_the_gpu() if _CUDA in names else nullcontext():
            return onnxruntime.InferenceSession(graph, options, providers=asked, enable_fallback=0)

    try:
        session = opened(providers)
    except RuntimeError as error:
        if _CUDA not in providers or _is_full(error):
            raise
        session = opened([_CPU])
    for lost in set(providers) - set(session.get_providers()):
        _warn_of_lost(lost)
    return session


def computes_here(session: Any) -> bool:
    """Whether a session computes on the CPU, the thread that calls among its threads."""
    return list(session.get_providers()) == [_CPU]


def _is_full(error: RuntimeError) -> bool:
    """Whether a session failed at a GPU that has no room for the moment, and not as CUDA cannot start here, or at its graph."""
    return any(sign in str(error) for sign in ("out of memory", "CUDA failure 2:", "Failed to allocate memory", "ALLOC_FAILED"))


def threads_granted() -> int:
    """The number in OMP_NUM_THREADS, which may also be empty, or a list with a number for each level of nesting; 0 without one."""
    return int(os.environ.get("OMP_NUM_THREADS", "").split(",")[0] or 0)


@cache
def _warn_of_lost(provider: str) -> None:
    """Warn, once in a process, that ONNX Runtime goes on without a provider that cannot load its libraries."""
    _LOG.warning("ONNX Runtime has %s but could not start it; serving without. Check that its CUDA and cuDNN libraries load", provider)
