"""Tests of everything; the clocks that they, and what they test, import by name can be made to jump."""

from tests import virtual_time

virtual_time.install()
