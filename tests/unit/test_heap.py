"""What is frozen costs later collections nothing; what is discarded is collected all the same."""

import gc
import weakref

import pytest

from cluster.engines.heap import collect_discarded, freeze_loaded


class Model:
    """Keeps itself alive by a reference cycle, as many modules and sessions do."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


def test_loaded_objects_are_left_out_of_collections():
    model = Model()
    gone = weakref.ref(model)
    freeze_loaded()
    del model
    gc.collect()
    freeze_loaded()
    assert gone() is not None, "a frozen object was walked, so a full collection costs what the process holds"


def test_discarded_objects_are_collected_although_they_were_frozen():
    model = Model()
    gone = weakref.ref(model)
    freeze_loaded()
    del model
    collect_discarded()
    assert gone() is None


def test_garbage_of_loading_is_not_kept_for_ever():
    model = Model()
    gone = weakref.ref(model)
    del model
    freeze_loaded()
    assert gone() is None
