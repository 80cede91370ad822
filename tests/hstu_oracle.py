"""HSTU's formula in float64 numpy, one user and one row at a time, with Meta's tensor names; shares no code with the model.

Time buckets alone are those of fp32.
"""

import math

import numpy as np

EPSILON = 1e-6


def silu(x):
    return x / (1 + np.exp(-x))


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON)


def meta_state(rng, *, rows, dim, layers, heads, dqk, dv, n, buckets=128, scale=0.3):
    """Random weights under Meta's names; `rows` is the number of embedding rows, padding included."""

    def normal(*shape, by=scale):
        return (rng.standard_normal(shape) * by).astype(np.float32)

    state = {"_embedding_module._item_emb.weight": normal(rows, dim), "_input_features_preproc._pos_emb.weight": normal(n, dim)}
    for i in range(layers):
        layer = f"_hstu._attention_layers.{i}."
        state[layer + "_uvqk"] = normal(dim, 2 * heads * (dqk + dv))
        state[layer + "_o.weight"] = normal(dim, heads * dv)
        state[layer + "_o.bias"] = normal(dim)
        state[layer + "_rel_attn_bias._ts_w"] = normal(buckets + 1, by=1.0)
        state[layer + "_rel_attn_bias._pos_w"] = normal(2 * n - 1, by=1.0)
    return state


def time_bucket(seconds, last=128):
    """Meta's (log(abs(x).clamp(min=1)) / 0.301).long(), each step rounded to fp32; here by rounding exact values."""
    logarithm = np.float32(math.log(np.float32(max(1, abs(seconds)))))
    return min(last, math.floor(logarithm / np.float32(0.301)))


def hstu_states(state, items, times, request_time, *, layers, heads, dqk, dv, n, divisor=None):
    """The L2-normalised state after each event of one user. `items` are embedding rows, `times` in seconds."""
    w = {name: tensor.astype(np.float64) for name, tensor in state.items()}
    dim = w["_embedding_module._item_emb.weight"].shape[1]
    length = len(items)
    next_times = [*times[1:], request_time]
    x = np.stack([w["_embedding_module._item_emb.weight"][item] * math.sqrt(dim) for item in items])
    x = x + w["_input_features_preproc._pos_emb.weight"][:length]
    for i in range(layers):
        weights = {name.split(f"layers.{i}.")[1]: tensor for name, tensor in w.items() if f"layers.{i}." in name}
        x = _layer(x, weights, times, next_times, heads, dqk, dv, n, divisor or n)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def _layer(x, w, times, next_times, heads, dqk, dv, n, divisor):
    u, v, q, k = np.split(silu(layer_norm(x) @ w["_uvqk"]), np.cumsum([heads * dv, heads * dv, heads * dqk]), axis=1)
    mixed = np.zeros_like(v)
    for head in range(heads):
        q_h, k_h = q[:, head * dqk : (head + 1) * dqk], k[:, head * dqk : (head + 1) * dqk]
        v_h = v[:, head * dv : (head + 1) * dv]
        for i in range(len(x)):
            for j in range(i + 1):
                bucket = time_bucket(next_times[i] - times[j])
                bias = w["_rel_attn_bias._ts_w"][bucket] + w["_rel_attn_bias._pos_w"][n - 1 + j - i]
                mixed[i, head * dv : (head + 1) * dv] += silu(q_h[i] @ k_h[j] + bias) / divisor * v_h[j]
    return (u * layer_norm(mixed)) @ w["_o.weight"].T + w["_o.bias"] + x
