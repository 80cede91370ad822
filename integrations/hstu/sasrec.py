"""SASRec (Kang and McAuley, arXiv 1808.09781): the baseline, trained and scored exactly as HSTU is.

    x = LayerNorm(x) + Attention(LayerNorm(x), x, x)          softmax(Q K^T / sqrt(D / H)), causal
    x = LayerNorm(x) + W_2 relu(W_1 LayerNorm(x))

Times are ignored: SASRec knows the order of events only.
"""

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from integrations.hstu.config import SASRecConfig
from integrations.hstu.sequence_model import SequenceModel, heads_apart, heads_joined

_EPSILON = 1e-8


class SASRecLayer(nn.Module):
    """One block of attention and feed-forward."""

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = nn.LayerNorm(config.dim, eps=_EPSILON)
        self.query = nn.Linear(config.dim, config.dim)
        self.key = nn.Linear(config.dim, config.dim)
        self.value = nn.Linear(config.dim, config.dim)
        self.output = nn.Linear(config.dim, config.dim)
        self.feedforward_norm = nn.LayerNorm(config.dim, eps=_EPSILON)
        self.expand = nn.Linear(config.dim, config.feedforward_dim)
        self.contract = nn.Linear(config.feedforward_dim, config.dim)
        for linear in (self.query, self.key, self.value, self.output, self.expand, self.contract):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        normed = self.attention_norm(x_BLD)
        x_BLD = self.feedforward_norm(normed + self.attend(normed, x_BLD))
        hidden = self._drop(F.relu(self.expand(x_BLD)))
        return x_BLD + self._drop(self.contract(hidden))

    def attend(self, queries_BLD: Tensor, x_BLD: Tensor) -> Tensor:
        heads, width = self.config.heads, self.config.dim // self.config.heads
        q, k, v = (heads_apart(part, heads, width) for part in (self.query(queries_BLD), self.key(x_BLD), self.value(x_BLD)))
        dropout = self.config.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.output(heads_joined(mixed, self.config.dim))
        return out

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training)


class SASRec(SequenceModel):
    """Self-attentive sequential recommendation."""

    config: SASRecConfig
    config_type: ClassVar = SASRecConfig

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(SASRecLayer(config) for _ in range(config.layers))

    def transform(self, x_BLD: Tensor, times_BL: Tensor, next_times_BL: Tensor) -> Tensor:
        del times_BL, next_times_BL
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        return x_BLD
