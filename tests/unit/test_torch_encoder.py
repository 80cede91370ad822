import shutil

import numpy as np
import pytest
import torch

from cluster.bundle import WEIGHTS, Bundle, ModelRecord
from cluster.errors import BackendUnavailable
from cluster.values import EncodeRequest
from cluster.window import Window
from integrations.hstu.encoder import CompiledTorchEncoder, TorchEncoder
from integrations.hstu.limits import Limits, limits
from tests.bundles import ONE_BUCKET, make_bundle, random_sequence


@pytest.fixture
def bundle(tmp_path):
    return make_bundle(tmp_path / "tiny")


def test_serves_a_bundle_that_was_never_compiled(bundle):
    encoder = TorchEncoder()
    encoder.load(bundle)
    assert len(encoder.infer(EncodeRequest(random_sequence(3), 4)).items) == 4


@pytest.mark.parametrize("encoder", [TorchEncoder(), CompiledTorchEncoder()])
def test_is_unavailable_where_the_weights_were_altered(bundle, tmp_path, encoder):
    shutil.copytree(bundle.path, tmp_path / "altered")
    altered = Bundle(tmp_path / "altered", bundle.manifest)
    with (altered.path / WEIGHTS).open("ab") as file:
        file.write(b"!")
    assert WEIGHTS in encoder.get_availability(altered).reason
    with pytest.raises(BackendUnavailable, match=WEIGHTS):
        encoder.load(altered)


def test_compiling_needs_a_compiler_and_says_which(bundle, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "'no-such-compiler' is not on the PATH" in CompiledTorchEncoder().get_availability(bundle).reason
    assert TorchEncoder().get_availability(bundle).ok


def test_knows_the_limits_of_a_model_whose_record_leaves_out_defaults():
    assert limits(ModelRecord(family="hstu", config={"items": 5})) == Limits(max_history=200, max_length=211, window=Window(200, 25))
    sasrec = ModelRecord(family="sasrec", config={"items": 5, "max_history": 20})
    assert limits(sasrec) == Limits(max_history=20, max_length=211, window=Window(20, 2))


class Recording(CompiledTorchEncoder):
    """Has buckets, and in place of compiled code the eager model, which notes the shapes it is given."""

    def load(self, bundle):
        TorchEncoder.load(self, bundle)
        self._lengths = [5, 20]
        self.shapes = set()
        eager = self._engine

        def encode(items, *others):
            self.shapes.add(tuple(items.shape))
            return eager(items, *others)

        self._engine = encode


def test_pads_every_batch_up_to_a_bucket_that_was_compiled(bundle):
    encoder, plain = Recording(state_bytes=0), TorchEncoder()
    encoder.load(bundle)
    plain.load(bundle)
    for sizes in ([1], [5], [6], [30], [3] * 2, [3, 20] * 4, [2] * 9, [7] * 70):
        requests = [EncodeRequest(random_sequence(size, seed=seed), 10) for seed, size in enumerate(sizes)]
        for expected, actual in zip(plain.batch_infer(requests), encoder.batch_infer(requests), strict=True):
            assert actual.state == pytest.approx(expected.state, abs=1e-5)
            assert np.array_equal(actual.items, expected.items)
    assert encoder.shapes == {(1, 5), (1, 20), (8, 5), (8, 20), (32, 5), (32, 20)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_shape_outside_the_buckets_is_an_error_and_never_runs_eagerly(bundle):
    class OneBucket(CompiledTorchEncoder):
        batches = ONE_BUCKET

    encoder = OneBucket(state_bytes=0)
    encoder.load(bundle)
    torch.set_autocast_cache_enabled(False)  # as other code may have left it in the thread that asks
    assert len(encoder.infer(EncodeRequest(random_sequence(5), 3)).items) == 3
    torch.set_autocast_cache_enabled(True)
    times = torch.zeros(3, 4, dtype=torch.int32)
    with torch.inference_mode(), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):  # noqa: SLF001 - PyTorch's name of the error
        encoder._engine(torch.ones(3, 4, dtype=torch.long), times, times, torch.ones(3, dtype=torch.long))  # noqa: SLF001 - requests cannot have this shape
