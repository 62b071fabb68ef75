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


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "Laplace fit": _laplace_fit,
    "variance": _variance,
    "evidence": _evidence,
    "EKFAC fit": _ekfac_fit,
    "scores": _scores,
    "self-influence": _self_scores,
}
