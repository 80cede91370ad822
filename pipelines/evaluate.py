"""Measure a sequence model: rank the whole catalogue for every user's held-out event.

Items inside the history window are filtered out of the ranking, except the answer itself, where the user came back to it. Such an answer
competes with unseen items only. So data with users that come back to items give higher figures than serving, which leaves out all seen
items (`exclude_seen`) or none, and than RecTools, which leaves such events out of the test (`filter_already_seen`). Where each item is only
once in a history, as in MovieLens, all of these are the same. Ties count against the model.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from cluster.dataset import Interactions
from cluster.errors import DataError
from cluster.values import Int64Array
from pipelines.batches import by_length
from pipelines.ranking_metrics import ranking_metrics
from pipelines.sequence_models import TrainableModel
from pipelines.splits import TEST, Example, held_out

MOST_USERS = 20_000
"""How many users a training ranks the items for: enough to tell a share of hits to 0.4 % or better."""
USERS_AT_ONCE, _USERS_A_BATCH = 20_000, 128
"""Of how many users the histories are taken at a time, and how many of these, with histories of similar length, the model sees together."""


def evaluate(
    model: TrainableModel,
    interactions: Interactions,
    *,
    from_end: int = TEST,
    most_users: int | None = None,
    after_batch: Callable[[int], None] = lambda _: None,
) -> Mapping[str, float]:
    """HR@10/50/200, NDCG@10/50 and MRR on each user's event that stands `from_end` from the end, over at most `most_users` users.

    `after_batch`: called with the number of users of each batch that is ranked.
    """
    examples, found = held_out(interactions, from_end, most_users=most_users), [np.zeros(0, np.int64)]
    while part := list(islice(examples, USERS_AT_ONCE)):  # the histories of all users together are gigabytes
        found.append(ranks(model, part, after_batch))
    return ranking_metrics(np.concatenate(found))


def ranks(model: TrainableModel, examples: Sequence[Example], after_batch: Callable[[int], None] = lambda _: None) -> Int64Array:
    """The rank (1 = first) of each example's target, in the order of the examples."""
    out = np.zeros(len(examples), np.int64)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        vectors = model.item_vectors()
        for rows in by_length(examples, _USERS_A_BATCH, model.config.max_history):
            out[rows] = _ranks(model, vectors, [examples[row] for row in rows])
            after_batch(len(rows))
    model.train(was_training)
    return out


def _ranks(model: TrainableModel, vectors_VD: Tensor, examples: Sequence[Example]) -> Int64Array:
    batch = {
        name: tensor.to(vectors_VD.device) for name, tensor in model.collate([example.history for example in examples]).tensors().items()
    }
    rows = torch.arange(len(examples), device=vectors_VD.device)
    states_BLD = model(batch["items"], batch["times"], batch["next_times"])
    scores_BV = states_BLD[rows, batch["lengths"] - 1] @ vectors_VD.T
    targets = torch.tensor([example.target for example in examples], device=vectors_VD.device)
    wanted_B = scores_BV[rows, targets]
    if not bool(torch.isfinite(wanted_B).all()):
        raise DataError("the model's scores are not finite; its weights are broken, train it again with a lower learning rate")
    scores_BV.scatter_(1, batch["items"], -torch.inf)
    scores_BV[:, 0] = -torch.inf
    scores_BV[rows, targets] = wanted_B
    out: Int64Array = (scores_BV >= wanted_B.unsqueeze(1)).sum(dim=1).cpu().numpy()
    return out
