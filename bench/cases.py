"""What is measured: each case does one job by its definition in plain NumPy and by our backend."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kfac_engine._types import Array
from kfac_engine.backend.numpy_backend import NumpyBackend
from kfac_engine.backend.window import Window
from kfac_engine.registry import Registry

# A way to a result, which the next run may overwrite.
Run: TypeAlias = Callable[[], Array]
Setup: TypeAlias = Callable[[], "Contest"]

# Decay of the moving average that every moment goes into.
_DECAY = 0.95
_DAMPING = 1e-3


@dataclass(frozen=True, slots=True)
class Contest:
    """Two ways to one result.

    Attributes:
        definition: The plain way; the truth.
        ours: The backend's.
    """

    definition: Run
    ours: Run


@dataclass(frozen=True, slots=True)
class Case:
    """One job.

    Attributes:
        name: Its sizes, for the table.
        setup: Makes the data, when its turn comes.
        multiplications: Of the definition done in full, for a rate.
        tolerance: Largest difference of the two float32 results relative to the largest entry.
    """

    name: str
    setup: Setup = field(repr=False)
    multiplications: float
    tolerance: float = 2e-5


def _dense(rows: int, d: int) -> Case:
    """Second moment of the inputs of a dense layer with bias, averaged in place."""

    def setup() -> Contest:
        x = _normal(rows, d)
        plain, fast = (np.zeros((d + 1, d + 1), np.float32) for _ in range(2))

        def definition() -> Array:
            with_one = np.concatenate([x, np.ones((rows, 1), np.float32)], axis=1)
            plain[...] = _DECAY * plain + (1 - _DECAY) / rows * (with_one.T @ with_one)
            return plain

        def ours() -> Array:
            NumpyBackend().second_moment(
                x, fast, homogeneous=True, alpha=(1 - _DECAY) / rows, beta=_DECAY
            )
            return fast

        return Contest(definition, ours)

    return Case(f"{rows} rows of {d}", setup, rows * (d + 1.0) ** 2)


def _conv(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Case:
    """Second moment of the patches that a 2-d convolution sees, averaged in place."""
    n, channels, *sides = shape
    window = Window((kernel,) * 2, (stride,) * 2, (1, 1), (pad,) * 2, (pad,) * 2)
    count = n * prod(window.output_sides(tuple(sides)))
    d = channels * kernel**2

    def setup() -> Contest:
        x = _normal(*shape)
        plain, fast = (np.zeros((d, d), np.float32) for _ in range(2))

        def definition() -> Array:
            padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
            seen = sliding_window_view(padded, (kernel, kernel), (2, 3))[:, :, ::stride, ::stride]
            z = seen.transpose(4, 5, 1, 0, 2, 3).reshape(d, count)
            plain[...] = _DECAY * plain + (1 - _DECAY) / count * (z @ z.T)
            return plain

        def ours() -> Array:
            NumpyBackend().patch_second_moment(
                x, window, fast, alpha=(1 - _DECAY) / count, beta=_DECAY
            )
            return fast

        return Contest(definition, ours)

    name = f"{'×'.join(map(str, shape))}, {kernel}×{kernel}, stride {stride}"
    return Case(name, setup, count * float(d) ** 2)


def _inverse(d: int) -> Case:
    """Damped inverse of a factor."""

    def setup() -> Contest:
        rows = _normal(2 * d, d)
        matrix = rows.T @ rows / len(rows)
        identity = np.eye(d, dtype=np.float32)
        return Contest(
            definition=lambda: np.linalg.inv(matrix + np.float32(_DAMPING) * identity),
            ours=partial(NumpyBackend().damped_inverse, matrix, _DAMPING),
        )

    return Case(f"{d} × {d}", setup, float(d) ** 3)


def _normal(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


SUITES: Mapping[str, tuple[Case, ...]] = Registry(
    "suite",
    {
        "dense": (_dense(64, 512), _dense(256, 1024), _dense(4096, 512), _dense(128, 4096)),
        "conv": (
            _conv((32, 64, 56, 56), 3, 1, 1),
            _conv((32, 128, 28, 28), 3, 1, 1),
            _conv((32, 256, 14, 14), 3, 1, 1),
            _conv((32, 512, 7, 7), 3, 1, 1),
            _conv((32, 64, 56, 56), 3, 2, 1),
            _conv((8, 3, 224, 224), 7, 2, 3),
            _conv((32, 64, 56, 56), 1, 1, 0),
            _conv((32, 1024, 14, 14), 1, 1, 0),
            _conv((32, 16, 28, 28), 5, 1, 2),
        ),
        "inverse": tuple(_inverse(d) for d in (64, 256, 512, 1024, 2048)),
    },
)
