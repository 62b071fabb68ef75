"""The data of the tasks: Fashion-MNIST or the bundled digits, a text, a smooth function."""

import gzip
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.training.models import INPUT, POSITIONS, SYMBOLS
from kfac_engine.data import digits
from kfac_engine.errors import BackendError, InputError
from kfac_engine.system.reading import check_file

# The folder of Debian's package dataset-fashion-mnist.
DATA_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_IMAGES, _LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
_COUNT, _SIDE, _WHITE = 60_000, 28, np.float32(255)
_TRAINING = 50_000
_UINT8 = 8  # the code of the element type in a file
_DIGITS_TRAINING = 1_400

_LICENCES = Path("/usr/share/common-licenses")
_CHARACTERS = 3_000_000
_FIRST_PRINTABLE = 32
_HELD_OUT_TEXTS = 300


@dataclass(frozen=True, slots=True)
class Images:
    """Images in [0, 1], ``(n, side, side)``, and their classes; the first ones are trained on."""

    pixels: Array = field(repr=False)
    labels: Array = field(repr=False)
    training: int
    source: str

    @property
    def side(self) -> int:
        """Pixels along an axis."""
        return int(self.pixels.shape[1])


@dataclass(frozen=True, slots=True)
class Data:
    """Examples to train on, and examples to validate on."""

    x: Array
    y: Array
    held_x: Array
    held_y: Array

    def batches(self, size: int, seed: int) -> Iterator[tuple[dict[str, Array], Array]]:
        """Yield batches without end; each epoch has a new order, and no incomplete batch."""
        # Weights are drawn from the same seeds: the offset makes the numbers independent.
        rng = np.random.default_rng(1000 + seed)
        size = min(size, len(self.x))
        while True:
            order = rng.permutation(len(self.x))
            for start in range(0, len(order) - size + 1, size):
                part = order[start : start + size]
                yield {INPUT: self.x[part]}, self.y[part]

    def held_batches(self, size: int) -> Iterator[tuple[dict[str, Array], Array]]:
        """Yield the validation examples in batches of a size; the last one may be smaller."""
        for start in range(0, len(self.held_x), size):
            part = slice(start, start + size)
            yield {INPUT: self.held_x[part]}, self.held_y[part]


def has_images(folder: Path) -> bool:
    """Return whether a folder has the training images of Fashion-MNIST."""
    return (folder / _IMAGES).is_file()


@cache
def load_images(folder: Path | None) -> Images:
    """Return the images of Fashion-MNIST in a folder; without a folder the bundled digits."""
    if folder is None:
        return load_digits()
    pixels = read_idx(folder / _IMAGES, (_COUNT, _SIDE, _SIDE)).astype(np.float32) / _WHITE
    labels = read_idx(folder / _LABELS, (_COUNT,)).astype(np.int64)
    return Images(pixels, labels, _TRAINING, "Fashion-MNIST")


