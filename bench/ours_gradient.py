"""Steps of the package without curvature: what K-FAC adds is the time beyond them."""

from collections.abc import Callable, Mapping
from typing import Any

from kfac_engine._types import Array
from kfac_engine.bench.jobs import GRADIENT, Run
from kfac_engine.bench.step_networks import NETWORKS
from kfac_engine.engine.engine import Engine


def step(network: str, batch: int, kind: str) -> Run:
    """One gradient, whatever else the kind would have due."""
    del kind
    net = NETWORKS[network]()
    inputs, targets = net.inputs(batch), net.targets(batch)
    engine = Engine.from_onnx(net.data, loss="categorical")

    def run() -> dict[str, list[Array]]:
        gradients = engine.gradients(inputs, targets).gradients
        return {GRADIENT: [gradients[name] for name in net.compared]}

    return run


OPERATIONS: Mapping[str, Callable[..., Any]] = {"step": step}
