"""The backend: histories -> the graph's tensors -> a server elsewhere -> states -> the nearest of the model's items, searched here."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.bundle import Bundle
from cluster.errors import BackendFailed, BackendUnavailable
from cluster.nearest import make_index
from cluster.values import Availability, Encoded, EncodeRequest
from genrec_kserve.client import Client, Timeouts
from integrations.hstu.engine_batch import engine_batch, with_states
from integrations.hstu.limits import limits

INPUTS = {"items": ("INT64", 2), "times": ("INT32", 2), "next_times": ("INT32", 2), "lengths": ("INT64", 1)}


@dataclass(slots=True)
class _Latest:
    """What the latest probe found, until when that holds, and of which version. A new one takes its place where the server is to be asked
    anew: a probe that was under way then leaves what it finds in the old one.
    """

    probed: tuple[float, str, Availability] | None = None


class KServeEncoder:
    """`url`: of the server, as http://triton:8000. `model`: what it calls the graph `onnx/encode.fp32.onnx` of a version of a model.

    {name} and {version} in it stand for the model's: a new version is not asked of a server that has yet to load it. `timeout_s`: for an
    answer; `connect_timeout_s`: for a connection and for probes, which are made once in `probe_every_s`. `binary`: Triton's extension for
    tensors; without it they are JSON numbers, which every server takes. `index`: see cluster/nearest.py.
    """

    def __init__(
        self,
        url: str = "",
        model: str = "{name}-{version}",
        timeout_s: float = 1.0,
        *,
        connect_timeout_s: float = 0.5,
        probe_every_s: float = 5.0,
        binary: bool = False,
        index: str = "exact",
    ) -> None:
        self._url, self._model, self._binary, self._index_name = url, model, binary, index
        self._timeouts, self._probe_every_s = Timeouts(timeout_s, connect_timeout_s), probe_every_s
        self._latest = _Latest()
        self._client: Client | None = None

    def get_availability(self, bundle: Bundle) -> Availability:
        """What the server said within the last `probe_every_s`: asking it takes a round trip, or the time until it counts as away."""
        if not self._url:
            return Availability.no("no server is configured; name it: encoder: {options: {kserve: {url: http://HOST:8000}}}")
        latest = self._latest  # as it is now: a call or a load, in another thread, may have the server asked anew meanwhile
        if (probed := latest.probed) and probed[1] == bundle.version and time.monotonic() < probed[0]:
            return probed[2]
        availability = self._asked(bundle)
        latest.probed = time.monotonic() + self._probe_every_s, bundle.version, availability
        return availability

    def load(self, bundle: Bundle) -> None:
        self._latest = _Latest()
        self.get_availability(bundle).require()
        self.close()
        self._name, self._outputs = self._model_of(bundle), _outputs(bundle)
        self._index = make_index(self._index_name, bundle.item_vectors)
        self._window = limits(bundle.manifest.model).window
        self._client = Client(self._url, self._timeouts)

    def infer(self, request: EncodeRequest) -> Encoded:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        """Raises BackendFailed, and DeadlineExceeded once all deadlines are past."""
        if self._client is None:
            raise BackendUnavailable("kserve has not been loaded, or was closed; call load(bundle)")
        if not requests:
            return []
        batch = engine_batch(requests, self._window, len(self._index))
        given = {name: getattr(batch, name) for name in INPUTS}
        try:
            outputs = self._client.infer(self._name, given, self._outputs, binary=self._binary, deadline=_last(requests))
        except BackendFailed:
            self._latest = _Latest()  # the next probe is to ask the server, not to repeat that it was well
            raise
        states = self._checked(outputs, len(requests))
        answers = self._index.answer(requests, states["state"])
        return with_states(requests, answers, states["states"], batch) if "states" in states else answers

    def close(self) -> None:
        client, self._client = self._client, None
        if client:
            client.close()

    def _asked(self, bundle: Bundle) -> Availability:
        client = Client(self._url, self._timeouts)
        try:
            problem = mismatch(client.metadata(self._model_of(bundle)), bundle)
        except (BackendUnavailable, OSError) as error:  # of the server, and of the model's own files
            problem = str(error)
        finally:
            client.close()
        return Availability.no(problem) if problem else Availability.yes()

    def _model_of(self, bundle: Bundle) -> str:
        return self._model.replace("{name}", bundle.manifest.name).replace("{version}", str(bundle.manifest.version))

    def _checked(self, outputs: Mapping[str, npt.NDArray[Any]], users: int) -> Mapping[str, npt.NDArray[np.float32]]:
        """The outputs as they are. Raises BackendFailed where one is missing or of another shape."""
        for name, shape in self._outputs.items():
            given = outputs[name].shape if name in outputs else None
            if given != (users, *shape):
                raise BackendFailed(f"{self._url} gave {name} the shape {given} for model {self._name}; {(users, *shape)} is expected")
        return outputs


def mismatch(metadata: Mapping[str, Any], bundle: Bundle) -> str:
    """Why the served graph is not this model's `encode` graph, "" where it may be: a server need not describe its tensors."""
    wanted = {"inputs": INPUTS, "outputs": {name: ("FP32", 1 + len(shape)) for name, shape in _outputs(bundle).items()}}
    for side, tensors in wanted.items():
        served = {one.get("name"): one for one in metadata.get(side) or []}
        for name, (datatype, dims) in tensors.items() if served else ():
            if name not in served:
                return f"the served model has no {side[:-1]} {name!r}; serve {bundle.version}'s graph onnx/encode.fp32.onnx"
            if (served[name].get("datatype"), len(served[name].get("shape", ()))) != (datatype, dims):
                said = f"{served[name].get('datatype')} {served[name].get('shape')}"
                return f"the served model's {side[:-1]} {name!r} is {said}; {datatype} of {dims} dimensions is expected"
        for name, shape in _outputs(bundle).items() if served and side == "outputs" else ():
            last = served[name]["shape"][-1]
            if last not in (-1, shape[-1]):
                return f"the served model's states have {last} numbers, those of {bundle.version} {shape[-1]}: it is another model"
    return ""


def _outputs(bundle: Bundle) -> dict[str, tuple[int, ...]]:
    """What is asked for, and its shape for each user."""
    dim = bundle.item_vectors.shape[1]
    return {"state": (dim,), **({"states": (bundle.prompt_length, dim)} if bundle.prompt_length else {})}


def _last(requests: Sequence[EncodeRequest]) -> float | None:
    """When the last deadline of a batch is past, None where a request has none."""
    given = [request.deadline for request in requests if request.deadline is not None]
    return max(given) if len(given) == len(requests) else None
