"""Drawing items instead of searching for them: paths drawn code by code, for all users in one pass at each level.

Draws that share a path share its computation. Each request has its own random stream and takes the same number of bits at every level,
so that a seed draws the same in any batch.

Shapes: U users, W distinct paths a user, C children of a path at most, N draws of all users together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cluster.semantic_ids import SemanticIds
from cluster.trie import TrieView
from cluster.values import Generated, SamplingOptions
from integrations.torch_beam.beam import Continues, Paths, chosen, expand, log_probs, ranked, tokens
from integrations.torch_beam.sampling import RandomStream, Sampler


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One user's request: the `k` most probable of the items drawn from a view with at least one."""

    view: TrieView
    k: int
    options: SamplingOptions


def draw(
    draws: Sequence[Draw], ids: SemanticIds, model: Continues, sampler: Sampler, between_levels: Callable[[], None]
) -> list[Generated]:
    """Each user's distinct drawn items with their log-probabilities at temperature 1, most probable first, in the order asked.

    `between_levels` may raise. Raises BackendFailed at NaN.
    """
    trie, views, paths = draws[0].view.trie, [one.view for one in draws], Paths.roots(len(draws))
    user_N = np.repeat(np.arange(len(draws)), [one.options.samples for one in draws])
    per_user = [(one.options, RandomStream(one.options.seed)) for one in draws]
    options, streams = [per_user[user][0] for user in user_N], [per_user[user][1] for user in user_N]
    path_N = np.zeros(len(user_N), np.int64)
    for level in range(ids.levels):
        between_levels()
        children_UWC = expand(views, level, paths.nodes)
        log_probs_UWC = log_probs(model, ids, level, trie, children_UWC)
        drawn_N = sampler.draw(torch.from_numpy(log_probs_UWC[user_N, path_N]), options, streams).tokens.numpy()
        kept_UWC = np.zeros(children_UWC.shape, np.bool_)
        kept_UWC[user_N, path_N, drawn_N] = True
        kept_UN = kept_UWC.reshape(len(draws), -1)
        path_N = (kept_UN.cumsum(1) - 1)[user_N, path_N * children_UWC.shape[2] + drawn_N]
        parents_UW, paths = chosen(children_UWC, paths.scores[:, :, None] + log_probs_UWC, kept_UN)
        if level < ids.levels - 1:
            model.branch(parents_UW, tokens(trie, level, paths.nodes))
    return ranked(trie, paths, np.array([one.k for one in draws]))
