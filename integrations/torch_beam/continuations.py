"""A batch of prompts and the paths that continue each: the logits after every path, computed when they are asked for.

A chosen code is only noted, and waits until the search asks what follows it. So a code without alternatives costs no pass through the
model, and several waiting codes are computed in one pass.

Shapes: U users, W paths a user, P codes that wait, S codes that are in memory, T prompt rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cluster.semantic_ids import SemanticIds
from cluster.values import Int64Array
from integrations.torch_beam.llama import Llama, Memory


class Continuations:
    """`prompts`: each user's rows (T, H), T differing. Until `branch`, a user has one path without codes; `widest`: the largest W."""

    def __init__(self, llama: Llama, ids: SemanticIds, prompts: Sequence[Tensor], widest: int) -> None:
        self._llama, self._ids, self._prompts, self._widest = llama, ids, prompts, widest
        self._memory: Memory | None = None
        self._used = 0
        self._waiting_UWP = torch.zeros(len(prompts), 1, 0, dtype=torch.long, device=llama.device)
        self._remembered_UWS = self._waiting_UWP  # where in memory each path's codes stand

    def branch(self, parents_UW: Int64Array, tokens_UW: Int64Array) -> None:
        """Replace each user's paths: path w becomes the earlier path `parents[w]` with one token more."""
        parents, tokens = (torch.from_numpy(given).to(self._llama.device).unsqueeze(2) for given in (parents_UW, tokens_UW))
        self._waiting_UWP = torch.cat([_taken(self._waiting_UWP, parents), tokens], dim=2)
        self._remembered_UWS = _taken(self._remembered_UWS, parents)

    @torch.inference_mode()
    def logits(self, level: int) -> Tensor:
        """The logits of this level's codes after every path, (U, W, size). To be asked for at most once for each level."""
        said_UWH = self._prompted() if self._memory is None else None
        if said_UWH is None or self._waiting_UWP.shape[2]:
            said_UWH = self._continued()
        return self._llama.logits(said_UWH, self._ids.first_tokens[level], self._ids.sizes[level])

    def _prompted(self) -> Tensor:
        said_UH, self._memory = prefill(self._llama, self._prompts, self._widest * (self._ids.levels - 1))
        self._used = self._memory.prompt_rows
        return said_UH.unsqueeze(1)

    def _continued(self) -> Tensor:
        memory, waiting = self._memory, self._waiting_UWP
        assert memory is not None
        users, width, count = waiting.shape
        places_UP = memory.lengths_U.unsqueeze(1) + self._remembered_UWS.shape[2] + torch.arange(count, device=waiting.device)
        said = self._llama.step(
            memory, self._used, waiting.flatten(1), places_UP.repeat(1, width), self._sight(memory, width, count).flatten(1, 2)
        )
        slots_WP = self._used + torch.arange(width * count, device=waiting.device).view(width, count)
        self._remembered_UWS = torch.cat([self._remembered_UWS, slots_WP.expand(users, -1, -1)], dim=2)
        self._waiting_UWP, self._used = waiting[:, :, :0], self._used + width * count
        return said.view(users, width, count, -1)[:, :, -1]

    def _sight(self, memory: Memory, width: int, count: int) -> Tensor:
        """Which rows each waiting code attends to, (U, W, P, R) as 0 or -inf: its prompt, its path in memory, its path's codes up to it."""
        prompt = self._llama.prompt_mask(memory)
        rest = torch.full((len(prompt), width, count, self._used - memory.prompt_rows + width * count), -torch.inf)
        rest = rest.to(prompt.device, prompt.dtype)
        own_path = torch.eye(width, dtype=torch.bool).view(width, 1, width, 1)
        before = torch.ones(count, count, dtype=torch.bool).tril().view(1, count, 1, count)
        rest[..., self._used - memory.prompt_rows :].masked_fill_((own_path & before).view(width, count, -1).to(prompt.device), 0.0)
        slots_UWPS = (self._remembered_UWS - memory.prompt_rows).unsqueeze(2).expand(-1, -1, count, -1)
        return torch.cat([prompt.expand(-1, width, count, -1), rest.scatter_(3, slots_UWPS, 0.0)], dim=3)


def _taken(values_UWN: Tensor, parents_UV1: Tensor) -> Tensor:
    """Each user's rows `parents`, (U, V, N)."""
    return values_UWN.gather(1, parents_UV1.expand(-1, -1, values_UWN.shape[2]))


def prefill(llama: Llama, prompts: Sequence[Tensor], spare: int) -> tuple[Tensor, Memory]:
    """Every prompt's rows, computed whole."""
    lengths_U = torch.tensor([len(rows) for rows in prompts], device=llama.device)
    return llama.prefill(pad_sequence(list(prompts), batch_first=True).to(llama.device), lengths_U, spare)
