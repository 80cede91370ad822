"""What every encoder refuses before its engine is called."""

import numpy as np
import pytest

from cluster.errors import BackendFailed
from cluster.nearest import NearestItems
from cluster.values import EncodeRequest, UserSequence
from cluster.window import Window
from integrations.hstu.encoder import TorchEncoder
from integrations.hstu.engine_batch import engine_batch
from integrations.onnx.encoder import OnnxRuntimeEncoder
from integrations.tensorrt.encoder import TensorRTEncoder


def asked(*items):
    count = len(items)
    times = np.arange(count, dtype=np.int64)
    return EncodeRequest(UserSequence(np.array(items, np.int32), times, np.zeros(count, np.int8), np.zeros(count, np.float32), 100), 3)


def test_passes_on_the_latest_events_of_users_with_events_the_model_knows():
    batch = engine_batch([asked(9, 1, 5), asked(2)], Window.of(2), items=5)
    assert batch.items.tolist() == [[1, 5], [2, 0]]


@pytest.mark.parametrize("item", [0, -1, 6, 2**31 - 1])
def test_refuses_an_item_outside_of_the_catalogue(item):
    with pytest.raises(BackendFailed, match=rf"item index {item} is outside of 1\.\.5"):
        engine_batch([asked(1), asked(3, item, 2)], Window.of(10), items=5)


def test_refuses_an_empty_history():
    with pytest.raises(BackendFailed, match="request 1 of the batch has a history of 0 events"):
        engine_batch([asked(1), asked()], Window.of(10), items=5)


class Unreached:
    """An engine that cannot be called."""

    largest_batch = 32


@pytest.mark.parametrize("items", [(), (201,), (3, 0)])
@pytest.mark.parametrize("kind", [TorchEncoder, OnnxRuntimeEncoder, TensorRTEncoder])
def test_every_encoder_refuses_them_before_it_calls_its_engine(compiled_hstu, kind, items):
    encoder = kind()
    if kind is TensorRTEncoder:
        encoder._engine, encoder._window, encoder._index = Unreached(), Window.of(20), NearestItems(np.zeros((201, 16), np.float32))  # noqa: SLF001 - no TensorRT engine can be loaded here
    else:
        encoder.load(compiled_hstu)
    with pytest.raises(BackendFailed, match=r"history of 0 events|outside of 1\.\.200"):
        encoder.infer(asked(*items))
