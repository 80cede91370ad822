"""What a gateway and the HAProxy that `cluster/haproxy.sh` has started tell each other, by headers that clients do not see.

    header             told by the gateway                          what HAProxy does
    genrec-most        in each answer                               refuses what is beyond its numbers, see `most`
    genrec-pages       in the refusal of a page                     refuses the pages that are asked for within the same second
    genrec-known       in answers to a key that is known            counts its requests as the key's; to a full gateway lets some through
    genrec-urgent      in answers to a key that may be urgent       to a full gateway lets its urgent requests through
    genrec-operates    in answers to a key that operates            to a full gateway lets operators' calls through
    genrec-unread      in a refusal, the body still on its way      gives the answer itself, and closes the connection

    header             told by HAProxy                              what the gateway does
    genrec-refused     in a request, since the last that had it     counts so many requests as refused in the gateways' place

With a 401 HAProxy forgets what it was told of the key. A `genrec-refused` that a client sends it removes.
"""

from base64 import b64encode
from collections.abc import Mapping

MOST, PAGES, UNREAD = b"genrec-most", b"genrec-pages", b"genrec-unread"
KNOWN, URGENT, OPERATES = b"genrec-known", b"genrec-urgent", b"genrec-operates"
REFUSED = b"genrec-refused"
IN_ANSWERS = frozenset(name.decode() for name in (MOST, PAGES, UNREAD, KNOWN, URGENT, OPERATES))
"""The headers of answers that are for HAProxy alone."""
NO_PAGES = (PAGES, b"none")
MARGIN_S = 10.0
"""How much longer than a request may take HAProxy waits for a gateway that says nothing: by then it is stopped, or stuck."""


def most(requests: int, body_bytes: int, part: int, request_within_s: float) -> tuple[bytes, bytes]:
    """How many requests a gateway takes, how many bytes of a body, how many requests are one caller's part, and the milliseconds for which
    HAProxy waits for the answer to a batch or an erasure, which may take `request_within_s`.
    """
    return MOST, b"%d, %d, %d, %d" % (requests, body_bytes, part, (request_within_s + MARGIN_S) * 1e3)


def of_key(*, known: bool, urgent: bool, operates: bool) -> list[tuple[bytes, bytes]]:
    """What is so of the caller's key."""
    return [(name, b"1") for name, so in ((KNOWN, known), (URGENT, urgent), (OPERATES, operates)) if so]


def unread(problem: bytes) -> tuple[bytes, bytes]:
    """The JSON of the refusal. HAProxy would keep the exchange until the body is there; told the answer, it gives that itself."""
    return UNREAD, b64encode(problem)


def refused(headers: Mapping[bytes, bytes]) -> int:
    """How many requests HAProxy has refused since the last one that had the header; 0 where this one has none, or no number in it."""
    count = headers.get(REFUSED, b"")
    return int(count[:18]) if count.isdigit() else 0
