"""Kept states: what an encoder answers from them equals what it answers without, whatever became of the history in between."""

import logging
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from cluster.compilation import CompileOptions
from cluster.engines.buffers import BufferPool
from cluster.engines.controller import FrameworkController
from cluster.engines.roster import Choice
from cluster.engines.stage_rules import encoder_rules
from cluster.errors import ConfigError, UnknownChoice
from cluster.registry import backends
from cluster.values import EncodeRequest, UserSequence
from cluster.window import Window
from integrations.datasets.movielens import read_ml_1m
from integrations.datasets.options import ReadOptions
from integrations.hstu.append_inputs import GROUP_BYTES, AppendRequest, Shapes, groups
from integrations.hstu.config import HSTUConfig
from integrations.hstu.encoder import CompiledTorchEncoder, TorchEncoder
from integrations.hstu.engine_batch import engine_batch
from integrations.hstu.kernels.recorded_append import RecordedAppend
from integrations.hstu.limits import MOST_PAIRS, rows_at_once
from integrations.hstu.state_options import StateOptions
from integrations.hstu.stateful import KeptStates
from integrations.hstu.torch_append import append_run, compiled_append, device_memory, device_states, nothing
from integrations.hstu.weights import load_model
from integrations.onnx.encoder import OnnxRuntimeEncoder
from integrations.openvino.encoder import OpenVinoEncoder
from tests.bundles import make_bundle, make_generative_bundle, random_sequence, with_window_step
from tests.compiled import compiled
from tests.conftest import shared_data
from tests.repetitions import times


def run_eagerly(function, *, recompile_limit, **_):
    """In place of torch.compile: takes as many shapes and strides as that would compile for, and then no other."""
    seen = set()

    def run(*inputs):
        shapes = tuple((tensor.shape, tensor.stride()) for tensor in inputs)
        if len(seen) < recompile_limit:
            seen.add(shapes)
        assert shapes in seen
        return function(*inputs)

    return run


class UncompiledTorchEncoder(CompiledTorchEncoder):
    """The buckets of torch_compiled, and eager code; what is really compiled runs in the contract suite of encoders."""

    def load(self, bundle):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", run_eagerly)
            super().load(bundle)


class RecordedTorchEncoder(TorchEncoder):
    """What the `triton` encoder records as CUDA graphs, run as it is by torch. `ran`: what each of them last read and wrote."""

    def _appending(self, model):
        self.ran = {}
        append = RecordedAppend(model.append, model.config, (1, 8), self._device, self._recorded)
        return append, append.shapes, append.memory

    def _recorded(self, run, inputs):
        def replay():
            made = run(*inputs)
            self.ran[tuple(one.shape for one in inputs)] = *inputs, *made
            return made

        return replay


ENGINES = {
    "onnxruntime": OnnxRuntimeEncoder,
    "openvino": OpenVinoEncoder,
    "torch": TorchEncoder,
    "torch_compiled": UncompiledTorchEncoder,
    "recorded": RecordedTorchEncoder,
}
LONGEST = 20
"""max_history of the bundle; the window moves by 2."""


@pytest.fixture(params=ENGINES)
def engine(request, compiled_hstu):
    kind = ENGINES[request.param]
    if not (availability := kind().get_availability(compiled_hstu)).ok:
        pytest.skip(f"{request.param}: {availability.reason}")
    return kind


@pytest.fixture(params=["paged", "radix"])
def store(request):
    return request.param


@pytest.fixture
def loaded(compiled_hstu):
    """Encoders of the compiled bundle by class and options, closed at the end."""
    made = []

    def load(kind, bundle=compiled_hstu, **options):
        encoder = kind(**options)
        encoder.load(bundle)
        made.append(encoder)
        return encoder

    yield load
    for encoder in made:
        encoder.close()


def kept_by(encoder):
    """Where the append graph is run and states are stored: what a test breaks, or listens to."""
    return encoder._kept  # noqa: SLF001 - no door of an encoder breaks its graph


def of(sequence, rows, asked_after=60):
    """These events of the history, asked for a minute after the last of them."""
    columns = {name: getattr(sequence, name)[rows] for name in ("items", "timestamps", "actions", "values")}
    return UserSequence(**columns, request_time=int(columns["timestamps"][-1]) + asked_after)


def asked(sequence, user="ann", tenant="default", **more):
    return EncodeRequest(sequence, 10, user_id=user, tenant=tenant, **more)


def assert_agree(plain, keeping, requests, atol=1e-5):
    """`plain` keeps nothing; `keeping` answers the same, and none of its answers fell back to encoding the whole history."""
    for request, expected, actual in zip(requests, plain.batch_infer(requests), keeping.batch_infer(requests), strict=True):
        assert actual.state == pytest.approx(expected.state, abs=atol)
        assert actual.scores == pytest.approx(expected.scores, abs=2 * atol)
        if expected.states is not None:
            assert actual.states == pytest.approx(expected.states, abs=atol)
        assert len(actual.items) == min(request.top_n, 200)
    assert not keeping.kept()["failures"]


