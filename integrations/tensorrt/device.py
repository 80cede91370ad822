"""The GPU of this process, as torch sees it: TensorRT's buffers are torch tensors."""

from importlib.util import find_spec

from cluster.errors import BackendUnavailable


def gpu_architecture() -> str:
    """The architecture of the current GPU, as ``sm_90``. Raises BackendUnavailable with what is missing."""
    if find_spec("torch") is None:
        raise BackendUnavailable("torch, which holds the engine's buffers, is not installed; install genrec with its extra gpu")
    import torch  # noqa: PLC0415 - seconds, spent only once the cheaper questions are answered

    from integrations.hstu.kernels.gpu import without_gpu  # noqa: PLC0415 - imports torch

    if not torch.cuda.is_available():
        raise BackendUnavailable(without_gpu())
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def gpu_name() -> str:
    """The name of the current GPU, as ``NVIDIA L4``: several have one architecture, and not the same number of cores."""
    import torch  # noqa: PLC0415 - as above

    return torch.cuda.get_device_name()
