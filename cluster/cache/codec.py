"""How values become bytes for the shared cache. A value that cannot be encoded is not kept; bytes that cannot be decoded are a miss."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from cluster.cache.entry import Entry, weight_of

DECODED_TIMES = 4
"""How many times as large as its bytes a decoded value is in memory, at most: an answer has an object, and a dictionary, for each item."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """How a value travels. `decode` may raise anything at bytes that `encode`, or another version of it, did not write."""

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]


class CountingCodec(Generic[T]):
    """A codec that never raises; `failures` are counted and the first is logged with its traceback."""

    def __init__(self, codec: Codec[T]) -> None:
        self.failures = 0
        self._codec = codec

    def encoded(self, value: T) -> bytes | None:
        try:
            return self._codec.encode(value)
        except Exception as error:  # noqa: BLE001 - the answer is good, whether or not it can be kept
            self._failed("encoded: it is not kept", error)
            return None

    def decoded(self, entry: Entry) -> Entry | None:
        """The entry with the decoded value as its payload, and the weight that it has with that."""
        try:
            weight = weight_of(DECODED_TIMES * len(entry.payload))
            return replace(entry, payload=self._codec.decode(entry.payload), weight=weight)
        except Exception as error:  # noqa: BLE001 - another version of the program may have written it
            self._failed("decoded: it is a miss", error)
            return None

    def _failed(self, what: str, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning("a cached answer cannot be %s (any more of these are only counted)", what, exc_info=error)
