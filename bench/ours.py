"""Every job as the package does it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.numpy_backend import NumpyBackend
from kfac_engine.bench import made
from kfac_engine.bench.definition import Run
from kfac_engine.bench.jobs import DAMPING, DECAY, STEPS, patch_count, square_window
from kfac_engine.bench.step_networks import NETWORKS
from kfac_engine.config import Schedule
from kfac_engine.engine import Engine
from kfac_engine.factors.stacked import GroupedMoment
from kfac_engine.layers.views import Patches
from kfac_engine.linalg.kronecker import kron_matvec
from kfac_engine.linalg.spectral import eigh_power


def _dense(rows: int, d: int) -> Run:
    x, average = made.normal(rows, d), np.zeros((d + 1, d + 1), np.float32)

    def run() -> Array:
        NumpyBackend().second_moment(
            x, average, homogeneous=True, alpha=(1 - DECAY) / rows, beta=DECAY
        )
        return average

    return run


def _patches(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    x, d, window = made.normal(*shape), shape[1] * kernel**2, square_window(kernel, stride, pad)
    average = np.zeros((d, d), np.float32)
    alpha = (1 - DECAY) / patch_count(tuple(shape), kernel, stride, pad)

    def run() -> Array:
        NumpyBackend().patch_second_moment(x, window, average, alpha=alpha, beta=DECAY)
        return average

    return run


def _depthwise(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    x, channels = made.normal(*shape), shape[1]
    average = np.zeros((channels, kernel**2, kernel**2), np.float32)
    square = (kernel,) * 2, (stride,) * 2, (1, 1)
    view = Patches(*square, ((pad, pad),) * 2, channels_first=True)
    statistic = GroupedMoment(((("x",),),), view, groups=channels, taps=kernel**2)
    backend = NumpyBackend()

    def run() -> Array:
        statistic.add_to(average, {"x": x}, backend, 1 - DECAY, DECAY)
        return average

    return run


def _inverse(d: int) -> Run:
    return partial(NumpyBackend().damped_inverse, made.factor(d), DAMPING)


def _power(d: int, exp: float) -> Run:
    matrix, backend = made.factor(d), NumpyBackend()

    def run() -> Array:
        values, vectors = backend.eigh(matrix)
        return eigh_power(values, vectors, DAMPING, exp, dtype=np.float32)

    return run


def _precondition(layers: tuple[tuple[int, int, int], ...]) -> Run:
    todo = made.layers(layers)
    # These factors are not symmetric, so that a wrong side would show.
    return lambda: [kron_matvec(A, G.T, V) for A, G, V in todo]


def _step(network: str, batch: int, kind: str, cycle: int) -> Run:
    """``cycle`` steps; the result is the gradient of the last one."""
    net, periods = NETWORKS[network](), STEPS[kind]
    inputs, targets = net.inputs(batch), net.targets(batch)
    schedule = Schedule(*periods) if periods else Schedule()
    engine = Engine.from_onnx(
        net.data, loss="categorical", estimation_mode="empirical", schedule=schedule,
        damping=DAMPING, ema_decay=DECAY,
    )  # fmt: skip
    one = engine.gradients if periods is None else engine.step

    def run() -> list[Array]:
        for _ in range(cycle):
            result = one(inputs, targets)
        return [result.gradients[name] for name in net.compared]

    return run


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "dense": _dense,
    "patches": _patches,
    "depthwise": _depthwise,
    "inverse": _inverse,
    "power": _power,
    "precondition": _precondition,
    "step": _step,
}
