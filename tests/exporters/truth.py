"""Gradients by torch's autograd in float64, and where exporters put each parameter element."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from math import log, pi

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.exporters.case import Case


def first(output: object) -> Tensor:
    """The first tensor of a module's result."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output


def made_up_targets(case: Case, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Targets of the right shape for the loss."""
    with torch.no_grad():
        output = first(copy.deepcopy(module)(*inputs))
    if case.loss == "categorical":
        return torch.randint(0, output.shape[-1], output.shape[:-1])
    return torch.randn(output.shape)


def gradients(
    case: Case, module: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor
) -> tuple[float, dict[str, NDArray[np.float64]]]:
    """Loss and its gradient for every parameter, in float64.

    ``−log p`` summed over the last axis and averaged over all others.
    """
    exact = copy.deepcopy(module).double()
    exact.requires_grad_(True)  # tables of sinusoids may be frozen
    output = first(exact(*(x.double() if x.is_floating_point() else x for x in inputs)))
    loss = LOSSES[case.loss](output, targets)
    loss.backward()
    found = {
        name: np.zeros(p.shape) if p.grad is None else p.grad.numpy()
        for name, p in exact.named_parameters()
    }
    return float(loss), found


def _normal(output: Tensor, targets: Tensor) -> Tensor:
    terms = (output - targets.double()) ** 2 + 0.5 * log(pi)
    return terms.sum(-1).mean() if terms.ndim > 1 else terms.mean()


def _categorical(output: Tensor, targets: Tensor) -> Tensor:
    log_p = torch.log_softmax(output, -1)
    return -log_p.gather(-1, targets.unsqueeze(-1)).mean()


LOSSES = {"normal": _normal, "categorical": _categorical}


@dataclass(frozen=True)
class Provenance:
    """Which element of which parameter an element of a file's weights came from."""

    values: NDArray[np.float32]  # all parameter elements, sorted; they are distinct
    # Of each in ``values``, its place in the parameters laid end to end.
    position: NDArray[np.int64]
    shapes: dict[str, tuple[int, ...]]  # parameter name to shape, in that order

    @classmethod
    def of(cls, module: nn.Module) -> "Provenance":
        """The parameters of a module, as they are exported."""
        named = dict(module.named_parameters())
        flat = np.concatenate([p.detach().numpy().ravel() for p in named.values()])
        order = np.argsort(flat)
        return cls(flat[order], order, {name: tuple(p.shape) for name, p in named.items()})

    def gather(
        self, weights: Mapping[str, NDArray[np.float32]], found: Mapping[str, NDArray[np.float32]]
    ) -> tuple[dict[str, NDArray[np.float64]], set[str], set[str]]:
        """Gradients of the parameters, from those of a file's weights.

        An element that the file holds twice has two gradients, which add up; one that it holds
        nowhere has none.

        Args:
            weights: Name in the file to value.
            found: Name in the file to gradient.

        Returns:
            Parameter name to gradient, NaN where the file does not hold the element; names in the
            file that hold a parameter; names in the file that hold none.
        """
        total = np.zeros(len(self.values))
        seen = np.zeros(len(self.values), bool)
        known, strange = set(), set()
        for name, weight in weights.items():
            values = weight.ravel()
            at = np.minimum(np.searchsorted(self.values, values), len(self.values) - 1)
            hit = self.values[at] == values
            (known if hit.any() else strange).add(name)
            into = self.position[at[hit]]
            np.add.at(total, into, found[name].ravel()[hit].astype(np.float64))
            seen[into] = True
        total[~seen] = np.nan
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])
        pieces = np.split(total, ends[:-1])
        gathered = {
            name: piece.reshape(shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }
        return gathered, known, strange
