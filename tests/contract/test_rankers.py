"""What every ranker must do, run over all that are registered. A backend that cannot run here is skipped with its own reason.

`truth` is the model itself in PyTorch, one candidate at a time.
`cluster/checks`, which the last test runs, asks any backend what can be asked without the model.
"""

import weakref

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from cluster.bundle_store import BundleStore
from cluster.checks.report import Result
from cluster.checks.suite import check
from cluster.compilation import CompileOptions
from cluster.errors import BackendFailed
from cluster.protocols import Backend
from cluster.ranking import RankRequest
from cluster.registry import backends, choose
from cluster.values import Action, UserSequence
from integrations.hstu.limits import MOST_PAIRS
from integrations.hstu.weights import load_ranker
from pipelines.compile import compile_bundle
from tests.bundles import make_bundle, make_ranking_bundle, random_sequence

ITEMS, LONGEST = 200, 20
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=backends("ranker"))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def make(name, compiled_hstu):
    """Make a ranker of the kind with options, loaded."""

    def made(**options):
        ranker = choose("ranker", backends("ranker"), name)(**options)
        if not (availability := ranker.get_availability(compiled_hstu)).ok:
            pytest.skip(f"{name}: {availability.reason}")
        ranker.load(compiled_hstu)
        return ranker

    return made


@pytest.fixture(scope="module")
def ranker(make):
    loaded = make()
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def model(compiled_hstu):
    return load_ranker(compiled_hstu)


def history(length, seed=0):
    plain, rng = random_sequence(length, items=ITEMS, seed=seed) if length else random_sequence(1, items=ITEMS), np.random.default_rng(seed)
    actions = rng.choice([action.code for action in Action], len(plain)).astype(np.int8)
    values = np.where(actions == Action.RATING.code, rng.integers(1, 6, len(plain)), np.nan).astype(np.float32)
    rows = slice(0, length)
    return UserSequence(plain.items[rows], plain.timestamps[rows], actions[rows], values[rows], plain.request_time)


def asked(length, candidates=range(1, 31), user="", seed=0):
    return RankRequest(history(length, seed), np.array(candidates, np.int32), user)


@torch.inference_mode()
def truth(model, request):
    """By the model itself, one candidate at a time."""
    each = [model.after(request.sequence, torch.tensor([item])) for item in request.candidates.tolist()]
    return torch.cat(each).numpy() if each else np.empty((0, 3), np.float32)


def test_has_the_methods_of_a_backend(ranker):
    assert isinstance(ranker, Backend)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 19, LONGEST, LONGEST + 1, 3 * LONGEST])
def test_predicts_what_the_model_predicts(ranker, model, length):
    request = asked(length)
    assert ranker.infer(request).predictions == pytest.approx(truth(model, request), abs=TOLERANCE)


@pytest.mark.parametrize("count", [0, 1, 2, 200])
def test_takes_any_number_of_candidates(ranker, model, count):
    request = asked(5, candidates=range(1, count + 1))
    assert ranker.infer(request).predictions == pytest.approx(truth(model, request), abs=TOLERANCE)


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_predictions_do_not_depend_on_the_size_of_the_batches(make, ranker, size):
    small = make(micro_batch=size)
    request = asked(9, candidates=range(1, 101))
    assert small.infer(request).predictions == pytest.approx(ranker.infer(request).predictions, abs=1e-5)
    small.close()


@pytest.fixture(scope="session", params=[{"layers": 1}, {"layers": 2, "heads": 1, "attention_dim": 12, "linear_dim": 7}], ids=str)
def sized(request, tmp_path_factory):
    """A compiled ranker of another size."""
    store = BundleStore(tmp_path_factory.mktemp("sized") / "ranker")
    make_ranking_bundle(store.root, **request.param)
    return compile_bundle(store, CompileOptions(targets=(), precisions=("fp32",)), only=["onnx"])


@pytest.mark.parametrize("name", backends("ranker"))
def test_a_ranker_of_any_size_compiles_and_serves(name, sized):
    assert not sized.manifest.failed_steps
    ranker = choose("ranker", backends("ranker"), name)(keep_from=1)
    if not (availability := ranker.get_availability(sized)).ok:
        pytest.skip(f"{name}: {availability.reason}")
    ranker.load(sized)
    for length in (3, 9):
        request = asked(length, user="ada")
        assert ranker.infer(request).predictions == pytest.approx(truth(load_ranker(sized), request), abs=TOLERANCE)
    ranker.close()


def test_a_batch_is_answered_in_the_order_asked(ranker):
    requests = [asked(length, candidates=range(1, 5 + length), seed=length) for length in (3, 0, 12, 1, 20)]
    for request, answer in zip(requests, ranker.batch_infer(requests), strict=True):
        assert answer.predictions == pytest.approx(ranker.infer(request).predictions, abs=1e-5)


