"""The registry: names to import strings, and what is said where one does not lead anywhere."""

import os

import pytest

from cluster import registry
from cluster.errors import ConfigError, UnknownChoice
from tests.examples import installed


def test_the_configuration_adds_backends_and_wins_over_ours():
    table = registry.backends("encoder", {"mine": "my.module:Mine", "torch": "my.module:BetterTorch"})
    assert table["mine"] == "my.module:Mine"
    assert table["torch"] == "my.module:BetterTorch"
    assert table["onnxruntime"] == registry.BACKENDS["encoder"]["onnxruntime"]


def test_installed_backends_follow_ours_in_the_order_of_their_names_also_those_that_are_installed_meanwhile(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for second, (name, names) in enumerate([("b", ["b"]), ("c", ["b", "c"]), ("a", ["a", "b", "c"])]):
        installed(tmp_path, f"package_{name}", f"encoder.{name} = my:{name}")
        os.utime(tmp_path, (second, second))  # else all three within a tick of the file system's clock
        assert [*registry.backends("encoder")] == [*registry.BACKENDS["encoder"], *names]


def test_an_unknown_stage_is_refused_with_the_stages_there_are():
    with pytest.raises(UnknownChoice, match=r"unknown stage 'decoder'; choose from .*encoder"):
        registry.backends("decoder")


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(UnknownChoice, match=r"unknown encoder 'trt'; choose from .*onnxruntime.*tensorrt.*torch"):
        registry.choose("encoder", registry.backends("encoder"), "trt")


def test_a_name_is_imported_when_it_is_chosen():
    assert registry.choose("thing", {"path": "pathlib:PurePath"}, "path").__name__ == "PurePath"


@pytest.mark.parametrize("import_string", ["pathlib", "pathlib:", ":Path", ""])
def test_an_import_string_without_module_or_name_is_refused(import_string: str):
    with pytest.raises(ConfigError, match="not of the form 'module:name'"):
        registry.resolve(import_string)


def test_a_name_that_the_module_lacks_is_refused():
    with pytest.raises(ConfigError, match="module 'pathlib' has no 'Pathway'"):
        registry.resolve("pathlib:Pathway")


def test_a_missing_package_is_named():
    with pytest.raises(ModuleNotFoundError, match="no_such_engine"):
        registry.resolve("no_such_engine.encoder:Encoder")
