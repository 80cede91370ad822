"""SASRec, the baseline."""

import torch

from integrations.hstu.config import SASRecConfig
from integrations.hstu.sasrec import SASRec
from integrations.hstu.user_behavior_schema import collate
from tests.bundles import random_sequence


def states(model, sequences):
    batch = collate(sequences, model.config.max_history).tensors()
    with torch.inference_mode():
        return model(batch["items"], batch["times"], batch["next_times"])


def make():
    torch.manual_seed(0)
    return SASRec(SASRecConfig(items=200, dim=16, heads=2, feedforward_dim=16, max_length=31, max_history=30)).eval()


def test_a_state_is_a_unit_vector_that_knows_nothing_of_later_events():
    model = make()
    long = random_sequence(20)
    short = collate([long], 30).tensors()
    whole = states(model, [long])
    with torch.inference_mode():
        prefix = model(*(short[name][:, :7] for name in ("items", "times", "next_times")))
    torch.testing.assert_close(whole[:, :7], prefix, atol=1e-6, rtol=0)
    torch.testing.assert_close(whole.norm(dim=-1), torch.ones(1, 20))


def test_padding_changes_nothing():
    model = make()
    alone, padded = states(model, [random_sequence(5)]), states(model, [random_sequence(5), random_sequence(30)])
    torch.testing.assert_close(alone[0], padded[0, :5], atol=1e-6, rtol=0)


def test_attention_is_a_softmax_over_the_earlier_events():
    """A layer's attention against a plain one, row by row."""
    model = make()
    layer = model.layers[0]
    queries, x = torch.randn(1, 6, 16), torch.randn(1, 6, 16)
    q, k, v = layer.query(queries)[0], layer.key(x)[0], layer.value(x)[0]
    rows = []
    for i in range(6):
        heads = [torch.softmax(q[i, part] @ k[: i + 1, part].T / 8**0.5, dim=-1) @ v[: i + 1, part] for part in (slice(0, 8), slice(8, 16))]
        rows.append(layer.output(torch.cat(heads)))
    torch.testing.assert_close(layer.attend(queries, x)[0], torch.stack(rows))


def test_item_vectors_are_unit_vectors_but_for_padding():
    vectors = make().item_vectors()
    torch.testing.assert_close(vectors.norm(dim=-1)[1:], torch.ones(200))
    assert vectors[0].abs().max() == 0
