"""A browser for tests of pages. Tests that import this are skipped where playwright is not installed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install '.[dev]')")
expect = playwright.expect
PATIENCE_MS = 120_000
"""For whatever a page is to come to: a test says what that is, not how soon on a busy machine."""
expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def chromium() -> Iterator[Any]:
    """The system's Chromium or, without one, playwright's own, without a window. Skips the test where neither can be started."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with playwright.sync_playwright() as started:
        try:
            browser = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium can be started (apt-get install chromium): {error.message.splitlines()[0]}")
        yield browser
        browser.close()


def patient(page: Any) -> Any:
    """The page, or all pages of the context: what is done there, and what it waits for, may take long."""
    page.set_default_timeout(PATIENCE_MS)
    return page
