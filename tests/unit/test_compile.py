import re

import pytest
from typer import Typer
from typer.testing import CliRunner

from cluster.bundle import WEIGHTS, Artifact, FailedStep
from cluster.bundle_store import BundleStore
from cluster.compilation import CompileOptions, CompileStep, why_missing
from cluster.errors import CompileError, UnknownChoice
from deployments.cli.compile import compile_
from integrations.hstu.encoder import TorchEncoder
from integrations.tensorrt import build
from integrations.tensorrt.build import TensorRTCompiler
from integrations.tensorrt.encoder import TensorRTEncoder
from pipelines.compile import compile_bundle
from tests.bundles import make_bundle


class Good:
    """Leaves a file for each precision."""

    def steps(self, bundle, draft, options):
        return [CompileStep(f"onnx encode {p}", lambda p=p: self.make(draft, p)) for p in options.precisions]

    def make(self, draft, precision):
        (draft.path / "onnx").mkdir(exist_ok=True)
        (draft.path / f"onnx/encode.{precision}").write_text(precision)
        return Artifact(kind="onnx", graph="encode", file=f"onnx/encode.{precision}", precision=precision, builder="test")


class HalfFails(Good):
    """Refuses fp16 after its file was written."""

    def make(self, draft, precision):
        artifact = super().make(draft, precision)
        if precision == "fp16":
            raise CompileError("its outputs are 0.5 from the model's")
        return artifact


class Int8Fails(Good):
    """Refuses int8."""

    def make(self, draft, precision):
        if precision == "int8":
            raise CompileError("it names other items than the model")
        return super().make(draft, precision)


class Chained:
    """Builds on what stands in the draft."""

    def steps(self, bundle, draft, options):
        return [CompileStep("tensorrt encode sm_80", lambda: self.make(draft))]

    def make(self, draft):
        if not draft.artifacts:
            raise CompileError("there is no graph to build from")
        (draft.path / "tensorrt").mkdir()
        (draft.path / "tensorrt/encode.sm_80").write_text("engine")
        return Artifact(kind="tensorrt", graph="encode", file="tensorrt/encode.sm_80", target="sm_80", builder="test")


class ForTargets:
    """Leaves an engine for each target."""

    def steps(self, bundle, draft, options):
        (draft.path / "tensorrt").mkdir(exist_ok=True)
        return [CompileStep(f"tensorrt encode fp32 {target}", lambda target=target: self.make(draft, target)) for target in options.targets]

    def make(self, draft, target):
        (draft.path / f"tensorrt/encode.{target}").write_text("engine")
        return Artifact(kind="tensorrt", graph="encode", file=f"tensorrt/encode.{target}", target=target, builder="test")


class HalvedForTargets(ForTargets):
    """Builds from the graph in fp16."""

    def make(self, draft, target):
        return super().make(draft, target).model_copy(update={"precision": "fp16"})


class Measured(ForTargets):
    """Builds where its GPU is."""

    def make(self, draft, target):
        artifact = super().make(draft, target)
        (draft.path / artifact.file).write_text("measured")
        return artifact.model_copy(update={"measured_on": "NVIDIA L4", "parity": {"max_abs_error": 1e-6, "top10_agreement": 1.0}})


class MeasuredByAnEarlierRelease(Measured):
    """As with the library of last year."""

    def make(self, draft, target):
        return super().make(draft, target).model_copy(update={"builder": "test 1"})


class ForNone(ForTargets):
    """Builds for no target."""

    def make(self, draft, target):
        raise CompileError("FP32 GEMM is not supported")


class GoodOnceMore(Good):
    """Another release's: its graphs compute the same and have other bytes."""

    def make(self, draft, precision):
        artifact = super().make(draft, precision)
        (draft.path / artifact.file).write_text(f"{precision} anew")
        return artifact


class Broken:
    """Has a bug."""

    def steps(self, bundle, draft, options):
        return [CompileStep("onnx encode fp32", lambda: 1 / 0)]


def table(onnx, tensorrt="Chained"):
    return {"onnx": f"tests.unit.test_compile:{onnx}", "tensorrt": f"tests.unit.test_compile:{tensorrt}"}


