"""What every encoder must do, run over all that are registered. A backend that cannot run here is skipped with its own reason.

`truth` is the model itself in PyTorch: one user, no padding, no pruning.
`cluster/checks`, which the last test runs, asks any backend what can be asked without the model.
"""

import errno
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from cluster.checks.report import Result
from cluster.checks.suite import check
from cluster.protocols import Backend
from cluster.registry import backends, choose
from cluster.values import EncodeRequest
from integrations.hstu.encoder import CompiledTorchEncoder
from integrations.hstu.weights import load_model
from tests.bundles import ONE_BUCKET, random_sequence, with_window_step
from tests.repetitions import times

ITEMS, LONGEST = 200, 20
TOLERANCE = 1e-4
COMPILES = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]  # Inductor's own remarks
CASES = [
    pytest.param((name, family), id=f"{name}-{family}", marks=COMPILES if name == "torch_compiled" else ())
    for name in backends("encoder")
    for family in ("hstu", "sasrec")
]


@pytest.fixture(scope="module", autouse=True)
def _few_buckets():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledTorchEncoder, "batches", times(CompiledTorchEncoder.batches, ONE_BUCKET))
        patch.setattr("integrations.hstu.encoder.NEW_BUCKETS", (8,))  # so that longer histories are appended in steps
        yield


@pytest.fixture(scope="module", params=CASES)
def served(request):
    """(an encoder that is loaded, its bundle)."""
    name, family = request.param
    bundle = request.getfixturevalue(f"compiled_{family}")
    encoder = choose("encoder", backends("encoder"), name)()
    if not (availability := encoder.get_availability(bundle)).ok:
        pytest.skip(f"{name}: {availability.reason}")
    encoder.load(bundle)
    yield encoder, bundle
    encoder.close()


@pytest.fixture(scope="module")
def encoder(served):
    return served[0]


@pytest.fixture(scope="module")
def model(served):
    return load_model(served[1])


def test_where_its_files_cannot_be_read_for_now_it_says_that_it_is_not_certain(served, monkeypatch):
    def stale(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    encoder, bundle = served
    monkeypatch.setattr("cluster.bundle._size", stale)
    availability = encoder.get_availability(bundle)
    assert (availability.ok, availability.certain) == (False, False)
    assert "Stale file handle" in availability.reason


def asked(length, top_n=10, among=None, seed=0, user=""):
    return EncodeRequest(random_sequence(length, items=ITEMS, seed=seed), top_n, None if among is None else np.array(among, np.int32), user)


def truth(model, request):
    """The state and all cosines by the model itself: one user, no padding, no pruning."""
    sequence = request.sequence
    recent = slice(max(0, len(sequence) - LONGEST), None)
    times = sequence.timestamps[recent] - sequence.request_time
    rows = (sequence.items[recent], times, np.append(times[1:], 0))
    with torch.no_grad():
        state = model(*(torch.from_numpy(row.astype(np.int64))[None] for row in rows))[0, -1].numpy()
        return state, model.item_vectors().numpy() @ state


def assert_same(actual, expected):
    assert actual.items.tolist() == expected.items.tolist()
    assert actual.state == pytest.approx(expected.state, abs=TOLERANCE)
    assert actual.scores == pytest.approx(expected.scores, abs=TOLERANCE)


def test_has_the_methods_of_a_backend(encoder):
    assert isinstance(encoder, Backend)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 19, LONGEST])
def test_finds_the_state_and_the_ten_items_that_pytorch_finds(encoder, model, length):
    request = asked(length)
    state, cosines = truth(model, request)
    answer = encoder.infer(request)
    assert answer.state == pytest.approx(state, abs=TOLERANCE)
    assert answer.items.tolist() == (np.argsort(-cosines[1:], kind="stable")[:10] + 1).tolist()
    assert answer.scores == pytest.approx(cosines[answer.items], abs=TOLERANCE)


