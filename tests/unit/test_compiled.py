"""The artifacts that tests share: as those that the compilers would make, and never those of something else."""

import os
import shutil
import time
from pathlib import Path

import pytest

import tests.compiled
from cluster.bundle_store import BundleStore
from cluster.compilation import CompileOptions
from pipelines.compile import compile_bundle
from tests.bundles import make_bundle
from tests.compiled import CODE, ROOT, compiled, digest
from tests.unit.test_compile import table

OPTIONS = CompileOptions(targets=("sm_80",), precisions=("fp32",))


@pytest.fixture
def compilations(tmp_path, monkeypatch):
    """The models that were really compiled, by the small compilers of test_compile.py."""
    made = []

    def counted(store, options, only=(), compilers="Good"):
        made.append(store.root.parent.name)
        return compile_bundle(store, options, only=only, compilers=table(compilers if options.precisions == ("fp32",) else "HalfFails"))

    monkeypatch.setattr(tests.compiled, "compile_bundle", counted)
    monkeypatch.setattr(tests.compiled, "DIRECTORY", tmp_path / "kept")
    return made


def model(tmp_path, name, **config):
    make_bundle(tmp_path / name / "tiny", **config)
    return tmp_path / name / "tiny"


def test_the_same_model_is_compiled_once_and_is_the_same_bundle(tmp_path, compilations):
    first, second = (compiled(model(tmp_path, name), OPTIONS) for name in "ab")
    assert compilations == ["a"]
    assert second.manifest.model_copy(update={"created": first.manifest.created}) == first.manifest
    assert {artifact.kind for artifact in second.manifest.artifacts} == {"onnx", "tensorrt"}
    assert all(second.verified(file).read_bytes() == first.verified(file).read_bytes() for file in second.manifest.files)


def test_another_model_or_other_options_are_compiled_for_themselves(tmp_path, compilations):
    compiled(model(tmp_path, "a"), OPTIONS)
    compiled(model(tmp_path, "b", seed=1), OPTIONS)
    compiled(model(tmp_path, "c"), CompileOptions(targets=("sm_89",), precisions=("fp32",)))
    compiled(model(tmp_path, "d"), OPTIONS, only=["onnx"])
    assert compilations == ["a", "b", "c", "d"]


def test_nothing_is_kept_of_a_compilation_that_failed_in_part(tmp_path, compilations):
    both = CompileOptions(targets=("sm_80",), precisions=("fp32", "fp16"))
    assert [bool(compiled(model(tmp_path, name), both).manifest.failed_steps) for name in "ab"] == [True, True]
    assert compilations == ["a", "b"]


def test_what_was_made_by_other_code_or_packages_is_not_found(tmp_path, monkeypatch):
    bundle, code = BundleStore(model(tmp_path, "a")).open(), tmp_path / "code"
    for path in CODE:
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        (code / path).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / path, code / path)
    digests = [digest(bundle, OPTIONS)]
    monkeypatch.setattr(tests.compiled, "ROOT", code)
    assert digest(bundle, OPTIONS) == digests[0]
    for path in ("integrations/onnx/half.py", "integrations/hstu/model.py", "pipelines/compile.py"):
        (code / path).write_text("# other\n")
        digests.append(digest(bundle, OPTIONS))
    monkeypatch.setattr(tests.compiled, "_packages", lambda: ["torch 99"])
    digests.append(digest(bundle, OPTIONS))
    assert len(set(digests)) == 5


def test_what_was_not_asked_for_in_a_day_goes(tmp_path, compilations):
    compiled(model(tmp_path, "a"), OPTIONS)
    (kept,) = (entry for entry in (tmp_path / "kept").iterdir() if entry.is_dir())
    os.utime(kept, (time.time() - 25 * 3600,) * 2)
    compiled(model(tmp_path, "b", seed=1), OPTIONS)
    compiled(model(tmp_path, "c"), OPTIONS)
    assert compilations == ["a", "b", "c"]


def test_a_draft_that_another_process_puts_in_its_place_meanwhile_is_let_be(tmp_path, compilations, monkeypatch):
    draft, whole, is_dir = tmp_path / "kept" / "draft", tmp_path / "kept" / "whole", Path.is_dir

    def seen_before_it_goes(path):
        found = is_dir(path)
        if found and path == draft:
            draft.rename(whole)
        return found

    draft.mkdir(parents=True)
    monkeypatch.setattr(Path, "is_dir", seen_before_it_goes)
    compiled(model(tmp_path, "a"), OPTIONS)
    assert (compilations, is_dir(whole)) == (["a"], True)