@pytest.fixture
def store(tmp_path):
    make_bundle(tmp_path / "tiny")
    return BundleStore(tmp_path / "tiny")


def files(bundle):
    return sorted(file for file in bundle.manifest.files if "/" in file)


def test_publishes_a_version_with_the_artifacts_of_all_compilers(store):
    bundle = compile_bundle(store, CompileOptions(), compilers=table("Good"))
    assert (bundle.version, bundle.manifest.compiled_from, store.current()) == ("tiny/2", 1, 2)
    assert files(bundle) == ["onnx/encode.fp16", "onnx/encode.fp32", "tensorrt/encode.sm_80"]
    assert [artifact.file for artifact in bundle.manifest.artifacts] == ["onnx/encode.fp32", "onnx/encode.fp16", "tensorrt/encode.sm_80"]
    assert bundle.manifest.failed_steps == []


def test_what_was_gone_back_to_meanwhile_stays_current(store):
    make_bundle(store.root)
    good, current = store.versions()[-2:]
    bundle = compile_bundle(
        store, CompileOptions(), compilers=table("Good"), on_step=lambda _: store.current() == current and store.roll_back()
    )
    assert (store.current(), bundle.manifest.version, bundle.manifest.compiled_from) == (good, current + 1, current)


def test_what_became_current_while_the_version_was_opened_stays_so(store, monkeypatch):
    def opened():
        opening = BundleStore.open_last_good(store)
        make_bundle(store.root)
        return opening

    monkeypatch.setattr(store, "open_last_good", opened)
    bundle = compile_bundle(store, CompileOptions(), compilers=table("Good"))
    assert (bundle.manifest.compiled_from, bundle.version, store.current()) == (1, "tiny/3", 2)


def test_of_a_current_version_that_is_refused_the_one_made_of_the_last_good_takes_the_place(store):
    damaged = make_bundle(store.root)
    (damaged.path / WEIGHTS).write_bytes(b"")
    bundle = compile_bundle(store, CompileOptions(), compilers=table("Good"))
    assert (bundle.manifest.compiled_from, store.current()) == (1, bundle.manifest.version)


def test_drops_a_refused_artifact_records_why_and_goes_on(store):
    seen = []
    bundle = compile_bundle(store, CompileOptions(), compilers=table("HalfFails"), on_step=seen.append)
    assert files(bundle) == ["onnx/encode.fp32", "tensorrt/encode.sm_80"]
    assert [(step.step, step.reason) for step in bundle.manifest.failed_steps] == [
        ("onnx encode fp16", "its outputs are 0.5 from the model's")
    ]
    assert [(result.step, bool(result.failure)) for result in seen] == [
        ("onnx encode fp32", False),
        ("onnx encode fp16", True),
        ("tensorrt encode sm_80", False),
    ]


def test_publishes_nothing_where_nothing_compiles(store):
    seen, compilers = [], {"onnx": "no_such_package.export:OnnxCompiler", "tensorrt": "tests.unit.test_compile:Chained"}
    with pytest.raises(CompileError, match="no step made anything, so no version is published beside tiny/1"):
        compile_bundle(store, CompileOptions(), compilers=compilers, on_step=seen.append)
    assert (store.versions(), store.current()) == ([1], 1)
    reasons = {result.step: result.failure for result in seen}
    assert "No module named 'no_such_package'" in reasons["onnx"]
    assert "install genrec with its extra cpu" in reasons["onnx"]
    assert reasons["tensorrt encode sm_80"] == "there is no graph to build from"


def test_torch_serves_where_a_compiler_failed_and_the_reason_is_kept(store):
    compilers = {"onnx": "tests.unit.test_compile:Good", "tensorrt": "no_such_package.export:TensorRTCompiler"}
    bundle = compile_bundle(store, CompileOptions(), compilers=compilers)
    assert (store.current(), files(bundle)) == (2, ["onnx/encode.fp16", "onnx/encode.fp32"])
    assert TorchEncoder().get_availability(bundle).ok
    assert "the step 'tensorrt' failed: No module named 'no_such_package'" in why_missing(bundle, "tensorrt", "encode")
    assert not TensorRTEncoder().get_availability(bundle).ok


