"""What is OpenVINO's own; how it answers is in the contract suite of encoders."""

import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cluster.bundle import Bundle
from cluster.compilation import CompileOptions
from cluster.engines.stage_rules import STATE_TOLERANCE
from cluster.errors import BackendFailed, BackendUnavailable, UnknownChoice
from cluster.ranking import RankRequest
from cluster.values import EncodeRequest, UserSequence
from integrations.hstu.config import HSTUConfig
from integrations.hstu.encoder import TorchEncoder
from integrations.onnx.files import graph_file
from integrations.openvino.encoder import OpenVinoEncoder
from integrations.openvino.ranker import KEPT, OpenVinoRanker
from integrations.openvino.shapes import shapes_met
from tests.bundles import make_bundle, make_generative_bundle, make_ranking_bundle, random_sequence
from tests.compiled import compiled

FILE = graph_file("encode", "fp32")


@pytest.fixture
def loaded(compiled_hstu):
    """Makes encoders that serve the small HSTU; skips with their own reason where none can."""
    encoders = []

    def load(bundle=compiled_hstu, **options):
        encoder = OpenVinoEncoder(**options)
        if not (availability := encoder.get_availability(bundle)).ok:
            pytest.skip(availability.reason)
        encoder.load(bundle)
        encoders.append(encoder)
        return encoder

    yield load
    for encoder in encoders:
        encoder.close()


@pytest.fixture
def reference(compiled_hstu):
    encoder = TorchEncoder()
    encoder.load(compiled_hstu)
    return encoder


@pytest.fixture
def altered(compiled_hstu, tmp_path):
    """A copy of the compiled bundle that a test may damage."""
    shutil.copytree(compiled_hstu.path, tmp_path / "2")
    return Bundle(tmp_path / "2", compiled_hstu.manifest)


@pytest.fixture
def _installed(monkeypatch):
    """As far as the probe can tell."""
    monkeypatch.setattr("integrations.openvino.encoder.find_spec", lambda _: True)


def test_says_how_to_install_it_where_it_is_missing(compiled_hstu, monkeypatch):
    monkeypatch.setattr("integrations.openvino.encoder.find_spec", lambda _: None)
    assert OpenVinoEncoder().get_availability(compiled_hstu).reason == "openvino is not installed; install genrec with its extra openvino"
    with pytest.raises(BackendUnavailable, match="not installed"):
        OpenVinoEncoder().load(compiled_hstu)


@pytest.mark.usefixtures("_installed")
def test_says_that_the_bundle_was_never_compiled_and_how_to(compiled_hstu):
    bare = replace(compiled_hstu, manifest=compiled_hstu.manifest.model_copy(update={"artifacts": []}))
    cure = f"run: genrec compile --model-dir {bare.path.parent}"
    assert OpenVinoEncoder().get_availability(bare).reason == f"tiny-hstu/2 has no onnx artifact 'encode'; {cure}"
    with pytest.raises(BackendUnavailable, match="genrec compile"):
        OpenVinoEncoder().load(bare)


@pytest.mark.usefixtures("_installed")
def test_is_unavailable_where_its_graph_is_missing_or_altered(altered):
    encoder = OpenVinoEncoder()
    assert encoder.get_availability(altered).ok
    damaged = altered.path / FILE
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert "checksum" in encoder.get_availability(altered).reason
    assert encoder.get_availability(altered).reason.endswith(f"run: genrec compile --model-dir {altered.path.parent}")
    damaged.unlink()
    assert FILE in encoder.get_availability(altered).reason
    with pytest.raises(BackendUnavailable):
        encoder.load(altered)


@pytest.mark.parametrize("precision", ["fp32", "int8", ""])
def test_refuses_a_precision_that_it_does_not_have(precision):
    with pytest.raises(UnknownChoice, match=f"unknown precision '{precision}'; choose from bf16, f32"):
        OpenVinoEncoder(precision=precision)


