"""Estimated cost of the two algorithms for Gram matrices of patches.

The unit of cost is a multiplication of SYRK at full speed, on one core in float32. The constants
are fitted to 39 geometries with one to three axes, 1 to 512 channels, and 4 to 2000 pixels along an
axis. ADR 9 compares estimates with measurements.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from kfac_engine.backend.cpu.shifted_gram import FEW_CHANNELS, images_per_round, scratch_numbers
from kfac_engine.backend.kernel_offsets import line_products
from kfac_engine.backend.window import Window

# Costs of copying an entry to channels-last order, of writing an entry of a block, and of copying
# an entry of a patch.
_COPIED_NUMBER = 60
_WRITTEN_NUMBER = 30
_PLAIN_NUMBER = 50
# Costs of preparing a product, of a BLAS call for a line, and of writing a block.
_CALL = 1_000_000
_LINE = 400_000
_BLOCK = 600_000
# Cost of a pair of pixels in a small product, in addition to its multiplications.
_PAIR = 130
# Number of rows that take as long to load as to multiply.
_PACKED_ROWS = 64


class Images(NamedTuple):
    """Sizes of a batch of images.

    Attributes:
        number: Number of images.
        channels: Channels of each image.
        spatial_shape: Shape of each image.
    """

    number: int
    channels: int
    spatial_shape: tuple[int, ...]


@lru_cache(maxsize=1024)
def select_algorithm(window: Window, images: Images, numbers: int, threads: int) -> str:
    """Return the name of the algorithm with the lower estimated cost.

    Args:
        window: Geometry.
        images: Sizes of the batch.
        numbers: Number of entries of the scratch memory, without copies of patches.
        threads: Number of threads.

    Returns:
        A name of ``COSTS``. It is ``"im2col"`` for a stride above one, a single tap, an empty batch
        and too little memory.
    """
    if window.taps == 1 or set(window.strides) != {1} or not images.number:
        return "im2col"
    if scratch_numbers(window, *images, threads) > numbers:
        return "im2col"
    return min(COSTS, key=lambda name: COSTS[name](window, images))


def _shifted(window: Window, images: Images) -> float:
    """Return the cost of copying the images, multiplying lines, and writing the blocks."""
    count, channels, spatial_shape = images
    few = channels <= FEW_CHANNELS
    groups = line_products(window, spatial_shape, joined=few)
    products = [part for group in groups for part in group.products]
    pairs, calls = sum(part.pairs for part in products), _CALL * len(products)
    if not few:
        rounds = -(-count // images_per_round(*images))
        lines = sum(prod(map(len, part.lines)) for part in products if part.sign > 0)
        calls += _LINE * rounds * lines
    blocks = _BLOCK * sum(len(group.blocks) for group in groups)
    each = channels**2 + _PAIR if few else channels * (channels + _PACKED_ROWS)
    copied = _COPIED_NUMBER * channels * prod(spatial_shape)
    written = _WRITTEN_NUMBER * (window.taps * channels) ** 2
    return count * (pairs * each + copied) + calls + blocks + written


def _im2col(window: Window, images: Images) -> float:
    """Return the cost of copying the patches and multiplying them by SYRK."""
    features = window.taps * images.channels
    patches = images.number * prod(window.output_shape(images.spatial_shape))
    return patches * features * (features // 2 + _PLAIN_NUMBER)


COSTS: Mapping[str, Callable[[Window, Images], float]] = {"im2col": _im2col, "shifted": _shifted}
