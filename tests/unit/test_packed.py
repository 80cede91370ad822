"""A user's rows as bytes: what is read is what was written, or nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from integrations.hstu.state.packed import layout_of, packed, unpacked
from integrations.hstu.state.pool import Plane
from tests.repetitions import fuzzed
from tests.unit.test_state_stores import EVENTS, PLANES, contents, history

ROWS = history(*EVENTS[:9])
LAYOUT = layout_of("model", PLANES)
WHOLE = packed(LAYOUT, ROWS, contents(ROWS))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rows_are_read_as_they_were_written(dtype):
    planes = {name: Plane(plane.shape, plane.axis, dtype) for name, plane in PLANES.items()}
    arrays = {name: array.astype(dtype) for name, array in contents(ROWS).items()}
    layout = layout_of("model", planes)
    rows, read = unpacked(packed(layout, ROWS, arrays), layout)
    np.testing.assert_array_equal(rows, ROWS)
    for name, array in arrays.items():
        assert read[name].dtype == dtype
        np.testing.assert_array_equal(read[name], array)


@pytest.mark.parametrize(
    "other",
    [
        layout_of("another model", PLANES),
        layout_of("model", {**PLANES, "states": Plane((4,), 0, np.float16)}),
        layout_of("model", {**PLANES, "states": Plane((5,), 0)}),
        layout_of("model", {**PLANES, "kt": Plane((2, 1, 3), 2)}),
        layout_of("model", {name: PLANES[name] for name in ("kt", "v")}),
    ],
    ids=["model", "precision", "shape", "axis", "planes"],
)
def test_rows_of_another_model_precision_or_shape_are_refused(other):
    with pytest.raises(ValueError, match="another model or layout"):
        unpacked(WHOLE, other)


def test_rows_that_end_early_are_refused_wherever_that_is():
    for length in range(len(WHOLE)):
        with pytest.raises(ValueError, match=r"."):
            unpacked(WHOLE[:length], LAYOUT)


def altered(at, byte):
    return WHOLE[:at] + bytes([byte]) + WHOLE[at + 1 :]


@fuzzed()
@given(st.binary(max_size=200) | st.builds(altered, st.integers(0, 400), st.integers(0, 255)))
def test_bytes_that_are_altered_are_refused_or_have_the_shapes_that_are_asked_for(data):
    try:
        rows, planes = unpacked(data, LAYOUT)
    except ValueError:
        return
    for name, array in planes.items():
        assert array.shape == PLANES[name].stacked(len(rows))