def test_says_about_how_many_rows_a_request_takes_before_it_computes_them(make):
    keeps, whole, told = make(keep_from=10), history(18, seed=3), []
    for length in (5, 12, 12, 15):
        columns = (column[:length] for column in (whole.items, whole.timestamps, whole.actions, whole.values))
        request = replace(asked(1), sequence=UserSequence(*columns, whole.request_time), user_id="ada")
        told.append(keeps.rows([request]) - len(request.candidates))
        keeps.infer(request)
    assert told == [5, 12, 0, 3]
    keeps.close()


def test_kept_rows_give_the_same_predictions_as_none(make, ranker):
    keeps, whole = make(keep_from=1), history(18, seed=3)
    for length in (1, 2, 9, 9, 18, 5):
        columns = (column[:length] for column in (whole.items, whole.timestamps, whole.actions, whole.values))
        request = replace(asked(1), sequence=UserSequence(*columns, whole.request_time), user_id="ada")
        assert keeps.infer(request).predictions == pytest.approx(ranker.infer(request).predictions, abs=1e-5)
    assert keeps.kept()["hit_rows"] >= 1 + 2 + 9 + 9
    assert keeps.forget("default", "ada") == 18
    assert keeps.kept()["rows"] == 0
    keeps.close()


def test_what_was_read_last_of_a_forgotten_user_is_not_left_in_memory(make, ranker):
    keeps, request = make(keep_from=1), asked(12, user="ada")
    for length in (9, 12):
        keeps.infer(asked(length, user="ada"))
    buffers = [weakref.ref(buffer) for buffer in keeps._pool._held.values()]  # noqa: SLF001 - what else refers to a buffer is not told
    assert keeps.forget("default", "ada")
    assert not any(buffer() is not None for buffer in buffers), "an engine still refers to its last inputs"
    assert keeps.infer(request).predictions == pytest.approx(ranker.infer(request).predictions, abs=1e-5)
    keeps.close()


def test_a_graph_is_given_so_many_new_events_at_a_time_as_it_may_hold(name, make, ranker, monkeypatch):
    monkeypatch.setattr("integrations.hstu.ranker_backend.rows_at_once", lambda _, most_pairs: 7 if most_pairs == MOST_PAIRS else 1000)
    keeps, given = make(keep_from=1), []
    engine = keeps._engine  # noqa: SLF001 - the graph that is called is listened to
    monkeypatch.setattr(engine, "_run_append", lambda inputs, run=engine._run_append: given.append(len(inputs["items"])) or run(inputs))  # noqa: SLF001
    for length in (18, 19, LONGEST):
        request = asked(length, user="ada" if length == 18 else "")
        assert keeps.infer(request).predictions == pytest.approx(ranker.infer(request).predictions, abs=1e-5)
    if name in {"onnxruntime", "openvino"}:
        assert given == [7, 7, 4, 7, 7, 5, 7, 7, 6]
    assert keeps.kept()["not_looked_up"] == 2
    keeps.close()


def test_a_model_with_no_history_long_enough_keeps_nothing(make):
    keeps = make(keep_from=21)
    assert keeps.kept() == {}
    keeps.close()


def test_an_event_that_is_another_one_now_is_not_taken_from_what_is_kept(make, ranker):
    keeps, request = make(keep_from=1), replace(asked(10), user_id="ada")
    keeps.infer(request)
    actions = np.full(10, Action.LIKE.code, np.int8)
    changed = replace(request, sequence=replace(request.sequence, actions=actions, values=np.full(10, np.nan, np.float32)))
    assert keeps.infer(changed).predictions == pytest.approx(ranker.infer(replace(changed, user_id="")).predictions, abs=1e-5)
    keeps.close()


@pytest.mark.parametrize("request_", [asked(3, candidates=[201]), asked(3, candidates=[0])], ids=["beyond", "padding"])
def test_an_item_that_the_model_does_not_have_is_refused(ranker, request_):
    with pytest.raises(BackendFailed, match=r"outside of 1\.\.200"):
        ranker.infer(request_)


def test_says_that_a_model_has_no_ranker(name, tmp_path):
    availability = choose("ranker", backends("ranker"), name)().get_availability(make_bundle(tmp_path / "plain"))
    assert not availability.ok
    assert "no ranker" in availability.reason or "not installed" in availability.reason


def test_passes_the_checks_that_are_shipped(name, ranker, compiled_hstu):
    assert ranker
    outcomes = check(backends("ranker")[name], "ranker", compiled_hstu).outcomes
    assert [outcome for outcome in outcomes if outcome.result is Result.FAILED] == []
