"""What docs/architecture.md says of the coroutines that wait for an engine is what `benchmarks.hops` finds."""

import re
from pathlib import Path

from benchmarks.hops import walked
from benchmarks.load_bodies import bodies
from cluster.config import parse
from tests.bundles import make_complete_bundle

PAGE = Path(__file__).resolve().parents[2] / "docs/architecture.md"


def told() -> list[str]:
    """The coroutines in the first column of the page's table."""
    section = PAGE.read_text().partition("### Why each await is there")[2]
    return [name for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`([^`]+)`", cell)]


async def test_the_page_names_each_coroutine_that_waits_while_an_engine_runs(tmp_path):
    make_complete_bundle(tmp_path / "models")
    settings = parse({"model_dir": str(tmp_path / "models"), "events": {"enabled": False}, "generator": {"order": ["torch_beam"]}})
    walk = await walked(settings, bodies(tmp_path / "models", strategy="retrieval", cache="bypass")[0].encode())
    assert walk.waiting == told()
    assert ("cluster/engines/controller.py", "FrameworkController.call") in walk.functions