def growing(sequences, seed, most=9):
    """Rounds of requests: every history grows by 1 to `most` events a round until all of it was asked for."""
    rng = np.random.default_rng(seed)
    lengths = [int(rng.integers(1, len(sequence) + 1)) for sequence in sequences]
    while True:
        yield [
            asked(of(sequence, slice(length)), f"user {row}") for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
        ]
        if all(length == len(sequence) for sequence, length in zip(sequences, lengths, strict=True)):
            return
        lengths = [min(len(sequence), length + int(rng.integers(1, most))) for sequence, length in zip(sequences, lengths, strict=True)]


def test_answers_of_growing_histories_are_those_of_whole_ones(loaded, engine, store):
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, state_store=store, keep_from=1)
    for requests in growing([random_sequence(length, seed=length) for length in range(1, 51)], seed=3):
        assert_agree(plain, keeping, requests)
    assert keeping.kept()["hit_rows"] > 0.5 * keeping.kept()["asked_rows"]


def test_a_window_that_moves_by_one_event_uses_what_is_kept_until_it_is_full(compiled_hstu, loaded, engine, store):
    exact = with_window_step(compiled_hstu, 1)
    plain, keeping = loaded(engine, exact, state_bytes=0), loaded(engine, exact, state_store=store, keep_from=1)
    sequence, kept = random_sequence(26), []
    for length in (LONGEST - 1, LONGEST, LONGEST + 1, LONGEST + 2, LONGEST + 2, 26):
        before = keeping.kept()["hit_rows"]
        assert_agree(plain, keeping, [asked(of(sequence, slice(length)))])
        kept.append(keeping.kept()["hit_rows"] - before)
    assert kept == [0, LONGEST - 2, 0, 0, LONGEST - 1, 0]


def test_every_engine_answers_from_kept_states_as_eager_pytorch_does(loaded, engine):
    compared, eager = loaded(engine, keep_from=1), loaded(TorchEncoder, keep_from=1)
    for requests in growing([random_sequence(length, seed=length) for length in range(1, 21)], seed=4):
        for ours, theirs in zip(compared.batch_infer(requests), eager.batch_infer(requests), strict=True):
            assert ours.state == pytest.approx(theirs.state, abs=1e-5)


def test_half_precision_moves_states_by_less_than_a_thousandth(loaded, engine, store):
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, state_store=store, state_dtype="fp16", keep_from=1)
    for requests in growing([random_sequence(length, seed=length) for length in range(1, 21)], seed=5):
        assert_agree(plain, keeping, requests, atol=1e-3)
    assert keeping.kept()["hit_rows"]


def test_only_rows_behind_the_kept_ones_are_encoded(loaded, engine):
    keeping = loaded(engine, keep_from=1)
    given, run = [], kept_by(keeping).run
    kept_by(keeping).run = lambda inputs: given.append((inputs["lengths"].max(), inputs["past_lengths"].max())) or run(inputs)
    sequence = random_sequence(18)
    for length in (10, 11, 14, 14, 18):
        keeping.infer(asked(of(sequence, slice(length))))
    assert given == [(10, 0), (2, 9), (4, 10), (1, 13), (5, 13)]


def test_how_many_rows_requests_take_is_known_before(loaded, engine, store):
    keeping, sequence, told = loaded(engine, state_store=store, keep_from=10), random_sequence(40), []
    for length in (5, 10, 11, 14, 14, 20, 21):
        request = asked(of(sequence, slice(length)))
        told.append(keeping.rows([request]))
        keeping.infer(request)
    assert told == [5, 10, 2, 4, 1, 7, 19], "the last one moves the window"
    others = asked(sequence, user=""), asked(sequence, user="bob"), asked(sequence, tenant="shop")
    assert [keeping.rows([asked(of(sequence, slice(21))), request]) for request in others] == [1 + 20] * 3


def test_a_model_with_no_history_long_enough_keeps_nothing_and_takes_no_memory_for_it(loaded, engine):
    assert loaded(engine, keep_from=LONGEST + 1).kept() == loaded(engine, state_bytes=0).kept() == {}
    assert loaded(engine, keep_from=LONGEST).kept()


def test_an_edit_or_a_deletion_in_the_middle_is_followed(loaded, engine, store):
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, state_store=store, keep_from=1)
    sequence = random_sequence(19)
    other = replace(sequence, items=np.where(np.arange(19) == 7, 3, sequence.items).astype(np.int32))
    moved = replace(sequence, timestamps=sequence.timestamps + 1000 * (np.arange(19) == 11))
    without = np.delete(np.arange(19), [4, 5])
    for history in (sequence, other, sequence, moved, of(sequence, without), of(sequence, slice(6)), sequence):
        assert_agree(plain, keeping, [asked(history)])
        assert_agree(plain, keeping, [asked(history)])
    assert keeping.kept()["hit_rows"]