def test_a_window_that_moves_by_one_event_gives_what_the_model_says_of_the_latest(served, model):
    encoder, bundle = served
    exact = type(encoder)()
    exact.load(with_window_step(bundle, 1))
    for length in (LONGEST + 1, LONGEST + 9, 3 * LONGEST):
        state, cosines = truth(model, asked(length))
        answer = exact.infer(asked(length))
        assert answer.state == pytest.approx(state, abs=TOLERANCE)
        assert answer.items.tolist() == (np.argsort(-cosines[1:], kind="stable")[:10] + 1).tolist()
    exact.close()


def test_answers_in_the_types_of_the_interface(encoder):
    answer = encoder.infer(asked(5))
    assert (answer.state.dtype, answer.items.dtype, answer.scores.dtype) == (np.float32, np.int32, np.float32)
    assert np.linalg.norm(answer.state) == pytest.approx(1, abs=1e-3)


def test_answers_a_batch_of_mixed_lengths_as_it_answers_each_alone_and_in_the_order_asked(encoder):
    requests = [asked(length, seed=seed) for seed, length in enumerate([1, 20, 3, 25, 7, 2, 20, 1])]
    answers = encoder.batch_infer(requests)
    assert len(answers) == len(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert_same(answer, encoder.infer(request))


def test_answers_more_requests_at_once_than_an_engine_takes(encoder):
    requests = [asked(1 + seed % 9, seed=seed) for seed in range(70)]
    for request, answer in zip(requests[::23], encoder.batch_infer(requests)[::23], strict=True):
        assert_same(answer, encoder.infer(request))


def test_gives_each_request_of_a_batch_as_many_items_as_it_asked_for(encoder):
    answers = encoder.batch_infer([asked(5, top_n) for top_n in (1, 50, 3)])
    assert [len(answer.items) for answer in answers] == [1, 50, 3]
    assert answers[0].items[0] == answers[1].items[0] == answers[2].items[0]


def test_gives_the_whole_catalogue_once_where_more_is_asked_for_and_never_padding(encoder):
    answer = encoder.infer(asked(5, top_n=ITEMS + 50))
    assert sorted(answer.items.tolist()) == list(range(1, ITEMS + 1))
    assert (np.diff(answer.scores) <= 0).all()


def test_searches_only_among_the_items_given(encoder, model):
    among = [3, 50, 7, 120, 199, 200, 1]
    request = asked(6, 3, among)
    _, cosines = truth(model, request)
    answer = encoder.infer(request)
    assert answer.items.tolist() == sorted(among, key=lambda item: -cosines[item])[:3]
    assert answer.scores == pytest.approx(cosines[answer.items], abs=TOLERANCE)


def test_keeps_requests_with_and_without_a_subset_apart_in_one_batch(encoder):
    requests = [asked(4, 5), asked(9, 5, [1, 2, 3]), asked(2, 40), asked(3, 2, [])]
    answers = encoder.batch_infer(requests)
    assert [len(answer.items) for answer in answers] == [5, 3, 40, 0]
    assert_same(answers[1], encoder.infer(requests[1]))


def test_encodes_only_the_latest_events_of_a_history_that_is_too_long(encoder):
    request = asked(3 * LONGEST)
    whole = request.sequence
    columns = {name: getattr(whole, name)[-LONGEST:] for name in ("items", "timestamps", "actions", "values")}
    latest = replace(whole, **columns)
    assert_same(encoder.infer(request), encoder.infer(replace(request, sequence=latest)))


def test_the_moment_of_the_request_matters_to_hstu_and_not_to_sasrec(served):
    encoder, bundle = served
    request = asked(8)
    later = replace(request, sequence=replace(request.sequence, request_time=request.sequence.request_time + 10**7))
    moved = np.abs(encoder.infer(request).state - encoder.infer(later).state).max()
    assert (moved > 1e-3) == (bundle.manifest.model.family == "hstu")


def first(request, count):
    """The same user's request `count` events into the history."""
    sequence = request.sequence
    columns = {name: getattr(sequence, name)[:count] for name in ("items", "timestamps", "actions", "values")}
    return replace(request, sequence=replace(sequence, **columns, request_time=int(columns["timestamps"][-1]) + 60))


@pytest.fixture
def keeping(served):
    """The encoder, where it can keep states keeping those of histories of any length; as it is where it cannot."""
    encoder, bundle = served
    if not hasattr(encoder, "kept") or not encoder.kept():
        yield encoder
        return
    own = type(encoder)(keep_from=1)
    own.load(bundle)
    yield own
    own.close()


def test_whose_history_it_is_does_not_change_the_answer_as_the_history_grows(encoder, keeping):
    for seed in range(6):
        request = asked(3 * LONGEST, seed=seed, user=f"user {seed}")
        for count in (1, 2, 9, 10, 19, 20, 21, 22, 30, 60):
            grown = first(request, count)
            assert_same(keeping.infer(grown), encoder.infer(replace(grown, user_id="")))
    if hasattr(keeping, "kept") and (figures := keeping.kept()):
        assert figures["hits"]
        assert not figures["failures"]


def test_another_process_goes_on_from_what_is_handed_over(served, encoder, keeping):
    if not hasattr(keeping, "kept") or not keeping.kept():
        pytest.skip(f"{type(keeping).__name__} keeps nothing of this model's users")
    users = [asked(LONGEST, seed=seed, user=f"user {seed}") for seed in range(4)]
    for count in (5, 12):
        keeping.batch_infer([first(user, count) for user in users])
    heir = type(keeping)(keep_from=1)
    heir.load(served[1])
    try:
        for tenant, user, data in keeping.hand_over():
            assert heir.take_over(tenant, user, data) > 0
            assert heir.take_over(tenant, user, data) == 0, "all of it is kept"
        grown = [first(user, 15) for user in users]
        for ours, uninterrupted, plain in zip(
            heir.batch_infer(grown),
            keeping.batch_infer(grown),
            encoder.batch_infer([replace(one, user_id="") for one in grown]),
            strict=True,
        ):
            assert_same(ours, uninterrupted)
            assert_same(ours, plain)
        figures = heir.kept()
        assert (figures["adopted"], figures["hits"], figures["misses"], figures["hit_rows"]) == (4, 4, 0, 4 * 11)
        assert not figures["failures"]
    finally:
        heir.close()


def test_what_is_kept_of_a_user_can_be_erased_and_counted(keeping):
    if not hasattr(keeping, "kept"):
        pytest.skip(f"{type(keeping).__name__} keeps nothing of its users")
    keeping.batch_infer([asked(15, user="ann"), asked(15, seed=1, user="bob")])
    keeps = bool(keeping.kept())
    assert (keeping.forget("default", "ann") > 0) == keeps
    assert keeping.forget("default", "ann") == 0
    assert all(isinstance(value, float) for value in keeping.kept().values())
    if keeps:
        assert keeping.kept()["users"] == 1


def test_answers_again_after_it_was_closed_and_loaded(served):
    encoder, bundle = served
    before = encoder.infer(asked(5))
    encoder.close()
    encoder.load(bundle)
    assert_same(encoder.infer(asked(5)), before)


def test_can_be_closed_twice(served):
    encoder, bundle = served
    encoder.close()
    encoder.close()
    encoder.load(bundle)


def test_answers_from_other_threads_than_the_one_that_loaded_it(encoder):
    requests = [asked(length) for length in (1, 5, 20)]
    here = [encoder.infer(request) for request in requests]
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            for expected, actual in zip(here, thread.map(encoder.infer, requests), strict=True):
                assert_same(actual, expected)


def test_passes_the_checks_that_are_shipped(served):
    encoder, bundle = served
    outcomes = check(f"{type(encoder).__module__}:{type(encoder).__name__}", "encoder", bundle).outcomes
    assert [outcome for outcome in outcomes if outcome.result is Result.FAILED] == []
