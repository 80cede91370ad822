"""The GPU of this process, as torch sees it: TensorRT's buffers are torch tensors."""

from importlib.util import find_spec

from cluster.errors import BackendUnavailable


def gpu_architecture() -> str:
    """The architecture of the current GPU, as ``sm_90``. Raises BackendUnavailable with what is missing."""
    if find_spec("torch") is None:
        raise BackendUnavailable("torch, which holds the engine's buffers, is not installed; run: pip install 'genrec[gpu]'")
    import torch  # noqa: PLC0415 - seconds, spent only once the cheaper questions are answered

    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} was built without CUDA" if torch.version.cuda is None else "torch.cuda.is_available() is False"
        raise BackendUnavailable(f"no NVIDIA GPU with a driver is usable here ({built}); check nvidia-smi, or serve with another backend")
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"