def test_a_history_beyond_the_window_keeps_its_state_until_the_window_moves(loaded, engine):
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, keep_from=1)
    sequence = random_sequence(40)
    found = []
    for length in range(15, 41):
        before = keeping.kept()["hit_rows"]
        assert_agree(plain, keeping, [asked(of(sequence, slice(length)))])
        found.append(int(keeping.kept()["hit_rows"] - before))
    assert found[:6] == [0, *range(14, 19)]
    assert found[6:] == [0, 18] * 10  # a step of 2: every other event moves the window of 20 and leaves 19


def test_an_event_after_the_request_counts_as_simultaneous_and_is_kept_as_such(loaded, engine):
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, keep_from=1)
    sequence = random_sequence(12)
    early = replace(sequence, request_time=int(sequence.timestamps[8]))
    for history in (early, sequence, early, replace(sequence, request_time=int(sequence.timestamps[-1]) + 10**8)):
        assert_agree(plain, keeping, [asked(history)])


def test_times_older_than_the_engine_counts_are_not_taken_for_the_same_later(loaded, engine):
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, keep_from=1)
    sequence = replace(random_sequence(12), timestamps=np.arange(12, dtype=np.int64) * 10**8 - 10**9)
    for request_time in (2 * 10**9, 2 * 10**9 + 10**8, 4 * 10**9):
        assert_agree(plain, keeping, [asked(replace(sequence, request_time=request_time))])


def test_users_and_tenants_are_kept_apart(loaded, engine, store):
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, state_store=store, keep_from=1)
    sequence = random_sequence(15)
    for user, tenant in (("ann", "a"), ("bob", "a"), ("ann", "b")):
        assert_agree(plain, keeping, [asked(sequence, user, tenant)])
    assert keeping.kept()["hits"] == 0
    assert_agree(plain, keeping, [asked(sequence, "ann", "a")])
    assert keeping.kept()["hits"] == 1


def test_two_requests_of_one_user_in_one_batch_are_both_answered(loaded, engine, store):
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, state_store=store, keep_from=1)
    sequence = random_sequence(19)
    for first, second in ((9, 12), (14, 14), (19, 11)):
        assert_agree(
            plain, keeping, [asked(of(sequence, slice(first))), asked(random_sequence(9), "bob"), asked(of(sequence, slice(second)))]
        )
    assert_agree(plain, keeping, [asked(sequence)])


def test_a_budget_for_few_users_evicts_the_others_and_answers_all(loaded, engine, store):
    page_bytes = 64 * 2 * 2 * (8 + 8) * 4
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, state_store=store, state_bytes=3 * page_bytes, keep_from=1)
    sequences = [random_sequence(12, seed=seed) for seed in range(8)]
    for length in (5, 9, 12):
        assert_agree(plain, keeping, [asked(of(sequence, slice(length)), f"user {row}") for row, sequence in enumerate(sequences)])
        for row, sequence in enumerate(sequences):
            assert_agree(plain, keeping, [asked(of(sequence, slice(length)), f"user {row}")])
    assert keeping.kept()["evictions"]
    assert keeping.kept()["used_bytes"] <= keeping.kept()["budget_bytes"] == 3 * page_bytes


def test_nobodys_requests_and_short_histories_are_encoded_whole_and_not_kept(loaded, engine):
    keeping = loaded(engine, keep_from=5)
    keeping.batch_infer([asked(random_sequence(9), user=""), asked(random_sequence(4))])
    assert keeping.kept()["users"] == keeping.kept()["misses"] == 0
    keeping.batch_infer([asked(random_sequence(5))])
    assert keeping.kept()["users"] == 1


def test_a_subset_of_items_and_different_counts_are_answered_in_one_batch(loaded, engine):
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, keep_from=6)
    sequence = random_sequence(15)
    among = np.array([3, 50, 7, 199], np.int32)
    keeping.infer(asked(sequence))
    requests = [
        replace(asked(of(sequence, slice(3)), "cold"), top_n=4),
        replace(asked(sequence), among=among, top_n=2),
        replace(asked(sequence), top_n=30),
        replace(asked(sequence, ""), among=among),
    ]
    for expected, actual in zip(plain.batch_infer(requests), keeping.batch_infer(requests), strict=True):
        assert actual.items.tolist() == expected.items.tolist()
        assert actual.scores == pytest.approx(expected.scores, abs=1e-5)


def test_nothing_of_another_model_is_used_after_a_swap(compiled_hstu, tmp_path, loaded):
    other = make_bundle(tmp_path / "other", seed=1)
    keeping, plain = loaded(TorchEncoder, keep_from=1), loaded(TorchEncoder, other, state_bytes=0)
    sequence = random_sequence(15)
    keeping.infer(asked(sequence))
    keeping.close()
    keeping.load(other)
    assert_agree(plain, keeping, [asked(sequence)])
    assert keeping.kept()["hits"] == 0
    assert_agree(plain, keeping, [asked(sequence)])
    assert keeping.kept()["hits"] == 1


