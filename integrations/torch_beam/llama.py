"""The decoder's forward pass, for many users and many beams of each at once; every prompt is computed once and kept once.

    rows of a user    [prompt, right-padded to T][codes of one step, one a beam][codes of the next step] ...

Beams share the keys and values of all these rows; a mask gives each the prompt and its own codes. So nothing is copied when a beam
branches. In the last layer, a prompt's rows need only their keys and values, except the row that predicts the first code.

Shapes: U users, T prompt rows, Q rows that attend, R rows in memory, H hidden, A heads, D width of a head, F feed-forward.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from cluster.errors import BundleError

QUERIES, KEYS_AND_VALUES, ALL = slice(0, 1), slice(1, 3), slice(0, 3)
_SUPPORTED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes in Hugging Face's config.json that the forward pass needs."""

    layers: int
    heads: int
    head_dim: int
    eps: float
    theta: float

    @classmethod
    def read(cls, path: Path) -> "Sizes":
        """The sizes in a file. Raises BundleError where it is not the configuration of a model that this code computes."""
        try:
            config = json.loads(path.read_text())
            rope = config["rope_parameters"]
            given = {name: config[name] for name in _SUPPORTED} | {"rope_type": rope["rope_type"]}
            wanted = {**_SUPPORTED, "rope_type": "default", "num_key_value_heads": config["num_attention_heads"]}
            given["num_key_value_heads"] = config["num_key_value_heads"]
            sizes = cls(
                config["num_hidden_layers"], config["num_attention_heads"], config["head_dim"], config["rms_norm_eps"], rope["rope_theta"]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BundleError(f"{path} is not the configuration of a decoder: {type(error).__name__}: {error}") from error
        if other := {name: value for name, value in given.items() if value != wanted[name]}:
            raise BundleError(f"{path} describes a model that torch_beam does not compute: {other}; serve it with vllm")
        return sizes


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """`qkv` (3 x H, H) and `gate_up` (2 x F, H) join weights that are separate in the file."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    feedforward_norm: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], prefix: str, heads: int) -> "Layer":
        q, k, v, out = (weights[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkvo")
        gate, up, down = (weights[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        norms = (weights[f"{prefix}.{name}_layernorm.weight"] for name in ("input", "post_attention"))
        attention_norm, feedforward_norm = norms
        qkv = torch.cat([_paired(q, heads), _paired(k, heads), v])
        return cls(attention_norm, qkv, out, feedforward_norm, torch.cat([gate, up]), down)


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Keys and values of every layer, each (U, R, 2, A, D); the first `prompt_rows` rows are for prompts, `lengths_U` of them a user's."""

    layers: list[Tensor]
    prompt_rows: int
    lengths_U: Tensor


class Llama:
    """Weights of one decoder. `longest`: the most rows a path may have, prompt and codes. All methods run without gradients."""

    def __init__(self, sizes: Sizes, weights: Mapping[str, Tensor], longest: int) -> None:
        self.sizes = sizes
        self._layers = [Layer.of(weights, f"model.layers.{index}", sizes.heads) for index in range(sizes.layers)]
        self._embedding, self._norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self._head = weights["lm_head.weight"]
        self._turns = _turns(sizes, longest).to(self._embedding.device)

    @classmethod
    def read(cls, directory: Path, longest: int, dtype: torch.dtype, device: torch.device) -> "Llama":
        """The decoder that stands in a directory in Hugging Face format. Raises BundleError."""
        sizes = Sizes.read(directory / "config.json")
        try:
            weights = load_file(directory / "model.safetensors")
            return cls(sizes, {name: tensor.to(device, dtype) for name, tensor in weights.items()}, longest)
        except (OSError, SafetensorError, KeyError) as error:
            raise BundleError(f"{directory / 'model.safetensors'} does not hold this decoder: {type(error).__name__}: {error}") from error

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights, activations, keys and values."""
        return self._embedding.dtype

    @torch.inference_mode()
    def prefill(self, rows_UTH: Tensor, lengths_U: Tensor, spare: int) -> tuple[Tensor, Memory]:
        """The output of each user's last prompt row, normalised (U, H), and a memory of all rows with room for `spare` more."""
        users, rows, _ = rows_UTH.shape
        memory = self._memory(users, rows, lengths_U, spare)
        x, turns = rows_UTH.to(self._embedding.dtype), self._turns[:rows]
        for layer, kept in zip(self._layers[:-1], memory.layers[:-1], strict=True):
            projected = self._project(layer, x, turns, ALL)
            kept[:, :rows] = projected[:, :, KEYS_AND_VALUES]
            x = self._rest(layer, x, _attend(projected[:, :, 0], projected[:, :, KEYS_AND_VALUES], None))
        memory.layers[-1][:, :rows] = self._project(self._layers[-1], x, turns, KEYS_AND_VALUES)
        x = x.gather(1, (lengths_U - 1).view(-1, 1, 1).expand(-1, 1, x.shape[2]))
        return self._said_last(x, memory), memory

    @torch.inference_mode()
    def prefill_behind(self, memory: Memory, kept_U: Tensor, rows_NH: Tensor) -> Tensor:
        """As `prefill`, with a memory that has the first `kept_U` rows of each prompt; `rows_NH`: the rows after them, at least one for
        each user, one user's after the other's.
        """
        new_U, T = memory.lengths_U - kept_U, memory.prompt_rows
        users_N = torch.arange(len(new_U), device=self.device).repeat_interleave(new_U)
        slots_N = torch.arange(len(users_N), device=self.device) - (new_U.cumsum(0) - new_U)[users_N]
        places_N = kept_U[users_N] + slots_N
        query_UQAD = torch.zeros(len(new_U), int(new_U.max()), self.sizes.heads, self.sizes.head_dim, dtype=self.dtype, device=self.device)
        x, turns, mask = rows_NH.to(self.dtype).unsqueeze(0), self._turns[places_N], self._sight(kept_U, query_UQAD.shape[1], T)
        for layer, kept in zip(self._layers[:-1], memory.layers[:-1], strict=True):
            projected = self._project(layer, x, turns, ALL).squeeze(0)
            kept[users_N, places_N], query_UQAD[users_N, slots_N] = projected[:, KEYS_AND_VALUES], projected[:, 0]
            x = self._rest(layer, x, _attend(query_UQAD, kept[:, :T], mask)[users_N, slots_N].unsqueeze(0))
        memory.layers[-1][users_N, places_N] = self._project(self._layers[-1], x, turns, KEYS_AND_VALUES).squeeze(0)
        return self._said_last(x[0, new_U.cumsum(0) - 1].unsqueeze(1), memory)

    @torch.inference_mode()
    def step(self, memory: Memory, start: int, tokens_UQ: Tensor, places_UQ: Tensor, mask_UQR: Tensor) -> Tensor:
        """Put codes at the rows from `start` on; returns the output of each, normalised (U, Q, H). `places_UQ`: the codes' positions in
        their paths; `mask_UQR`: 0 where a code may attend and -inf elsewhere, over the R rows up to and including these.
        """
        stop = start + tokens_UQ.shape[1]
        x, turns, mask = self._embedding[tokens_UQ], self._turns[places_UQ], mask_UQR.unsqueeze(1)
        for layer, kept in zip(self._layers, memory.layers, strict=True):
            projected = self._project(layer, x, turns, ALL)
            kept[:, start:stop] = projected[:, :, KEYS_AND_VALUES]
            x = self._rest(layer, x, _attend(projected[:, :, 0], kept[:, :stop], mask))
        return self._normed(x, self._norm)

    @torch.inference_mode()
    def logits(self, said: Tensor, first: int, size: int) -> Tensor:
        """Logits, float32, of the `size` tokens from `first` on: (..., H) -> (..., size)."""
        return F.linear(said, self._head[first : first + size]).float()

    def memory(self, lengths: Sequence[int], spare: int) -> Memory:
        """A memory for prompts of these lengths, not filled except for zeros at the padding: masked rows must not be NaN."""
        memory = self._memory(len(lengths), max(lengths), torch.tensor(lengths, device=self.device), spare)
        for layer in memory.layers:
            for user, length in enumerate(lengths):
                layer[user, length : memory.prompt_rows] = 0
        return memory

    def prompt_mask(self, memory: Memory) -> Tensor:
        """(U, 1, 1, T): 0 at each user's prompt, -inf at its padding."""
        places = torch.arange(memory.prompt_rows, device=self.device)
        mask = torch.zeros(len(memory.lengths_U), 1, 1, memory.prompt_rows, dtype=self.dtype, device=self.device)
        return mask.masked_fill_((places >= memory.lengths_U.unsqueeze(1))[:, None, None], -torch.inf)

    def _memory(self, users: int, rows: int, lengths_U: Tensor, spare: int) -> Memory:
        shape = (users, rows + spare, 2, self.sizes.heads, self.sizes.head_dim)
        like = self._embedding
        return Memory([torch.empty(shape, dtype=like.dtype, device=like.device) for _ in self._layers], rows, lengths_U)

    def _sight(self, kept_U: Tensor, new_rows: int, prompt_rows: int) -> Tensor:
        """The mask (U, 1, Q, T) of the rows after the kept ones: 0 at each row itself and all rows before it, -inf elsewhere."""
        places_UQ1 = (kept_U.unsqueeze(1) + torch.arange(new_rows, device=self.device)).unsqueeze(2)
        mask = torch.zeros(len(kept_U), new_rows, prompt_rows, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(torch.arange(prompt_rows, device=self.device) > places_UQ1, -torch.inf).unsqueeze(1)

    def _said_last(self, x_U1H: Tensor, memory: Memory) -> Tensor:
        """The output of each prompt's last row, normalised (U, H), once the top layer has every row's keys and values."""
        top, kept, last_U = self._layers[-1], memory.layers[-1], memory.lengths_U - 1
        query = self._project(top, x_U1H, self._turns[last_U].unsqueeze(1), QUERIES)[:, :, 0]
        x = self._rest(top, x_U1H, _attend(query, kept[:, : memory.prompt_rows], self.prompt_mask(memory)))
        return self._normed(x, self._norm).squeeze(1)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.sizes.eps)

    def _project(self, layer: Layer, x_UQH: Tensor, turns: Tensor, part: slice) -> Tensor:
        """Turned queries, turned keys and values, or a part of the three: (U, Q, 1 to 3, A, D)."""
        width = self.sizes.heads * self.sizes.head_dim
        flat = F.linear(self._normed(x_UQH, layer.attention_norm), layer.qkv[part.start * width : part.stop * width])
        pairs = flat.float().view(*flat.shape[:2], -1, self.sizes.heads, self.sizes.head_dim // 2, 2)
        turned = torch.view_as_real(torch.view_as_complex(pairs) * turns[..., part, :, :])
        return turned.flatten(-2).to(flat.dtype)

    def _rest(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """The part of a layer that follows the attention."""
        x = F.linear(attended, layer.out).add_(x)
        gate, up = F.linear(self._normed(x, layer.feedforward_norm), layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate, inplace=True).mul_(up), layer.down).add_(x)


def _attend(query_UQAD: Tensor, kept_UR2AD: Tensor, mask: Tensor | None) -> Tensor:
    """The attention's output (U, Q, A x D). Without a mask, each row attends to itself and to the rows before it."""
    keys, values = kept_UR2AD.permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(query_UQAD.transpose(1, 2), keys, values, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2).flatten(2)


def _paired(weight: Tensor, heads: int) -> Tensor:
    """Rows reordered so that the two numbers that rotary embedding turns together are neighbours; Llama keeps them half a head apart.

    Done to queries and keys alike, it leaves their products as they are.
    """
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape_as(weight)


def _turns(sizes: Sizes, longest: int) -> Tensor:
    """Rotary embedding as complex numbers, (longest, 3, 1, D / 2), for queries, keys and values, which last are not turned."""
    exponents = torch.arange(0, sizes.head_dim, 2, dtype=torch.float64) / sizes.head_dim
    angles = torch.outer(torch.arange(longest, dtype=torch.float64), sizes.theta**-exponents)
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.stack([turns, turns, torch.ones_like(turns)], dim=1).unsqueeze(2).to(torch.complex64)
