"""`genrec init` writes what a service of one's own is configured and started with."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.config import parse
from cluster.config_file import read
from cluster.errors import ConfigError
from cluster.events.ledger import split_ledger
from deployments import cli
from deployments.cli import main
from deployments.cli.init import EXAMPLE_HOME, EXAMPLE_MODEL, filled_in, init
from deployments.shipped import DEMO_MODEL, LAUNCH, RAY_CONFIG
from tests.disks import largest_file
from tests.documents import ROOT, Command, problem

FILES = {path.name for path in (ROOT / "cluster" / "launch").iterdir()}
WITHOUT_ENGINES = """
import sys
from deployments.cli import main
sys.argv = ["genrec", "init", sys.argv[1]]
try:
    main()
except SystemExit as ended:
    assert not ended.code
assert not {"torch", "ray"} & set(sys.modules)
"""


def test_a_file_that_a_command_cannot_have_is_one_line_and_no_trace(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "a_file").write_text("")
    command = ["bench", "interleave", "--baseline", "true", "--candidate", "true", "--rounds", "1", "--warm-up", "0"]
    files = ["--json-baseline", str(tmp_path / "a_file/new.json"), "--json-candidate", str(tmp_path / "other.json")]
    monkeypatch.setattr(sys, "argv", ["genrec", *command, *files])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"genrec: {tmp_path}/a_file is a file, and no directory; name another one\n"


def test_a_full_disk_is_one_line_and_no_trace(tmp_path: Path, monkeypatch, capsys):
    command = ["bench", "interleave", "--baseline", "true", "--candidate", "true", "--rounds", "1", "--warm-up", "0"]
    files = ["--json-baseline", "/dev/full", "--json-candidate", str(tmp_path / "other.json")]
    monkeypatch.setattr(sys, "argv", ["genrec", *command, *files])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "genrec: [Errno 28] No space left on device: '/dev/full'; make room\n"


@pytest.mark.parametrize(
    ("command", "empty"),
    [
        (["init", ""], "the argument after 'init'"),
        (["data", "inspect", "table", "--path", ""], "--path"),
        (["train", "table", "--path", "events.csv", "--model-dir", ""], "--model-dir"),
        (["events", "import", "--as-trained=", "--url", "sqlite:///events.db"], "--as-trained"),
        (["config", "-c", ""], "-c"),
        (["config", "--config="], "--config"),
        (["bench", "compare", "old.json", ""], "the argument after 'old.json'"),
        (["models", "promote", "1", "--model-dir", ""], "--model-dir"),
    ],
)
def test_an_empty_path_is_not_the_current_directory(tmp_path: Path, monkeypatch, capsys, command, empty):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["genrec", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"genrec: {empty} is empty: is a variable of the shell not set?")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_text_is_taken_where_it_is_no_path(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["genrec", "models", "rollback", "--model-dir", str(tmp_path), "--reason", ""])
    with pytest.raises(SystemExit):
        main()
    assert "no model has been published" in capsys.readouterr().err


def test_an_engine_that_a_command_needs_and_is_not_installed_is_one_line_and_no_trace(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "needs_an_engine.py").write_text("import no_such_engine")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cli, "COMMANDS", {"train": "needs_an_engine:train"})
    monkeypatch.setattr(sys, "argv", ["genrec", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("genrec: No module named 'no_such_engine'; install genrec with its extra cpu")


def test_every_configuration_serves_the_model_that_the_directory_is_named_after(tmp_path: Path):
    init(tmp_path / "shop")
    assert read(tmp_path / "shop/ray_config.yaml").model_dir == Path("models/shop")
    assert read(tmp_path / "shop/one_machine.yaml").model_dir == Path("models/shop")
    manifests = yaml.safe_load_all((tmp_path / "shop/kuberay.yaml").read_text())
    (text,) = [one["spec"]["serveConfigV2"] for one in manifests if one["kind"] == "RayService"]
    assert parse(yaml.safe_load(text)["applications"][0]["args"]).model_dir == Path("/models/shop")


def test_all_files_are_written_without_a_path_of_the_example(tmp_path: Path):
    init(tmp_path / "shop")
    texts = {path.name: path.read_text() for path in (tmp_path / "shop").iterdir()}
    assert texts.keys() == FILES
    assert "ray_config.yaml" in texts
    for example in (EXAMPLE_MODEL, EXAMPLE_HOME, "cluster/launch/"):
        assert [name for name, text in texts.items() if example in text] == []


@pytest.mark.parametrize("directory", ["/srv/shop", "/opt/genrec/shop", "/srv/models/ml-100k/shop"])
def test_an_installation_at_the_examples_path_keeps_its_path(directory: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", f"{EXAMPLE_HOME}/.venv/bin/python")
    monkeypatch.setattr("shutil.which", lambda name: f"{EXAMPLE_HOME}/.venv/bin/{name}")
    unit = filled_in((LAUNCH / "genrec.service").read_text(), Path(directory))
    (command,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    assert command.startswith(f"ExecStart={EXAMPLE_HOME}/.venv/bin/genrec serve ")
    assert f"WorkingDirectory={directory}\n" in unit


def test_the_unit_starts_genrec_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    beside, elsewhere = (tmp_path / name / "genrec" for name in ("bin", "scripts"))
    monkeypatch.setattr(sys, "executable", str(beside.with_name("python")))
    monkeypatch.setenv("PATH", str(elsewhere.parent))
    with pytest.raises(ConfigError, match=rf"`genrec` is neither {beside} nor on the search path; have it on PATH"):
        init(tmp_path / "none")
    for command, home in ((elsewhere, "one"), (beside, "two")):
        command.parent.mkdir()
        command.touch(mode=0o755)
        init(tmp_path / home)
        assert f"\nExecStart={command} serve " in (tmp_path / home / "genrec.service").read_text()
    assert not (tmp_path / "none").exists()


def test_each_postgresql_that_a_launch_file_names_has_a_ledger_of_erasures():
    files = [*LAUNCH.iterdir(), ROOT / "docs" / "deploy.md"]
    urls = [(file.name, url) for file in files for url in re.findall(r'postgresql://[^\s}`"]+', file.read_text())]
    assert {name for name, _ in urls} == {"kuberay.yaml", "compose.yaml", "ray_config.yaml", "deploy.md"}
    assert [(name, url) for name, url in urls if split_ledger(url)[1] is None] == []
    mappings = [found for file in files for found in re.findall(r"\{url: [^}]*\}", file.read_text())]
    assert {type(yaml.safe_load(mapping)["url"]) for mapping in mappings} == {str}, "a question mark has to stand in quotes"


def test_the_example_paths_that_are_filled_in_stand_in_the_files():
    text = "".join(path.read_text() for path in LAUNCH.iterdir())
    assert f"{EXAMPLE_HOME}/.venv/bin/genrec" in text
    assert EXAMPLE_MODEL in text


def test_the_commands_that_come_next_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    init(tmp_path / "shop")
    printed = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("  genrec ")]
    assert [words[1] for words in printed] == ["train", "compile", "serve"]
    assert [problem(Command(tuple(words[1:]), whole=True)) for words in printed] == ["", "", ""]


def test_a_file_that_is_there_is_named_and_nothing_is_written(tmp_path: Path):
    (tmp_path / "compose.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"already has compose\.yaml; nothing was written: move them away"):
        init(tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("compose.yaml", "mine")]


def test_a_directory_with_tables_in_it_gets_the_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "events.csv").write_text("")
    monkeypatch.chdir(tmp_path)
    init(Path())
    assert read(Path("one_machine.yaml")).model_dir == Path(f"models/{tmp_path.name}")


@pytest.mark.parametrize(("directory", "message"), [("my shop", "'my shop' cannot be a model's name"), ("50%/shop", "cannot name")])
def test_a_name_that_the_files_cannot_hold_is_refused(directory: str, message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        init(tmp_path / directory)
    assert list(tmp_path.iterdir()) == []


def test_an_installation_that_a_unit_cannot_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/srv/my venv/bin/python")
    monkeypatch.setattr("shutil.which", lambda name: f"/srv/my venv/bin/{name}")
    with pytest.raises(ConfigError, match=r"/srv/my venv/bin/genrec has a space, .*; install genrec elsewhere"):
        init(tmp_path / "shop")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"shop cannot be written: .* name another directory"):
        init(tmp_path / "file" / "shop")


def test_a_disk_that_does_not_take_all_files_is_told_and_gets_none(tmp_path: Path):
    sizes = sorted((LAUNCH / name).stat().st_size for name in FILES)
    with largest_file(sizes[-1] // 2), pytest.raises(ConfigError, match=r"cannot be written: .*; make room"):
        init(tmp_path / "shop")
    assert list((tmp_path / "shop").iterdir()) == []
    init(tmp_path / "shop")


def test_it_loads_neither_torch_nor_ray(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", WITHOUT_ENGINES, str(tmp_path / "shop")], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_shipped_files_have_one_source():
    assert RAY_CONFIG.resolve() == ROOT / "ray_config.yaml"
    assert DEMO_MODEL.resolve() == ROOT / "examples" / "ml-100k"
