"""The key of a kept answer, made of all that it depends on: tenant, user, and a digest of model, settings, history and request."""

import json
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec.structs import replace

from cluster.cache.entry import Key
from cluster.values import Behaviour, RecommendRequest

DIGEST_BYTES = 16


def answer_key(request: RecommendRequest, model_digest: str, history_version: str) -> Key:
    """The key of the answer that this model gives to this request over a history of that version.

    Without a `request_time` a request is as of now, and its answer is cached for a limited time. `cache`, `deadline_ms` and the time of
    arrival are not part of the key: an answer for which the time did not suffice is degraded, and is not kept.
    """
    return Key(request.tenant, request.user_id, _digest(model_digest, history_version, request))


def request_key(request: RecommendRequest, model_digest: str) -> Key:
    """The key by which a user's last good answer is found: differences in history and blocked items do not matter."""
    return Key(request.tenant, request.user_id, _digest(model_digest, replace(request, blocked=frozenset())))


def digest_with(model_digest: str, **settings: int | str) -> str:
    """In place of a model's digest, one of it and of settings that its answers depend on: what other settings computed has another key."""
    return _digest(model_digest, json.dumps(settings, sort_keys=True))


def version_of(behaviours: tuple[Behaviour, ...]) -> str:
    """The version of a history that came with its request. It never equals that of a stored history, which has no "sent:" before it."""
    return "sent:" + _digest(behaviours)


def cacheable(request: RecommendRequest) -> bool:
    """Whether asking again gives the same answer: not if items are sampled without a seed, and not if the caller bypasses the cache."""
    drawn_anew = request.sampling is not None and request.sampling.seed is None and request.sampling.temperature > 0
    return request.cache != "bypass" and not drawn_anew


def _digest(*parts: str | RecommendRequest | tuple[Behaviour, ...]) -> str:
    said = [_parameters(part) if isinstance(part, RecommendRequest) else part for part in parts]
    try:
        packed = _ENCODER.encode(said)
    except (UnicodeEncodeError, OverflowError):  # half of a surrogate pair, or a number beyond 64 bits, from a caller in this process
        packed = json.dumps(msgspec.to_builtins(said, order="deterministic", enc_hook=_plain)).encode()
    return blake2b(packed, digest_size=DIGEST_BYTES).hexdigest()


def _parameters(request: RecommendRequest) -> RecommendRequest:
    """The request with what a key's other parts say, and what no answer depends on, as it is by default."""
    return replace(request, user_id="", tenant="", behaviours=None, cache="use", deadline_ms=None, deadline=None)


def _plain(value: Any) -> Any:
    """The string or number that a value of a class of its own says, such as one of NumPy's. Raises TypeError where it says none."""
    return json.loads(json.dumps(value))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain, order="deterministic")
