"""Lists of items on their way through the pipeline."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.blend import Evidence
from pipelines.candidates import contained

lists = st.lists(st.integers(1, 30), max_size=20, unique=True).map(lambda items: np.array(items, np.int32))


@given(items=lists, among=lists)
def test_what_is_held_is_what_stands_in_the_other_list(items, among):
    assert contained(items, np.sort(among)).tolist() == np.isin(items, among).tolist()


@given(retrieved=lists, generated=lists)
def test_evidence_holds_each_item_once_with_what_each_list_says_of_it(retrieved, generated):
    cosines, log_probs = (np.linspace(high, low, len(each)) for each, high, low in ((retrieved, 1, 0), (generated, -1, -5)))
    evidence = Evidence.of((retrieved, cosines), (generated, log_probs), 0.05)
    said, floor = dict(zip(generated.tolist(), log_probs.tolist(), strict=True)), min(log_probs.tolist(), default=0.0)
    assert evidence.items.tolist() == [*retrieved.tolist(), *(item for item in generated.tolist() if item not in set(retrieved.tolist()))]
    assert evidence.named.tolist() == [item in said for item in evidence.items.tolist()]
    assert evidence.generation.tolist() == [said.get(item, floor) for item in evidence.items.tolist()]