def test_two_models_that_share_a_store_do_not_share_states(compiled_hstu, tmp_path, loaded):
    other = make_bundle(tmp_path / "other", seed=1)
    first, second, plain = (
        loaded(TorchEncoder, keep_from=1),
        loaded(TorchEncoder, other, keep_from=1),
        loaded(TorchEncoder, other, state_bytes=0),
    )
    kept_by(second).store = kept_by(first).store
    sequence = random_sequence(15)
    first.infer(asked(sequence))
    assert_agree(plain, second, [asked(sequence)])
    assert second.kept()["hits"] == 0


@pytest.mark.parametrize("prompt_length", [8, 30])
def test_a_decoder_is_prompted_with_the_same_latest_states(tmp_path, loaded, prompt_length):
    bundle = make_generative_bundle(tmp_path / "generative", prompt_length=prompt_length)
    plain, keeping = loaded(TorchEncoder, bundle, state_bytes=0), loaded(TorchEncoder, bundle, keep_from=1)
    for requests in growing([random_sequence(length, seed=length) for length in range(1, 31)], seed=6):
        assert_agree(plain, keeping, requests)
        for expected, actual in zip(plain.batch_infer(requests), keeping.batch_infer(requests), strict=True):
            assert actual.states.shape == expected.states.shape
            assert np.array_equal(actual.state, actual.states[-1])
    assert keeping.kept()["hit_rows"]


def test_states_that_are_not_asked_for_are_not_in_the_answer_and_are_kept_all_the_same(tmp_path, loaded):
    bundle = make_generative_bundle(tmp_path / "generative", prompt_length=8)
    plain, keeping = loaded(TorchEncoder, bundle, state_bytes=0), loaded(TorchEncoder, bundle, keep_from=1)
    for requests in growing([random_sequence(length, seed=length) for length in range(1, 31)], seed=6):
        asks = [number % 2 == 0 for number in range(len(requests))]
        mixed = [replace(request, states=states) for request, states in zip(requests, asks, strict=True)]
        assert_agree(plain, keeping, mixed)
        for encoder in (plain, keeping):
            assert [answer.states is not None for answer in encoder.batch_infer(mixed)] == asks
    sequence = random_sequence(15)
    keeping.infer(replace(asked(sequence), states=False))
    expected, actual = plain.infer(asked(sequence)), keeping.infer(asked(sequence))  # the last event is computed, the others were kept
    assert np.allclose(actual.states, expected.states, atol=1e-4)
    assert keeping.kept()["hit_rows"]


def test_an_answers_states_do_not_change_with_the_next_request(tmp_path, loaded):
    keeping = loaded(TorchEncoder, make_generative_bundle(tmp_path / "generative"), keep_from=1)
    first = keeping.infer(asked(random_sequence(15)))
    copy = first.states.copy()
    keeping.infer(asked(random_sequence(16, seed=9), "bob"))
    assert np.array_equal(first.states, copy)


def test_forgetting_a_user_drops_their_rows_and_leaves_the_others(loaded, engine, store):
    keeping = loaded(engine, state_store=store, keep_from=1)
    keeping.batch_infer([asked(random_sequence(15)), asked(random_sequence(15), "bob")])
    used = keeping.kept()["used_bytes"]
    assert keeping.forget("default", "ann") == 14 == keeping.kept()["rows"]
    assert keeping.kept()["used_bytes"] == used / 2
    assert keeping.forget("default", "ann") == keeping.forget("other tenant", "bob") == 0
    keeping.infer(asked(random_sequence(15)))
    assert keeping.kept()["hits"] == 0


def test_forgetting_a_tenant_or_everybody_drops_their_rows_and_nobody_elses(loaded, engine, store):
    keeping = loaded(engine, state_store=store, keep_from=1)
    keeping.batch_infer([asked(random_sequence(15), user, tenant) for user, tenant in (("ann", "a"), ("bob", "a"), ("ann", "b"))])
    assert keeping.forget_tenant("a") == 28
    assert keeping.forget_tenant("a") == 0
    keeping.infer(asked(random_sequence(15), "ann", "b"))
    assert keeping.kept()["hits"] == 1
    assert keeping.forget_everything() == 14
    assert keeping.kept()["used_bytes"] == keeping.kept()["rows"] == 0


