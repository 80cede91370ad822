"""The beam search: of every user's paths the best are kept at each level, and the best items at the last.

A path's score is the sum of log p(code | prompt, codes before it), p being renormalised over the codes that may follow in the user's view
of the trie. Ties go to the lower node.

Shapes: U users, W paths a user, C children of a path at most.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cluster.errors import BackendFailed
from cluster.semantic_ids import SemanticIds
from cluster.trie import NO_NODE, Trie, TrieView
from cluster.values import BoolArray, FloatArray, Generated, Int32Array, Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """One user's request: the `k` best items of a view with at least one, keeping `beam` paths at each level."""

    view: TrieView
    beam: int
    k: int


class Continues(Protocol):
    """The model, as the search calls it; see `Continuations`."""

    def logits(self, level: int) -> Tensor: ...
    def branch(self, parents_UW: Int64Array, tokens_UW: Int64Array) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """Each user's paths by node and score, (U, W), in the order of their nodes; NO_NODE and -inf fill up those of users with fewer."""

    nodes: Int32Array
    scores: FloatArray

    @classmethod
    def roots(cls, users: int) -> "Paths":
        return cls(np.zeros((users, 1), np.int32), np.zeros((users, 1), np.float32))


def search(searches: Sequence[Search], ids: SemanticIds, model: Continues, between_levels: Callable[[], None]) -> list[Generated]:
    """Each user's items, most probable first, in the order asked. `between_levels` may raise. Raises BackendFailed at NaN."""
    views, paths = [one.view for one in searches], Paths.roots(len(searches))
    beams, answers = np.array([one.beam for one in searches]), np.array([one.k for one in searches])
    for level in range(ids.levels):
        between_levels()
        children_UWC = expand(views, level, paths.nodes)
        scores_UWC = paths.scores[:, :, None] + log_probs(model, ids, level, views[0].trie, children_UWC)
        last = level == ids.levels - 1
        kept_UN = best(scores_UWC.reshape(len(views), -1), answers if last else beams)
        parents_UW, paths = chosen(children_UWC, scores_UWC, kept_UN)
        if not last:
            model.branch(parents_UW, tokens(views[0].trie, level, paths.nodes))
    return ranked(views[0].trie, paths, answers)


def expand(views: Sequence[TrieView], level: int, nodes_UW: Int32Array) -> Int32Array:
    """The nodes that may follow each path, (U, W, C), ascending; NO_NODE elsewhere."""
    children_UWC = views[0].trie.children(level, nodes_UW.ravel()).reshape(*nodes_UW.shape, -1)
    for children, view in zip(children_UWC, views, strict=True):
        children[:] = view.permitted(level, children)
    return children_UWC


def log_probs(model: Continues, ids: SemanticIds, level: int, trie: Trie, children_UWC: Int32Array) -> FloatArray:
    """Log-probability of each child among those that may follow, (U, W, C); -inf where there is none. Raises BackendFailed at NaN."""
    allowed = children_UWC != NO_NODE
    if (allowed.sum(2) <= 1).all():  # nothing to choose
        return np.where(allowed, np.float32(0), np.float32(-np.inf))
    logits = model.logits(level)
    codes = torch.from_numpy(tokens(trie, level, children_UWC) - np.where(allowed, ids.first_tokens[level], 0)).to(logits.device)
    found = logits.gather(2, codes).masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)
    probs: FloatArray = np.where(allowed, found.log_softmax(2).cpu().numpy(), np.float32(-np.inf))
    if not np.isfinite(probs[allowed]).all():
        raise BackendFailed(f"the decoder's logits at level {level} are NaN or infinite; its weights are damaged or of too low a precision")
    return probs


def chosen(children_UWC: Int32Array, scores_UWC: FloatArray, kept_UN: BoolArray) -> tuple[Int64Array, Paths]:
    """The paths that go on: each user's children at `kept` (N = W x C), and which of the former paths each one continues, (U, W)."""
    users, _, branches = children_UWC.shape
    rows, columns = np.nonzero(kept_UN)
    per_user = kept_UN.sum(1)
    places = np.arange(len(rows)) - np.repeat(per_user.cumsum() - per_user, per_user)
    parents = np.zeros((users, int(per_user.max())), np.int64)
    nodes, scores = np.full(parents.shape, NO_NODE, np.int32), np.full(parents.shape, -np.inf, np.float32)
    parents[rows, places] = columns // branches
    nodes[rows, places] = children_UWC.reshape(users, -1)[rows, columns]
    scores[rows, places] = scores_UWC.reshape(users, -1)[rows, columns]
    return parents, Paths(nodes, scores)


def best(scores_UN: FloatArray, counts_U: Int64Array) -> BoolArray:
    """Which are each user's `counts` highest, never one of -inf; among equal ones, the first."""
    place = np.minimum(counts_U, scores_UN.shape[1])[:, None]
    bound = np.take_along_axis(np.sort(scores_UN, axis=1), -place, axis=1)
    above, ties = scores_UN > bound, scores_UN == bound
    kept: BoolArray = above | (ties & (ties.cumsum(1) <= place - above.sum(1, keepdims=True)))
    return kept & (scores_UN > -np.inf)


def tokens(trie: Trie, level: int, nodes: Int32Array) -> Int64Array:
    """The tokens that lead to these nodes of level `level` + 1; 0 for NO_NODE."""
    found: Int64Array = np.where(nodes == NO_NODE, 0, trie.tokens[level][nodes]).astype(np.int64)
    return found


def ranked(trie: Trie, leaves: Paths, counts_U: Int64Array) -> list[Generated]:
    """Each user's items, most probable first, at most `counts`; of equal ones the lower leaf first."""
    orders = np.argsort(-leaves.scores, axis=1, kind="stable")
    counts = np.minimum((leaves.nodes != NO_NODE).sum(1), counts_U)
    best_first = [order[:count] for order, count in zip(orders, counts, strict=True)]
    return [Generated(trie.items[nodes[o]], scores[o]) for nodes, scores, o in zip(leaves.nodes, leaves.scores, best_first, strict=True)]
