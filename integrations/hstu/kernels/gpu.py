"""Whether an NVIDIA GPU that the kernels can be compiled for is usable here."""

import torch

from cluster.values import Availability

OLDEST = (8, 0)
"""The first compute capability with the tensor core instructions and asynchronous copies that the kernels use."""


def usable_gpu(needing: str) -> Availability:
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} was built without CUDA" if torch.version.cuda is None else "torch.cuda.is_available() is False"
        return Availability.no(f"no NVIDIA GPU with a driver is usable here ({built}); check nvidia-smi, or serve with another backend")
    if (capability := torch.cuda.get_device_capability()) < OLDEST:
        name = torch.cuda.get_device_name()
        return Availability.no(f"{needing} needs compute capability 8.0 and {name} has {capability[0]}.{capability[1]}; serve with torch")
    return Availability.yes()
