"""An answer as the bytes in which the shared cache holds it."""

import msgspec
from msgspec.structs import replace

from cluster.cache.codec import Codec
from cluster.values import Recommendation

_ENCODER, _DECODER = msgspec.json.Encoder(enc_hook=tuple), msgspec.json.Decoder(Recommendation)


def encode_answer(answer: Recommendation) -> bytes:
    """The answer as JSON: decoding bytes of a shared cache must not run code, as unpickling does."""
    return _ENCODER.encode(answer)


def decode_answer(payload: bytes) -> Recommendation:
    """The answer in bytes of `encode_answer`. Raises ValueError if `payload` is not an encoded answer."""
    try:
        answer = _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not an answer: {error}") from error
    return replace(answer, items=tuple(answer.items))


ANSWER_CODEC: Codec[Recommendation] = Codec(encode_answer, decode_answer)
