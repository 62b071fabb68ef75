"""Cases for what puts pixels elsewhere: resizing, unpooling, patches."""

from itertools import product

import numpy as np

from tests.autodiff.harness import N, Operand, case, k, x


def _scales(*scales: float) -> tuple:
    return (None, k([1, 1, *scales], "float32"))


_COORDINATES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
)  # fmt: skip
_KINDS = {
    "linear": {"mode": "linear"},
    "cubic": {"mode": "cubic"},
    "cubic_inside": {"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5},
    "linear_antialias": {"mode": "linear", "antialias": 1},
    "cubic_antialias": {"mode": "cubic", "antialias": 1},
}
_MODES = [
    case("Resize", f"{kind}_{mode}", x(1, N, 2, 4), None, None, k([3, 3]), opset=19,
         coordinate_transformation_mode=mode, axes=(2, 3), **_KINDS[kind])
    for kind, mode in product(_KINDS, _COORDINATES)
]  # fmt: skip

_CROP = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 3.0}
_ROI = k([0.1, -0.2, 0.8, 1.1], "float32")
_FORMS = [
    case("Resize", label, x(N, 1, *sides), *target, **attributes)
    for label, sides, target, attributes in (
        ("linear_scales", (3, 4), _scales(1.7, 0.6), {"mode": "linear"}),
        ("cubic_scales", (4, 3), _scales(0.6, 1.4), {"mode": "cubic"}),
        ("one_axis_of_two", (3, 4), _scales(1, 1.5), {"mode": "linear"}),
        ("first_axis_of_two", (3, 4), _scales(2.5, 1), {"mode": "cubic"}),
        ("linear_line", (5,), _scales(1.7), {"mode": "linear"}),
        ("linear_volume", (2, 3, 2), _scales(1.5, 0.7, 2), {"mode": "linear"}),
        ("axes_out_of_order", (3, 4), (None, None, k([6, 3])), {"mode": "linear", "axes": (3, 2)}),
        ("scales_of_axes", (3, 4), (None, k([2.3, 1], "float32")),
         {"mode": "linear", "axes": (2, 3)}),
        ("nearest_of_axes", (3, 4), (None, k([2, 3], "float32")), {"axes": (2, 3)}),
        ("to_one_pixel", (3, 4), (None, None, k([1, 1])), {"mode": "linear", "axes": (2, 3)}),
        ("not_larger", (3, 4), (None, None, k([7, 6])),
         {"mode": "linear", "axes": (2, 3), "keep_aspect_ratio_policy": "not_larger"}),
        ("not_smaller", (3, 4), (None, None, k([7, 6])),
         {"mode": "cubic", "axes": (2, 3), "keep_aspect_ratio_policy": "not_smaller"}),
        ("crop_of_axes", (4, 3), (_ROI, None, k([3, 5])),
         {"mode": "linear", "axes": (2, 3), **_CROP}),
        ("crop_nearest", (4, 3), (_ROI, None, k([3, 5])),
         {"mode": "nearest", "axes": (2, 3), **_CROP}),
    )
]  # fmt: skip

_MATRICES = [
    # Images without batch and channels, whose last axis is the batch of the test.
    case("Resize", "matrix_not_resized_in_columns", x(3, N), None, k([2, 1], "float32"),
         mode="linear"),
    case("Resize", "channels_last", x(N, 3, 4, 2), None, k([1, 1.5, 2, 1], "float32"),
         mode="linear"),
]  # fmt: skip


def _apart(rng: np.random.Generator, sides: tuple[int, ...]) -> np.ndarray:
    """Places in an image of four times the size, each once."""
    count = int(np.prod(sides))
    return rng.permutation(4 * count)[:count].reshape(sides)


def _crowded(rng: np.random.Generator, sides: tuple[int, ...]) -> np.ndarray:
    """Places among the first few, some of them twice."""
    return rng.integers(0, int(np.prod(sides)), sides)


_UNPOOLED = [
    case("MaxUnpool", label, x(N, 2, 2, 3), Operand((N, 2, 2, 3), draw, active=False),
         kernel_shape=(2, 2), strides=(2, 2))
    for label, draw in (("apart", _apart), ("crowded", _crowded))
] + [
    case("MaxUnpool", "padded", x(N, 1, 3), Operand((N, 1, 3), _crowded, active=False),
         kernel_shape=(3,), strides=(2,), pads=(1, 0)),
]  # fmt: skip

_PATCHES = [
    case("Col2Im", label, x(N, channels, positions), k(image), k(block), **geometry)
    for label, channels, positions, image, block, geometry in (
        ("plain", 8, 6, (3, 4), (2, 2), {}),
        ("strided", 6, 4, (4, 5), (2, 3), {"strides": (2, 2)}),
        ("padded", 4, 9, (3, 4), (2, 2), {"pads": (1, 0, 0, 0)}),
        ("dilated", 4, 4, (4, 4), (2, 2), {"dilations": (2, 3), "pads": (0, 0, 0, 1)}),
        ("line", 6, 3, (5,), (3,), {}),
    )
]

CASES = (*_MODES, *_FORMS, *_MATRICES, *_UNPOOLED, *_PATCHES)