@pytest.mark.parametrize(("granted", "asked", "expected"), [("1", None, 1), ("1,2", None, 1), ("2", 1, 1)])
def test_runs_in_as_many_threads_as_asked_for_or_as_ray_granted(loaded, monkeypatch, granted, asked, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", granted)
    assert loaded(threads=asked)._engine.model.get_property("INFERENCE_NUM_THREADS") == expected  # noqa: SLF001 - OpenVINO's own engine tells its properties


def test_computes_in_f32_unless_told_otherwise_even_where_the_cpu_multiplies_bf16(loaded):
    assert loaded()._engine.model.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"  # noqa: SLF001 - OpenVINO's own engine tells its properties


def test_bf16_stays_within_what_counts_as_agreement(loaded, reference):
    encoder = loaded(precision="bf16")
    for length in (1, 7, 20):
        request = EncodeRequest(random_sequence(length, seed=length), 10)
        assert np.abs(encoder.infer(request).state - reference.infer(request).state).max() < STATE_TOLERANCE


def events(*timestamps, request_time):
    count = len(timestamps)
    items, times = np.arange(1, count + 1, dtype=np.int32), np.array(timestamps, np.int64)
    return EncodeRequest(UserSequence(items, times, np.zeros(count, np.int8), np.zeros(count, np.float32), request_time), 5)


@pytest.mark.parametrize("years", [0, 1, 20, 60])
def test_seconds_between_events_matter_however_long_ago_they_were(loaded, reference, years):
    """In fp32, times of 20 years ago are exact to 64 s only."""
    times = np.cumsum([0, 1, 2, 1, 5, 9, 3, 17, 33, 70])
    request = events(*times, request_time=int(times[-1]) + years * 365 * 86_400 + 1)
    answer, expected = loaded().infer(request), reference.infer(request)
    assert answer.state == pytest.approx(expected.state, abs=1e-5)
    assert answer.items.tolist() == expected.items.tolist()


def test_takes_times_as_old_as_int32_holds(loaded, reference):
    request = events(-(2**31), 5, 2**31 - 10, request_time=2**31)
    assert loaded().infer(request).state == pytest.approx(reference.infer(request).state, abs=1e-5)


def test_gives_the_latest_states_that_a_decoder_is_prompted_with(loaded, tmp_path):
    make_generative_bundle(tmp_path / "tiny")
    bundle = compiled(tmp_path / "tiny", CompileOptions(precisions=("fp32",)), only=["onnx"])
    encoder, eager = loaded(bundle), TorchEncoder()
    eager.load(bundle)
    for length in (1, 3, 20):
        request = EncodeRequest(random_sequence(length), 5)
        answer, expected = encoder.infer(request), eager.infer(request)
        assert answer.states.shape == (min(length, 8), 16)
        assert answer.states == pytest.approx(expected.states, abs=1e-4)
        assert answer.states[-1] == pytest.approx(answer.state)


def test_pads_no_history_beyond_what_the_model_takes(loaded, tmp_path):
    make_bundle(tmp_path / "tiny", max_length=19, max_history=19)
    bundle = compiled(tmp_path / "tiny", CompileOptions(precisions=("fp32",)), only=["onnx"])
    encoder, eager = loaded(bundle), TorchEncoder()
    eager.load(bundle)
    for length in (17, 18, 19, 30):
        request = EncodeRequest(random_sequence(length), 5)
        assert encoder.infer(request).state == pytest.approx(eager.infer(request).state, abs=1e-4)


def test_what_is_kept_of_a_whole_window_is_what_the_model_computes(loaded, tmp_path):
    """Rows beyond the window would count like events, from the second layer on."""
    make_bundle(tmp_path / "tiny", max_length=19, max_history=19, layers=3)
    bundle = compiled(tmp_path / "tiny", CompileOptions(precisions=("fp32",)), only=["onnx"])
    encoder, eager = loaded(bundle, keep_from=1), TorchEncoder()
    eager.load(bundle)
    for length in (17, 18, 19, 30):
        request = EncodeRequest(random_sequence(length, seed=length), 5, user_id=f"user {length}")
        assert encoder.infer(request).state == pytest.approx(eager.infer(request).state, abs=1e-5)
    assert not encoder.kept()["failures"]


def test_keeps_states_of_a_model_with_one_layer(loaded, tmp_path):
    make_bundle(tmp_path / "tiny", layers=1)
    bundle = compiled(tmp_path / "tiny", CompileOptions(precisions=("fp32",)), only=["onnx"])
    encoder, eager = loaded(bundle, keep_from=1), TorchEncoder()
    eager.load(bundle)
    for length in (8, 9):
        request = EncodeRequest(first_of(random_sequence(9), length), 5, user_id="ann")
        assert encoder.infer(request).state == pytest.approx(eager.infer(request).state, abs=1e-5)
    assert encoder.kept()["hit_rows"] == 7


def test_an_answer_stays_what_it_is_when_the_next_one_is_computed(loaded):
    encoder = loaded()
    first = encoder.infer(EncodeRequest(random_sequence(5), 5))
    state = first.state.copy()
    encoder.infer(EncodeRequest(random_sequence(5, seed=1), 5))
    assert np.array_equal(first.state, state)


@pytest.mark.parametrize("items", [(), (201,), (3, 0)])
def test_refuses_what_the_model_does_not_know_before_it_calls_the_engine(loaded, items):
    encoder = loaded()
    encoder._engine = lambda _: pytest.fail("the engine was called")  # noqa: SLF001 - the engine is not to be called
    count = len(items)
    sequence = UserSequence(
        np.array(items, np.int32), np.arange(count, dtype=np.int64), np.zeros(count, np.int8), np.zeros(count, np.float32), 100
    )
    with pytest.raises(BackendFailed, match=r"history of 0 events|outside of 1\.\.200"):
        encoder.infer(EncodeRequest(sequence, 3))


def test_shows_openvino_few_shapes_because_it_compiles_for_each(loaded):
    encoder = loaded()
    engine, shapes = encoder._engine, set()  # noqa: SLF001 - the engine that is called is listened to

    def noted(inputs):
        shapes.add(inputs["items"].shape)
        return engine(inputs)

    noted.inputs = engine.inputs
    encoder._engine = noted  # noqa: SLF001 - as above
    for length in range(1, 21):
        encoder.infer(EncodeRequest(random_sequence(length), 3))
    assert shapes == {(1, length) for length in range(4, 21, 2)}
    assert sorted(shapes) == shapes_met(1, range(1, 21), HSTUConfig(items=200, max_history=20))[0]
    shapes.clear()
    for users in range(1, 34):
        answers = encoder.batch_infer([EncodeRequest(random_sequence(20, seed=seed), 3) for seed in range(users)])
        assert len(answers) == users
    assert {batch for batch, _ in shapes} == {1, 2, 4, 8, 16, 24, 32, 40}


def first_of(sequence, count):
    columns = (getattr(sequence, name)[:count] for name in ("items", "timestamps", "actions", "values"))
    return UserSequence(*columns, request_time=sequence.request_time)


def test_shows_openvino_few_shapes_of_kept_states(loaded):
    encoder = loaded(keep_from=1)
    kept, shapes = encoder._kept, set()  # noqa: SLF001 - the engine that is called is listened to
    run = kept.run
    kept.run = lambda inputs: shapes.add((*inputs["items"].shape, inputs["past_times"].shape[1])) or run(inputs)
    for users in (1, 3, 9):
        for length in range(1, 21):
            histories = [first_of(random_sequence(20, seed=seed), length) for seed in range(users)]
            encoder.batch_infer([EncodeRequest(history, 3, user_id=f"{users} {seed}") for seed, history in enumerate(histories)])
    assert {batch for batch, _, _ in shapes} == {1, 4, 16}
    assert {new for _, new, _ in shapes} == {1, 2}
    assert {past for _, _, past in shapes} == {1, *range(2, 19, 2)}
    assert shapes < set(shapes_met(9, range(1, 21), HSTUConfig(items=200, max_history=20))[1])


def test_the_shapes_of_appends_in_steps_are_foreseen(loaded, monkeypatch, compiled_hstu):
    monkeypatch.setattr("integrations.openvino.shapes.MOST_PAIRS", 300)
    encoder = loaded(keep_from=1)
    kept, shapes = encoder._kept, set()  # noqa: SLF001 - the engine that is called is listened to
    run = kept.run
    kept.run = lambda inputs: shapes.add((*inputs["items"].shape, inputs["past_times"].shape[1])) or run(inputs)
    for users, length in product((1, 3, 9), range(1, 21)):
        for events in (length, min(20, length + 1)):
            histories = [first_of(random_sequence(20, seed=seed), events) for seed in range(users)]
            encoder.batch_infer([EncodeRequest(history, 3, user_id=f"{users} {length} {seed}") for seed, history in enumerate(histories)])
    config = HSTUConfig.model_validate(compiled_hstu.manifest.model.config)
    assert shapes <= set(shapes_met(9, range(1, 21), config)[1])


def test_keeps_few_programs_for_the_shapes_of_a_ranker_of_which_hardly_any_comes_twice(compiled_hstu, tmp_path, monkeypatch):
    make_ranking_bundle(tmp_path / "tiny")
    bundle = compiled(tmp_path / "tiny", CompileOptions(precisions=("fp32",)), only=["onnx"])
    openvino = pytest.importorskip("openvino")
    compile_model, asked = openvino.Core.compile_model, []

    def noted(core, model, device, options):
        asked.append(options.get("CPU_RUNTIME_CACHE_CAPACITY"))
        return compile_model(core, model, device, options)

    monkeypatch.setattr(openvino.Core, "compile_model", noted)
    for backend, model in ((OpenVinoRanker(keep_from=1), bundle), (OpenVinoEncoder(keep_from=1), compiled_hstu)):
        backend.load(model)
        backend.close()
    assert asked == [KEPT, KEPT, None, None]


def test_an_openvino_that_does_not_let_the_kept_programs_be_bounded_ranks_all_the_same_and_the_log_says_so(tmp_path, monkeypatch, caplog):
    make_ranking_bundle(tmp_path / "tiny")
    bundle = compiled(tmp_path / "tiny", CompileOptions(precisions=("fp32",)), only=["onnx"])
    openvino = pytest.importorskip("openvino")
    compile_model = openvino.Core.compile_model

    def without_it(core, model, device, options):
        renamed = {name.replace("CPU_RUNTIME_CACHE_CAPACITY", "NO_PROPERTY_OF_OPENVINO"): value for name, value in options.items()}
        try:
            return compile_model(core, model, device, renamed)
        except RuntimeError as error:
            raise RuntimeError(str(error).replace("NO_PROPERTY_OF_OPENVINO", "CPU_RUNTIME_CACHE_CAPACITY")) from None

    monkeypatch.setattr(openvino.Core, "compile_model", without_it)
    backend = OpenVinoRanker()
    backend.load(bundle)
    request = RankRequest(random_sequence(9), np.array([1, 2, 3], np.int32))
    assert backend.infer(request).predictions.shape == (3, 3)
    backend.close()
    assert caplog.text.count("this OpenVINO does not let the programs be bounded that it keeps") == 2, "once for each graph"


def test_keeps_no_state_where_the_append_graph_is_missing_and_says_how_to_make_it(loaded, compiled_hstu, caplog):
    artifacts = [artifact for artifact in compiled_hstu.manifest.artifacts if artifact.graph != "append"]
    bare = replace(compiled_hstu, manifest=compiled_hstu.manifest.model_copy(update={"artifacts": artifacts}))
    encoder = loaded(bare, keep_from=1)
    assert encoder.infer(EncodeRequest(random_sequence(9), 3, user_id="ann")).items.size == 3
    assert encoder.kept() == {}
    assert "openvino keeps no user's state: tiny-hstu/2 has no onnx artifact 'append'; run: genrec compile" in caplog.text
