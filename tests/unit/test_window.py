import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.window import Window
from integrations.hstu.user_behavior_schema import collate
from tests.bundles import random_sequence


@pytest.mark.parametrize(("events", "start"), [(0, 0), (1, 0), (200, 0), (201, 25), (225, 25), (226, 50), (1000, 800)])
def test_leaves_out_the_least_multiple_of_the_step(events, start):
    assert Window(200, 25).start(events) == start


@given(events=st.integers(0, 5000), longest=st.integers(1, 300), share=st.floats(0, 1))
def test_is_full_to_within_a_step_and_moves_only_by_steps(events, longest, share):
    step = 1 + int(share * (longest - 1))
    window = Window(longest, step)
    start = window.start(events)
    left = events - start
    assert left <= longest
    assert left > longest - step or start == 0
    assert window.start(events + 1) - start in (0, step)


def test_a_step_of_one_always_leaves_the_latest_events():
    assert [events - Window.of(200, 1).start(events) for events in (1, 200, 201, 5000)] == [1, 200, 200, 200]


@pytest.mark.parametrize("step", [0, -1, 201])
def test_refuses_a_step_that_could_leave_no_event(step):
    with pytest.raises(ValueError, match=rf"cannot move in steps of {step}; the step must be within 1\.\.200"):
        Window(200, step)


@pytest.mark.parametrize(("longest", "step"), [(1, 1), (7, 1), (20, 2), (200, 25), (2048, 256)])
def test_the_default_step_is_an_eighth_of_the_window(longest, step):
    assert Window.of(longest) == Window(longest, step)


def test_training_keeps_exactly_the_latest_events_and_serving_a_stepped_window():
    sequence = random_sequence(23)
    assert collate([sequence], 20).items[0].tolist() == sequence.items[3:].tolist()
    assert collate([sequence], 20, step=2).items[0].tolist() == sequence.items[4:].tolist()
