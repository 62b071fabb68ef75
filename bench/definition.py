"""Every job by its definition in NumPy: the truth for all contenders."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from kfac_engine._types import Array
from kfac_engine.bench import data, reference_uses
from kfac_engine.bench.jobs import DAMPING, DECAY, Run
from kfac_engine.bench.reference_step import step


def _dense(rows: int, d: int) -> Run:
    x = data.normal(rows, d)
    average: Array = data.zeros(d + 1, d + 1)

    def run() -> Array:
        with_one = np.concatenate([x, np.ones((rows, 1), np.float32)], axis=1)
        average[...] = DECAY * average + (1 - DECAY) / rows * (with_one.T @ with_one)
        return average

    return run


def _patches(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    x, d = data.normal(*shape), shape[1] * kernel**2
    average: Array = data.zeros(d, d)

    def run() -> Array:
        z = _windows(x, kernel, stride, pad).transpose(4, 5, 1, 0, 2, 3).reshape(d, -1)
        average[...] = DECAY * average + (1 - DECAY) / z.shape[1] * (z @ z.T)
        return average

    return run


def _depthwise(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    x, d = data.normal(*shape), kernel**2
    average: Array = data.zeros(shape[1], d, d)

    def run() -> Array:
        z = _windows(x, kernel, stride, pad).transpose(1, 4, 5, 0, 2, 3).reshape(shape[1], d, -1)
        product = z @ z.swapaxes(1, 2)
        average[...] = DECAY * average + (1 - DECAY) / z.shape[2] * product
        return average

    return run


def _windows(x: Array, kernel: int, stride: int, pad: int) -> Array:
    """Return the windows of images, ``(n, channels, oh, ow, kh, kw)``, a view."""
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    return sliding_window_view(padded, (kernel, kernel), (2, 3))[:, :, ::stride, ::stride]


def _inverse(d: int) -> Run:
    matrix, identity = data.factor(d), np.eye(d, dtype=np.float32)
    return lambda: np.linalg.inv(matrix + np.float32(DAMPING) * identity)


def _power(d: int, exp: float) -> Run:
    matrix = data.factor(d)

    def run() -> Array:
        values, vectors = np.linalg.eigh(matrix.astype(np.float64))
        raised: Array = (vectors * (np.maximum(values, 0) + DAMPING) ** exp) @ vectors.T
        return raised

    return run


def _precondition(layers: tuple[tuple[int, int, int], ...]) -> Run:
    todo = data.layers(layers)

    return lambda: [A @ V @ G for A, G, V in todo]


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "dense": _dense,
    "patches": _patches,
    "depthwise": _depthwise,
    "inverse": _inverse,
    "power": _power,
    "precondition": _precondition,
    "step": step,
    **reference_uses.OPERATIONS,
}
