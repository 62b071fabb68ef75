"""Every job in PyTorch, as its documentation and the K-FAC libraries for it do it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import unfold

from kfac_engine._types import Array
from kfac_engine.bench import made
from kfac_engine.bench.jobs import DAMPING, DECAY, Run
from kfac_engine.bench.torch_step import step


def _dense(rows: int, d: int) -> Run:
    x = torch.from_numpy(made.normal(rows, d))
    average, ones = torch.zeros(d + 1, d + 1), torch.ones(rows, 1)

    def run() -> Array:
        with_one = torch.cat([x, ones], 1)
        average.addmm_(with_one.T, with_one, beta=DECAY, alpha=(1 - DECAY) / rows)
        return _array(average)

    return run


def _patches(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    x, taps, channels = torch.from_numpy(made.normal(*shape)), kernel**2, shape[1]
    d = channels * taps
    average = torch.zeros(d, d)

    def run() -> Array:
        z = unfold(x, kernel, padding=pad, stride=stride).transpose(0, 1).reshape(d, -1)
        average.addmm_(z, z.T, beta=DECAY, alpha=(1 - DECAY) / z.shape[1])
        return _array(average)

    # ``unfold`` puts channels first; the order costs nothing, so only the first result is moved.
    return _reordered(run, lambda a: _tap_major(a, channels, taps))


def _depthwise(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    x, taps, channels = torch.from_numpy(made.normal(*shape)), kernel**2, shape[1]
    average = torch.zeros(channels, taps, taps)

    def run() -> Array:
        z = unfold(x, kernel, padding=pad, stride=stride).reshape(len(x), channels, taps, -1)
        z = z.permute(1, 2, 0, 3).reshape(channels, taps, -1)
        average.baddbmm_(z, z.transpose(1, 2), beta=DECAY, alpha=(1 - DECAY) / z.shape[2])
        return _array(average)

    return run


def _inverse(d: int) -> Run:
    matrix, identity = torch.from_numpy(made.factor(d)), torch.eye(d)

    def run() -> Array:
        lower = torch.linalg.cholesky(matrix + DAMPING * identity)
        return _array(torch.cholesky_inverse(lower))

    return run


def _power(d: int, exp: float) -> Run:
    matrix = torch.from_numpy(made.factor(d))

    def run() -> Array:
        values, vectors = torch.linalg.eigh(matrix)
        return _array((vectors * (values.clamp(min=0) + DAMPING) ** exp) @ vectors.T)

    return run


def _precondition(layers: tuple[tuple[int, int, int], ...]) -> Run:
    todo = [tuple(map(torch.from_numpy, layer)) for layer in made.layers(layers)]

    return lambda: [A @ V @ G for A, G, V in todo]


def _tap_major(average: Array, channels: int, taps: int) -> Array:
    square = average.reshape(channels, taps, channels, taps)
    return square.transpose(1, 0, 3, 2).reshape(average.shape)


def _reordered(run: Run, reorder: Callable[[Array], Array]) -> Run:
    first = True

    def once() -> Array:
        nonlocal first
        result, first_time, first = run(), first, False
        return reorder(result) if first_time else result

    return once


def _array(result: torch.Tensor) -> Array:
    array: Array = result.numpy()
    return array


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "dense": _dense,
    "patches": _patches,
    "depthwise": _depthwise,
    "inverse": _inverse,
    "power": _power,
    "precondition": _precondition,
    "step": step,
}
