"""Waiting for what a running service comes to, sooner or later."""

import asyncio
import inspect
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import httpx

T = TypeVar("T")


def eventually(holds: Callable[[], Any], what: str = "it holds", within_s: float = 300, every_s: float = 0.1) -> float:
    """Wait until it holds; the seconds that took. A server that is away for the moment does not hold."""
    began = time.monotonic()
    while True:
        with suppress(httpx.TransportError, KeyError, StopIteration, json.JSONDecodeError):
            if holds():
                return time.monotonic() - began
        assert time.monotonic() - began < within_s, f"not within {within_s:g} s: {what}"
        time.sleep(every_s)


def until_right(look: Callable[[], T], right: Callable[[T], object], within_s: float = 300, every_s: float = 0.1) -> T:
    """What is seen once it is right."""
    deadline = time.monotonic() + within_s
    while not right(seen := look()):
        assert time.monotonic() < deadline, f"still so after {within_s:g} s: {seen}"
        time.sleep(every_s)
    return seen


def json_of(url: str, within_s: float = 300) -> dict[str, Any]:
    """The JSON of a GET that is answered with 200, or with 503 while what it asks does not answer in time."""
    response = until_right(lambda: httpx.get(url, timeout=120), lambda seen: seen.status_code != 503, within_s)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def until(holds: Callable[[], Any], what: str = "it holds", within_s: float = 300) -> None:
    """As `eventually`, beside the event loop; `holds` may be a coroutine function."""
    deadline = time.monotonic() + within_s
    while not (await held if inspect.isawaitable(held := holds()) else held):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.001)


async def passed(seconds: float) -> float:
    """Wait until at least so many seconds have passed by the clock, in virtual time or real; the seconds that have."""
    began = time.monotonic()
    await until(lambda: time.monotonic() - began >= seconds, "the time has passed")
    return time.monotonic() - began


async def settled() -> None:
    """Until everything that can happen without time passing has happened."""
    for _ in range(50):
        await asyncio.sleep(0)
