"""One backward pass brings both the gradients of a loss and what statistics read of them."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.sessions.session import Session
from tests import models, oracle

# Relative to the largest entry: passes of small networks in float64, and divisions by one number.
DOUBLE = 1e-9
BATCH = 4
TARGETS = {"mlp": np.array([0, 2, 1, 2]), "token_mlp": np.arange(16).reshape(4, 4) % 3}


@pytest.fixture
def runs(monkeypatch):
    """Names of what ONNX Runtime evaluated."""
    seen = []

    done = Session._done  # all ways to run a session end here

    def counted(self, call):
        seen.append(self._what)
        return done(self, call)

    monkeypatch.setattr(Session, "_done", counted)
    return seen


def engine_of(model, **options):
    return ke.Engine.from_onnx(
        model, loss="categorical", **{"estimation_mode": "empirical", **options}
    )


MODES = {"empirical": 1, "gradients": 2, "curvature_prop": 2}


@pytest.mark.parametrize(("mode", "expected"), MODES.items(), ids=MODES)
def test_empirical_statistics_take_no_backward_pass_of_their_own(runs, mode, expected):
    model = models.mlp()
    engine, inputs = engine_of(model, estimation_mode=mode), models.random_inputs(model, BATCH)
    engine.step(inputs, TARGETS["mlp"])
    runs.clear()
    engine.step(inputs, TARGETS["mlp"])
    assert sum("backward" in what for what in runs) == expected


def test_losses_of_other_numbers_of_predictions_are_propagated_twice(runs):
    net = models.Net("float64")
    net.op("MatMul", "input", net.weight("trunk.weight", 3, 4), to="trunk")
    net.op("Tanh", "trunk", to="act")
    net.op("MatMul", "act", net.weight("tokens.weight", 4, 2), to="tokens")
    net.op("ReduceMean", "act", net.constant("axis", np.array([1])), to="mean", keepdims=0)
    net.dense("head", "mean", 4, 3)
    model = net.model({"input": ["batch", 5, 3]}, {"tokens": ["batch", 5, 2], "head": ["batch", 3]})
    engine = ke.Engine.from_onnx(
        model, loss=["normal", "categorical"], output=["tokens", "head"], reduction="mean",
        estimation_mode="empirical",
    )  # fmt: skip
    inputs = models.random_inputs(model, BATCH)
    targets = {"tokens": np.ones((BATCH, 5, 2)), "head": np.array([0, 2, 1, 1])}
    engine.step(inputs, targets)
    runs.clear()
    found = engine.step(inputs, targets)
    assert sum("backward" in what for what in runs) == 2
    names = list(found.gradients)
    losses = {"tokens": "normal", "head": "categorical"}
    truths = [
        oracle.loss_and_gradient(model, inputs, output, names, loss, targets[output])[1]
        for output, loss in losses.items()
    ]
    for name in names:
        expected = sum(truth[name] for truth in truths)
        np.testing.assert_allclose(found.gradients[name], expected, atol=DOUBLE)
