"""The suite ``uses`` computed by this package."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import kfac_engine as ke
from kfac_engine._types import Array
from kfac_engine.bench import uses
from kfac_engine.bench.jobs import Run
from kfac_engine.bench.uses import Study, study

Pair = tuple[dict[str, Array], Array]


def _train(data: Study) -> Pair:
    x, targets = data.train
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


def _ekfac_fit(**sizes: Any) -> Run:
    data = study(**sizes)
    return lambda: {uses.EFFECTIVE_DIMENSION: _ekfac(data).effective_dimension(uses.DAMPING)}


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "Laplace fit": _laplace_fit,
    "EKFAC fit": _ekfac_fit,
}
