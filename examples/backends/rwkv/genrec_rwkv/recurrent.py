"""RWKV as it is served: one position at a time, in numpy, for any number of paths; what was read is a state.

The sums over all positions of `genrec_rwkv.model` become two numbers a channel that decay with every step. With the inputs of the step
before, to which the shifts refer, a layer's state is four rows of C numbers, however long the history. A copy is a snapshot to go back to.

Shapes: N paths, C channels, S tokens; a state is (layers, 4, N, C).
"""

from collections.abc import Mapping

import numpy as np

from cluster.values import FloatArray, Int64Array

ROWS = 4
LARGEST_KEY = 20.0
BEGIN = 0
"""The token before every history: no semantic ID has it."""
_TIME_BEFORE, _CHANNEL_BEFORE, _NUMERATOR, _DENOMINATOR = range(ROWS)
_EPSILON = np.float32(1e-5)


class Recurrent:
    """`weights`: those of `Rwkv`, by their names there."""

    def __init__(self, weights: Mapping[str, FloatArray]) -> None:
        self._weights = {name: np.ascontiguousarray(array, np.float32) for name, array in weights.items()}
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        self.vocabulary, self.channels = self._weights["embedding.weight"].shape

    def start(self, paths: int) -> FloatArray:
        """The state before the first token."""
        return np.zeros((self.layers, ROWS, paths, self.channels), np.float32)

    def step(self, state: FloatArray, tokens_N: Int64Array) -> tuple[FloatArray, FloatArray]:
        """The logits (N, S) of what follows these tokens, and the state after them; the one given stays as it is."""
        state = state.copy()
        x_NC = self._norm("first_norm", self._weights["embedding.weight"][tokens_N])
        for layer in range(self.layers):
            x_NC = x_NC + self._time(layer, state[layer], self._norm(f"blocks.{layer}.time_norm", x_NC))
            x_NC = x_NC + self._channel(layer, state[layer], self._norm(f"blocks.{layer}.channel_norm", x_NC))
        logits: FloatArray = self._norm("last_norm", x_NC) @ self._weights["head"].T
        return logits, state

    def _time(self, layer: int, state: FloatArray, x_NC: FloatArray) -> FloatArray:
        name, before = f"blocks.{layer}.time", state[_TIME_BEFORE]
        r, k, v = (self._shifted(f"{name}.{which}", x_NC, before) for which in "rkv")
        weight = np.exp(np.clip(k, -LARGEST_KEY, LARGEST_KEY))
        now = np.exp(self._weights[f"{name}.u"]) * weight
        wkv = (state[_NUMERATOR] + now * v) / (state[_DENOMINATOR] + now)
        decay = np.exp(-np.exp(self._weights[f"{name}.log_w"]))
        state[_NUMERATOR], state[_DENOMINATOR] = decay * state[_NUMERATOR] + weight * v, decay * state[_DENOMINATOR] + weight
        state[_TIME_BEFORE] = x_NC
        mixed: FloatArray = (_sigmoid(r) * wkv) @ self._weights[f"{name}.out"].T
        return mixed

    def _channel(self, layer: int, state: FloatArray, x_NC: FloatArray) -> FloatArray:
        name, before = f"blocks.{layer}.channel", state[_CHANNEL_BEFORE]
        r, k = (self._shifted(f"{name}.{which}", x_NC, before) for which in "rk")
        state[_CHANNEL_BEFORE] = x_NC
        mixed: FloatArray = _sigmoid(r) * (np.square(np.maximum(k, 0)) @ self._weights[f"{name}.out"].T)
        return mixed

    def _shifted(self, name: str, x_NC: FloatArray, before_NC: FloatArray) -> FloatArray:
        mu = self._weights[f"{name}.mu"]
        mixed: FloatArray = (mu * x_NC + (1 - mu) * before_NC) @ self._weights[f"{name}.weight"].T
        return mixed

    def _norm(self, name: str, x_NC: FloatArray) -> FloatArray:
        centred = x_NC - x_NC.mean(axis=1, keepdims=True)
        scaled = centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + _EPSILON)
        normed: FloatArray = scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]
        return normed


def _sigmoid(x: FloatArray) -> FloatArray:
    halved: FloatArray = 0.5 * (1 + np.tanh(0.5 * x))  # no overflow on either side
    return halved
