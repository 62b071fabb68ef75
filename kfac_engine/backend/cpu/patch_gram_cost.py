"""Which form of the second moment of patches is the quickest for a geometry.

Things cost multiplications of SYRK at full speed, on one core with OpenBLAS's AVX-512 kernels in
float32. The constants were fitted to 39 geometries (1 to 3 axes, 1 to 512 channels, images of 4 to
2000 pixels a side). Milliseconds on one core, measured and estimated at 70 multiplications a
nanosecond, padding as large as keeps the sides:

    images, channels, side, kernel     lines          plain
    32      512        7×7    3×3       85 /  76           / 243
    32      256       14×14   3×3       87 /  89           / 248
    32      128       28×28   3×3      112 / 115           / 259
    32       64       56×56   3×3       95 /  84           / 279
    128      64        8×8    3×3      8.4 / 7.0       23 /  23
    128      32       16×16   3×3      9.3 / 8.2       27 /  26
    128      16       32×32   3×3       12 /  12       36 /  33
    128       3       32×32   3×3      6.2 / 4.2      5.5 / 3.2
    32       16       28×28   5×5      8.9 / 9.9       35 /  36
    8         3       64×64   7×7       24 /  21       10 /   9
    1       128       14×14   3×3      4.3 / 3.1      2.1 / 2.0
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from kfac_engine.backend.cpu.shifted_gram import FEW_CHANNELS, line_numbers, together
from kfac_engine.backend.kernel_offsets import line_products
from kfac_engine.backend.window import Window

_COPIED_NUMBER = 60
_WRITTEN_NUMBER = 30
_PLAIN_NUMBER = 50
_CALL = 1_000_000
_LINE = 400_000  # a product of its own
_BLOCK = 600_000
_PAIR = 130  # of pixels in a small product, whatever its sides
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
    if line_numbers(window, *images, threads) > room:
        return "plain"
    return min(FORMS, key=lambda name: FORMS[name](window, images))


def _lines(window: Window, images: Images) -> float:
    """Copying the images, products of lines, and writing the blocks."""
    count, channels, sides = images
    few = channels <= FEW_CHANNELS
    groups = line_products(window, sides, joined=few)
    parts = [part for group in groups for part in group.parts]
    pairs, calls = sum(part.pairs for part in parts), _CALL * len(parts)
    if not few:
        rounds = -(-count // together(*images))
        calls += _LINE * rounds * sum(prod(map(len, part.lines)) for part in parts if part.sign > 0)
    blocks = _BLOCK * sum(len(group.blocks) for group in groups)
    each = channels**2 + _PAIR if few else channels * (channels + _PACKED_ROWS)
    moved = _COPIED_NUMBER * channels * prod(sides)
    written = _WRITTEN_NUMBER * (window.taps * channels) ** 2
    return count * (pairs * each + moved) + calls + blocks + written


def _plain(window: Window, images: Images) -> float:
    """Copying the patches and multiplying them by SYRK, which does half of a product."""
    features = window.taps * images.channels
    patches = images.number * prod(window.output_shape(images.sides))
    return patches * features * (features // 2 + _PLAIN_NUMBER)


FORMS: Mapping[str, Callable[[Window, Images], float]] = {"plain": _plain, "lines": _lines}
