"""What an answer depends on, as the key it is kept under: tenant, user, and a digest of the model, the history and the request."""

import json
from dataclasses import asdict, replace
from hashlib import blake2b

from cluster.cache.entry import Key
from cluster.values import Behaviour, RecommendRequest

DIGEST_BYTES = 16


def answer_key(request: RecommendRequest, model_digest: str, history_version: str) -> Key:
    """The key of the answer that this model gives to this request over a history of that version.

    Without a `request_time` of its own a request is as of now: its answer is kept for a while, not for ever. `deadline_ms` is part of it,
    since who is in a hurry may get less and must not wait for who is not; `cache` is not.
    """
    asked = asdict(replace(request, user_id="", tenant="", behaviours=None, cache="use"))
    for name in ("blocked", "allowed"):
        asked[name] = None if asked[name] is None else sorted(asked[name])
    digest = blake2b(json.dumps([model_digest, history_version, asked], sort_keys=True).encode(), digest_size=DIGEST_BYTES)
    return Key(request.tenant, request.user_id, digest.hexdigest())


def version_of(behaviours: tuple[Behaviour, ...]) -> str:
    """The version of a history that came with its request. Never that of a stored one, whose digits are fewer."""
    rows = [(behaviour.item_id, behaviour.timestamp, behaviour.action, behaviour.value) for behaviour in behaviours]
    return "sent:" + blake2b(json.dumps(rows).encode(), digest_size=DIGEST_BYTES).hexdigest()


def cacheable(request: RecommendRequest) -> bool:
    """Whether asking again would give the same: not where items are drawn anew each time, nor where the caller wants no cache."""
    drawn_anew = request.sampling is not None and request.sampling.seed is None and request.sampling.temperature > 0
    return request.cache != "bypass" and not drawn_anew
