"""The variants of the kernels that second moments choose by shape, as measured by architecture.

``kfac-engine bench --suite gpu --tune FILE`` measures them and writes a file like ``tuned.json``,
which has the choices of this package. Shapes without a measurement have the static default.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

# The ways to multiply patches.
UNITS = "units"  # on FP32 units, by patch_products.cu
ROWS = "rows"  # from images, by pair_rows.cu
PIXELS = "pixels"  # from pixels that are copied as pairs, by pair_products.cu
PATCHES = "patches"  # from patches that are copied as pairs, by pair_products.cu

# Blocks for each multiprocessor, the default first: more blocks have fewer positions each, so that
# the last wave is shorter and more partial results are added.
BLOCKS: Mapping[str, Sequence[int]] = {
    UNITS: (12, 6, 24),
    ROWS: (8, 4, 16),
    PIXELS: (8, 4, 16),
    PATCHES: (8, 4, 16),
}


class Choice(NamedTuple):
    """A variant of a second moment of patches.

    Attributes:
        way: The way to multiply.
        blocks: Number of blocks for each multiprocessor.
    """

    way: str
    blocks: int


# Choice of each shape that was measured, by the text of ``shape_key``.
Choices = Mapping[str, Choice]


def shape_key(taps: int, channels: int, positions: int) -> str:
    """Return the text of a shape; numbers of positions within a factor of two are alike."""
    return f"{taps} taps, {channels} channels, 2^{positions.bit_length()} positions"


def choices(ways: Sequence[str]) -> tuple[Choice, ...]:
    """Return the variants of some ways, of which the first is the default."""
    return tuple(Choice(way, blocks) for way in ways for blocks in BLOCKS[way])


@cache
def tuned(architecture: str) -> Choices:
    """Return the choices of an architecture, such as ``"sm_90"``."""
    table = json.loads((files(__package__) / "tuned.json").read_text("utf-8"))
    return {key: Choice(*choice) for key, choice in table.get(architecture, {}).items()}