def read_idx(path: Path, shape: tuple[int, ...]) -> Array:
    """Return the array of a compressed IDX file of bytes, which must have this shape.

    MNIST has this format: four bytes (two zeros, the element type, the number of axes), the sizes
    as big-endian 32-bit numbers, the elements.
    No more bytes are decompressed. ``InputError`` is raised if the file cannot be read, or contains
    another type or shape.
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


def load_digits() -> Images:
    """Return the bundled digits in a seeded order: the file is sorted by writer."""
    pixels, labels = digits()
    order = np.random.default_rng(7).permutation(len(labels))
    return Images(pixels[order, 0], labels[order], _DIGITS_TRAINING, "digits")


def classified(images: Images, shape: tuple[int, ...], held_out: int | None = None) -> Data:
    """Return images with their classes.

    ``held_out`` is the number of validation examples; None for all images that are not trained on.
    """
    x, n = images.pixels.reshape(-1, *shape), images.training
    last = None if held_out is None else n + held_out
    return Data(x[:n], images.labels[:n], x[n:last], images.labels[n:last])


def reconstructed(images: Images, held_out: int) -> Data:
    """Return flat images as inputs and targets."""
    x, n = images.pixels.reshape(len(images.pixels), -1), images.training
    validation = x[n : n + held_out]
    return Data(x[:n], x[:n], validation, validation)


def blurred(images: Images, training: int, held_out: int) -> Data:
    """Return images that are blurred by 3 × 3 and noisy, with flat sharp images as targets."""
    last = min(len(images.pixels), images.training + held_out)
    chosen = np.r_[:training, images.training : last]
    sharp = images.pixels[chosen]
    wide = np.pad(sharp, ((0, 0), (1, 1), (1, 1)))
    side = images.side
    blur = sum(wide[:, i : i + side, j : j + side] for i in range(3) for j in range(3)) / 9
    noise = np.random.default_rng(3).standard_normal(sharp.shape)
    x = (blur + 0.1 * noise).astype(np.float32)[:, None]
    y = sharp.reshape(len(sharp), -1)
    return Data(x[:training], y[:training], x[training:], y[training:])


def smooth_function(training: int = 20_000, held_out: int = 2_000) -> Data:
    """Return points of the cube ``[-1, 1]⁸`` and four smooth functions of them, of variance 1/2."""
    rng = np.random.default_rng(11)
    x = rng.uniform(-1, 1, (training + held_out, 8))
    waves, shifts = rng.standard_normal((8, 4)), rng.uniform(0, 2 * np.pi, 4)
    y = np.sin(x @ waves + shifts)
    x, y = x.astype(np.float32), y.astype(np.float32)
    return Data(x[:training], y[:training], x[training:], y[training:])


@dataclass(frozen=True, slots=True)
class Text:
    """A text as numbers: newline is 0, the printable characters of ASCII are 1 to 95.

    ``digest`` has the first digits of the SHA-256 hash of the symbols.
    """

    symbols: Array = field(repr=False)
    digest: str


@cache
def load_text() -> Text:
    """Return the licences of the system (on Debian) and the library of this version of Python."""
    files = [*sorted(_LICENCES.glob("*")), *sorted(Path(os.__file__).parent.glob("*.py"))]
    symbols = np.empty(0, np.int8)
    for path in (path for path in files if path.is_file()):
        characters = np.frombuffer(path.read_bytes(), np.uint8)
        newline = characters == ord("\n")
        printable = (characters >= _FIRST_PRINTABLE) & (characters < _FIRST_PRINTABLE + SYMBOLS - 1)
        numbers = np.where(newline, 0, characters.astype(np.int16) - _FIRST_PRINTABLE + 1)
        symbols = np.concatenate([symbols, numbers[newline | printable].astype(np.int8)])
        if len(symbols) >= _CHARACTERS:
            break
    symbols = symbols[:_CHARACTERS]
    return Text(symbols, hashlib.sha256(symbols.tobytes()).hexdigest()[:12])


def next_characters(held_out: int = _HELD_OUT_TEXTS) -> Data:
    """Return pieces of the text, with the character that follows each position as target."""
    symbols = load_text().symbols.astype(np.int64)
    count = (len(symbols) - 1) // POSITIONS
    x = symbols[: count * POSITIONS].reshape(count, POSITIONS)
    y = symbols[1 : count * POSITIONS + 1].reshape(count, POSITIONS)
    order = np.random.default_rng(5).permutation(count)
    x, y, k = x[order], y[order], held_out
    return Data(x[k:], y[k:], x[:k], y[:k])


_TRAINING_PART = 0.8
_INK = 16  # digits from 0 to 16 become bytes


@dataclass(frozen=True, slots=True)
class Table:
    """A table of data; ``outputs`` is the number of classes or of targets.

    ``read`` returns the columns and the targets, as they are.
    """

    columns: int
    outputs: int
    read: Callable[[], tuple[Array, Array]] = field(repr=False)
    classes: bool = True

    def data(self, *, raw: bool) -> Data:
        """Return four fifths of the rows to train on, and a fifth to validate on.

        Raw columns and targets have their own units, in place of the mean 0 and the deviation 1.
        """
        x, y = self.read()
        if not raw:
            x, y = _standardized(x), y if self.classes else _standardized(y)
        x, y = x.astype(np.float32), y if self.classes else y.astype(np.float32)
        order = np.random.default_rng(0).permutation(len(x))
        training, validation = np.split(order, [int(_TRAINING_PART * len(x))])
        return Data(x[training], y[training], x[validation], y[validation])


def _standardized(x: Array) -> Array:
    deviation = x.std(axis=0)
    result: Array = (x - x.mean(axis=0)) / np.where(deviation > 0, deviation, 1)
    return result


def _of_sklearn(name: str, **options: Any) -> tuple[Array, Array]:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise BackendError(
            "the tasks 'tables' need scikit-learn: run pip install scikit-learn, or leave them out."
        ) from error
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True, **options)
    return x, y


def _digits() -> tuple[Array, Array]:
    x, y = _of_sklearn("digits")
    return _INK * x, y


def _diabetes() -> tuple[Array, Array]:
    x, y = _of_sklearn("diabetes", scaled=False)
    return x, y[:, None]


def _moons() -> tuple[Array, Array]:
    """Return two half circles with noise, a class each."""
    rng, angles = np.random.default_rng(0), np.linspace(0, np.pi, 300)
    upper = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    x = np.concatenate([upper, [1.0, 0.5] - upper]) + 0.2 * rng.standard_normal((600, 2))
    return x, np.repeat([0, 1], 300)


def _houses() -> tuple[Array, Array]:
    """Return prices from incomes, ages, rooms, people of a block and of a house, latitudes."""
    rng, n = np.random.default_rng(5), 2000
    columns = [
        rng.lognormal(1.3, 0.5, n), rng.uniform(1, 52, n), rng.lognormal(1.6, 0.4, n),
        rng.lognormal(7, 0.7, n), rng.lognormal(1, 0.3, n), rng.uniform(32, 42, n),
    ]  # fmt: skip
    income, age, rooms, _, _, latitude = columns
    price = 0.4 * income + 0.01 * age - 0.01 * (latitude - 37) ** 2 + np.log(rooms)
    price += 0.2 * rng.standard_normal(n)
    return np.stack(columns, axis=1), 1e4 * price[:, None]


TABLES: Mapping[str, Table] = {
    "handwriting": Table(64, 10, _digits),
    "wine": Table(13, 3, lambda: _of_sklearn("wine")),
    "cancer": Table(30, 2, lambda: _of_sklearn("breast_cancer")),
    "diabetes": Table(10, 1, _diabetes, classes=False),
    "moons": Table(2, 2, _moons),
    "houses": Table(6, 1, _houses, classes=False),
}
