"""HSTU's append in PyTorch, eager and compiled, and the memory that kept states have on an accelerator."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeAlias

import numpy as np
import torch

from cluster.bundle import Bundle
from cluster.engines.buffers import BufferPool
from integrations.hstu.append_inputs import Arrays
from integrations.hstu.config import HSTUConfig
from integrations.hstu.model import HSTU
from integrations.hstu.state.copies import pinned
from integrations.hstu.state.device import DeviceTier
from integrations.hstu.state_options import StateOptions, make_store
from integrations.hstu.stateful import RunAppend

INPUTS = ("items", "times", "next_times", "past_times", "past_lengths", "past_kt", "past_v")
Append: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""HSTU.append."""


def append_run(append: Append, device: torch.device) -> RunAppend:
    """A model's append as a function of arrays. On a CPU nothing is copied on the way in or out; K and V stay on their device."""

    def run(inputs: Arrays) -> Arrays:
        given = [torch.as_tensor(inputs[name], device=device) for name in INPUTS]  # outside, as what is on the device already was made
        with torch.inference_mode():
            return arrays(*append(*given))

    return run


def arrays(states: torch.Tensor, kt: torch.Tensor, v: torch.Tensor) -> Arrays:
    """The results of an append in the form for KeptStates; K and V stay on their device."""
    kept = {"kt": kt, "v": v} if kt.device.type != "cpu" else {"kt": kt.numpy(), "v": v.numpy()}
    return {"states": states.cpu().numpy(), **kept}


def compiled_append(model: HSTU, device: torch.device, users: Sequence[int], new: Sequence[int], kept: Sequence[int]) -> RunAppend:
    """The append through torch.compile, compiled here for each combination of these sizes: another shape is an error."""
    shapes = list(product(users, new, kept))

    def append(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return model.append(*inputs)

    options = {"fullgraph": True, "dynamic": False, "recompile_limit": len(shapes), "isolate_recompiles": True}
    run = append_run(torch.compile(append, **options), device)  # type: ignore[call-overload]  # as in CompiledTorchEncoder

    def run_compiled(inputs: Arrays) -> Arrays:
        torch.set_autocast_cache_enabled(True)  # as in CompiledTorchEncoder
        return run(inputs)

    for shape in shapes:
        run_compiled(nothing(model.config, *shape))
    return run_compiled


def nothing(config: HSTUConfig, users: int, new: int, past: int) -> Arrays:
    """Inputs of this shape that are all padding."""
    layers, heads = config.layers, config.heads
    return {
        **padding(users, new, past),
        "past_kt": np.zeros((layers, users, heads, config.attention_dim, past), np.float32),
        "past_v": np.zeros((layers, users, heads, past, config.linear_dim), np.float32),
    }


def padding(users: int, new: int, past: int) -> Arrays:
    """As `nothing`, without kept keys and values."""
    return {
        "items": np.zeros((users, new), np.int64),
        **{name: np.zeros((users, new), np.int32) for name in ("times", "next_times")},
        "lengths": np.ones(users, np.int64),
        "past_times": np.zeros((users, past), np.int32),
        "past_lengths": np.zeros(users, np.int64),
    }


def device_states(config: HSTUConfig, options: StateOptions, bundle: Bundle, device: torch.device) -> DeviceTier:
    """States on the accelerator, over as many bytes of pinned host memory."""
    store = make_store(config, options, with_states=bool(bundle.prompt_length), allocate=np.empty if device.type == "cpu" else pinned)
    return DeviceTier(store, str(device), options.bytes)


def device_memory(device: torch.device) -> BufferPool:
    """The memory in which states on the accelerator are put side by side."""
    return BufferPool(lambda count, _: torch.empty(count, device=device))
