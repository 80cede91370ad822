"""HSTU on an NVIDIA GPU by the Triton kernels, a CUDA graph for each bucket of batch size and length."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cluster.bundle import WEIGHTS, Bundle
from cluster.errors import UnknownChoice
from cluster.nearest import make_index
from cluster.values import Availability
from integrations.hstu.encoder import TorchEncoder, doublings

if TYPE_CHECKING:
    from cluster.engines.buffers import BufferPool
    from integrations.hstu.append_inputs import Shapes
    from integrations.hstu.kernels.buckets import Record
    from integrations.hstu.model import HSTU
    from integrations.hstu.stateful import RunAppend

PROJECTIONS = ("torch", "cutlass")

_FAMILY = "hstu"


class TritonEncoder(TorchEncoder):
    """Kept rows are continued by the append kernel; few new events at a time by a CUDA graph too.

    Histories of fewer than `keep_from` events are encoded whole, by one CUDA graph; continuing them would take longer.
    `projection`: `torch`, or `cutlass` for gemm_silu in fp16 (or torch's with a warning where that cannot run; see projection.py).
    The other options are those of TorchEncoder.
    """

    device = "cuda"
    batches = (1, 8, 32)
    shortest = 64

    def __init__(self, *, projection: str = "torch", **options: Any) -> None:
        super().__init__(**options)
        if projection not in PROJECTIONS:
            raise UnknownChoice("projection", projection, PROJECTIONS)
        self._projection = projection

    def get_availability(self, bundle: Bundle) -> Availability:
        if find_spec("triton") is None:
            return Availability.no("triton is not installed; it comes with torch for NVIDIA GPUs: install genrec with its extra gpu")
        if (family := bundle.manifest.model.family) != _FAMILY:
            return Availability.no(f"these kernels are HSTU's and {bundle.version} holds a {family}; serve it with torch")
        if not (eager := super().get_availability(bundle)).ok:
            return eager
        from integrations.hstu.kernels.gpu import usable_gpu  # noqa: PLC0415 - imports torch, only once the cheaper questions are answered

        return usable_gpu("Triton")

    def load(self, bundle: Bundle) -> None:
        self.get_availability(bundle).require()
        import torch  # noqa: PLC0415 - as in TorchEncoder

        from integrations.hstu.config import HSTUConfig  # noqa: PLC0415
        from integrations.hstu.kernels.buckets import Bucketed  # noqa: PLC0415
        from integrations.hstu.kernels.fused import FusedHSTU  # noqa: PLC0415 - imports triton
        from integrations.hstu.kernels.projection import chosen  # noqa: PLC0415
        from integrations.hstu.weights import load_weights  # noqa: PLC0415

        config = HSTUConfig.model_validate(bundle.manifest.model.config)
        model = FusedHSTU(config, chosen(self._projection, config))
        load_weights(model, bundle.verified(WEIGHTS))
        self._device = torch.device(self.device)
        model.eval().to(self._device)
        self._prompt_length = bundle.prompt_length
        self._window = model.config.window
        count = max(1, self._prompt_length)

        def encode(items: torch.Tensor, times: torch.Tensor, next_times: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return model.latest(items, times, next_times, lengths, count)

        with torch.inference_mode():
            self._index = make_index(self._index_name, model.item_vectors().cpu().numpy(), on_gpu=self._device.type == "cuda")
            lengths = doublings(self.shortest, self._window.longest)
            self._engine = Bucketed(encode, self.batches, lengths, self._device, self._recorder())
        self._kept = self._keep(bundle, model)

    def _clear(self) -> None:
        super()._clear()
        if engine := self.__dict__.get("_engine"):  # there is none before `load`
            engine.clear()

    def _appending(self, model: "HSTU") -> "tuple[RunAppend, Shapes, BufferPool | None]":
        from integrations.hstu.kernels.recorded_append import RecordedAppend  # noqa: PLC0415 - imports torch

        append = RecordedAppend(model.append, model.config, self.batches, self._device, self._recorder())
        return append, append.shapes, append.memory

    def _recorder(self) -> "Record":
        from integrations.hstu.kernels.buckets import cuda_graphs  # noqa: PLC0415

        return cuda_graphs()
