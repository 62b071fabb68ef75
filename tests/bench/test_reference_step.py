"""The truth of the suite ``step``: its derivatives by differences, its curvature by brute force."""

import numpy as np
import pytest

from kfac_engine.bench import jobs, ours, reference_step as reference
from kfac_engine.bench.step_networks import NETWORKS, classifier

# Second differences in float64: the step's square, and rounding divided by the step. Kinks of ReLU
# that the step crosses cost a little more.
TOLERANCE = 1e-4
# A gradient in float32; and a natural one: statistics of so few examples have no full rank, so the
# inverses of what float32 leaves of them are as large as the damping lets them be.
SINGLE = {jobs.GRADIENT: 1e-5, jobs.NATURAL: 1e-3}
KFAC = "factors 1, inverses 10"
BATCHES = {"mlp": 8, "resnet20": 2, "transformer": 2}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_slopes_of_the_loss(name):
    net = NETWORKS[name]()
    x, targets = net.inputs(BATCHES[name])["x"], net.targets(BATCHES[name])
    _, found = reference.differentiate(net, reference.evaluate(net, x), targets)
    rng, step = np.random.default_rng(3), 1e-7
    for _ in range(2):
        direction = {n: rng.standard_normal(w.shape) for n, w in net.weights.items()}
        losses = []
        for sign in (1, -1):
            moved = {n: w + sign * step * direction[n] for n, w in net.weights.items()}
            losses.append(
                reference.differentiate(net, reference.evaluate(net, x, moved), targets)[0]
            )
        slope = sum((found[n] * direction[n]).sum() for n in net.weights)
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=TOLERANCE)


def test_natural_gradients_solve_the_damped_kronecker_system():
    """A dense network small enough for the whole block as one matrix."""
    net = classifier((3, 4, 2))
    x, targets = net.inputs(7)["x"].astype(float), net.targets(7)
    tape = reference.evaluate(net, x)
    _, sums = reference.differentiate(net, tape, targets)
    gradients = {name: sums[name] / 7 for name in net.compared}
    natural = reference.natural_gradients(net, tape, sums, gradients)
    first, bias, last = (net.weights[n].astype(float) for n in ("0.weight", "0.bias", "1.weight"))
    s = x @ first + bias
    z = np.maximum(s, 0) @ last
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    ds = ((p - np.eye(2)[targets]) @ last.T) * (s > 0)
    a = np.c_[x, np.ones(7)]
    A, G = a.T @ a / 7, ds.T @ ds / 7
    pi = np.sqrt(np.trace(A) / 4 / (np.trace(G) / 4))
    root = np.sqrt(jobs.DAMPING)
    block = np.kron(A + pi * root * np.eye(4), G + root / pi * np.eye(4))
    V = np.vstack([gradients["0.weight"], gradients["0.bias"]])
    expected = np.linalg.solve(block, V.ravel()).reshape(V.shape)
    found = np.vstack([natural["0.weight"], natural["0.bias"]])
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("name", NETWORKS)
def test_our_steps_are_those_of_the_definition(name):
    batch = BATCHES[name]
    expected = reference.step(name, batch, KFAC)()
    found = ours.OPERATIONS["step"](name, batch, KFAC)()
    assert set(found) == set(expected) == {jobs.GRADIENT, jobs.NATURAL}
    for part, arrays in expected.items():
        truth, mine = (np.concatenate([a.ravel() for a in one]) for one in (arrays, found[part]))
        assert np.abs(mine - truth).max() <= SINGLE[part] * np.abs(truth).max()
