"""Every job computed by this package."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

import kfac_engine as ke
from kfac_engine._types import Array, DType
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.threads import single_threaded_blas
from kfac_engine.bench import data, ours_gradient, uses
from kfac_engine.bench.jobs import (
    DAMPING,
    DECAY,
    GRADIENT,
    NATURAL,
    STEPS,
    Run,
    patch_count,
    square_window,
)
from kfac_engine.bench.step_networks import NETWORKS
from kfac_engine.bench.uses import Study, study
from kfac_engine.curvature.block_products import multiply, multiply_power
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.curvature.factors.base import refresh
from kfac_engine.curvature.factors.stacked import GroupedMoment
from kfac_engine.curvature.linalg.spectral import eigh_power
from kfac_engine.curvature.schedule import Schedule
from kfac_engine.engine.engine import Engine
from kfac_engine.layers.layer_forms import dense_form
from kfac_engine.layers.views import patch_view

Pair = tuple[dict[str, Array], Array]


def _train(data: Study) -> Pair:
    x, targets = data.train
    return {"x": x}, targets


def _queries(data: Study) -> Pair:
    x, targets = data.queries
    return {"x": x}, targets


def _kron(data: Study) -> ke.Curvature:
    return ke.curvature(
        data.network.data, _train(data), loss="categorical", structure="kron", biases="separate"
    )


def _ekfac(data: Study) -> ke.Curvature:
    return ke.curvature(
        data.network.data, _train(data), loss="categorical", structure="ekfac", fisher="empirical"
    )


def _laplace_fit(**sizes: Any) -> Run:
    data = study(**sizes)

    def run() -> dict[str, float]:
        curvature = _kron(data)
        n = data.examples  # log det(n F + 1) = P log n + log det(F + 1/n)
        rest = curvature.log_determinant(1 / n)
        return {uses.LOG_DETERMINANT: curvature.vector.size * np.log(n) + rest}

    return run


def _variance(**sizes: Any) -> Run:
    data = study(**sizes)
    posterior = ke.Laplace(_kron(data), prior_precision=1.0)
    return lambda: posterior.predict(_queries(data)[0]).variance


def _evidence(**sizes: Any) -> Run:
    posterior = ke.Laplace(_kron(study(**sizes)))
    return lambda: [
        posterior.log_marginal_likelihood(prior_precision=float(prior)) for prior in uses.PRIORS
    ]


def _ekfac_fit(**sizes: Any) -> Run:
    data = study(**sizes)
    return lambda: {uses.EFFECTIVE_DIMENSION: _ekfac(data).effective_dimension(uses.DAMPING)}


def _scores(**sizes: Any) -> Run:
    data = study(**sizes)
    influence = ke.Influence(_ekfac(data))
    return lambda: influence.scores(_queries(data), _train(data))


def _self_scores(**sizes: Any) -> Run:
    data = study(**sizes)
    influence = ke.Influence(_ekfac(data))
    return lambda: influence.self_scores(_train(data))


USES: Mapping[str, Callable[..., Any]] = {
    "Laplace fit": _laplace_fit,
    "variance": _variance,
    "evidence": _evidence,
    "EKFAC fit": _ekfac_fit,
    "scores": _scores,
    "self-influence": _self_scores,
}


class _Moment:
    """A second moment whose upper triangle is written when it is read, as in factors."""

    def __init__(self, lower: Array) -> None:
        self._lower = lower

    def __array__(self, dtype: DType | None = None, copy: bool | None = None) -> Array:
        NumpyBackend().mirror(self._lower)
        return np.array(self._lower, dtype, copy=copy)


def _dense(rows: int, d: int) -> Run:
    x, average = data.normal(rows, d), data.zeros(d + 1, d + 1)
    how = Accumulation(homogeneous=True, alpha=(1 - DECAY) / rows, beta=DECAY)

    def run() -> _Moment:
        NumpyBackend().second_moment(x, average, how)
        return _Moment(average)

    return run


def _patches(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    x, d, window = data.normal(*shape), shape[1] * kernel**2, square_window(kernel, stride, pad)
    average = data.zeros(d, d)
    alpha = (1 - DECAY) / patch_count(tuple(shape), kernel, stride, pad)
    how = Accumulation(alpha=alpha, beta=DECAY)

    def run() -> _Moment:
        NumpyBackend().patch_second_moment(x, window, average, how)
        return _Moment(average)

    return run


def _depthwise(shape: tuple[int, ...], kernel: int, stride: int, pad: int) -> Run:
    x, channels = data.normal(*shape), shape[1]
    average = data.zeros(channels, kernel**2, kernel**2)
    square = (kernel,) * 2, (stride,) * 2, (1, 1)
    view = patch_view(*square, ((pad, pad),) * 2, channels_first=True)
    statistic = GroupedMoment(("x",), view, groups=channels, taps=kernel**2)
    backend = NumpyBackend()

    def run() -> _Moment:
        statistic.add_to(average, {"x": x}, backend, 1 - DECAY, DECAY)
        return _Moment(average)

    return run


def _inverse(d: int) -> Run:
    matrices, linalg = [data.factor(d)], NumpyBackend().linalg
    return lambda: linalg.begin_damped_inverses(matrices, [DAMPING])()[0]


def _power(d: int, exp: float) -> Run:
    matrix, backend = data.factor(d), NumpyBackend()

    def run() -> Array:
        values, vectors = backend.linalg.eighs([matrix])[0]
        return eigh_power(values, vectors, DAMPING, exp, dtype=np.float32)

    return run


def _precondition(layers: tuple[tuple[int, int, int], ...]) -> Run:
    """Multiply gradients by the inverses of registered factors, as ``Engine.step`` does."""
    gradients, values, shapes, shared = {}, {}, {}, {}
    for d_in, d_out, count in layers:
        size = f"{d_in}×{d_out}"
        values[f"a {size}"], values[f"ds {size}"] = data.batch(d_in, d_out)
        for i, V in enumerate(data.gradients(d_in, d_out, count)):
            name = f"{size} {i}"
            gradients[name], shapes[name], shared[name] = V, V.shape, size
    collection = LayerCollection(graph=shapes, backend="numpy")
    for name, size in shared.items():
        form = dense_form("IO", has_bias=False)
        collection.register("fully_connected", name, form, f"a {size}", f"s {name}")
        block = collection.fisher_blocks[name]
        block.instantiate_factors([[f"ds {size}"]], DAMPING)
        block.register_inverse()
    factors = collection.get_factors()
    for factor in factors:
        factor.update(values, 0.0)
    refresh(factors, collection.backend)

    def run() -> list[Array]:
        with single_threaded_blas():
            return list(multiply(collection, gradients, partial(multiply_power, -1)).values())

    return run


def _step(network: str, batch: int, kind: str) -> Run:
    """Return the run of a step, or of a plain gradient."""
    periods = STEPS[kind]
    if periods is None:
        return ours_gradient.step(network, batch, kind)
    net = NETWORKS[network]()
    inputs, targets = net.inputs(batch), net.targets(batch)
    engine = Engine.from_onnx(
        net.data, loss="categorical", estimation_mode="empirical", damping=DAMPING,
        ema_decay=DECAY, schedule=Schedule(*periods.measured),
        approximations={"fully_connected": "kron"},  # whole factors, as all contenders have
    )  # fmt: skip

    def run() -> dict[str, list[Array]]:
        result = engine.step(inputs, targets)
        return {
            GRADIENT: [result.gradients[name] for name in net.compared],
            NATURAL: [result.natural_gradients[name] for name in net.preconditioned],
        }

    return run


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "dense": _dense,
    "patches": _patches,
    "depthwise": _depthwise,
    "inverse": _inverse,
    "power": _power,
    "precondition": _precondition,
    "step": _step,
    **USES,
}
