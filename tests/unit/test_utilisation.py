import pytest

from cluster.traffic.utilisation import Utilisation


def test_it_is_the_share_of_the_window_that_was_busy():
    meter = Utilisation(now=0.0, window_s=4.0)
    assert meter.share(1.0, 0.5) == pytest.approx(0.5)
    assert meter.share(2.0, 0.5) == pytest.approx(0.25)
    for second in range(3, 8):
        share = meter.share(float(second), 0.5)
    assert share == 0.0, "what was busy lies before the window"


def test_asked_twice_at_the_same_moment_it_says_nothing_new():
    meter = Utilisation(now=5.0, busy_s=3.0)
    assert meter.share(5.0, 3.0) == 0.0
