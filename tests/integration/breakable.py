"""Our own encoders, which raise as long as a file says so, or at a request: what a broken driver or a bug in an engine looks like."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from cluster.bundle import Bundle
from cluster.values import Encoded, EncodeRequest
from integrations.hstu.encoder import TorchEncoder
from integrations.onnx.encoder import OnnxRuntimeEncoder

POISON = 13
"""A history that begins at this time makes ONNX Runtime's encoder raise, whatever else is in the batch."""


def switch(model_dir: Path, name: str) -> Path:
    """The file whose presence breaks the backend `name`."""
    return model_dir / f"broken-{name}"


class _Breakable:
    """Goes before an encoder among the bases of a class."""

    name: ClassVar[str]

    def load(self, bundle: Bundle) -> None:
        self._switch = switch(bundle.path.parent, self.name)
        super().load(bundle)

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        if self._switch.exists():
            raise RuntimeError(f"made to fail: {self._switch.name}")
        if self.name == "onnxruntime" and any(request.sequence.timestamps[0] == POISON for request in requests):
            raise RuntimeError("made to fail: a poisoned request is in the batch")
        return super().batch_infer(requests)


class BreakableOnnxRuntime(_Breakable, OnnxRuntimeEncoder):
    name = "onnxruntime"


class BreakableTorch(_Breakable, TorchEncoder):
    name = "torch"