def test_a_version_that_lacks_what_served_as_steps_failed_is_not_made_current(store, genrec, monkeypatch):
    compile_bundle(store, CompileOptions(), compilers=table("Good"))
    monkeypatch.setattr(compile_bundle, "__kwdefaults__", {**compile_bundle.__kwdefaults__, "compilers": table("HalfFails")})
    result = genrec("--model-dir", str(store.root), "--precision", "fp32,fp16")
    assert (result.exit_code, store.versions(), store.current()) == (0, [1, 2, 3], 2)
    assert "version 2 stays current: it has artifacts that 3 lacks, as steps failed; to serve this one all the same" in result.output
    monkeypatch.setattr(compile_bundle, "__kwdefaults__", {**compile_bundle.__kwdefaults__, "compilers": table("Good")})
    result = genrec("--model-dir", str(store.root), "--precision", "fp32")
    assert (result.exit_code, store.current()) == (0, 4), "fp16 was not asked for"
    assert "stays" not in result.output


def test_a_version_without_what_was_not_asked_for_is_made_current_though_another_step_failed(store):
    compile_bundle(store, CompileOptions(), compilers=table("Good"))
    compile_bundle(store, CompileOptions(precisions=("fp32", "int8")), compilers=table("Int8Fails"))
    assert (store.versions(), store.current()) == ([1, 2, 3], 3)


def test_a_missing_graph_is_not_explained_by_another_of_the_same_beginning(store):
    bundle = store.open()
    failed = {"onnx rank_append fp16": "parity", "onnx rank": "export"}
    bundle.manifest.failed_steps.extend(FailedStep(step=step, reason=reason) for step, reason in failed.items())
    assert "'onnx rank' failed: export" in why_missing(bundle, "onnx", "rank")
    assert "'onnx rank_append fp16' failed: parity" in why_missing(bundle, "onnx", "rank_append", "fp16")


def test_a_version_nobody_compiled_says_how_to(store):
    assert why_missing(store.open(), "onnx", "encode").endswith(f"run: genrec compile --model-dir {store.root}")


def test_the_engine_builder_says_that_there_is_no_graph_where_the_export_failed(store):
    with store.recompile(store.open()) as draft, pytest.raises(CompileError, match="its export failed or was never run"):
        TensorRTCompiler().steps(store.open(), draft, CompileOptions())


def test_the_engine_builder_says_that_no_architecture_was_named_where_there_is_no_gpu(store, monkeypatch):
    monkeypatch.setattr(build, "_architecture_here", lambda: None)
    with store.recompile(store.open()) as draft, pytest.raises(CompileError, match="none was named to build for"):
        TensorRTCompiler().steps(store.open(), draft, CompileOptions(targets=()))


def test_a_bug_in_a_compiler_stays_loud_and_publishes_nothing(store):
    with pytest.raises(ZeroDivisionError):
        compile_bundle(store, CompileOptions(), compilers=table("Broken"))
    assert store.versions() == [1]


def test_running_one_compiler_keeps_what_the_others_made(store):
    first = compile_bundle(store, CompileOptions(), compilers=table("HalfFails"))
    second = compile_bundle(store, CompileOptions(), only=["tensorrt"], compilers=table("Good"))
    assert (second.version, files(second)) == ("tiny/3", files(first))
    assert second.manifest.failed_steps == first.manifest.failed_steps
    assert second.verified("onnx/encode.fp32").read_text() == "fp32"


def engines(bundle):
    return sorted(artifact.target for artifact in bundle.manifest.artifacts if artifact.kind == "tensorrt")


def for_targets(store, *targets, only=("tensorrt",), onnx="Good", builder="ForTargets"):
    return compile_bundle(store, CompileOptions(targets=targets), only=only, compilers=table(onnx, builder))


def test_engines_for_other_gpus_stay_while_their_graph_does(store):
    for_targets(store, "sm_80", "sm_89", only=())
    second = for_targets(store, "sm_90")
    assert engines(second) == ["sm_80", "sm_89", "sm_90"]
    assert second.verified("tensorrt/encode.sm_89").read_text() == "engine"
    assert engines(for_targets(store, "sm_80", only=())) == ["sm_80", "sm_89", "sm_90"]


