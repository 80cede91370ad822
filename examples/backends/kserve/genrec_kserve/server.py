"""A small server of the Open Inference Protocol v2 over ONNX Runtime, to try the backend without Triton:

python -m genrec_kserve.server models/ml-100k/3/onnx/encode.fp32.onnx --name ml-100k-3 --port 8000
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnxruntime
import typer
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from starlette.concurrency import run_in_threadpool

from genrec_kserve import wire

DATATYPES = {"tensor(int64)": "INT64", "tensor(int32)": "INT32", "tensor(float)": "FP32"}
BAD_REQUEST, NOT_FOUND = 400, 404


def application(graph: Path, name: str) -> FastAPI:
    """Serve one graph under one name."""
    session, app = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"]), FastAPI(title=f"{name} over v2")

    def known(model: str) -> None:
        if model != name:
            raise HTTPException(NOT_FOUND, f"there is no model {model!r}; there is {name!r}")

    @app.get("/v2/health/live")
    @app.get("/v2/health/ready")
    def ready() -> Response:
        return Response()

    @app.get("/v2/models/{model}/ready")
    def model_ready(model: str) -> Response:
        known(model)
        return Response()

    @app.get("/v2/models/{model}")
    def metadata(model: str) -> dict[str, Any]:
        known(model)
        inputs, outputs = [[_described(node) for node in nodes] for nodes in (session.get_inputs(), session.get_outputs())]
        return {"name": name, "versions": ["1"], "platform": "onnxruntime_onnx", "inputs": inputs, "outputs": outputs}

    @app.post("/v2/models/{model}/infer")
    async def infer(model: str, request: Request) -> Response:
        known(model)
        body = await request.body()
        try:
            head, inputs = wire.tensors(body, request.headers, "inputs")
        except wire.WireError as error:
            raise HTTPException(BAD_REQUEST, f"the request is not one of the protocol: {error}") from error
        outputs = head.get("outputs") or [{"name": node.name} for node in session.get_outputs()]
        names = [one["name"] for one in outputs]
        binary = any(one.get("parameters", {}).get("binary_data") for one in outputs)
        try:
            made = await run_in_threadpool(session.run, names, inputs)
        except Exception as error:  # ONNX Runtime's own errors, and ValueError at a name that is not there
            raise HTTPException(BAD_REQUEST, f"{error}") from error
        arrays = dict(zip(names, map(np.asarray, made), strict=True))
        content, headers = wire.message({"model_name": name, "model_version": "1"}, "outputs", arrays, binary=binary)
        return Response(content, headers=headers)

    return app


def _described(node: Any) -> dict[str, Any]:
    return {"name": node.name, "datatype": DATATYPES[node.type], "shape": [d if isinstance(d, int) else -1 for d in node.shape]}


def serve(
    graph: Path,
    *,
    name: Annotated[str, typer.Option(help="of the model")],
    port: Annotated[int, typer.Option()] = 8000,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
) -> None:
    """Serve a graph until it is interrupted."""
    uvicorn.run(application(graph, name), host=host, port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(serve)