def test_what_was_read_last_of_a_forgotten_user_is_not_left_in_memory(loaded, engine):
    keeping = loaded(engine, keep_from=1)
    for length in (14, 15):
        keeping.infer(asked(of(random_sequence(15), slice(length))))
    assert keeping.kept()["buffer_held_bytes"]
    pools = keeping._pool, kept_by(keeping).inputs._pool  # noqa: SLF001 - what else refers to a buffer is not told
    buffers = [weakref.ref(buffer) for pool in pools for buffer in pool._held.values()]  # noqa: SLF001 - as above
    keeping.forget("default", "ann")
    if engine is RecordedTorchEncoder:  # its memory stays where it is
        assert len(keeping.ran) == 2
        assert not any(one.any() for ran in keeping.ran.values() for one in ran)
    else:
        assert not keeping.kept()["buffer_held_bytes"]
        assert len(buffers) > 2
        assert not any(buffer() is not None for buffer in buffers), "an engine still refers to its last inputs"
    sequence = random_sequence(15)
    assert_agree(loaded(engine, state_bytes=0), keeping, [asked(sequence)])


def test_the_memory_in_which_kept_rows_lie_side_by_side_is_among_the_buffers_that_are_told(loaded, engine):
    keeping, sequence = loaded(engine, keep_from=1), random_sequence(15)
    for length in (14, 15):
        keeping.infer(asked(of(sequence, slice(length))))
    rows = kept_by(keeping).inputs.statistics()
    assert rows["buffer_held_bytes"] > 0
    assert all(keeping.kept()[name] > figure for name, figure in rows.items())


def test_a_user_forgotten_while_being_encoded_is_not_kept(loaded, engine, store):
    keeping = loaded(engine, state_store=store, keep_from=1)
    run = kept_by(keeping).run

    def forgetting(inputs):
        keeping.forget("default", "ann")
        return run(inputs)

    for length in (9, 15):
        kept_by(keeping).run = forgetting if length == 15 else run
        keeping.infer(asked(of(random_sequence(15), slice(length))))
    assert keeping.kept()["used_bytes"] == keeping.kept()["users"] == 0


def test_what_is_handed_over_is_used_whatever_store_keeps_it(loaded, engine, store):
    options = {"state_store": store, "keep_from": 1}
    keeping, heir, plain = loaded(engine, **options), loaded(engine, **options), loaded(engine, state_bytes=0)
    sequences = [random_sequence(length, seed=length) for length in range(3, 16)]
    keeping.batch_infer([asked(sequence, f"user {row}", f"tenant {row % 2}") for row, sequence in enumerate(sequences)])
    keeping.infer(asked(sequences[2], "user 2", "tenant 0"))
    handed = list(keeping.hand_over())
    assert handed[0][:2] == ("tenant 0", "user 2"), "the hottest first"
    assert sum(heir.take_over(*one) > 0 for one in handed) == len(sequences)
    later = [replace(sequence, request_time=sequence.request_time + 60) for sequence in sequences]
    assert_agree(plain, heir, [asked(sequence, f"user {row}", f"tenant {row % 2}") for row, sequence in enumerate(later)])
    assert (heir.kept()["hits"], heir.kept()["misses"]) == (len(sequences), 0)


def test_rows_of_another_model_or_precision_are_refused_and_nothing_is_kept_of_them(loaded, engine, compiled_hstu, tmp_path):
    keeping, half = loaded(engine, keep_from=1), loaded(engine, keep_from=1, state_dtype="fp16")
    keeping.infer(asked(random_sequence(9)))
    ((tenant, user, data),) = keeping.hand_over()
    for other in (half, loaded(TorchEncoder, make_bundle(tmp_path / "other", seed=5), keep_from=1)):
        with pytest.raises(ValueError, match="another model or layout"):
            other.take_over(tenant, user, data)
        assert other.kept()["users"] == 0


@pytest.mark.parametrize("state_bytes", [0, 1 << 20])
def test_an_encoder_that_keeps_nothing_has_nothing_to_forget_or_to_tell(loaded, state_bytes):
    encoder = TorchEncoder(state_bytes=state_bytes)
    assert (encoder.forget("default", "ann"), encoder.forget_tenant("default"), encoder.forget_everything(), encoder.kept()) == (
        0,
        0,
        0,
        {},
    )
    encoder = loaded(TorchEncoder, state_bytes=0)
    encoder.infer(asked(random_sequence(15)))
    assert (encoder.forget("default", "ann"), encoder.kept()) == (0, {})


def broken(error):
    def run(inputs):
        raise error

    return run


@pytest.mark.parametrize("error", [MemoryError("no 67 MB"), ValueError("shapes (3,) and (4,)"), RuntimeError("the session is gone")])
def test_a_request_is_answered_in_full_where_its_kept_state_cannot_be_used_and_it_is_said_once(loaded, engine, caplog, error):
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, keep_from=1)
    run, kept_by(keeping).run = kept_by(keeping).run, broken(error)
    request = asked(random_sequence(15))
    for _ in range(3):
        assert keeping.infer(request).state == pytest.approx(plain.infer(request).state, abs=1e-6)
    (record,) = caplog.records
    assert (record.levelno, record.exc_info[1]) == (logging.ERROR, error)
    assert keeping.kept()["failures"] == 3
    assert keeping.kept()["held"] == 0
    kept_by(keeping).run = run
    for _ in range(2):
        assert keeping.infer(request).state == pytest.approx(plain.infer(request).state, abs=1e-5)
    assert keeping.kept()["hits"] == 1


