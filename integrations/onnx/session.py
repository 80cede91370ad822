"""ONNX Runtime sessions, opened the same way for serving and for the parity gate."""

import os
from pathlib import Path
from typing import Any


def open_session(graph: Path, threads: int | None = None) -> Any:
    """An onnxruntime.InferenceSession on the first GPU where this build of ONNX Runtime can use one, else on the CPU.

    `threads` defaults to OMP_NUM_THREADS, which Ray sets to a replica's share of the machine, and else to all cores. Threads that wait do
    not spin: spinning gains nothing at these sizes and nearly doubles the latency of a neighbouring session.
    """
    import onnxruntime  # noqa: PLC0415 - a quarter of a second that processes serving another engine don't spend

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or int(os.environ.get("OMP_NUM_THREADS", "0"))
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors are raised; its warnings are notes on shapes
    wanted = ("CUDAExecutionProvider", "CPUExecutionProvider")
    providers = [provider for provider in wanted if provider in onnxruntime.get_available_providers()]
    return onnxruntime.InferenceSession(graph, options, providers=providers)
