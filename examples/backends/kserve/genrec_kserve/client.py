"""A server of the Open Inference Protocol v2, asked over HTTP; an error names the address and the cure."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from cluster.errors import BackendFailed, BackendUnavailable, DeadlineExceeded
from genrec_kserve import wire

SHOWN = 200


@dataclass(frozen=True, slots=True)
class Timeouts:
    """`answer_s`: for a whole answer; `connect_s`: to be connected, and for a probe to be answered."""

    answer_s: float
    connect_s: float


class Client:
    """Connections are kept between calls. For many threads."""

    def __init__(self, url: str, timeouts: Timeouts) -> None:
        self._url, self._timeouts = url.rstrip("/"), timeouts
        self._http = httpx.Client(base_url=self._url, timeout=httpx.Timeout(timeouts.connect_s))

    def metadata(self, model: str) -> dict[str, Any]:
        """What the server says of a model that is ready. Raises BackendUnavailable."""
        for path, what in (("/v2/health/ready", "the server"), (f"/v2/models/{model}/ready", f"model {model!r}")):
            if (answer := self._probe(path)).status_code != httpx.codes.OK:
                raise BackendUnavailable(f"{what} is not ready: {self._url}{path} answered {_shown(answer)}")
        answer = self._probe(f"/v2/models/{model}")
        try:
            found = answer.raise_for_status().json()
        except (httpx.HTTPStatusError, ValueError) as error:
            raise BackendUnavailable(f"{self._url}/v2/models/{model} answered {_shown(answer)}, not a description of the model") from error
        if not isinstance(found, dict):
            raise BackendUnavailable(f"{self._url}/v2/models/{model} answered {_shown(answer)}, not a description of the model")
        return found

    def infer(
        self, model: str, inputs: wire.Tensors, outputs: Iterable[str], *, binary: bool, deadline: float | None
    ) -> dict[str, npt.NDArray[Any]]:
        """The outputs by name. Raises BackendFailed, and DeadlineExceeded where it is not the server that was slow."""
        began = time.monotonic()
        end = min(began + self._timeouts.answer_s, deadline or np.inf)
        if end <= began:
            raise DeadlineExceeded(f"the deadline was {(began - end) * 1e3:.0f} ms ago; {self._url} was not asked")
        path, (body, headers) = f"/v2/models/{model}/infer", wire.request(inputs, outputs, binary=binary)
        try:
            given, answer_headers = self._answered(path, body, headers, end)
        except (httpx.TimeoutException, TimeoutError) as error:
            if deadline is not None and end == deadline:
                raise DeadlineExceeded(f"{self._url} had not answered at the deadline, {end - began:.3f} s after it was asked") from error
            raise BackendFailed(f"{self._url}{path} gave no answer within {self._timeouts.answer_s:g} s (timeout_s)") from error
        except httpx.HTTPError as error:
            raise BackendFailed(f"{self._url} cannot be asked: {type(error).__name__}: {error}") from error
        try:
            return wire.tensors(given, answer_headers, "outputs")[1]
        except wire.WireError as error:
            raise BackendFailed(f"{self._url}{path} answered with what is no answer of the protocol ({error})") from error

    def close(self) -> None:
        self._http.close()

    def _probe(self, path: str) -> httpx.Response:
        try:
            return self._http.get(path)
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise BackendUnavailable(f"{self._url} cannot be reached ({reason}); start the server, or correct the option url") from error

    def _answered(self, path: str, body: bytes, headers: dict[str, str], end: float) -> tuple[bytes, httpx.Headers]:
        """The body of a good answer. httpx limits the wait for each piece; the whole has to be here by `end`."""
        left = max(0.001, end - time.monotonic())
        limits = httpx.Timeout(left, connect=min(left, self._timeouts.connect_s))
        with self._http.stream("POST", path, content=body, headers=headers, timeout=limits) as answer:
            pieces = []
            for piece in answer.iter_bytes():
                pieces.append(piece)
                if time.monotonic() > end:
                    raise TimeoutError
            given = b"".join(pieces)
        if answer.status_code != httpx.codes.OK:
            raise BackendFailed(f"{self._url}{path} answered {answer.status_code}: {given[:SHOWN].decode(errors='replace')}")
        return given, answer.headers


def _shown(answer: httpx.Response) -> str:
    return f"{answer.status_code} {answer.text[:SHOWN]}".rstrip()
