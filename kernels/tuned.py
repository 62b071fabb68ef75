"""The variants of the kernels that second moments choose by shape, as measured by architecture.

``kfac-engine bench --suite gpu --tune FILE`` measures them and writes a file like ``tuned.json``,
which has the choices of this package. Shapes without a measurement have the static default.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

# Blocks for each multiprocessor, the default first: more blocks have fewer positions each, so that
# the last wave is shorter and more partial results are added.
PAIR_BLOCKS, PATCH_BLOCKS = (8, 4, 16), (12, 6, 24)


class Choice(NamedTuple):
    """A variant of a second moment of patches.

    Attributes:
        pairs: Whether ``pair_products.cu`` multiplies, in place of ``patch_products.cu``.
        blocks: Number of blocks for each multiprocessor.
    """

    pairs: bool
    blocks: int


# Choice of each shape that was measured, by the text of ``shape_key``.
Choices = Mapping[str, Choice]


def shape_key(taps: int, channels: int, positions: int) -> str:
    """Return the text of a shape; numbers of positions within a factor of two are alike."""
    return f"{taps} taps, {channels} channels, 2^{positions.bit_length()} positions"


def choices(*, pairs: bool) -> tuple[Choice, ...]:
    """Return all variants, the default first; without ``pairs``, those of ``patch_products.cu``."""
    patches = tuple(Choice(False, blocks) for blocks in PATCH_BLOCKS)
    return (*(Choice(True, blocks) for blocks in PAIR_BLOCKS), *patches) if pairs else patches


@cache
def tuned(architecture: str) -> Choices:
    """Return the choices of an architecture, such as ``"sm_90"``."""
    table = json.loads((files(__package__) / "tuned.json").read_text("utf-8"))
    return {key: Choice(*choice) for key, choice in table.get(architecture, {}).items()}
