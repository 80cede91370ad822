"""HSTU's append in eager PyTorch, and the memory that kept states have on an accelerator."""

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

_INPUTS = ("items", "times", "next_times", "past_times", "past_lengths", "past_kt", "past_v")


def append_run(model: HSTU, device: torch.device) -> RunAppend:
    """The model's append as a function of arrays; on a CPU nothing is copied on the way in or out, and K and V stay where they are made."""

    def run(inputs: Arrays) -> Arrays:
        with torch.inference_mode():
            states, kt, v = model.append(*(torch.as_tensor(inputs[name], device=device) for name in _INPUTS))
        kept = {"kt": kt, "v": v} if device.type != "cpu" else {"kt": kt.numpy(), "v": v.numpy()}
        return {"states": states.cpu().numpy(), **kept}

    return run


def device_memory(config: HSTUConfig, options: StateOptions, bundle: Bundle, device: torch.device) -> tuple[DeviceTier, BufferPool]:
    """States on the accelerator, over as many bytes of pinned host memory; and the memory they are put side by side in."""
    store = make_store(config, options, with_states=bool(bundle.prompt_length), allocate=np.empty if device.type == "cpu" else pinned)
    return DeviceTier(store, str(device), options.bytes), BufferPool(lambda count, _: torch.empty(count, device=device))