def test_a_state_that_went_bad_is_forgotten_and_the_others_of_the_batch_stay(loaded, engine, caplog):
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, keep_from=1)
    run = kept_by(keeping).run

    def spoiling(inputs):
        outputs = run(inputs)
        return {**outputs, "states": np.where(np.arange(len(inputs["items"]))[:, None, None] == 1, np.nan, outputs["states"])}

    requests = [asked(random_sequence(15, seed=seed), f"user {seed}") for seed in range(3)]
    keeping.batch_infer(requests)
    kept_by(keeping).run = spoiling
    for expected, actual in zip(plain.batch_infer(requests), keeping.batch_infer(requests), strict=True):
        assert actual.state == pytest.approx(expected.state, abs=1e-5)
    assert keeping.kept()["users"] == 2
    assert "not finite" in caplog.text


def test_an_error_in_one_group_of_a_batch_leaves_the_rows_and_answers_of_the_others(loaded, engine, store):
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, state_store=store, keep_from=1)
    ann, bob, newcomer = (random_sequence(length, seed=length) for length in (15, 16, 20))
    keeping.batch_infer([asked(of(ann, slice(14))), asked(of(bob, slice(15)), "bob")])
    run = kept_by(keeping).run

    def short_of_memory(inputs):
        if inputs["lengths"].max() > 10:
            raise MemoryError("no 67 MB")
        return run(inputs)

    requests = [asked(newcomer, "newcomer"), asked(ann), asked(bob, "bob")]
    kept_by(keeping).run = short_of_memory
    for expected, actual in zip(plain.batch_infer(requests), keeping.batch_infer(requests), strict=True):
        assert actual.state == pytest.approx(expected.state, abs=1e-5)
    kept = keeping.kept()
    assert (kept["failures"], kept["users"], kept["rows"], kept["held"]) == (1, 2, 14 + 15, 0)


def test_a_user_with_rows_that_cannot_be_kept_is_answered_and_costs_the_others_none_of_theirs(loaded, engine, store, monkeypatch):
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, state_store=store, keep_from=1)
    requests = [asked(random_sequence(15, seed=seed), f"user {seed}") for seed in range(3)]
    commit, encoded_whole = kept_by(keeping).store.commit, []

    def refused(held, *more):
        if held.owner.user == "user 1":
            raise RuntimeError("no room")
        commit(held, *more)

    monkeypatch.setattr(kept_by(keeping).store, "commit", refused)
    monkeypatch.setattr(keeping, "_whole", lambda requests, _: encoded_whole.extend(requests))
    for expected, actual in zip(plain.batch_infer(requests), keeping.batch_infer(requests), strict=True):
        assert actual.state == pytest.approx(expected.state, abs=1e-5)
    kept = keeping.kept()
    assert (encoded_whole, kept["failures"], kept["users"], kept["rows"], kept["held"]) == ([], 1, 2, 28, 0)


def test_a_neighbours_memory_is_never_looked_at(loaded, engine, monkeypatch):
    """Kept rows are right-padded into memory that held another user's: what stood there, were it NaN, must not be seen."""
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, keep_from=1)
    sequences = [random_sequence(length, seed=length) for length in (20, 4)]
    keeping.batch_infer([asked(sequence, f"user {row}") for row, sequence in enumerate(sequences)])
    keeping.batch_infer([asked(sequence, f"user {row}") for row, sequence in enumerate(sequences)])
    array_of = BufferPool.array

    def spoilt(pool, name, shape, *more):
        array = array_of(pool, name, shape, *more)
        array[:] = np.nan if array.dtype.kind == "f" else 0
        return array

    monkeypatch.setattr(BufferPool, "array", spoilt)
    assert_agree(plain, keeping, [asked(sequence, f"user {row}") for row, sequence in enumerate(sequences)])


async def test_the_fastest_is_measured_with_a_user_who_returns_and_of_whom_nothing_stays(compiled_hstu, caplog):
    caplog.set_level("INFO")
    table, options = {name: backends("encoder")[name] for name in ("onnxruntime", "torch")}, {"onnxruntime": {"keep_from": 1}}
    choice = Choice(table, list(table), selection="fastest", returning=0.5, options=options)
    controller = FrameworkController("encoder", choice, compiled_hstu, encoder_rules(200))
    await controller.warm_up([EncodeRequest(random_sequence(length), 10) for length in (1, 18)])
    kept = next(one.kept for one in controller.snapshot().backends if one.name == "onnxruntime")
    assert (kept["hits"], kept["hit_rows"], kept["misses"], kept["users"], kept["failures"]) == (5, 5 * 16, 1, 0, 0)
    assert "fastest encoder, 50% of users returning: " in caplog.text
    controller.close()


