"""How many of genrec's functions a request walks through before an engine runs, and which coroutines wait for it then.

    python -m benchmarks.hops                        # with the demo's model (run `make demo ONCE=1` before)
    python -m benchmarks.hops --names                # each function, in the order in which it is called first

One warm POST /v1/recommend, strategy retrieval, split, without a cache; Ray's remote call is replaced by a direct one. `sys.setprofile`
counts the distinct functions (file and qualified name) of the four packages that are called until the engine's `batch_infer` is.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from benchmarks.load_bodies import bodies
from cluster.config import Settings, parse
from cluster.stages import STAGES
from deployments.fleet.heartbeat import Heartbeat
from deployments.fleet.switchboard import SwitchboardDeployment
from deployments.gateway import Gateway
from deployments.http.exchange import HttpRequest
from deployments.replicas.encoder import Encoder
from deployments.replicas.generator import Generator
from deployments.replicas.ranker import Ranker
from deployments.stages import SplitStages
from tests.fakes.handles import Handle

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cluster", "deployments", "integrations", "pipelines")
WARM_UP = 20


class Walk:
    """The functions that were called while `on`, until `batch_infer`, and the chain of coroutines that waited at that moment."""

    def __init__(self, request: str) -> None:
        self.functions: dict[tuple[str, str], None] = {}
        self.waiting: list[str] = []
        self.on = False
        self._request = request

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.on or event != "call":
            return
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in PACKAGES:
            return
        if frame.f_code.co_name == "batch_infer":
            self.on = False
            self.waiting = list(self._chain())
        else:
            self.functions[str(path.relative_to(ROOT)), frame.f_code.co_qualname] = None

    def _chain(self) -> Iterator[str]:
        """From the task of the request inward, by what each coroutine awaits."""
        (task,) = (one for one in asyncio.all_tasks(self.loop) if one.get_name() == self._request)
        waits: Any = task.get_coro()
        while waits is not None:
            name = getattr(waits, "__qualname__", "")
            if name and not name.startswith("Walk."):
                yield name
            waits = getattr(waits, "cr_await", None) or getattr(waits, "ag_await", None)

    async def of(self, gateway: Gateway, encoder: Encoder, body: bytes) -> None:
        """Walk with one request."""
        self.loop = asyncio.get_running_loop()
        (model,) = encoder._models.models  # noqa: SLF001 - the profile has to be set in the engine's own thread
        await model.controller.thread.run(lambda: sys.setprofile(self))
        sys.setprofile(self)
        self.on = True
        answered = await asyncio.create_task(gateway.exchange(HttpRequest("POST", "/v1/recommend", body=body)), name=self._request)
        sys.setprofile(None)
        if answered.status != 200:
            raise SystemExit(f"the request was answered {answered.status}: {answered.body!r}")


async def walked(settings: Settings, body: bytes) -> Walk:
    """A gateway and its stages in this process, warmed up, and one request's walk through them."""
    board: Any = Handle(SwitchboardDeployment(settings.model_dump(mode="json")))
    encoder, generator, ranker = (Heartbeat(settings, board, stage) for stage in STAGES)
    stages = Encoder(settings, encoder), Generator(settings, generator), Ranker(settings, ranker)
    for stage in stages:
        await stage.start()
    handles: list[Any] = [Handle(stage) for stage in stages]
    gateway = Gateway(settings, board, Heartbeat(settings, board, "hops"), SplitStages(*handles))
    await gateway.start()
    for _ in range(WARM_UP):
        await gateway.exchange(HttpRequest("POST", "/v1/recommend", body=body))
    walk = Walk("the request")
    await walk.of(gateway, stages[0], body)
    await gateway.close()
    for stage in stages:
        await stage.close()
    return walk


def main(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    names: Annotated[bool, typer.Option("--names", help="print every function")] = False,
) -> None:
    """Count and print."""
    settings = parse({"model_dir": str(model_dir), "events": {"enabled": False}, "generator": {"order": ["torch_beam"]}})
    walk = asyncio.run(walked(settings, bodies(model_dir, strategy="retrieval", cache="bypass")[0].encode()))
    files = {file for file, _ in walk.functions}
    if names:
        for file, name in walk.functions:
            print(f"{file}: {name}")
    print(f"{len(walk.functions)} functions in {len(files)} files before the engine runs; {len(walk.waiting)} coroutines wait:")
    print(" -> ".join(walk.waiting))


if __name__ == "__main__":
    typer.run(main)
