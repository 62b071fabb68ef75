"""The data of the tasks: Fashion-MNIST or the bundled digits, a text, a smooth function."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.training.image_files import read_idx
from kfac_engine.bench.training.layers import INPUT
from kfac_engine.bench.training.models import POSITIONS, SYMBOLS
from kfac_engine.data import digits

# The folder of Debian's package dataset-fashion-mnist.
DATA_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_IMAGES, _LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
_COUNT, _SIDE, _WHITE = 60_000, 28, np.float32(255)
_TRAINING = 50_000
_DIGITS_TRAINING = 1_400

_LICENCES = Path("/usr/share/common-licenses")
_CHARACTERS = 3_000_000
_FIRST_PRINTABLE = 32
_HELD_OUT_TEXTS = 300


@dataclass(frozen=True, slots=True)
class Images:
    """Images in [0, 1] and their classes.

    Attributes:
        pixels: ``(n, side, side)``.
        labels: ``(n,)``.
        training: Number of the first images, which are trained on.
        source: Name of the data.
    """

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
    """Examples to train on, and examples to validate on.

    Attributes:
        x: Inputs.
        y: Targets.
        held_x: Inputs of the validation examples.
        held_y: Targets of the validation examples.
    """

    x: Array
    y: Array
    held_x: Array
    held_y: Array

    def batches(self, size: int, seed: int) -> Iterator[tuple[dict[str, Array], Array]]:
        """Yield batches without end; each epoch has a new order, and no incomplete batch.

        Args:
            size: Number of examples of a batch.
            seed: Seed of the orders.

        Yields:
            Inputs by name, and targets.
        """
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
    """Return the images of the tasks.

    Args:
        folder: Folder of Fashion-MNIST; None for the bundled digits.

    Returns:
        60,000 images of 28 × 28 pixels, or 1797 of 8 × 8.

    Raises:
        InputError: A file cannot be read or has another size.
    """
    if folder is None:
        return load_digits()
    pixels = read_idx(folder / _IMAGES, (_COUNT, _SIDE, _SIDE)).astype(np.float32) / _WHITE
    labels = read_idx(folder / _LABELS, (_COUNT,)).astype(np.int64)
    return Images(pixels, labels, _TRAINING, "Fashion-MNIST")


def load_digits() -> Images:
    """Return the bundled digits in a seeded order: the file is sorted by writer."""
    pixels, labels = digits()
    order = np.random.default_rng(7).permutation(len(labels))
    return Images(pixels[order, 0], labels[order], _DIGITS_TRAINING, "digits")


def classified(images: Images, shape: tuple[int, ...], held_out: int | None = None) -> Data:
    """Return images with their classes.

    Args:
        images: The images.
        shape: Shape of one example.
        held_out: Number of validation examples; None for all images that are not trained on.

    Returns:
        The data.
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
    """A text.

    Attributes:
        symbols: Numbers of the characters: newline is 0, the printable ones of ASCII are 1 to 95.
        digest: First digits of the SHA-256 hash of the symbols.
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
