"""Real servers on a port of their own: the example's server of the Open Inference Protocol, and others that misbehave."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from genrec_kserve.server import application

from integrations.hstu.weights import load_model
from integrations.onnx.export import export
from integrations.onnx.graphs import graphs
from tests.ports import free_port


def encode_graph(bundle, path: Path) -> Path:
    """The bundle's `encode` graph, exported."""
    if not path.exists():
        model = load_model(bundle)
        (graph,) = [graph for graph in graphs(model, bundle.prompt_length) if graph.name == "encode"]
        export(graph, model.config, path)
    return path


@contextmanager
def running(graph: Path, name: str) -> Iterator[str]:
    """The URL of the example's server over a graph."""
    with running_app(application(graph, name)) as url:
        yield url


@contextmanager
def running_app(app: Any) -> Iterator[str]:
    """The URL of any ASGI application."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 300
    while not server.started:
        assert thread.is_alive(), "the server ended"
        assert time.monotonic() < until, "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(300)
