"""`genrec backends` with a model, without one, and with a configuration of one's own."""

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cluster.errors import BundleError
from deployments.cli import backends
from tests.bundles import make_bundle
from tests.examples import installed

app = typer.Typer()
app.command()(backends.backends)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")


def genrec_backends(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def by_name(output: str) -> dict[str, dict]:
    return {backend["name"]: backend for backend in json.loads(output)["stages"][0]["backends"]}


def test_says_for_a_model_which_engines_can_serve_it_and_why_others_cannot(tmp_path: Path):
    make_bundle(tmp_path / "tiny")
    output = genrec_backends("--model-dir", "tiny", "--json")
    listed, shown = by_name(output), json.loads(output)
    assert shown["model_version"] == "tiny/1"
    assert (listed["torch"]["available"], listed["torch"]["rank"]) == (True, 2)
    assert listed["onnxruntime"]["available"] is False
    assert listed["onnxruntime"]["reason"].endswith("run: genrec compile --model-dir tiny")
    assert listed["torch_compiled"]["rank"] is listed["openvino"]["rank"] is None
    assert shown["stages"][0]["explanation"].startswith("encoder=torch (tensorrt: ")


def test_prints_a_table(tmp_path: Path):
    make_bundle(tmp_path / "tiny")
    output = genrec_backends("--model-dir", "tiny")
    assert "backends for tiny/1" in output
    assert "torch_compiled" in output
    assert "encoder=torch (" in output


def test_without_a_model_it_says_what_it_could_not_probe():
    assert "nothing is published in models/ml-100k, so only imports were tried" in genrec_backends()
    listed = by_name(genrec_backends("--json"))
    assert (listed["torch"]["available"], listed["torch"]["reason"]) == (None, "not probed without a model")


def test_a_backend_and_an_order_of_ones_own_come_from_the_configuration(tmp_path: Path):
    make_bundle(tmp_path / "tiny")
    encoder = {"backends": {"mine": "no_such_package.encoder:Mine"}, "order": ["mine", "torch"], "disabled": ["torch"]}
    args = {"model_dir": "tiny", "encoder": encoder}
    (tmp_path / "ray_config.yaml").write_text(json.dumps({"applications": [{"args": args}]}))
    listed = by_name(genrec_backends("--json"))
    assert listed["mine"]["reason"] == "no_such_package.encoder:Mine cannot be imported: No module named 'no_such_package'"
    assert (listed["torch"]["rank"], listed["torch"]["available"], listed["torch"]["reason"]) == (1, True, "switched off by the operator")


def test_a_name_with_brackets_is_shown_as_it_is(tmp_path: Path):
    encoder = {"backends": {"mine[gpu]": "no_such_package.encoder:Mine"}, "order": ["mine[gpu]", "torch"]}
    (tmp_path / "ray_config.yaml").write_text(json.dumps({"applications": [{"args": {"encoder": encoder}}]}))
    assert "│ mine[gpu] " in genrec_backends()


def test_of_two_packages_with_an_entry_point_of_one_name_one_is_used_wherever_they_lie_and_it_is_told(tmp_path: Path, monkeypatch):
    for package in ("zeta", "alpha", "alike"):
        installed(tmp_path / package, package, f"encoder.mine = {'zeta' if package == 'zeta' else 'alpha'}:Mine")
    for packages in (("zeta", "alpha", "alike"), ("alike", "alpha", "zeta")):
        for package in packages:
            monkeypatch.syspath_prepend(tmp_path / package)
        result = CliRunner().invoke(app, ["--json"])
        assert by_name(result.stdout)["mine"]["import_string"] == "alpha:Mine"
        assert "entry point 'encoder.mine' of zeta (zeta:Mine) is not used: alike has one of that name" in result.stderr
        assert result.stderr.count("is not used") == 1


def test_an_entry_point_of_no_stage_is_named_with_the_stages(tmp_path: Path, monkeypatch):
    installed(tmp_path / "site", "typo", "encodr.mean = typo:Mean")
    monkeypatch.syspath_prepend(tmp_path / "site")
    result = CliRunner().invoke(app, [])
    assert "'encodr.mean' of genrec.backends adds no backend; name it by its stage (encoder, ranker, generator)" in result.stderr


def test_a_model_directory_that_is_not_there_is_an_error():
    with pytest.raises(BundleError, match="no model has been published in nowhere"):
        genrec_backends("--model-dir", "nowhere")


def test_a_module_in_the_current_directory_is_found_as_by_genrec_serve(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "lies_beside.py").write_text("from tests.broken_backends import Sound as Mine\n")
    encoder = {"backends": {"mine": "lies_beside:Mine"}, "order": ["mine", "torch"]}
    (tmp_path / "ray_config.yaml").write_text(json.dumps({"applications": [{"args": {"encoder": encoder}}]}))
    assert by_name(genrec_backends("--json"))["mine"]["reason"] == "not probed without a model"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("class Mine(\n", "cannot be imported: SyntaxError: "),
        ("Mine = undefined\n", "cannot be imported: NameError: name 'undefined' is not defined"),
        ("import sys\nsys.exit('no licence')\n", "cannot be imported: SystemExit: no licence"),
    ],
)
def test_a_module_that_breaks_is_listed_with_the_reason(tmp_path: Path, content, reason):
    (tmp_path / f"breaks_{len(content)}.py").write_text(content)
    encoder = {"backends": {"mine": f"breaks_{len(content)}:Mine"}, "order": ["mine", "torch"]}
    (tmp_path / "ray_config.yaml").write_text(json.dumps({"applications": [{"args": {"encoder": encoder}}]}))
    listed = by_name(genrec_backends("--json"))
    assert (listed["mine"]["available"], listed["mine"]["reason"][: len(reason)]) == (False, reason)
