"""Servers as one would write them in an afternoon: the same model, the same requests, the same answers by strategy `retrieval`.

    python -m benchmarks.naive_servers fastapi --model-dir models/ml-100k --port 8021     one process: FastAPI, PyTorch in eager mode
    python -m benchmarks.naive_servers chain   --model-dir models/ml-100k --port 8021     Ray Serve: ingress -> encoder -> ranker
    python -m benchmarks.naive_servers constant --port 8021                               Ray Serve: an answer that is always the same

What they lack: batching, compiled engines, kept states, fallbacks, deadlines, admission, anything to watch them by. Both check requests by
the messages genrec checks them by and answer in its form, so that only the serving differs. Serve is left at its defaults.
"""

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import ray
import torch
import typer
import uvicorn
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.values import Recommendation, RecommendRequest, ScoredItem, StageReport
from deployments.http.answer_json import answer_json
from deployments.http.messages import RecommendIn, RecommendOut
from integrations.hstu.limits import limits
from integrations.hstu.user_behavior_schema import collate
from integrations.hstu.weights import load_model
from pipelines.history import resolve

State = list[float]


class EagerEncoder:
    """A request's user state: the model's output at the last event, one request at a time."""

    def __init__(self, model_dir: str) -> None:
        self._bundle = BundleStore(Path(model_dir)).open()
        self._model = load_model(self._bundle).eval()
        self._longest = limits(self._bundle.manifest.model).max_history
        self._catalogue = self._bundle.catalogue

    def encode(self, request: RecommendRequest) -> tuple[State, float]:
        """The state (D,), and the milliseconds it took."""
        began = time.perf_counter()
        tensors = collate([resolve(request, self._catalogue).sequence], self._longest).tensors()
        with torch.inference_mode():
            states_BLD = self._model(tensors["items"], tensors["times"], tensors["next_times"])
        state: State = states_BLD[0, int(tensors["lengths"][0]) - 1].tolist()
        return state, (time.perf_counter() - began) * 1e3


class Ranker:
    """The nearest items to a state, with their titles."""

    def __init__(self, model_dir: str) -> None:
        self._bundle: Bundle = BundleStore(Path(model_dir)).open()
        self._catalogue, self._vectors = self._bundle.catalogue, torch.from_numpy(np.array(self._bundle.item_vectors))

    def rank(self, request: RecommendRequest, state: State, encode_ms: float) -> RecommendOut:
        """The whole answer. Its stage `encode` contains the search for the nearest items, as genrec's does."""
        began = time.perf_counter()
        resolved = resolve(request, self._catalogue)
        scores = self._vectors @ torch.tensor(state)
        scores[0] = -torch.inf
        scores[torch.from_numpy(resolved.excluded.astype(np.int64))] = -torch.inf
        best = torch.topk(scores, min(request.k, len(self._catalogue)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        items = tuple(ScoredItem(self._catalogue[index], score, "encode") for index, score in pairs)
        reports = (StageReport("encode", "eager", encode_ms + (time.perf_counter() - began) * 1e3, ()),)
        answer = Recommendation(request.user_id, items, reports, self._bundle.version, degraded=False, unknown_items=resolved.unknown_items)
        return RecommendOut.model_validate_json(answer_json(answer))


def one_process(model_dir: str) -> FastAPI:
    """FastAPI calls the function in a thread of its pool, as it does with any that is not `async`."""
    api, encoder, ranker = FastAPI(), EagerEncoder(model_dir), Ranker(model_dir)

    @api.post("/v1/recommend")
    def recommend(message: RecommendIn) -> RecommendOut:
        request = message.to_value()
        return ranker.rank(request, *encoder.encode(request))

    @api.get("/readyz")
    def readyz() -> dict[str, bool]:
        return {"ready": True}

    return api


def chain(model_dir: str) -> Application:
    """Three deployments, a call each, at Serve's defaults."""
    api = FastAPI()

    class Ingress:
        def __init__(self, encoder: Any, ranker: Any) -> None:
            self._encoder, self._ranker = encoder, ranker

        @api.post("/v1/recommend")
        async def recommend(self, message: RecommendIn) -> RecommendOut:
            request = message.to_value()
            state, encode_ms = await self._encoder.encode.remote(request)
            found: RecommendOut = await self._ranker.rank.remote(request, state, encode_ms)
            return found

        @api.get("/readyz")
        async def readyz(self) -> dict[str, bool]:
            return {"ready": True}

    encoder = serve.deployment(name="encoder")(EagerEncoder).bind(model_dir)
    ranker = serve.deployment(name="ranker")(Ranker).bind(model_dir)
    return serve.deployment(name="ingress")(serve.ingress(api)(Ingress)).bind(encoder, ranker)


ANSWER = b'{"items": "' + b"x" * 1700 + b'"}'


async def answer_constantly(scope: Scope, receive: Receive, send: Send) -> None:
    """What Serve itself costs: reads the body, and sends as many bytes as an answer of ten items has."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body", False):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


class Constant:
    """A deployment that has it as its ASGI application."""

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return answer_constantly


def constant() -> Application:
    """One replica that computes nothing, as the gateway is deployed."""
    return serve.deployment(name="gateway", max_ongoing_requests=1000)(serve.ingress()(Constant)).bind()


def main(
    kind: Annotated[Literal["fastapi", "chain", "constant"], typer.Argument()],
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    port: Annotated[int, typer.Option()] = 8021,
) -> None:
    """Serve until Ctrl-C."""
    model = str(model_dir.absolute())
    if kind == "fastapi":
        uvicorn.run(one_process(model), host="127.0.0.1", port=port, access_log=False)
        return
    ray.init(address="local", num_cpus=8)  # a replica asks for a core; none may wait for one that Ray thinks is taken
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    quiet = {"enable_access_log": False}
    serve.run(constant() if kind == "constant" else chain(model), blocking=True, logging_config=quiet if kind == "constant" else None)


if __name__ == "__main__":
    typer.run(main)
