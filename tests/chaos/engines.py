"""Engines that count, fail, take their time or tell when they are cancelled, all under the eyes of a test in another process.

What they count stands in files of the model's directory: a byte for each request, appended at once, so that a kill -9 loses none.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from cluster.bundle import Bundle
from cluster.values import Availability, Encoded, EncodeRequest, Generated, GenerateRequest
from integrations.onnx.encoder import OnnxRuntimeEncoder
from integrations.tensorrt import engine_files
from integrations.tensorrt.encoder import TensorRTEncoder
from integrations.torch_beam.generator import TorchBeamGenerator
from tests.integration.breakable import BreakableOnnxRuntime, BreakableTorch, switch

ENCODERS = {"onnxruntime": "tests.chaos.engines:CountedOnnxRuntime", "torch": "tests.chaos.engines:CountedTorch"}
GENERATORS = {"torch_beam": "tests.chaos.engines:BreakableBeam"}


def counter(model_dir: Path, name: str) -> Path:
    """The file whose size is how many requests, or calls, were counted."""
    return model_dir / f"counted-{name}"


def counted(model_dir: Path, name: str) -> int:
    path = counter(model_dir, name)
    return path.stat().st_size if path.exists() else 0


def holding(model_dir: Path) -> Path:
    """The file that keeps `Paced` from its next answer as long as it is there."""
    return model_dir / "holding-paced"


def _count(bundle_dir: Path, name: str, number: int = 1) -> None:
    descriptor = os.open(counter(bundle_dir, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, b"." * number)
    finally:
        os.close(descriptor)


class _Counted:
    """Counts requests, and calls that were made to fail, before an encoder that can be broken."""

    name: str

    def load(self, bundle: Bundle) -> None:
        self._model_dir = bundle.path.parent
        super().load(bundle)

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        _count(self._model_dir, self.name, len(requests))
        try:
            return super().batch_infer(requests)
        except RuntimeError:
            _count(self._model_dir, f"failed-{self.name}")
            raise


class CountedOnnxRuntime(_Counted, BreakableOnnxRuntime):
    pass


class CountedTorch(_Counted, BreakableTorch):
    pass


class BreakableBeam(TorchBeamGenerator):
    """Fails as long as the file `broken-torch_beam` is there."""

    def load(self, bundle: Bundle) -> None:
        self._model_dir = bundle.path.parent
        super().load(bundle)

    def batch_infer(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        if switch(self._model_dir, "torch_beam").exists():
            _count(self._model_dir, "failed-torch_beam")
            raise RuntimeError("made to fail: broken-torch_beam")
        return super().batch_infer(requests)


class Paced(OnnxRuntimeEncoder):
    """An engine of a known speed: so many seconds a batch and a request, as an accelerator would take, while the processor idles.

    It also waits as long as the file `holding` is there.
    """

    def __init__(self, batch_s: float = 0.0, request_s: float = 0.05) -> None:
        super().__init__()
        self._batch_s, self._request_s = batch_s, request_s

    def load(self, bundle: Bundle) -> None:
        self._model_dir = bundle.path.parent
        super().load(bundle)
        self.brief = False  # the thread that calls waits; the event loop must not

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        _count(self._model_dir, "paced", len(requests))
        while holding(self._model_dir).exists():
            time.sleep(0.005)
        time.sleep(self._batch_s + self._request_s * len(requests))
        return super().batch_infer(requests)


class OnAnotherGpu(TensorRTEncoder):
    """TensorRT as on a machine whose GPU no engine was built for, whether or not there is a GPU here."""

    def get_availability(self, bundle: Bundle) -> Availability:
        with mock.patch.object(engine_files, "gpu_architecture", return_value="sm_90"):
            return super().get_availability(bundle)


class Telling:
    """A generator that takes long, many requests at a time, and writes down when each began and when it was cancelled."""

    def __init__(self, seconds: float = 30.0) -> None:
        self._seconds = seconds

    def get_availability(self, bundle: Bundle) -> Availability:
        return Availability.yes()

    def load(self, bundle: Bundle) -> None:
        self._model_dir = bundle.path.parent
        self._warm = TorchBeamGenerator()
        self._warm.load(bundle)

    async def ainfer(self, request: GenerateRequest) -> Generated:
        if request.deadline is None:  # a sample for the warm-up, or for a trial; a copy of a request that stalls has no user either
            return self._warm.infer(request)
        self._tell("began")
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self._tell("cancelled")
            raise
        self._tell("ended")
        return self._warm.infer(request)

    def infer(self, request: GenerateRequest) -> Generated:
        return self._warm.infer(request)

    def batch_infer(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        return self._warm.batch_infer(requests)

    def close(self) -> None:
        self._warm.close()

    def _tell(self, what: str) -> None:
        with (self._model_dir / "told").open("a") as file:
            file.write(f"{what} {time.monotonic()}\n")


def told(model_dir: Path) -> list[tuple[str, float]]:
    """What `Telling` wrote: (what, the monotonic clock then), in order."""
    path = model_dir / "told"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(what, float(at)) for what, at in map(str.split, lines)]
