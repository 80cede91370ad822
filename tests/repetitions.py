"""How often tests repeat what is drawn at random: a few times in `make test`, and in full with --thorough, as `make chaos` does it."""

from typing import TypeVar

from hypothesis import HealthCheck, settings

T = TypeVar("T")
_thorough = False


def times(full: T, few: T) -> T:
    """`full` with --thorough, else `few`."""
    return full if _thorough else few


def choose(*, thorough: bool) -> None:
    """To be called before any test is imported; what says nothing else is tried with Hypothesis's 100 examples, or with 25."""
    global _thorough  # noqa: PLW0603 - decorators ask for it, which are given no fixture
    _thorough = thorough
    settings.register_profile("genrec", deadline=None, max_examples=times(100, 25))  # an example's time says more of the machine
    settings.load_profile("genrec")


def fuzzed() -> settings:
    """Many examples of broken input: 100, or 5,000 with --thorough. A decorator's settings, to be asked for as the test is defined."""
    return settings(max_examples=times(5_000, 100), deadline=None, suppress_health_check=list(HealthCheck))
