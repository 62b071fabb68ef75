"""Linear regression models and their data."""

import numpy as np

from tests import models


def linear(features=3, outputs=2, bias=True):
    """``output = x · W + b`` in float64."""
    net = models.Net("float64")
    product = net.op(
        "MatMul", "input", net.weight("w", features, outputs), to="p" if bias else "output"
    )
    if bias:
        net.op("Add", product, net.weight("b", outputs), to="output")
    return net.model({"input": ["batch", features]}, {"output": ["batch", outputs]})


def regression(n=30, features=3, outputs=2, noise=0.4):
    """A linear model at its posterior mean for the prior precision 0.5, with its data."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, features))
    y = x @ rng.standard_normal((features, outputs)) + noise * rng.standard_normal((n, outputs))
    return x, y
