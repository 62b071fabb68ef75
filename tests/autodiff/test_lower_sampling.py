"""Operators that read images at computed places, rewritten: the same values, and true gradients."""

from itertools import product

import numpy as np
import pytest

from tests.autodiff.harness import N, Operand, case, distinct, k, p, x
from tests.autodiff.lowering_checks import BATCHES, check_gradients, check_values


def _places(rng, sides):
    """Within the image and outside of it, in coordinates from −1 to 1."""
    return rng.uniform(-1.6, 1.6, sides)


def _regions(rng, sides):
    """Corners of regions, some of which reach over the image's edge."""
    begin = rng.uniform(-1.5, 3, (sides[0], 2))
    return np.concatenate([begin, begin + rng.uniform(0.4, 6, (sides[0], 2))], axis=1)


def _images(rng, sides):
    return rng.integers(0, 2, sides)


_SAMPLED = [
    case(
        "GridSample", f"{mode}_{padding}_{'corners' if corners else 'edges'}",
        x(N, 2, 3, 4), x(N, 2, 2, 2, draw=_places), opset=20, mode=mode, padding_mode=padding,
        align_corners=corners,
    )
    for mode, padding, corners in product(
        ("linear", "nearest", "cubic"), ("zeros", "border", "reflection"), (0, 1)
    )
] + [
    case("GridSample", f"volume_{mode}_{padding}", x(N, 1, 2, 3, 2),
         x(N, 1, 1, 2, 3, draw=_places), opset=20, mode=mode, padding_mode=padding)
    for mode in ("linear", "nearest")
    for padding in ("zeros", "border", "reflection")
] + [
    case("GridSample", "one_pixel_corners", x(N, 2, 1, 1), x(N, 1, 2, 2, draw=_places), opset=20,
         padding_mode="reflection", align_corners=1),
    case("GridSample", "parameter_grid", p(2, 2, 3, 3), p(2, 2, 2, 2, draw=_places), opset=20),
]  # fmt: skip

_ALIGNED = [
    case(
        "RoiAlign", f"{mode}_{ratio}_{pixel}", x(2, N, 5, 4), x(3, 4, draw=_regions),
        Operand((3,), _images, active=False), newest=21, mode=mode, sampling_ratio=ratio,
        output_height=2, output_width=3, spatial_scale=0.75, coordinate_transformation_mode=pixel,
    )
    for mode in ("avg", "max")
    for ratio in (0, 2)
    for pixel in ("half_pixel", "output_half_pixel")
] + [
    case("RoiAlign", "default", x(2, N, 3, 4), x(2, 4, draw=_regions), k([1, 0]), newest=21),
]  # fmt: skip


def _moves(*sides):
    return x(*sides, draw=lambda rng, shape: rng.normal(size=shape))


_DEFORMED = [
    case("DeformConv", "plain", x(N, 2, 4, 4), p(2, 2, 2, 2), _moves(N, 8, 3, 3), opset=19),
    case("DeformConv", "bias", x(N, 1, 3, 3), p(2, 1, 2, 1), _moves(N, 4, 2, 3), p(2), opset=19),
    case("DeformConv", "modulated", x(N, 2, 3, 3), p(1, 2, 2, 2), _moves(N, 8, 2, 2), None,
         x(N, 4, 2, 2), opset=19),
    case("DeformConv", "groups", x(N, 4, 3, 3), p(4, 2, 2, 2), _moves(N, 16, 2, 2), p(4),
         x(N, 8, 2, 2), opset=19, group=2, offset_group=2),
    case("DeformConv", "geometry", x(N, 1, 5, 4), p(1, 1, 3, 2), _moves(N, 12, 3, 2), opset=19,
         strides=(2, 3), pads=(2, 1, 1, 1), dilations=(1, 2)),
]  # fmt: skip


def _pooled(rng, sides):
    """An image and corners at whole pixels, some of them outside."""
    image, begin = rng.integers(0, 2, (sides[0], 1)), rng.integers(-2, 4, (sides[0], 2))
    return np.concatenate([image, begin, begin + rng.integers(0, 9, begin.shape)], axis=1) * 1.0


_POOLED = [
    case(
        "MaxRoiPool",
        label,
        x(2, N, *sides, draw=distinct),
        Operand((regions, 5), _pooled, active=False),
        newest=21,
        pooled_shape=bins,
        **scale,
    )
    for label, sides, regions, bins, scale in (
        ("bins", (5, 6), 4, (2, 3), {}),
        ("scaled", (6, 5), 3, (3, 2), {"spatial_scale": 0.75}),
        ("one_bin", (3, 4), 2, (1, 1), {}),
    )
]

_FRAMED = [
    case("AffineGrid", "image", p(2, 2, 3), k([2, 3, 4, 5]), opset=20),
    case("AffineGrid", "volume_corners", p(2, 3, 4), k([2, 1, 2, 3, 2]), opset=20, align_corners=1),
    case("CenterCropPad", "cut_and_filled", x(N, 3, 5), k([4, 2]), axes=(1, 2)),
    case("CenterCropPad", "all_axes", p(3, 4), k([5, 4])),
]  # fmt: skip

CASES = (*_SAMPLED, *_ALIGNED, *_DEFORMED, *_POOLED, *_FRAMED)

_ONE_PIXEL = case("AffineGrid", "one_pixel_corners", p(2, 2, 3), k([2, 1, 1, 3]), opset=20,
                  align_corners=1)  # fmt: skip
# Names of modes before operator set 20, which the reference does not know.
_FORMER = [
    case("GridSample", mode, x(N, 2, 3, 4), x(N, 2, 2, 2, draw=_places), newest=19, mode=mode)
    for mode in ("bilinear", "bicubic", "nearest")
]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("tested", [*CASES, *_FORMER, _ONE_PIXEL], ids=str)
def test_lowered_operator_has_values_of_operator(tested, batch):
    check_values(tested, batch)


@pytest.mark.parametrize("tested", CASES, ids=str)
def test_lowered_operator_gradients_equal_finite_differences(tested):
    check_gradients(tested)
