"""Ends a process of tests that hangs where no test's timeout reaches it, in C or after its last test, and says where it hangs."""

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

LATER_S = 300
"""Than the test's own timeout, or than the end of the last test."""
STDERR = pytest.StashKey[IO[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = stderr = os.fdopen(os.dup(2), "w")  # that of a test is kept for its report
    config.add_cleanup(stderr.close)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("timeout")
    with _ended_in(item.config, LATER_S + float(marker.args[0] if marker else item.config.getini("timeout"))):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    with _ended_in(session.config, LATER_S):
        return (yield)


@contextmanager
def _ended_in(config: pytest.Config, seconds: float) -> Iterator[None]:
    """End the process in so many seconds, unless what is done meanwhile ends before."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
