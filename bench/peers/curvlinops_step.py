"""Steps of curvlinops, whose operators have no moving averages: factors are computed anew."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from curvlinops import KFACInverseLinearOperator, KFACLinearOperator
from torch import nn
from torch.nn.functional import cross_entropy

from kfac_engine.bench.jobs import DAMPING, GRADIENT, STEPS, Run
from kfac_engine.bench.peers.torch_networks import transposed, with_weights
from kfac_engine.bench.step_networks import NETWORKS


def _step(network: str, batch: int, kind: str) -> Run:
    """Return a function that runs one step and returns the gradient."""
    net, periods = NETWORKS[network](), STEPS[kind]
    module = with_weights(network, net.weights)
    data = torch.from_numpy(net.inputs(batch)["x"]), torch.from_numpy(net.targets(batch))
    layers = [m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    params = [parameter for layer in layers for parameter in layer.parameters()]
    natural = _Natural(module, params, data, *periods.measured) if periods else None

    def run() -> Any:
        module.zero_grad(set_to_none=True)
        logits = module(data[0])
        cross_entropy(logits.reshape(-1, logits.shape[-1]), data[1].reshape(-1)).backward()
        if natural is not None:
            natural.step()
        parameters = dict(module.named_parameters())
        return {
            GRADIENT: [transposed(name, parameters[name].grad).numpy() for name in net.compared]
        }

    return run


class _Natural:
    """The operator of a batch and its inverse, both computed anew when they are due."""

    def __init__(
        self, module: nn.Module, params: Any, data: Any, factors_every: int, inverses_every: int
    ) -> None:
        self._given = _ClassesSecond(module), nn.CrossEntropyLoss(), params, [data]
        self._params = params
        self._periods = factors_every, inverses_every
        self._count = 0
        self._inverse: Any = None

    def step(self) -> None:
        """Update factors and inverses when due, and precondition the gradients."""
        gradients = [parameter.grad for parameter in self._params]
        factors_every, inverses_every = self._periods
        if self._count % factors_every == 0:
            operator = KFACLinearOperator(
                *self._given, fisher_type="empirical", separate_weight_and_bias=False,
                check_deterministic=False,
            )  # fmt: skip
            operator.compute_kronecker_factors()
        if self._count % inverses_every == 0:
            self._inverse = KFACInverseLinearOperator(
                operator, damping=DAMPING, use_heuristic_damping=True
            )
        _ = self._inverse @ gradients
        self._count += 1
        for parameter, gradient in zip(self._params, gradients, strict=True):
            parameter.grad = gradient


class _ClassesSecond(nn.Module):
    """A module whose predictions have their classes on the second axis, before positions."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module(x).movedim(-1, 1)
        return logits


OPERATIONS: Mapping[str, Callable[..., Any]] = {"step": _step}
