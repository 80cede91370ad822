"""Inputs that nobody should send: none is answered with a 5xx, no process dies of one."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.chaos.rows import Row
from tests.chaos.served import DEPLOYMENTS, Served
from tests.waiting import eventually, until_right

pytestmark = pytest.mark.cluster
SWITCHES = "/v1/backends/{stage}/{name}:{switch}"
ASK_THE_SWITCHBOARD = {
    ("GET", "/readyz"), ("GET", "/v1/backends"), ("GET", "/v1/models"), ("POST", "/v1/cache:invalidate"),
    ("DELETE", "/v1/users/{user_id}/history"),
}  # fmt: skip
GENERATED_SHARE = 0.6
WITHIN_S = 120.0
"""For an answer, and for all that is sent again together: how soon there is an answer says nothing here."""
ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, -0.0, 0.1, "", " ", "\x00", "\ud800", "\u202e", "💥" * 300,
    "a" * 100_000,    "'; DROP TABLE events; --", "../../etc/passwd", [], [[]],
    [[[[]]]], {}, {"": {}}, {"user_id": {"user_id": {}}}, [None] * 1000,
]  # fmt: skip
FIELDS = (
    "user_id", "behaviours", "k", "request_time", "exclude_seen", "blocked", "allowed", "tenant", "strategy", "diversity", "freshness",
    "explain", "deadline_ms", "sampling", "cache", "unknown",
)  # fmt: skip


def test_no_malformed_input_is_answered_with_a_server_error_or_ends_a_process(two: Served, record, long: bool, run: int):
    inputs = 10_000 if long else 200
    with record(Row("10,000 malformed inputs (schemathesis and hand-made)", "0 5xx, 0 restarts", run)) as row:
        before = {name: two.running(name) for name in DEPLOYMENTS}
        statuses, worst, patience = Counter[int](), list[str](), Patience()

        def seen(send: Callable[[], Any], what: str, route: tuple[str, str]) -> None:
            response = patience.answer(send) if route in ASK_THE_SWITCHBOARD else send()
            statuses[response.status_code] += 1
            if response.status_code >= 500:
                worst.append(f"{response.status_code} {what[:300]}: {response.text[:300]}")

        generated(two.url, int(inputs * GENERATED_SHARE), run, seen)
        with httpx.Client(base_url=two.url, timeout=WITHIN_S) as client:
            for content, path in hand_made(inputs - statuses.total(), run):
                headers = {"content-type": "application/json"}
                seen(partial(client.post, path, content=content, headers=headers), f"{path} {content!r}", ("POST", path))
        row.figures |= {"inputs": sum(statuses.values()), "statuses": {str(status): count for status, count in statuses.items()}}
        row.figures |= {"sent_again": patience.again}
        row.notes += worst[:10]
        row.claim("inputs", sum(statuses.values()), least=inputs)
        row.claim("answered with a 5xx", sum(count for status, count in statuses.items() if status >= 500), most=0)
        restarted = sum(len(before[name] - two.running(name)) for name in DEPLOYMENTS)
        row.claim("restarts", restarted, most=0)
        eventually(lambda: two.ask(behaviours=[]).status_code == 200, "an answer afterwards", WITHIN_S)


class Patience:
    """Sends an input again while the switchboard does not answer in time and the caller is told to come again: it has two seconds for it,
    whatever else these cores do. An input that breaks something is answered so to the end. `left_s`: for all inputs that are still to come,
    together; `again`: how many were sent again.
    """

    def __init__(self) -> None:
        self.left_s, self.again = WITHIN_S, 0

    def answer(self, send: Callable[[], Any]) -> Any:
        """The last answer to what is sent."""
        answers = [send()]
        if _come_again(answers[0]) and self.left_s > 0:
            began, self.again = time.monotonic(), self.again + 1
            with suppress(AssertionError):  # it is so to the end
                until_right(lambda: answers.append(send()), lambda _: not _come_again(answers[-1]), self.left_s)
            self.left_s -= time.monotonic() - began
        return answers[-1]


def _come_again(response: Any) -> bool:
    return response.status_code == 503 and "retry-after" in response.headers


def hand_made(count: int, run: int) -> Iterator[tuple[bytes, str]]:
    """Bodies, and where to send them: a good request with odd values in one to three places, or cut off, or flipped in some bits."""
    rng = random.Random(run)
    for _ in range(count):
        path = rng.choice(("/v1/recommend", "/v1/recommend", "/v1/recommend:batch", "/v1/events"))
        body = good(rng, path)
        for _ in range(rng.randint(1, 3)):
            body = spoilt(rng, body)
        content = json.dumps(body, ensure_ascii=True).encode()
        yield damaged(rng, content), path


def good(rng: random.Random, path: str) -> Any:
    event = {"user_id": "ada", "item_id": "1", "timestamp": 1_700_000_000, "action": "view"}
    request = {"user_id": "ada", "behaviours": [{"item_id": str(rng.randint(1, 300)), "timestamp": 1_700_000_000}], "k": rng.randint(1, 20)}
    return event if path == "/v1/events" else {"requests": [request, request]} if path.endswith("batch") else request


def spoilt(rng: random.Random, body: Any) -> Any:
    """With one value replaced, or one key added, at any depth."""
    match body:
        case dict() if body and rng.random() < 0.8:
            key = rng.choice([*body, rng.choice(FIELDS)])
            return {**body, key: spoilt(rng, body.get(key, rng.choice(ODD)))}
        case list() if body and rng.random() < 0.8:
            place = rng.randrange(len(body))
            return [*body[:place], spoilt(rng, body[place]), *body[place + 1 :]]
        case _:
            return rng.choice(ODD)


def damaged(rng: random.Random, content: bytes) -> bytes:
    """One time in three cut off, or with a byte of it replaced."""
    place = rng.randrange(max(1, len(content)))
    match rng.randrange(6):
        case 0:
            return content[:place]
        case 1:
            return content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
        case _:
            return content


def generated(url: str, count: int, run: int, seen: Callable[[Callable[[], Any], str, tuple[str, str]], None]) -> None:
    """Up to so many requests that schemathesis makes from the live interface's description, most of them against it."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    operations = [one for one in operations if one.path != SWITCHES]  # they would switch engines off
    for operation in operations:
        for mode, share in ((GenerationMode.NEGATIVE, 0.7), (GenerationMode.POSITIVE, 0.3)):
            examples = max(1, round(share * count / len(operations)))

            @seed(run)
            @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                sent, route = f"{case.method} {case.formatted_path} {case.body!r}", (case.method.upper(), case.path)
                seen(partial(case.call, base_url=url, timeout=WITHIN_S), sent, route)

            with suppress(Unsatisfiable):  # nothing is wrong with a request that has nothing in it
                send()
