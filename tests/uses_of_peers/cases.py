"""The models and data on which other libraries were run; NumPy and onnx are enough to make them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from tests.models import Net, mlp

FOLDER = Path(__file__).parent
EXAMPLES, QUERIES, OUTPUTS = 24, 4, 3
# Batches of the other libraries; no result depends on their sizes.
BATCH = 10
LINKS = ("probit", "bridge", "bridge_norm")
# Dampings of influence scores; None is a tenth of the mean eigenvalue of each layer.
DAMPINGS = (None, 1e-3, 0.1)

# Damping of the log determinants and products of curvlinops.
DAMPING = 0.1


def wave(size: int) -> np.ndarray:
    """Return the vector of the products of curvlinops."""
    return np.sin(np.arange(size))


def settings(loss: str) -> list[tuple[float, float]]:
    """Return the pairs of prior precision and noise of a posterior, in the order of the results."""
    noises = (0.3, 1.0) if loss == "normal" else (1.0,)
    return [(prior, noise) for prior in (0.01, 30.0, 1.0) for noise in noises]


@dataclass(frozen=True)
class Case:
    """A model with its loss, data and queries."""

    model: onnx.ModelProto  # the model, from ``input`` to ``output``
    loss: str  # ``"categorical"`` or ``"normal"``
    inputs: np.ndarray  # ``(24, …)``
    targets: np.ndarray  # classes, or values ``(24, 3)``
    draws: np.ndarray  # other targets, as a sampled Fisher draws them
    queries: np.ndarray  # ``(4, …)``
    query_targets: np.ndarray  # targets of the queries

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Parameter name to value."""
        return {entry.name: onnx.numpy_helper.to_array(entry) for entry in
                self.model.graph.initializer}  # fmt: skip


def _cnn() -> onnx.ModelProto:
    """Two convolutions with several positions and a dense layer, in float32.

    ONNX Runtime convolves no float64 values on a CPU.
    """
    net = Net("float32", seed=3)
    x = net.conv("conv0", "input", 2, 3, 3, pads=[1, 1, 1, 1], strides=[2, 2])
    x = net.op("Tanh", x, to="act0")
    x = net.conv("conv1", x, 3, 4, 2)
    x = net.op("Tanh", x, to="act1")
    x = net.op("Flatten", x, to="flat")
    net.dense("output", x, 16, OUTPUTS)
    return net.model({"input": ["batch", 2, 6, 6]}, {"output": ["batch", OUTPUTS]})


def _case(model: onnx.ModelProto, loss: str, shape: tuple[int, ...], dtype: str) -> Case:
    generator = np.random.default_rng(7)
    inputs = generator.standard_normal((EXAMPLES + QUERIES, *shape)).astype(dtype)
    if loss == "categorical":
        targets, draws = generator.integers(0, OUTPUTS, (2, EXAMPLES + QUERIES))
    else:
        targets, draws = generator.standard_normal((2, EXAMPLES + QUERIES, OUTPUTS)).astype(dtype)
    train, query = slice(EXAMPLES), slice(EXAMPLES, None)
    return Case(model, loss, inputs[train], targets[train], draws[train], inputs[query],
                targets[query])  # fmt: skip


def cases() -> Mapping[str, Case]:
    """Return the cases by name; ``mlp`` and ``regression`` are in float64."""
    dense = mlp((6, 5, OUTPUTS), dtype="float64")
    return {
        "mlp": _case(dense, "categorical", (6,), "float64"),
        "regression": _case(dense, "normal", (6,), "float64"),
        "cnn": _case(_cnn(), "categorical", (2, 6, 6), "float32"),
    }
