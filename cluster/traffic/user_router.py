"""Which replica a user's requests go to: always the same one, as long as it is not busy.

    user -> the replicas in the user's own order -> the first that is not busy

A replica keeps what it computed for its users, and another one would compute it anew. Replicas are ordered by rendezvous hashing
(Thaler and Ravishankar, 1998): one that goes moves only its own users, one that comes takes an equal share of all others'. Loads are
bounded as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018): of m requests on n replicas, none has more
than ceil(bound x m / n); a home that has as many passes a user on to the next replica of the user's order, always the same one too.
Requests that go together in one call are not parted: they may be more than that, and all are passed on by the first one's order, so that
a user may meet several other replicas, each of which computes the user's state anew, while a home is busy.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from math import ceil
from typing import TypeAlias

from cluster.ranking import RankRequest
from cluster.values import EncodeRequest, GenerateRequest, Together

OfUser: TypeAlias = EncodeRequest | RankRequest | GenerateRequest
"""The requests that have a user, and a home."""
BOUND = 1.25
SLACK = 8
"""Requests that an engine answers in one batch anyway: a home with so few more than its share is not worth leaving."""


def user_key(request: object) -> str:
    """The user of a request, the first one's of several that go together; "" where there is none, and for any other object."""
    if isinstance(request, Together):
        return user_key(request.requests[0][0])
    return f"{request.tenant}/{request.user_id}" if isinstance(request, OfUser) and request.user_id else ""


def attempt_of(request: object) -> int:
    """How many replicas were asked before this request is sent, the first one of several that go together; 0 for any other object."""
    if isinstance(request, Together):
        return attempt_of(request.requests[0][0])
    return request.attempt if isinstance(request, OfUser) else 0


def home_of(request: object, replicas: Sequence[str]) -> str:
    """The replica that its user's requests go to as long as it is not busy, or the next one of the user's order for each earlier attempt;
    "" for a request without a user, and without replicas.
    """
    user = user_key(request)
    return in_order_of(user, replicas)[attempt_of(request) % len(replicas)] if user and replicas else ""


def choose(user: str, loads: Mapping[str, int], bound: float = BOUND, slack: int = SLACK) -> list[str]:
    """The replicas in the order to try them for this user: in the user's own order, the busy ones last.

    `loads`: requests under way, by replica.
    """
    most = capacity(loads.values(), bound, slack)
    return sorted(in_order_of(user, loads), key=lambda replica: loads[replica] >= most)


def asked_before(call: object, replicas: Iterable[str]) -> set[str]:
    """The replicas that the earlier attempts of a copy went to, of several that go together of any: as noted or, where one of them waits to
    be sent, the first ones of the user's order of `replicas`: none where they do not go by it.
    """
    return set[str]().union(*(_asked(request, replicas) for request in _requests_of(call)))


def asked_by_all(call: object, replicas: Iterable[str]) -> set[str]:
    """As `asked_before`, but of several that go together of every one: none where one of them is sent for the first time."""
    asked = [_asked(request, replicas) for request in _requests_of(call)]
    return set.intersection(*asked) if asked else set()


def _asked(request: OfUser, replicas: Iterable[str]) -> set[str]:
    if len(request.asked) >= request.attempt:
        return set(request.asked) if request.attempt else set()
    return {*request.asked, *in_order_of(user_key(request), replicas)[: request.attempt]}


def note_asked(call: object, replica: str) -> None:
    """The request, or each of several that go together, goes to that replica; copies of it will know."""
    for request in _requests_of(call):
        request.asked.append(replica)


def _requests_of(call: object) -> tuple[OfUser, ...]:
    calls = tuple(request for request, _ in call.requests) if isinstance(call, Together) else (call,)
    return tuple(one for one in calls if isinstance(one, OfUser))


def capacity(loads: Iterable[int], bound: float = BOUND, slack: int = 0) -> int:
    """How many requests a replica may have when one more comes. With a bound of 1 or more, some replica always has fewer."""
    loads = list(loads)
    return ceil(bound * (sum(loads) + 1) / len(loads)) + slack if loads else 0


def in_order_of(user: str, replicas: Iterable[str]) -> list[str]:
    """The same order in every process; that of the other replicas does not depend on whether one is there."""
    return sorted(replicas, key=lambda replica: (_weight(user, replica), replica), reverse=True)


def _weight(user: str, replica: str) -> bytes:
    return blake2b(f"{replica}\0{user}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
