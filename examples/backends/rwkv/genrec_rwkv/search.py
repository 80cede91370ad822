"""The beam: from the state after a user's history, the most probable items of a view of the trie, code by code.

A path's score is the sum of log p(code | what was read), p being renormalised over the codes that may follow in the view, as torch_beam's
is; so the two can be blended by the same rule. Each path has a state of its own, a copy of its parent's and one step on.
"""

from collections.abc import Callable

import numpy as np

from cluster.trie import NO_NODE, TrieView
from cluster.values import FloatArray, Generated
from genrec_rwkv.recurrent import Recurrent

NOTHING = Generated(np.empty(0, np.int32), np.empty(0, np.float32))


def search(
    model: Recurrent, state: FloatArray, logits: FloatArray, view: TrieView, *, beam: int, k: int, in_time: Callable[[], None]
) -> Generated:
    """`state`, `logits`: of one path, after the history. `in_time` is called before each level, and may raise."""
    if not view.items or k < 1:
        return NOTHING
    trie, nodes, scores = view.trie, np.zeros(1, np.int32), np.zeros(1, np.float32)
    for level in range(trie.levels):
        in_time()
        children = view.permitted(level, trie.children(level, nodes))
        reached = (scores[:, None] + _log_probs(logits, children, view, level)).ravel()
        last = level == trie.levels - 1
        kept = np.argsort(-reached, kind="stable")[: k if last else beam]
        kept = kept[np.isfinite(reached[kept])]
        nodes, scores, parents = children.ravel()[kept], reached[kept], kept // children.shape[1]
        if not last:
            logits, state = model.step(state[:, :, parents], view.tokens(level, nodes).astype(np.int64))
    return Generated(trie.items[nodes], scores.astype(np.float32))


def _log_probs(logits: FloatArray, children: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]", view: TrieView, level: int) -> FloatArray:
    """Of each path's children that may be named, (paths, children); -inf where there is none."""
    there = children != NO_NODE
    tokens = np.where(there, view.tokens(level, np.maximum(children, 0)), 0)
    found = np.where(there, np.take_along_axis(logits, tokens.astype(np.int64), axis=1), -np.inf)
    above = found - found.max(axis=1, keepdims=True)
    probs: FloatArray = above - np.log(np.exp(above).sum(axis=1, keepdims=True))
    return probs
