"""Convolution geometries drawn at random, small enough to check pixel by pixel.

The gate runs the corners and a covering set of the others: for any two traits of a window, each
combination of values that any case has. `make test-all` runs all cases, and new ones of its seed.
"""

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from kfac_engine.backend.window import Window
from tests.nightly import SEED, nightly_but


class Case(NamedTuple):
    """Images ``(n, channels, *sides)`` and a window on them."""

    window: Window
    n: int
    channels: int
    sides: tuple[int, ...]

    def __str__(self):
        """The window axis by axis, for test ids."""
        axes = zip(*(getattr(self.window, name) for name in self.window.__slots__), strict=True)
        text = "_".join(f"k{k}s{s}d{d}p{b}.{e}" for k, s, d, b, e in axes)
        return f"{self.n}x{self.channels}x{'x'.join(map(str, self.sides))}-{text}"

    def images(self, seed=0):
        return np.random.default_rng(seed).standard_normal((self.n, self.channels, *self.sides))


LARGEST_SIDE = {1: 11, 2: 9, 3: 4}
LARGEST_KERNEL = {1: 5, 2: 5, 3: 3}


def draw(seed, count, *, strides):
    """``count`` cases of 1 to 3 axes; pads from -2 to 6, dilations up to 3."""
    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        axes = int(rng.integers(1, 4))

        def each(low, high, axes=axes):
            return tuple(map(int, rng.integers(low, high + 1, axes)))

        window = Window(
            kernel=each(1, LARGEST_KERNEL[axes]),
            strides=each(1, strides),
            dilations=each(1, 3) if rng.random() < 0.5 else (1,) * axes,
            begins=each(-2, 6 if axes < 3 else 2),
            ends=each(-2, 6 if axes < 3 else 2),
        )
        sides, channels = each(1, LARGEST_SIDE[axes]), int(rng.integers(1, 6))
        case = Case(window, int(rng.integers(1, 4)), channels, sides)
        if fits(case):
            found.append(case)
    return found


def fits(case):
    """Whether the padded images are as large as the kernel, which a window asks for."""
    w = case.window
    return all(
        begin + side + end > (k - 1) * d
        for side, k, d, begin, end in zip(
            case.sides, w.kernel, w.dilations, w.begins, w.ends, strict=True
        )
    )


def traits(case):
    """Name to value, of what the code distinguishes in a case."""
    window, pixels = case.window, np.prod(case.sides)
    found = {
        "axes": len(case.sides),
        "images": min(case.n, 2),
        "channels": "one" if case.channels == 1 else "few" if case.channels <= pixels else "many",
    }
    for place, axis in (("first", 0), ("last", -1)):
        reach, outputs = window.reaches[axis], window.output_shape(case.sides)[axis]
        begin, end, stride = (x[axis] for x in (window.begins, window.ends, window.strides))
        unseen = (begin + case.sides[axis] + end - reach - 1) % stride
        of_axis = {
            "kernel": min(window.kernel[axis], 3),
            "stride": stride,
            "dilation": window.dilations[axis] if reach else 1,
            "begin": kind_of_pad(begin, reach),
            "end": kind_of_pad(end, reach),
            "outputs": min(outputs, 2),
            "image": "small" if case.sides[axis] <= reach else "large",
            "pixels behind the last output": min(unseen, 1),
        }
        found |= {f"{place} {name}": value for name, value in of_axis.items()}
    return found


def kind_of_pad(pad, reach):
    """A pad beyond the reach of the kernel has outputs that see no pixel."""
    return "crop" if pad < 0 else "none" if pad == 0 else "within" if pad <= reach else "beyond"


@cache
def pairs_of_traits(case):
    return frozenset(combinations(traits(case).items(), 2))


def covering(cases):
    """Corners, and few other cases, that have all pairs of traits which any of the cases has.

    Greedy: the next case is the first one with the most pairs that no chosen case has.
    """
    pairs = {case: pairs_of_traits(case) for case in cases}
    chosen = [case for case in cases if case in CORNERS]
    missing = set().union(*pairs.values()).difference(*(pairs[case] for case in chosen))
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def nightly_but_covering(cases: Sequence[Case]):
    """Parameters of a test: the covering cases, then the others, which `make test-all` runs."""
    return nightly_but(covering(cases), cases)


FRESH = 0 if SEED is None else 150
STRIDED = [*draw(1, 150, strides=3), *draw((SEED or 0, 3), FRESH, strides=3)]
STRIDE_ONE = [*draw(2, 150, strides=1), *draw((SEED or 0, 1), FRESH, strides=1)]
EVERY = [*STRIDED, *STRIDE_ONE]

# The smallest kernel, an image smaller than the kernel, padding beyond what a kernel reaches, all
# outputs in the padding, a kernel of one with padding, more channels than pixels, with padding and
# without.
CORNERS = [
    Case(Window((1,), (1,), (1,), (0,), (0,)), 2, 3, (1,)),
    Case(Window((5, 3), (1, 1), (1, 1), (2, 1), (2, 1)), 2, 2, (2, 1)),
    Case(Window((2, 2), (1, 1), (1, 1), (6, 6), (6, 6)), 1, 2, (3, 3)),
    Case(Window((2,), (1,), (1,), (9,), (-6,)), 2, 2, (3,)),
    Case(Window((2, 2), (1, 1), (1, 1), (9, 0), (-6, 1)), 2, 2, (3, 3)),
    Case(Window((2, 2), (1, 1), (1, 1), (0, 9), (1, -6)), 2, 2, (3, 3)),
    Case(Window((1, 1), (2, 2), (1, 1), (1, 1), (1, 1)), 2, 3, (4, 5)),
    Case(Window((1, 3), (1, 1), (1, 2), (-1, -1), (-1, 0)), 2, 3, (6, 8)),
    Case(Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1)), 2, 20, (3, 3)),
    Case(Window((2, 2), (1, 1), (1, 1), (0, 0), (0, 0)), 2, 20, (3, 4)),
    Case(Window((3, 3), (1, 1), (1, 1), (-2, -2), (-2, -2)), 2, 3, (9, 9)),
]
