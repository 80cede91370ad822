"""RWKV as it is trained: all positions of a sequence at once. After "RWKV: Reinventing RNNs for the Transformer Era" (arXiv 2305.13048).

    time mixing     r, k, v = W (mu x_t + (1 - mu) x_(t-1))            each with its own mu and W
                    wkv_t   = sum_i exp(a_ti) v_i / sum_i exp(a_ti)    a_ti = k_i - (t - 1 - i) w for i < t, and k_t + u for i = t
                    out     = W_o (sigmoid(r) wkv)
    channel mixing  out     = sigmoid(r) W_v max(k, 0)^2

Every channel forgets by its own w > 0. The decays depend on no sequence: each channel's are one lower-triangular matrix (T, T), which all
sequences of a batch are multiplied with. Keys are clipped to +-LARGEST_KEY, so that exp(k) neither overflows nor vanishes in fp32; the
paper divides by the largest exponent instead. `genrec_rwkv.recurrent` computes the same one position at a time.

Shapes: B sequences, T positions, C channels, S tokens of the vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from genrec_rwkv.recurrent import LARGEST_KEY


class Shifted(nn.Module):
    """W (mu x_t + (1 - mu) x_(t-1))."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.linspace(0.2, 0.8, channels))
        self.weight = nn.Parameter(torch.randn(out, channels) / channels**0.5)

    def forward(self, x_BTC: Tensor) -> Tensor:
        before = F.pad(x_BTC, (0, 0, 1, -1))
        return (self.mu * x_BTC + (1 - self.mu) * before) @ self.weight.T


class TimeMixing(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.r, self.k, self.v = (Shifted(channels, channels) for _ in range(3))
        self.log_w = nn.Parameter(torch.linspace(-5, 2, channels))  # from what lasts for 150 positions to what is gone with the next
        self.u = nn.Parameter(torch.zeros(channels))
        self.out = nn.Parameter(torch.randn(channels, channels) / channels**0.5)

    def forward(self, x_BTC: Tensor) -> Tensor:
        r, k, v = self.r(x_BTC), self.k(x_BTC), self.v(x_BTC)
        weights_BTC = k.clamp(-LARGEST_KEY, LARGEST_KEY).exp()
        given_CTN = torch.cat([weights_BTC * v, weights_BTC]).permute(2, 1, 0)  # N = 2 B
        numerator, denominator = (self._decays(x_BTC.shape[1]) @ given_CTN).permute(2, 1, 0).chunk(2)
        wkv = numerator / denominator
        gated: Tensor = r.sigmoid() * wkv
        return gated @ self.out.T

    def _decays(self, length: int) -> Tensor:
        """What position i counts at position t, (C, T, T)."""
        place = torch.arange(length, device=self.u.device)
        between = place[:, None] - 1 - place
        decays_CTT = (-between.clamp(min=0) * self.log_w.exp()[:, None, None]).exp().tril(-1)
        return decays_CTT + torch.diag_embed(self.u.exp()[:, None].expand(-1, length))


class ChannelMixing(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.r, self.k = Shifted(channels, channels), Shifted(channels, 4 * channels)
        self.out = nn.Parameter(torch.randn(channels, 4 * channels) / (4 * channels) ** 0.5)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gated: Tensor = self.r(x_BTC).sigmoid() * (self.k(x_BTC).relu().square() @ self.out.T)
        return gated


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.time_norm, self.channel_norm = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.time, self.channel = TimeMixing(channels), ChannelMixing(channels)

    def forward(self, x_BTC: Tensor, dropout: float = 0.0) -> Tensor:
        x_BTC = x_BTC + F.dropout(self.time(self.time_norm(x_BTC)), dropout, self.training)
        return x_BTC + F.dropout(self.channel(self.channel_norm(x_BTC)), dropout, self.training)


class Rwkv(nn.Module):
    """Logits of the next token after each, (B, T, S)."""

    def __init__(self, vocabulary: int, channels: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(vocabulary, channels)
        self.first_norm, self.last_norm = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.blocks = nn.ModuleList(Block(channels) for _ in range(layers))
        self.head = nn.Parameter(torch.randn(vocabulary, channels) * 0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = F.dropout(self.first_norm(self.embedding(tokens_BT)), self.dropout, self.training)
        for block in self.blocks:
            x_BTC = block(x_BTC, self.dropout)
        logits: Tensor = self.last_norm(x_BTC) @ self.head.T
        return logits
