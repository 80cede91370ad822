"""The semantic-ID decoder: a Hugging Face Llama that continues a soft prompt with the codes of the next item, level by level.

Trained on whole windows at once: the T rows of a prompt are followed by T tokens of each level, one for every target, and the attention
mask gives each token its own target's path and the prompt up to its target's event: T training examples for one pass.

    rows    [state 0..T-1][first codes of T targets][second codes] ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.semantic_ids import SemanticIds
from cluster.values import FloatArray, UserSequence
from integrations.decoder.config import DecoderConfig
from integrations.decoder.soft_prompt import SoftPrompt, pause_codes, rating_codes


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Windows of T events, right-padded: states (B, T, D) and, as (B, T), items, rating and pause codes and `targets`, 0 where padded."""

    states: Tensor
    items: Tensor
    ratings: Tensor
    pauses: Tensor
    targets: Tensor


class SemanticIdDecoder(nn.Module):
    """A trainable decoder: `lm`, which a bundle keeps in Hugging Face format, and the soft prompt `prompt`."""

    config_type = DecoderConfig
    paths: Tensor

    def __init__(self, config: DecoderConfig, ids: SemanticIds, item_vectors: FloatArray) -> None:
        super().__init__()
        self.config, self.ids = config, ids
        self.lm = LlamaForCausalLM(llama_config(config))  # type: ignore[no-untyped-call]
        self.prompt = SoftPrompt(item_vectors, config.hidden, config.dropout)
        self.register_buffer("paths", torch.from_numpy(ids.tokens).long(), persistent=False)
        self._depth = max(level for level, size in enumerate(ids.sizes, start=1) if size > 1 or level == 1)
        self._siblings = [_Siblings(ids, level) for level in range(self._depth)]
        for layer in self.lm.model.layers:  # Llama has no dropout of its own where it matters
            for part in (layer.self_attn.o_proj, layer.mlp):
                part.register_forward_hook(partial(_drop, config.dropout))

    @property
    def prompt_length(self) -> int:
        return self.config.prompt_length

    def columns(self, history: UserSequence, states_LD: Tensor, targets_L: Tensor) -> dict[str, Tensor]:
        """A window as columns of one length L: the latest L events of a history, the states after them, and the item after each."""
        length = len(targets_L)
        codes: dict[str, np.ndarray[Any, Any]] = {"items": history.items, "ratings": rating_codes(history), "pauses": pause_codes(history)}
        tensors = {name: torch.from_numpy(np.asarray(column[-length:], np.int64)) for name, column in codes.items()}
        return {"states": states_LD, **tensors, "targets": targets_L}

    def batch(self, windows: Sequence[Mapping[str, Tensor]]) -> PromptBatch:
        """Windows of at most `prompt_length` rows, right-padded to the longest."""
        device = self.paths.device
        return PromptBatch(**{name: pad_sequence([window[name] for window in windows], batch_first=True).to(device) for name in windows[0]})

    def loss(self, batch: PromptBatch) -> Tensor:
        """Mean over the targets of -log P(path), each code's probability among those that may follow the path so far.

        Below the last level with more than one code there is nothing to learn.
        """
        paths_BTL = self.paths[batch.targets]
        hidden = self._hidden(batch, paths_BTL)
        present = batch.targets != 0
        paths = paths_BTL[present]
        losses = []
        for level, hidden_BTH in enumerate(torch.chunk(hidden, self._depth, dim=1)):
            first, size = self.ids.first_tokens[level], self.ids.sizes[level]
            logits = F.linear(hidden_BTH[present], self.lm.lm_head.weight[first : first + size])
            logits = logits.masked_fill(~self._siblings[level].of(batch.targets[present]), torch.finfo(logits.dtype).min)
            losses.append(F.cross_entropy(logits, paths[:, level] - first))
        return torch.stack(losses).sum()

    def _hidden(self, batch: PromptBatch, paths_BTL: Tensor) -> Tensor:
        """Last hidden states (B, depth x T, H): rows [0, T) predict the first codes, the next T rows the second codes, and so on."""
        users, length = batch.targets.shape
        rows = self.prompt(batch.states, batch.items, batch.ratings, batch.pauses)
        codes = self.lm.model.embed_tokens(paths_BTL[:, :, : self._depth - 1].transpose(1, 2).reshape(users, -1))
        mask, positions = window_attention(length, self._depth, rows.device, rows.dtype)
        out = self.lm.model(
            inputs_embeds=torch.cat([rows, codes], dim=1),
            attention_mask=mask,
            position_ids=positions.expand(users, -1),
            use_cache=False,
        )
        return F.dropout(out.last_hidden_state, self.config.dropout, self.training)


class _Siblings:
    """Which codes of a level may follow the codes before them in an item's path: (n, size) for n items."""

    def __init__(self, ids: SemanticIds, level: int) -> None:
        codes = torch.from_numpy(ids.codes).long()
        if level == 0:
            self._node = torch.zeros(len(codes), dtype=torch.long)
        else:
            _, self._node = torch.unique(codes[:, :level], dim=0, return_inverse=True)
        self._allowed = torch.zeros(int(self._node.max()) + 1, ids.sizes[level], dtype=torch.bool)
        self._allowed[self._node[1:], codes[1:, level]] = True

    def of(self, items: Tensor) -> Tensor:
        return self._allowed[self._node[items.cpu()]].to(items.device)


def llama_config(config: DecoderConfig) -> LlamaConfig:
    """The configuration for Hugging Face and vLLM. A path ends by its length alone: there are no special tokens."""
    return LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        intermediate_size=config.feedforward,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.prompt_length + config.levels,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def window_attention(length: int, levels: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The additive mask (1, 1, R, R) and positions (1, R) of R = levels x length rows: a window and a path's codes for each target."""
    place = torch.arange(length, device=device)
    past = place.unsqueeze(1) >= place
    own = torch.eye(length, dtype=torch.bool, device=device)
    blocks = [torch.cat([past, *[own if column <= row else ~own & own for column in range(1, levels)]], dim=1) for row in range(levels)]
    mask = torch.zeros(levels * length, levels * length, device=device, dtype=dtype)
    mask.masked_fill_(~torch.cat(blocks), torch.finfo(dtype).min)
    positions = torch.cat([place + level for level in range(levels)])
    return mask[None, None], positions.unsqueeze(0)


def _drop(dropout: float, module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return F.dropout(output, dropout, module.training)
