"""Waiting for what a running service comes to, sooner or later."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx


def eventually(holds: Callable[[], Any], what: str, within_s: float, every_s: float = 0.1) -> float:
    """Wait until it holds; the seconds that took. A server that is away for the moment does not hold."""
    began = time.monotonic()
    while True:
        with suppress(httpx.TransportError, KeyError, StopIteration, json.JSONDecodeError):
            if holds():
                return time.monotonic() - began
        assert time.monotonic() - began < within_s, f"not within {within_s:g} s: {what}"
        time.sleep(every_s)
