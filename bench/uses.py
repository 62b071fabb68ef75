"""Data and settings of the suite ``uses``: Laplace approximations and influence scores."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.step_networks import Network, classifier, small_cnn
from kfac_engine.registry import Registry

# Prior precisions of the evidence, damping of the effective dimension of EKFAC, and share of the
# mean eigenvalue of a layer that damps its influence scores.
PRIORS = np.logspace(-2, 2, 100)
DAMPING = 1e-3
SHARE = 0.1
# Names of the results of a fit.
LOG_DETERMINANT, EFFECTIVE_DIMENSION = "log determinant", "effective dimension"

_NETWORKS: Mapping[str, Callable[[], Network]] = Registry(
    "network of a use", {"mlp": lambda: classifier((784, 256, 128, 10)), "cnn": small_cnn}
)


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """A network, the data of its curvature, and the queries, which follow these examples."""

    network: Network
    examples: int
    inputs: Array
    targets: Array

    @property
    def train(self) -> tuple[Array, Array]:
        """Inputs and classes of the curvature."""
        return self.inputs[: self.examples], self.targets[: self.examples]

    @property
    def queries(self) -> tuple[Array, Array]:
        """Inputs and classes of the queries."""
        return self.inputs[self.examples :], self.targets[self.examples :]


def study(network: str, examples: int, queries: int) -> Study:
    """Return the data of a job, which are the same random numbers in every process."""
    net, count = _NETWORKS[network](), examples + queries
    return Study(net, examples, net.inputs(count)["x"], net.targets(count))
