"""A backend from outside the tree, registered without editing a file of genrec: the example, by configuration and by entry point."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cluster import registry
from cluster.config import parse
from cluster.engines.controller import FrameworkController
from cluster.engines.roster import Choice
from cluster.engines.stage_rules import encoder_rules
from cluster.errors import ConfigError
from cluster.values import EncodeRequest
from tests.bundles import make_bundle, random_sequence
from tests.examples import installed

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/own_backend.py"


def python(*arguments: object, path: Path) -> str:
    """What a fresh interpreter prints that imports genrec from this checkout and anything else from `path`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    command = [sys.executable, *(str(argument) for argument in arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs_and_is_chosen(tmp_path: Path):
    make_bundle(tmp_path / "tiny")
    output = python(EXAMPLE, tmp_path / "tiny", path=tmp_path)
    assert output.startswith("encoder=mean\n")
    assert "next, says mean: Item " in output


def test_the_example_is_a_backend_in_under_thirty_lines():
    _, docstring, rest = EXAMPLE.read_text().split('"""', 2)
    assert "genrec.backends" in docstring
    assert len(rest.split("\nif __name__", maxsplit=1)[0].strip().splitlines()) < 30


async def test_a_backend_named_in_the_configuration_serves_and_ours_takes_over_when_it_is_switched_off(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    table = registry.backends("encoder", {"mean": "own_backend:MeanEncoder"})
    bundle = make_bundle(tmp_path / "tiny")
    controller = FrameworkController("encoder", Choice(table, ["mean", "torch"]), bundle, encoder_rules(len(bundle.catalogue)))
    request = EncodeRequest(random_sequence(12), top_n=10)
    served = await controller.call_one(request)
    assert (served.backend, len(served.answer.items)) == ("mean", 10)
    controller.disable("mean")
    served = await controller.call_one(request)
    assert (served.backend, served.fallback_from[0].backend) == ("torch", "mean")


async def test_fastest_does_not_choose_it_because_it_is_not_the_same_model(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    table = registry.backends("encoder", {"mean": "own_backend:MeanEncoder"})
    bundle = make_bundle(tmp_path / "tiny")
    choice = Choice(table, ["mean", "torch"], selection="fastest")
    controller = FrameworkController("encoder", choice, bundle, encoder_rules(len(bundle.catalogue)))
    explanation = await controller.warm_up([EncodeRequest(random_sequence(length), top_n=10) for length in (3, 20)])
    assert explanation.startswith(("encoder=torch", "encoder=none"))
    mean = next(backend for backend in controller.snapshot().backends if backend.name == "mean")
    assert "disagrees with torch: its user state is" in mean.reason


def test_a_package_registers_a_backend_by_its_entry_point(tmp_path: Path):
    installed(tmp_path / "site", "own_backend", "encoder.mean = own_backend:MeanEncoder")
    (tmp_path / "site/own_backend.py").write_text(EXAMPLE.read_text())
    make_bundle(tmp_path / "tiny")
    (tmp_path / "ask.py").write_text(
        textwrap.dedent("""\
            import asyncio
            import sys
            from pathlib import Path
            from cluster.bundle_store import BundleStore
            from cluster.config import parse
            from cluster.engines.controller import FrameworkController
            from cluster.engines.stage_rules import encoder_rules
            from cluster.values import EncodeRequest
            from tests.bundles import random_sequence

            settings = parse({"encoder": {"order": ["mean", "torch"]}})
            bundle = BundleStore(Path(sys.argv[1])).open()
            controller = FrameworkController.configured(settings.encoder, bundle, encoder_rules(len(bundle.catalogue)))
            served = asyncio.run(controller.call_one(EncodeRequest(random_sequence(5), top_n=3)))
            print(served.backend, len(served.answer.items), sys.modules["own_backend"].__file__)
            """)
    )
    backend, items, file = python(tmp_path / "ask.py", tmp_path / "tiny", path=tmp_path / "site").split()
    assert (backend, items, Path(file)) == ("mean", "3", tmp_path / "site/own_backend.py")


def test_its_name_is_unknown_where_the_package_is_not_installed():
    with pytest.raises(ConfigError, match="order names mean, but no such encoder is registered"):
        parse({"encoder": {"order": ["mean", "torch"]}})
