"""Laplace approximations of laplace-torch with its backend of curvlinops."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from torch.utils.data import DataLoader, TensorDataset

from kfac_engine.bench import uses
from kfac_engine.bench.jobs import Run
from kfac_engine.bench.peers.torch_uses import network, tensors
from kfac_engine.bench.uses import Study, study


def _fitted(data: Study) -> Any:
    posterior = Laplace(
        network(data), "classification", subset_of_weights="all", hessian_structure="kron",
        backend=CurvlinopsGGN,
    )  # fmt: skip
    posterior.fit(DataLoader(TensorDataset(*tensors(data.train)), batch_size=data.examples))
    return posterior


def _fit(**sizes: Any) -> Run:
    data = study(**sizes)
    return lambda: {uses.LOG_DETERMINANT: float(_fitted(data).log_det_posterior_precision)}


def _variance(**sizes: Any) -> Run:
    data = study(**sizes)
    posterior, (x, _) = _fitted(data), tensors(data.queries)

    def run() -> Any:
        jacobians, _ = posterior.backend.jacobians(x)
        return posterior.functional_variance(jacobians).detach().numpy()

    return run


def _evidence(**sizes: Any) -> Run:
    posterior, priors = _fitted(study(**sizes)), torch.tensor(uses.PRIORS, dtype=torch.float32)
    return lambda: [
        float(posterior.log_marginal_likelihood(prior_precision=prior)) for prior in priors
    ]


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "Laplace fit": _fit,
    "variance": _variance,
    "evidence": _evidence,
}
