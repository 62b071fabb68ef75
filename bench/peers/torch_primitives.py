"""Every job in PyTorch, as in its documentation and in K-FAC libraries for it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import unfold

from kfac_engine._types import Array
from kfac_engine.bench import data
from kfac_engine.bench.jobs import DAMPING, DECAY, Run
from kfac_engine.bench.peers.torch_step import step


def _dense(rows: int, d: int) -> Run:
    x, average = torch.from_numpy(data.normal(rows, d)), torch.from_numpy(data.zeros(d + 1, d + 1))
    inner, alpha = average[:d, :d], (1 - DECAY) / rows

    def run() -> Array:
        # Faster than a product with a column of ones, which copies the batch.
        inner.addmm_(x.T, x, beta=DECAY, alpha=alpha)
        average[d, :d].mul_(DECAY).add_(x.sum(0), alpha=alpha)
        average[d, d].mul_(DECAY).add_(1 - DECAY)
        average[:d, d].copy_(average[d, :d])
        return _array(average)

    return run


def _patches(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    x, taps, channels = torch.from_numpy(data.normal(*shape)), kernel**2, shape[1]
    d = channels * taps
    average = torch.from_numpy(data.zeros(d, d))

    def run() -> Array:
        z = unfold(x, kernel, padding=pad, stride=stride).transpose(0, 1).reshape(d, -1)
        average.addmm_(z, z.T, beta=DECAY, alpha=(1 - DECAY) / z.shape[1])
        return _array(average)

    return with_taps_first(run, channels, taps)


def _depthwise(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    x, taps, channels = torch.from_numpy(data.normal(*shape)), kernel**2, shape[1]
    average = torch.from_numpy(data.zeros(channels, taps, taps))

    def run() -> Array:
        # Products of each example and channel, then their sum: faster than collecting the patches
        # of a channel.
        z = unfold(x, kernel, padding=pad, stride=stride).reshape(len(x) * channels, taps, -1)
        products = torch.bmm(z, z.transpose(1, 2)).reshape(len(x), channels, taps, taps).sum(0)
        average.mul_(DECAY).add_(products, alpha=(1 - DECAY) / (len(x) * z.shape[2]))
        return _array(average)

    return run


def _inverse(d: int) -> Run:
    matrix, identity = torch.from_numpy(data.factor(d)), torch.eye(d)

    def run() -> Array:
        lower = torch.linalg.cholesky(matrix + DAMPING * identity)
        return _array(torch.cholesky_inverse(lower))

    return run


def _power(d: int, exp: float) -> Run:
    matrix = torch.from_numpy(data.factor(d))

    def run() -> Array:
        values, vectors = torch.linalg.eigh(matrix)
        return _array((vectors * (values.clamp(min=0) + DAMPING) ** exp) @ vectors.T)

    return run


def _precondition(layers: tuple[tuple[int, int, int], ...]) -> Run:
    todo = [tuple(map(torch.from_numpy, layer)) for layer in data.layers(layers)]

    return lambda: [A @ V @ G for A, G, V in todo]


def with_taps_first(run: Run, channels: int, taps: int) -> Run:
    """Return a run whose first result has taps before channels, in contrast to ``unfold``.

    Both orders cost the same; only the first result is compared, and later results are unchanged.
    """
    first = True

    def once() -> Array:
        nonlocal first
        result: Array = run()
        if first:
            square = result.reshape(channels, taps, channels, taps)
            result = square.transpose(1, 0, 3, 2).reshape(result.shape)
        first = False
        return result

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
