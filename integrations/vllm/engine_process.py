"""The code that runs in vLLM's engine process, which imports this file by its name."""

import multiprocessing
import os
import threading
from typing import Any

from integrations.vllm.library import load

_uniproc: Any = load("vllm.v1.executor.uniproc_executor")


class HostBoundExecutor(_uniproc.UniProcExecutor):  # type: ignore[misc]  # the base class is known at run time only
    """One model in the engine's own process, which ends when the process that started it does, even by `kill -9`.

    vLLM's own engine would outlive that process, with all its memory. On CPUs vLLM would also start a further process for the model, to
    bind its threads to cores: that takes as long to start again, and an exchange between processes at each step.
    """

    def _init_executor(self) -> None:
        threading.Thread(target=_end_with_host, name="end-with-host", daemon=True).start()
        if self.vllm_config.model_config.enforce_eager:
            _compile_nothing()
        super()._init_executor()


def _compile_nothing() -> None:
    """Keep vLLM from compiling some small functions at the first request, which on CPUs takes as long as the rest of the start."""
    import torch  # noqa: PLC0415 - vllm has loaded it by now

    torch.compiler.set_stance("force_eager")


def _end_with_host() -> None:
    if host := multiprocessing.parent_process():
        host.join()
        os._exit(1)
