"""The calculator against real models."""

from itertools import accumulate

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cluster.ranking import Task
from integrations.hstu.config import HSTUConfig, RankerConfig, SASRecConfig
from integrations.hstu.model import HSTU
from integrations.hstu.model_parameter_calculator import model_size
from integrations.hstu.ranker import HSTURanker
from integrations.hstu.sasrec import SASRec

HSTUS = [
    HSTUConfig(items=3883),
    HSTUConfig(items=300, layers=8, heads=2, attention_dim=25, linear_dim=25),
    HSTUConfig(items=77, dim=24, layers=3, heads=4, attention_dim=5, linear_dim=7, max_length=40, max_history=30, time_buckets=64),
]
LONG = HSTUConfig(items=77, layers=2, dim=50, heads=4, attention_dim=12, linear_dim=12, max_length=1100, max_history=1024)
SASRECS = [SASRecConfig(items=3883), SASRecConfig(items=77, dim=24, layers=3, heads=4, feedforward_dim=31, max_length=40, max_history=30)]
RANKERS = [RankerConfig(items=77, dim=24, layers=3, heads=4, attention_dim=5, linear_dim=7, tasks=(Task.CLICK, Task.RATING))]
MODELS = [*((HSTU, config) for config in HSTUS), *((SASRec, config) for config in SASRECS)]


def inputs(batch, length):
    return torch.ones(batch, length, dtype=torch.int64), *(torch.zeros(batch, length, dtype=torch.int32) for _ in range(2))


@pytest.mark.parametrize(("family", "config"), [*MODELS, *((HSTURanker, config) for config in RANKERS)])
def test_counts_every_parameter_of_the_real_model(family, config):
    model = family(config)
    size = model_size(config)
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(("family", "config"), MODELS)
def test_counts_the_operations_that_torch_counts(family, config):
    model = family(config).eval()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        states = model(*inputs(3, 20))
        states.flatten(0, 1) @ model.item_vectors().T
    size = model_size(config, batch=3, length=20)
    assert size.encode_flops + size.score_flops == counter.get_total_flops()


@pytest.mark.parametrize("config", HSTUS)
def test_counts_the_bytes_of_the_kept_keys_and_values(config):
    with torch.no_grad():
        _, kt, v = HSTU(config).eval().encode_with_state(*inputs(3, 20))
    size = model_size(config, batch=3, length=20)
    assert size.kv_bytes == kt.nbytes + v.nbytes
    assert size.kv_bytes_per_event * 60 == size.kv_bytes


def test_the_state_of_a_long_history_in_bf16_is_as_large_as_published():
    """8 layers of 4 heads of 256: 32 KiB an event, 128 MiB for 4,096 events."""
    config = HSTUConfig(items=10, dim=512, layers=8, heads=4, attention_dim=256, linear_dim=256, max_length=4096, max_history=4096)
    size = model_size(config, bytes_per_number=2)
    assert size.kv_bytes_per_event == 32 * 1024
    assert size.kv_bytes == 128 * 1024**2


def peak_bytes(run):
    """The most bytes in use at once while it runs."""
    with torch.profiler.profile(profile_memory=True) as profile, torch.inference_mode():
        run()
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(changes, initial=0))


@pytest.mark.parametrize(("config", "batch", "length"), [(HSTUS[0], 8, 200), (HSTUS[1], 8, 200), (LONG, 1, 1024), (LONG, 3, 1024)])
def test_the_activation_estimate_is_near_the_measured_peak(config, batch, length):
    model = HSTU(config).eval()
    model(*inputs(1, 8))
    peak = peak_bytes(lambda: model(*inputs(batch, length)))
    assert model_size(config, batch=batch, length=length).activation_bytes == pytest.approx(peak, rel=0.1)


def test_a_user_of_whom_nothing_is_kept_takes_no_more_memory_than_an_encoding():
    model, size = HSTU(LONG).eval(), model_size(LONG, batch=2)
    past = torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    kept = torch.zeros(2, 2, 4, 12, 0), torch.zeros(2, 2, 4, 0, 12)
    assert peak_bytes(lambda: model.append(*inputs(2, 1024), *past, *kept)) < 1.1 * size.activation_bytes + size.kv_bytes


def test_a_ranker_attends_to_a_whole_history_in_as_little_memory():
    config = RankerConfig(**LONG.model_dump(), tasks=(Task.CLICK,))
    ranker, size = HSTURanker(config).eval(), model_size(config)
    items, times, _ = inputs(1, 1024)
    peak = peak_bytes(lambda: ranker.append(items, torch.zeros_like(items), torch.zeros(1, 1024), times))
    assert peak < 1.1 * size.activation_bytes + size.kv_bytes
