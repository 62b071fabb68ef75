"""A two-layer net in NumPy with its derivatives, and what an estimator should make of it."""

from dataclasses import dataclass, field

import numpy as np
import pytest

import kfac_engine as ke
from tests.lifecycle import second_moment
from tests.oracle import predictive_fisher

EXACT = 1e-11  # relative: float64 sums of some hundred products of size one
DAMPING = 0.2

D, H, K, N = 3, 4, 2, 5  # inputs, hidden units, outputs, examples
WEIGHTS = {"w1": (D, H), "b1": (H,), "w2": (H, K), "b2": (K,)}
BLOCKS = [("w1", "b1"), ("w2", "b2")]
TARGETS = np.array([0, 1, 1, 0, 1])


# -- the net ---------------------------------------------------------------------------------------


@dataclass
class Trace:
    """``z = tanh(x·w1 + b1)·w2 + b2`` (or without tanh), tower by tower; counts what is asked."""

    values: dict
    towers: tuple = ("",)
    linear: bool = False
    reads: list = field(default_factory=list)
    asked: list = field(default_factory=list)

    def __getitem__(self, name):
        self.reads.append(name)
        return self.values[name]

    def vjp(self, cotangents, wrt):
        self.asked.append(tuple(wrt))
        total = {}
        for tower in self.towers:
            self._backward(tower, cotangents, total)
        return {name: total.get(name, np.zeros_like(self.values[name])) for name in wrt}

    def _backward(self, tower, cotangents, total):
        x, a = self.values[f"x{tower}"], self.values[f"a{tower}"]
        dz = cotangents.get(f"z{tower}")
        if dz is None:
            return
        da = dz @ self.values["w2"].T
        ds = da if self.linear else da * (1 - a**2)
        found = {"w1": x.T @ ds, "b1": ds.sum(0), "w2": a.T @ dz, "b2": dz.sum(0)}
        found |= {f"z{tower}": dz, f"a{tower}": da, f"s{tower}": ds}
        for name, gradient in found.items():
            total[name] = total.get(name, 0) + gradient


def weights(dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in WEIGHTS.items()}


def run(x, targets=None, *, towers=1, linear=False, seed=0):
    """One evaluation; the batch is cut into towers of equal size."""
    values = weights(x.dtype, seed)
    names = ("",) if towers == 1 else tuple(str(tower) for tower in range(towers))
    for tower, part in zip(names, np.split(x, towers), strict=True):
        s = part @ values["w1"] + values["b1"]
        a = s if linear else np.tanh(s)
        z = a @ values["w2"] + values["b2"]
        values |= {f"x{tower}": part, f"s{tower}": s, f"a{tower}": a, f"z{tower}": z}
    if targets is not None:
        for tower, part in zip(names, np.split(targets, towers), strict=True):
            values[f"t{tower}"] = part
    return Trace(values, names, linear)


def batch(seed=1, n=N, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=(n, D)).astype(dtype)


# -- collections and estimators --------------------------------------------------------------------

LOSSES = {
    "categorical": "register_categorical_predictive_distribution",
    "normal": "register_normal_predictive_distribution",
    "multi_bernoulli": "register_multi_bernoulli_predictive_distribution",
}
every_loss = pytest.mark.parametrize("loss", LOSSES)


def layers(approx="kron", towers=("",)):
    collection = ke.LayerCollection()
    for tower in towers:
        for key, inputs, outputs in zip(BLOCKS, "xa", "sz", strict=True):
            collection.register_fully_connected(
                key, f"{inputs}{tower}", f"{outputs}{tower}", approx=approx
            )
    return collection


def estimator_of(collection, mode="exact", decay=0.9, **options):
    return ke.FisherEstimator(
        tuple(WEIGHTS), decay, DAMPING, collection, estimation_mode=mode, **options
    )


def estimate(loss="categorical", mode="exact", *, approx="kron", coeff=1.0, **options):
    collection = layers(approx)
    getattr(collection, LOSSES[loss])("z", targets="t", name="loss", coeff=coeff)
    return estimator_of(collection, mode, **options)


# -- truths ----------------------------------------------------------------------------------------


def example_jacobians(trace):
    """``∂z/∂θ`` of every example, ``(n, K, P)``: its own row through its own weights."""
    found = []
    for x, a in zip(trace.values["x"], trace.values["a"], strict=True):
        rows = []
        for k in range(K):
            ds = trace.values["w2"][:, k] * (1 if trace.linear else 1 - a**2)
            dz = np.eye(K)[k]
            rows.append(np.concatenate([np.outer(x, ds).ravel(), ds, np.outer(a, dz).ravel(), dz]))
        found.append(rows)
    return np.array(found)


def exact_fisher(trace, loss):
    """Mean over the examples of ``Jᵀ F J`` with the Fisher matrix of the prediction, dense."""
    total = 0.0
    for z, jac in zip(trace.values["z"], example_jacobians(trace), strict=True):
        total = total + jac.T @ predictive_fisher(loss, z) @ jac
    return total / len(trace.values["z"])


def on_diagonal(F):
    """The blocks of the two layers; the packed order is that of weight, then bias."""
    first = D * H + H
    return F[:first, :first], F[first:, first:]


def outer_sides(trace, cotangents):
    """``(A, G)`` of both layers: means over examples, sums over sources, by loops."""
    first = second = 0.0
    for dz in cotangents:
        ds = dz @ trace.values["w2"].T * (1 - trace.values["a"] ** 2)
        first, second = first + second_moment(ds), second + second_moment(dz)
    x, a = (second_moment(trace.values[name], has_bias=True) for name in "xa")
    return (x, first), (a, second)


def assert_blocks(estimator, sides, tolerance=EXACT):
    for block, (A, G) in zip(estimator.blocks, sides, strict=True):
        expected = np.kron(A, G)
        np.testing.assert_allclose(
            block.full_fisher_block(), expected, atol=tolerance * abs(expected).max()
        )


def softmax(z):
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def exact_cotangents(z, loss="categorical"):
    """``B e_k`` for every example at once, one for each k: any root of the Fisher will do."""
    sources = np.empty((K, *z.shape))
    for n, row in enumerate(z):
        sources[:, n] = np.linalg.cholesky(predictive_fisher(loss, row) + 1e-300 * np.eye(K)).T
    return list(sources)
