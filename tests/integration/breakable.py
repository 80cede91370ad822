"""Our own encoders, which raise as long as a file says so: what a broken driver or a bug in an engine looks like from outside."""

from collections.abc import Sequence
from pathlib import Path

from cluster.bundle import Bundle
from cluster.values import Encoded, EncodeRequest
from integrations.hstu.encoder import TorchEncoder
from integrations.onnx.encoder import OnnxRuntimeEncoder


def switch(model_dir: Path, name: str) -> Path:
    """The file whose presence breaks the backend `name`."""
    return model_dir / f"broken-{name}"


def _raise_if(switched: Path) -> None:
    if switched.exists():
        raise RuntimeError(f"made to fail: {switched.name}")


class BreakableOnnxRuntime(OnnxRuntimeEncoder):
    def load(self, bundle: Bundle) -> None:
        self._switch = switch(bundle.path.parent, "onnxruntime")
        super().load(bundle)

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        _raise_if(self._switch)
        return super().batch_infer(requests)


class BreakableTorch(TorchEncoder):
    def load(self, bundle: Bundle) -> None:
        self._switch = switch(bundle.path.parent, "torch")
        super().load(bundle)

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        _raise_if(self._switch)
        return super().batch_infer(requests)
