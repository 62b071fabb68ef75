"""Readers of the image and label files of MNIST and Fashion-MNIST (gzip of the IDX format).

A file begins with four bytes (two zeros, the element type, the number of axes), then the sizes as
big-endian 32-bit numbers, then the elements. Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST
database of handwritten digits".
"""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import InputError
from kfac_engine.system.reading import check_file

_UINT8 = 8  # the code of the element type


def read_idx(path: Path, shape: tuple[int, ...]) -> Array:
    """Return the array of a compressed IDX file of bytes.

    Args:
        path: The file.
        shape: The shape that the file must have. No more bytes are decompressed.

    Returns:
        uint8 numbers in the shape.

    Raises:
        InputError: The file cannot be read, or contains another type or shape.
    """
    check_file(path)
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, _UINT8, len(shape), *shape)
    size = len(header) + int(np.prod(shape))
    try:
        with gzip.open(path) as file:
            content = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot decompress '{path}': {error}.") from error
    if content[: len(header)] != header:
        raise InputError(
            f"'{path}' begins with the bytes {content[: len(header)].hex(' ')}; a file of bytes of "
            f"the shape {shape} begins with {header.hex(' ')}."
        )
    if len(content) != size:
        relation = "more" if len(content) > size else "fewer"
        raise InputError(f"'{path}' has {relation} than {size} bytes, which its header announces.")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)
