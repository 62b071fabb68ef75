"""Geometry agrees with counting positions one by one."""

from itertools import combinations, product

import numpy as np
import pytest

from kfac_engine.backend.cuda.recipes import frame, full_grid
from kfac_engine.backend.window import Window
from kfac_engine.errors import ShapeError
from tests.backend.geometries import (
    CORNERS,
    EVERY,
    STRIDE_ONE,
    covering,
    nightly_but_covering,
    traits,
)

EACH = pytest.mark.parametrize("case", nightly_but_covering([*CORNERS, *EVERY]))
EACH_OF_UNIT_STRIDES = pytest.mark.parametrize(
    "case",
    nightly_but_covering([c for c in [*CORNERS, *STRIDE_ONE] if set(c.window.strides) == {1}]),
)


def sights(window, sides, taps_from=None):
    """Every (output, tap, pixel) inside the image, each a tuple over axes, by plain counting.

    Outputs are named by the pixel under tap zero of the full kernel, so that windows on the same
    images can be compared whatever they call output zero.
    """
    shift = taps_from or (0,) * len(sides)
    found = []
    for output in product(*map(range, window.output_shape(sides))):
        for tap in product(*map(range, window.kernel)):
            under = [
                o * s + u * d - b
                for o, s, u, d, b in zip(
                    output, window.strides, tap, window.dilations, window.begins, strict=True
                )
            ]
            if all(0 <= p < side for p, side in zip(under, sides, strict=True)):
                full = tuple(u + f for u, f in zip(tap, shift, strict=True))
                origin = tuple(
                    p - u * d for p, u, d in zip(under, full, window.dilations, strict=True)
                )
                found.append((origin, full, tuple(under)))
    return found


@EACH
def test_output_shape_counts_positions_of_kernel(case):
    w, expected = case.window, []
    for axis, side in enumerate(case.sides):
        first, past = -w.begins[axis], side + w.ends[axis]
        reach = (w.kernel[axis] - 1) * w.dilations[axis]
        expected.append(sum(p + reach < past for p in range(first, past, w.strides[axis])))
    assert w.output_shape(case.sides) == tuple(expected)


@EACH
def test_seen_pixels_equal_enumeration(case):
    w = case.window
    for axis, side in enumerate(case.sides):
        for tap in range(w.kernel[axis]):
            outputs, pixels = w.seen(axis, tap, case.sides)
            pairs = [
                (o, o * w.strides[axis] + tap * w.dilations[axis] - w.begins[axis])
                for o in range(w.output_shape(case.sides)[axis])
            ]
            expected = [(o, p) for o, p in pairs if 0 <= p < side]
            found = zip(range(99)[outputs], range(99)[pixels], strict=True)
            assert list(found) == expected


@pytest.mark.parametrize("positions", [1, 3, 10, 1000])
@pytest.mark.parametrize("case", nightly_but_covering([*CORNERS, *EVERY[::7]]))
def test_split_windows_partition_outputs(case, positions):
    parts = list(case.window.split(case.sides, positions))
    assert all(np.prod(part.output_shape(case.sides)) <= positions for part in parts)
    found = [sight for part in parts for sight in sights(part, case.sides)]
    assert sorted(found) == sorted(sights(case.window, case.sides))


@EACH_OF_UNIT_STRIDES
def test_frame_and_outputs_partition_full_grid(case):
    window, sides = case.window, case.sides
    whole = window
    for axis, line in enumerate(full_grid(window, sides)):
        whole = whole.restricted(axis, sides, line)
    slabs = []
    for slab in frame(window, sides):
        before = [0] * len(sides)
        before[slab.axis] = slab.taps.start
        slabs += sights(slab.window, sides, before)
    assert sorted([*slabs, *sights(window, sides)]) == sorted(sights(whole, sides))


@EACH_OF_UNIT_STRIDES
def test_full_grid_has_each_tap_pixel_pair_once(case):
    window, sides = case.window, case.sides
    for axis, line in enumerate(full_grid(window, sides)):
        window = window.restricted(axis, sides, line)
    met = sorted((tap, pixel) for _, tap, pixel in sights(window, sides))
    taps, pixels = product(*map(range, window.kernel)), product(*map(range, sides))
    assert met == sorted(product(taps, pixels))


TOO_SMALL = {
    "image": (Window((3,), (1,), (1,), (0,), (0,)), (2,)),
    "dilated": (Window((3, 3), (1, 1), (1, 2), (0, 0), (0, 0)), (3, 4)),
    "cropped": (Window((1,), (1,), (1,), (-2,), (-2,)), (4,)),
    "strided": (Window((3,), (2,), (1,), (0,), (0,)), (2,)),
}


@pytest.mark.parametrize(("window", "sides"), TOO_SMALL.values(), ids=TOO_SMALL)
def test_image_smaller_than_kernel_raises_error(window, sides):
    with pytest.raises(ShapeError, match="smaller than the window"):
        window.output_shape(sides)


def test_image_with_other_number_of_axes_raises_error():
    with pytest.raises(ShapeError, match="has another number of axes"):
        Window((3,), (1,), (1,), (0,), (0,)).output_shape((5, 5))


def test_covering_windows_have_all_pairs_of_traits():
    windows = [*CORNERS, *EVERY]
    few = covering(windows)
    assert set(CORNERS) <= set(few) <= set(windows)
    assert len(few) < 70

    def pairs(cases):
        return {pair for case in cases for pair in combinations(sorted(traits(case).items()), 2)}

    assert pairs(few) == pairs(windows)
    assert len(traits(windows[0])) > 10