def test_requests_that_are_not_looked_up_are_told(loaded, engine):
    keeping = loaded(engine, keep_from=5)
    keeping.batch_infer([asked(random_sequence(9)), asked(random_sequence(4), "bea"), asked(random_sequence(9), "")])
    kept = keeping.kept()
    assert (kept["hits"], kept["misses"], kept["not_looked_up"]) == (0, 1, 2)


def test_a_sasrec_keeps_nothing(compiled_sasrec, loaded, engine):
    encoder = loaded(engine, compiled_sasrec)
    encoder.infer(asked(random_sequence(15)))
    assert encoder.kept() == {}


def test_new_rows_and_users_beyond_what_an_engine_takes_are_appended_in_steps(loaded, engine, monkeypatch):
    monkeypatch.setattr("integrations.hstu.encoder.NEW_BUCKETS", (2, 3))
    plain, keeping = loaded(engine, state_bytes=0), loaded(engine, keep_from=1)
    given, run, inputs = [], kept_by(keeping).run, kept_by(keeping).inputs
    kept_by(keeping).run = lambda inputs: given.append(inputs["items"].shape) or run(inputs)
    if inputs.shapes.most_new != 3:
        monkeypatch.setattr(inputs, "shapes", Shapes(past=inputs.shapes.past, most_new=3, most_users=8))
    for requests in growing([random_sequence(length, seed=length) for length in range(1, 31)], seed=8):
        assert_agree(plain, keeping, requests)
    assert max(new for _, new in given) == 3
    assert max(users for users, _ in given) == 8
    assert keeping.kept()["hit_rows"]


@pytest.mark.parametrize("kind", [OnnxRuntimeEncoder, OpenVinoEncoder])
def test_a_graph_is_given_no_more_pairs_of_rows_at_a_time_than_it_may_hold(loaded, monkeypatch, kind, compiled_hstu):
    """A graph attends to all its rows in one block: first visits with long histories would take memory by the square of their length."""
    most, heads = 300, HSTUConfig.model_validate(compiled_hstu.manifest.model.config).heads
    for module in ("integrations.onnx.encoder", "integrations.openvino.shapes"):
        monkeypatch.setattr(f"{module}.MOST_PAIRS", most)
    plain, keeping, given = loaded(kind, state_bytes=0), loaded(kind, keep_from=1), []
    run = kept_by(keeping).run
    kept_by(keeping).run = lambda inputs: given.append((*inputs["items"].shape, inputs["past_times"].shape[1])) or run(inputs)
    assert_agree(plain, keeping, [asked(random_sequence(LONGEST, seed=seed), f"long {seed}") for seed in range(3)])
    assert {users for users, _, _ in given} == {1}
    assert max(new for _, new, _ in given) <= 7
    assert given[0][2] <= 2, "no more kept rows than there are"
    assert given[-1][2] < LONGEST
    assert_agree(plain, keeping, [asked(random_sequence(4, seed=seed), f"short {seed}") for seed in range(8)])
    assert max(users for users, _, _ in given) > 1
    assert all(users == 1 or users * heads * new * (new + kept) <= most for users, new, kept in given)


@pytest.mark.parametrize(("longest", "heads", "rows"), [(200, 1, 200), (200, 8, 200), (2048, 8, 512), (8192, 16, 1024)])
def test_short_histories_are_appended_at_once_and_long_ones_by_blocks(longest, heads, rows):
    config = HSTUConfig(items=10, max_history=longest, max_length=longest, heads=heads)
    assert min(longest, rows_at_once(config, MOST_PAIRS)) == rows


def test_a_group_has_room_for_the_rows_that_its_steps_keep():
    users = [AppendRequest(row, SimpleNamespace(rows=0), np.zeros(2048, np.int64), 2048) for row in range(32)]
    stepped = [len(group) for group in groups(users, row_bytes=32 << 10, shapes=Shapes(most_users=32, most_new=258))]
    assert stepped == [2] * 16
    assert stepped[0] * 2048 * (32 << 10) == GROUP_BYTES
    assert [len(group) for group in groups(users, row_bytes=32 << 10)] == [32]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"state_dtype": "bf16"}, UnknownChoice, "unknown state_dtype 'bf16'; choose from fp16, fp32"),
        ({"state_store": "trie"}, UnknownChoice, "unknown state_store 'trie'; choose from paged, radix"),
        ({"state_policy": "arc"}, UnknownChoice, "unknown state_policy 'arc'; choose from fifo, lfu, lru"),
        ({"state_policy": "lfu"}, ConfigError, "set state_store to 'radix'"),
        ({"state_bytes": -1}, ConfigError, r"state_bytes \(-1\) must be at least 0"),
        ({"keep_from": 0}, ConfigError, r"keep_from \(0\) at least 1"),
        ({"state_bytes": "256MB"}, ConfigError, r"state_bytes \('256MB'\) must be a whole number, written out"),
        ({"keep_from": 1e3}, ConfigError, r"keep_from \(1000\.0\) must be a whole number, written out"),
    ],
)
def test_options_that_mean_nothing_are_refused_with_the_choices(engine, options, error, said):
    with pytest.raises(error, match=said):
        engine(**options)


