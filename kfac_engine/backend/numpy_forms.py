"""Which form of the second moment of patches is the quickest for a geometry.

Things cost multiplications of SYRK at full speed, on one core with OpenBLAS's AVX-512 kernels in
float32. The constants were fitted to 48 geometries (1 to 3 axes, 8 to 512 channels, images of 2 to
1000 pixels a side). Milliseconds on one core, measured and estimated at 65 multiplications a
nanosecond, padding as large as keeps the sides:

    images, channels, side, kernel     lines          shifted        plain
    32      512        7×7    3×3       91 /  88      132 / 118      247 / 283
    32      256       14×14   3×3      102 /  91      110 / 112      267 / 268
    32       64       56×56   3×3      183 / 204      149 / 141      340 / 308
    128      64        8×8    3×3       15 /  12       23 /  23       30 /  25
    128      16       32×32   3×3       90 /  80       21 /  25       45 /  38
    8       256        7×7    3×3       15 /  10       12 /  14       16 /  19
    1       128       14×14   3×3      6.4 / 3.2      2.9 / 3.0      2.4 / 2.2
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from kfac_engine.backend.frame import frame
from kfac_engine.backend.numpy_lines import boxes_of_all, line_numbers, together
from kfac_engine.backend.numpy_shift import distances, gapped_sides, scratch_numbers
from kfac_engine.backend.window import Window

_COPIED_NUMBER = 60
_WRITTEN_NUMBER = 50
_CALL = 300_000
_SLAB = 5_000_000
_THIN = 1.2  # operands with as few rows as there are channels
_PACKED_ROWS = 64  # rows that take as long to bring to their product as to multiply


class Images(NamedTuple):
    """What the choice depends on beside the window.

    Attributes:
        number: Of images.
        channels: Of each.
        sides: Of each, pixels an axis.
    """

    number: int
    channels: int
    sides: tuple[int, ...]


@lru_cache(maxsize=1024)
def quickest(window: Window, images: Images, room: int, threads: int) -> str:
    """The form to take.

    Args:
        window: Geometry.
        images: What it sees.
        room: How many numbers fit the working memory, copies of patches aside.
        threads: That share the work.

    Returns:
        A name of ``FORMS``; ``"plain"`` for strides above one, a single tap, or too little memory.
    """
    if window.taps == 1 or set(window.strides) != {1} or not images.number:
        return "plain"
    needed = {
        "plain": 0,
        "shifted": scratch_numbers(window, images.channels, images.sides),
        "lines": line_numbers(window, *images, threads),
    }
    fitting = [name for name, numbers in needed.items() if numbers <= room]
    return min(fitting, key=lambda name: FORMS[name](window, images))


def _lines(window: Window, images: Images) -> float:
    """Products of lines, for each chunk of images a call each; moments and blocks."""
    count, channels, sides = images
    boxes = [box for some in boxes_of_all(window, sides).values() for box in some]
    pairs = sum(prod(len(pixels) for pixels, _ in box) for box in boxes)
    calls = sum(prod(len(pixels) for pixels, _ in box[:-1]) for box in boxes)
    calls *= -(-count // together(*images))
    products = count * pairs * channels * (channels + _PACKED_ROWS)
    moved = _COPIED_NUMBER * count * channels * prod(sides)
    written = _WRITTEN_NUMBER * (window.taps * channels) ** 2
    return products + calls * (_CALL + _PACKED_ROWS * channels * channels // 8) + moved + written


def _shifted(window: Window, images: Images) -> float:
    """A product for each image and distance, filling the blocks, and the frame."""
    count, channels, sides = images
    pixels, blocks = prod(gapped_sides(sides, window)), len(distances(window))
    products = blocks * (_THIN * channels**2 * pixels + _CALL) + _COPIED_NUMBER * channels * pixels
    filling = _WRITTEN_NUMBER * (window.taps * channels) ** 2
    slabs = [_plain(slab.window, images) for slab in frame(window, sides)]
    return count * products + filling + sum(slabs) + _SLAB * len(slabs)


def _plain(window: Window, images: Images) -> float:
    """Copying the patches and multiplying them by SYRK, which does half of a product."""
    features = window.taps * images.channels
    patches = images.number * prod(window.output_sides(images.sides))
    return patches * features * (features // 2 + _COPIED_NUMBER)


FORMS: Mapping[str, Callable[[Window, Images], float]] = {
    "plain": _plain,
    "shifted": _shifted,
    "lines": _lines,
}