def test_engines_for_other_gpus_go_with_the_graph_that_they_were_built_from(store):
    first = for_targets(store, "sm_80", "sm_89", only=())
    second = for_targets(store, "sm_80", only=(), onnx="GoodOnceMore")
    assert (engines(second), files(second)) == (["sm_80"], ["onnx/encode.fp16", "onnx/encode.fp32", "tensorrt/encode.sm_80"])
    (failed,) = second.manifest.failed_steps
    assert failed.step == "tensorrt encode fp32 sm_89"
    cure = f"once this version is promoted, run where that GPU is: genrec compile --model-dir {store.root} --only tensorrt"
    assert failed.reason == f"it was built from an earlier graph; {cure}"
    assert store.current() == first.manifest.version


def test_the_command_says_which_engines_went_with_their_graph_and_how_to_build_them(store, genrec, monkeypatch):
    for_targets(store, "sm_80", "sm_89", only=())
    compilers = table("GoodOnceMore", "ForTargets")
    monkeypatch.setattr(compile_bundle, "__kwdefaults__", {**compile_bundle.__kwdefaults__, "compilers": compilers})
    said = " ".join(genrec("--model-dir", str(store.root), "--targets", "sm_80").output.split())
    assert "tensorrt encode fp32 sm_89: it was built from an earlier graph; once this version is promoted" in said
    assert "version 2 stays current: it has artifacts that 3 lacks, as steps failed" in said
    store.promote(3)
    assert engines(for_targets(store, "sm_89")) == ["sm_80", "sm_89"]
    assert store.current() == 4


def test_an_engine_for_another_gpu_whose_graph_was_not_asked_for_goes_without_a_word(store):
    for_targets(store, "sm_80", only=(), builder="HalvedForTargets")
    second = compile_bundle(store, CompileOptions(("sm_89",), ("fp32",)), compilers=table("Good", "ForTargets"))
    assert (engines(second), second.manifest.failed_steps, store.current()) == (["sm_89"], [], 3)


def test_an_engine_that_was_measured_on_its_gpu_stays_where_the_new_one_could_not_be(store):
    for_targets(store, "sm_89", only=(), builder="Measured")
    for only in (("tensorrt",), ()):
        bundle = for_targets(store, "sm_80", "sm_89", only=only)
        measured = {artifact.target: artifact.measured_on for artifact in bundle.manifest.artifacts if artifact.kind == "tensorrt"}
        assert measured == {"sm_80": "", "sm_89": "NVIDIA L4"}
        assert bundle.verified("tensorrt/encode.sm_89").read_text() == "measured"
        assert (bundle.manifest.failed_steps, store.current()) == ([], bundle.manifest.version)


@pytest.mark.parametrize("changed", ["graph", "library", "file"])
def test_an_engine_that_was_measured_is_replaced_where_its_graph_or_library_is_another_one_or_its_file_is_damaged(store, changed):
    first = for_targets(store, "sm_89", only=(), builder="MeasuredByAnEarlierRelease" if changed == "library" else "Measured")
    if changed == "file":
        (first.path / "tensorrt/encode.sm_89").write_text("MEASURED")
    second = for_targets(store, "sm_89", only=(), onnx="GoodOnceMore" if changed == "graph" else "Good")
    (engine,) = [artifact for artifact in second.manifest.artifacts if artifact.kind == "tensorrt"]
    assert (engine.builder, engine.measured_on) == ("test", "")
    assert second.verified("tensorrt/encode.sm_89").read_text() == "engine"
    assert (second.manifest.failed_steps, store.current()) == ([], 3)


def test_no_engine_stays_for_a_gpu_for_which_it_could_not_be_built_again(store):
    for_targets(store, "sm_80", "sm_89", only=())
    assert engines(for_targets(store, "sm_80", only=(), builder="ForNone")) == ["sm_89"]


