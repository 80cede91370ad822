"""Tensors on the wire: the Open Inference Protocol v2 as JSON, and Triton's binary tensor extension.

https://github.com/open-inference/open-inference-protocol (inference over HTTP), and protocol/extension_binary_data.md of Triton's server:
the JSON goes first, its length in a header, and each binary tensor follows as its little-endian bytes, in the order of the JSON.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

HEADER_LENGTH = "Inference-Header-Content-Length"
DATATYPES: dict[str, np.dtype[Any]] = {"INT64": np.dtype("<i8"), "INT32": np.dtype("<i4"), "FP32": np.dtype("<f4")}
NAMES = {dtype: name for name, dtype in DATATYPES.items()}
Tensors: TypeAlias = Mapping[str, npt.NDArray[Any]]


class WireError(Exception):
    """A message that is not what the protocol says."""


def request(inputs: Tensors, outputs: Iterable[str], *, binary: bool) -> tuple[bytes, dict[str, str]]:
    """The body and the headers that ask for these outputs."""
    asked = [{"name": name, "parameters": {"binary_data": binary}} for name in outputs] if binary else [{"name": name} for name in outputs]
    return message({"outputs": asked}, "inputs", inputs, binary=binary)


def message(head: Mapping[str, Any], field: str, tensors: Tensors, *, binary: bool) -> tuple[bytes, dict[str, str]]:
    """A body whose `field` holds the tensors, and its headers."""
    described, raw = [], []
    for name, array in tensors.items():
        datatype = NAMES[array.dtype.newbyteorder("<")]
        one: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
        if binary:
            raw.append(np.ascontiguousarray(array, DATATYPES[datatype]).tobytes())
            one["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            one["data"] = array.ravel().tolist()
        described.append(one)
    text = json.dumps({**head, field: described}).encode()
    if not binary:
        return text, {"Content-Type": "application/json"}
    return b"".join([text, *raw]), {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(text))}


def tensors(body: bytes, headers: Mapping[str, str], field: str) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The JSON of a message and its tensors by name. Raises WireError."""
    try:
        length = int(headers.get(HEADER_LENGTH.lower(), len(body)))
        head, rest = json.loads(body[:length]), memoryview(body)[length:]
        found = {}
        for one in head[field]:
            size = one.get("parameters", {}).get("binary_data_size")
            found[one["name"]] = _tensor(one, rest[: size or 0] if size is not None else None)
            rest = rest[size or 0 :]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"{type(error).__name__}: {error}") from error
    return head, found


def _tensor(described: Mapping[str, Any], raw: memoryview | None) -> npt.NDArray[Any]:
    dtype = DATATYPES[described["datatype"]]
    flat: npt.NDArray[Any] = np.array(described["data"], dtype) if raw is None else np.frombuffer(raw, dtype)
    return flat.reshape(described["shape"])
