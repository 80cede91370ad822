"""Whether this process can use an NVIDIA GPU that multiplies bfloat16 and for which the kernels can be compiled."""

import torch

from cluster.values import Availability

OLDEST = (8, 0)
"""The first compute capability with bfloat16, and with the tensor core instructions and asynchronous copies that the kernels use."""


def usable_gpu(needing: str) -> Availability:
    if not torch.cuda.is_available():
        return Availability.no(without_gpu())
    if (capability := torch.cuda.get_device_capability()) < OLDEST:
        name, (oldest, found) = torch.cuda.get_device_name(), (".".join(map(str, one)) for one in (OLDEST, capability))
        return Availability.no(f"{needing} needs compute capability {oldest} and {name} has {found}; serve with torch")
    return Availability.yes()


def without_gpu() -> str:
    """Why torch finds no GPU, in its own words where it has any: a driver may be there and too old."""
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} was built without CUDA"
    else:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            reason = "torch.cuda.is_available() is False"
        except RuntimeError as error:
            reason, _, _ = str(error).partition("\n")
    return f"no NVIDIA GPU with a driver is usable here ({reason}); check nvidia-smi, or serve with another backend"