def test_a_budget_below_one_page_is_refused_with_the_sizes(compiled_hstu, engine):
    with pytest.raises(ConfigError, match=r"state_bytes \(1000\) is too small for this model: .*16384 bytes.*; 0 keeps nothing"):
        engine(state_bytes=1000, keep_from=1).load(compiled_hstu)


def test_the_defaults_keep_a_quarter_of_a_gigabyte_in_pages():
    assert StateOptions() == StateOptions(bytes=256 << 20, dtype="fp32", store="paged", policy="lru")


def real_histories(count):
    """Seeded users of MovieLens-1M with at least two events, items folded into the small bundle's 200."""
    interactions = read_ml_1m(shared_data() / "ml-1m", ReadOptions()).interactions
    users = np.random.default_rng(0).permutation(np.flatnonzero(interactions.lengths >= 2))[:count]
    sequences = [interactions.sequence(int(user)) for user in users]
    return [replace(sequence, items=(sequence.items % 200 + 1).astype(np.int32)) for sequence in sequences]


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A small model that takes 200 events, with its ONNX graphs."""
    root = tmp_path_factory.mktemp("long") / "long"
    make_bundle(root, max_history=200, max_length=211)
    return compiled(root, CompileOptions(precisions=("fp32",)), only=["onnx"])


@pytest.mark.slow
def test_real_histories_split_at_random_are_answered_as_whole_ones(long, loaded, engine, store):
    sequences = real_histories(times(1000, 100))
    plain, keeping = loaded(engine, long, state_bytes=0), loaded(engine, long, state_store=store, state_bytes=64 << 20)
    rng = np.random.default_rng(1)
    cuts = [np.sort(rng.integers(1, len(sequence) + 1, 3)) for sequence in sequences]
    for split in range(3):
        for start in range(0, len(sequences), 50):
            users = range(start, start + 50)
            assert_agree(plain, keeping, [asked(of(sequences[user], slice(int(cuts[user][split]))), f"user {user}") for user in users])
    assert keeping.kept()["hit_rows"] > 0.2 * keeping.kept()["asked_rows"]


def test_states_on_a_device_answer_as_those_in_host_memory(tmp_path, loaded, monkeypatch):
    """The path of a GPU, with tensors and its write-back thread, on the CPU."""
    bundle = make_generative_bundle(tmp_path / "generative")
    plain, keeping = loaded(TorchEncoder, bundle, state_bytes=0), loaded(TorchEncoder, bundle, state_bytes=1 << 20)
    cpu, options, model = torch.device("cpu"), StateOptions(bytes=1 << 20, keep_from=1), load_model(bundle)
    run = append_run(model.append, cpu)

    def run_on_tensors(inputs):
        assert isinstance(inputs["past_kt"], torch.Tensor)
        outputs = run(inputs)
        with torch.inference_mode():  # as the model makes them: such tensors may not be written to later
            return {**outputs, **{name: torch.from_numpy(outputs[name]).clone() for name in ("kt", "v")}}

    before = set(threading.enumerate())
    memory = device_states(model.config, options, bundle, cpu), device_memory(cpu)
    monkeypatch.setattr(keeping, "_kept", KeptStates(bundle, run_on_tensors, options, *memory))
    for requests in growing([random_sequence(length, seed=length) for length in range(1, 31)], seed=7):
        assert_agree(plain, keeping, requests)
    assert keeping.kept()["hit_rows"]
    assert keeping.forget("default", "user 29")
    (writer,) = set(threading.enumerate()) - before
    keeping.close()
    writer.join(60)
    assert not writer.is_alive()


def test_engine_batches_leave_out_the_same_events_whether_or_not_they_are_kept():
    batch = engine_batch([asked(random_sequence(length)) for length in (20, 21, 22, 23)], Window.of(LONGEST), items=200)
    assert batch.lengths.tolist() == [20, 19, 20, 19]


def test_a_compiled_append_takes_states_that_are_on_the_device_already(compiled_hstu, monkeypatch):
    """torch.compile tells tensors made in inference mode from others, and what is kept on a GPU was made outside of it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = load_model(compiled_hstu).eval()
    run = compiled_append(model, torch.device("cpu"), (1,), (8,), (16,))
    inputs = nothing(model.config, 1, 8, 16)
    kept = {name: torch.from_numpy(inputs[name]) for name in ("past_kt", "past_v")}
    expected = append_run(model.append, torch.device("cpu"))(inputs)
    assert np.allclose(run({**inputs, **kept})["states"], expected["states"], atol=1e-5)