def test_an_altered_engine_for_another_gpu_is_left_out_and_the_manifest_says_why(store):
    first = for_targets(store, "sm_80", "sm_89", only=())
    (first.path / "tensorrt/encode.sm_80").write_text("ENGINE")
    second = for_targets(store, "sm_90")
    assert engines(second) == ["sm_89", "sm_90"]
    (failed,) = second.manifest.failed_steps
    assert (failed.step, "checksum" in failed.reason) == ("tensorrt encode fp32 sm_80", True)
    assert store.current() == first.manifest.version


def test_compilers_run_in_the_order_of_the_table_whatever_order_they_are_named_in(store):
    bundle = compile_bundle(store, CompileOptions(), only=["tensorrt", "onnx"], compilers=table("Good"))
    assert bundle.manifest.failed_steps == []
    assert files(bundle) == ["onnx/encode.fp16", "onnx/encode.fp32", "tensorrt/encode.sm_80"]


def test_does_not_keep_what_was_altered_and_says_so(store):
    first = compile_bundle(store, CompileOptions(), compilers=table("Good"))
    (first.path / "tensorrt/encode.sm_80").write_text("ENGINE")
    second = compile_bundle(store, CompileOptions(), only=["onnx"], compilers=table("Good"))
    assert files(second) == ["onnx/encode.fp16", "onnx/encode.fp32"]
    assert [step.step for step in second.manifest.failed_steps] == ["tensorrt encode fp32 sm_80"]
    assert "checksum" in second.manifest.failed_steps[0].reason
    assert store.current() == first.manifest.version


def test_of_what_others_made_the_altered_alone_is_left_out_and_the_command_says_so(store, genrec, monkeypatch):
    first = compile_bundle(store, CompileOptions(), compilers=table("Good"))
    (first.path / "onnx/encode.fp16").write_text("FP16")
    monkeypatch.setattr(compile_bundle, "__kwdefaults__", {**compile_bundle.__kwdefaults__, "compilers": table("Good")})
    result = genrec("--model-dir", str(store.root), "--only", "tensorrt")
    assert files(store.open(3)) == ["onnx/encode.fp32", "tensorrt/encode.sm_80"]
    assert re.search(r"onnx encode fp16: .*checksum", " ".join(result.output.split()))
    assert "version 2 stays current: it has artifacts that 3 lacks, as steps failed" in result.output
    assert store.current() == first.manifest.version


def test_refuses_the_name_of_a_compiler_that_is_not_there_before_doing_anything(store):
    with pytest.raises(UnknownChoice, match="unknown compiler 'onxx'; choose from onnx, tensorrt"):
        compile_bundle(store, CompileOptions(), only=["onxx"])
    assert store.versions() == [1]


@pytest.fixture
def genrec():
    app = Typer()
    app.command("compile")(compile_)
    return lambda *arguments: CliRunner().invoke(app, [*arguments])


def test_the_command_prints_what_became_of_every_step(genrec, store, monkeypatch):
    monkeypatch.setattr(compile_bundle, "__kwdefaults__", {**compile_bundle.__kwdefaults__, "compilers": table("HalfFails")})
    result = genrec("--model-dir", str(store.root), "--precision", "fp32,fp16", "--targets", "sm_80")
    assert result.exit_code == 0
    assert "tiny/2, compiled from version 1" in result.output
    assert re.search(r"onnx encode fp16 .*failed", result.output)
    assert "onnx encode fp16: its outputs are 0.5 from the model's" in result.output


def test_the_command_that_made_nothing_ends_with_status_1(genrec, store, monkeypatch):
    monkeypatch.setattr(compile_bundle, "__kwdefaults__", {**compile_bundle.__kwdefaults__, "compilers": table("HalfFails")})
    result = genrec("--model-dir", str(store.root), "--precision", "fp16")
    assert (result.exit_code, store.versions(), store.current()) == (1, [1], 1)
    assert "no step made anything" in result.output
    assert "onnx encode fp16: its outputs are 0.5 from the model's" in result.output


def test_the_command_refuses_a_precision_it_does_not_know(genrec, store):
    result = genrec("--model-dir", str(store.root), "--precision", "fp8")
    assert isinstance(result.exception, UnknownChoice)
    assert str(result.exception) == "unknown precision 'fp8'; choose from fp16, fp32, int8"
