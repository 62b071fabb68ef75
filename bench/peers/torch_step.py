"""Steps of K-FAC in PyTorch, as its libraries implement them.

Hooks save the input and the output gradient of each dense layer and convolution. Patches are
unfolded, moments are products of whole matrices, inverses follow from Cholesky factors. Targets are
those of the data, as in the whole suite. Normalizations and embeddings have plain gradients.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, unfold

from kfac_engine.bench.jobs import DAMPING, DECAY, GRADIENT, STEPS, Run
from kfac_engine.bench.peers.torch_networks import transposed, with_weights
from kfac_engine.bench.step_networks import NETWORKS

# The input of the first layer needs no gradient: PyTorch warns that its hook fires early.
warnings.filterwarnings("ignore", message="Full backward hook is firing")

# Averages the inputs of a module, the last argument, into a factor.
Add: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Any], None]


def step(network: str, batch: int, kind: str) -> Run:
    """Return a function that runs one step and returns the gradient."""
    return _run(network, batch, kind, add_rows)


def step_by_example(network: str, batch: int, kind: str) -> Run:
    """Return the run of one step with a product of patches for each example; see ``step``."""
    return _run(network, batch, kind, add_examples)


def _run(network: str, batch: int, kind: str, add: Add) -> Run:
    net = NETWORKS[network]()
    module, periods = with_weights(network, net.weights), STEPS[kind]
    x = torch.from_numpy(net.inputs(batch)["x"])
    y = torch.from_numpy(net.targets(batch))
    kfac = Preconditioner(module, periods.measured, add) if periods else None

    def run() -> Any:
        module.zero_grad(set_to_none=True)
        logits = module(x)
        cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1)).backward()
        if kfac is not None:
            kfac.step()
        parameters = dict(module.named_parameters())
        return {
            GRADIENT: [transposed(name, parameters[name].grad).numpy() for name in net.compared]
        }

    return run


class Preconditioner:
    """Factors and inverses of the dense layers and convolutions of a module.

    ``periods`` are the steps between updates of factors, and between inverses. ``add`` adds the
    inputs of a layer to its factor.
    """

    def __init__(self, module: nn.Module, periods: tuple[int, int], add: Add) -> None:
        self.natural: dict[str, torch.Tensor] = {}
        self._layers = {
            name: Layer(part, add)
            for name, part in module.named_modules()
            if isinstance(part, nn.Linear | nn.Conv2d)
        }
        self._periods = periods
        self._count = 0
        self._listen()

    def step(self) -> None:
        """Update averages and inverses when due, and precondition the gradients."""
        factors_every, inverses_every = self._periods
        for name, layer in self._layers.items():
            if self._count % factors_every == 0:
                layer.update()
            if self._count % inverses_every == 0:
                layer.invert()
            self.natural[name] = layer.precondition()
        self._count += 1
        self._listen()

    def _listen(self) -> None:
        due = self._count % self._periods[0] == 0
        for layer in self._layers.values():
            layer.listening = due


class Layer:
    """One dense layer or convolution with its factors."""

    def __init__(self, module: Any, add: Add) -> None:
        self.listening = True
        self._add = add
        self._module = module
        d_out, d_in = module.weight.flatten(1).shape
        self._average = torch.zeros(d_in + 1, d_in + 1), torch.zeros(d_out, d_out)
        self._inverse = self._average
        self._seen: dict[str, torch.Tensor] = {}
        module.register_forward_hook(self._save_input)
        module.register_full_backward_hook(self._save_gradient)

    def update(self) -> None:
        """Add the batch to the averages of both factors."""
        ds = self._seen["ds"].transpose(1, -1).reshape(-1, len(self._module.weight))
        A, G = self._average
        self._add(A, self._seen["a"], self._module)
        G.addmm_(ds.T, ds, beta=DECAY, alpha=(1 - DECAY) / len(ds))

    def invert(self) -> None:
        """Compute the damped inverses of both factors."""
        A, G = self._average
        pi = float(((A.trace() / len(A)) / (G.trace() / len(G))).sqrt())
        levels = np.sqrt(DAMPING) * pi, np.sqrt(DAMPING) / pi
        self._inverse = tuple(
            torch.cholesky_inverse(torch.linalg.cholesky(M + level * torch.eye(len(M))))
            for M, level in zip((A, G), levels, strict=True)
        )

    def precondition(self) -> torch.Tensor:
        """Return the gradient of weight and bias, multiplied by both inverses."""
        weight, bias = self._module.weight.grad.flatten(1), self._module.bias.grad
        A, G = self._inverse
        return G @ torch.cat([weight, bias[:, None]], 1) @ A

    def _save_input(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if self.listening:
            self._seen["a"] = inputs[0].detach()

    def _save_gradient(self, module: nn.Module, inputs: Any, gradients: Any) -> None:
        if self.listening:
            self._seen["ds"] = gradients[0] * len(gradients[0])


def add_rows(average: torch.Tensor, a: torch.Tensor, module: Any) -> None:
    """Add inputs to an average by one product of all rows, with a column of ones."""
    if a.ndim == 4:
        m = module
        a = unfold(a, m.kernel_size, padding=m.padding, stride=m.stride).transpose(1, 2)
    a = a.reshape(-1, a.shape[-1])
    a = torch.cat([a, torch.ones(len(a), 1)], 1)
    average.addmm_(a.T, a, beta=DECAY, alpha=(1 - DECAY) / len(a))


def add_examples(average: torch.Tensor, a: torch.Tensor, module: Any) -> None:
    """Add inputs to an average by a product for each example, and sums for the bias."""
    if a.ndim < 4:
        add_rows(average, a, module)
        return
    m = module
    z = unfold(a, m.kernel_size, padding=m.padding, stride=m.stride)
    d, alpha = z.shape[1], (1 - DECAY) / (len(z) * z.shape[2])
    average[:d, :d].addbmm_(z, z.transpose(1, 2), beta=DECAY, alpha=alpha)
    average[d, :d].mul_(DECAY).add_(z.sum((0, 2)), alpha=alpha)
    average[d, d].mul_(DECAY).add_(1 - DECAY)
    average[:d, d].copy_(average[d, :d])
