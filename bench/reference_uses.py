"""The results of the suite ``uses`` by definition: plain NumPy in float64 with dense eigenvectors.

Source: Daxberger et al. 2021, arXiv:2106.14806, for Laplace approximations; Grosse et al. 2023,
arXiv:2308.03296, for influence scores with EKFAC.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench import uses
from kfac_engine.bench.jobs import Run
from kfac_engine.bench.reference_step import Tape, evaluate, propagate, rows_of
from kfac_engine.bench.step_networks import Network
from kfac_engine.bench.uses import Study, study


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Inputs ``(n, t, d_in + 1)``, which end with a one, and output gradients of a layer.

    The gradients ``(losses, n, t, d_out)`` belong to several losses of each example.
    """

    a: Array
    ds: Array

    def moments(self) -> tuple[Array, Array]:
        """Return the means over examples and positions of ``a aᵀ`` and of ``Σ ds dsᵀ``."""
        rows = self.a.reshape(-1, self.a.shape[-1])
        sources = self.ds.reshape(-1, self.ds.shape[-1])
        return rows.T @ rows / len(rows), sources.T @ sources / len(rows)

    def gradients(self, U: Array, W: Array) -> Array:
        """Return ``Uᵀ (Σ a dsᵀ) W`` of each loss and example, ``(losses, n, d_in + 1, d_out)``."""
        product: Array = (self.a @ U).swapaxes(1, 2) @ (self.ds @ W)
        return product


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """The eigenvalues and eigenvectors of the sum over examples of the Fisher matrix of a layer.

    The block of the weight and the block of the bias are apart: ``U`` has a one for the bias.
    """

    eigenvalues: Array
    U: Array
    W: Array


def _cotangents(z: Array, kind: str, targets: Array | None = None) -> Iterator[Array]:
    """Yield derivatives with respect to logits: of losses, or of each logit."""
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    unit = np.eye(z.shape[-1])
    if kind == "empirical":
        yield p - unit[targets]
        return
    for number, hit in enumerate(unit):
        weight = np.sqrt(p[:, number : number + 1])
        yield weight * (p - hit) if kind == "exact" else np.broadcast_to(hit, z.shape)


def _layers(net: Network, x: Array, kind: str, targets: Array | None = None) -> list[Layer]:
    tape = evaluate(net, x)
    sources = [
        propagate(tape, net.result, cotangent)
        for cotangent in _cotangents(tape.values[net.result], kind, targets)
    ]
    return list(_read(tape, sources, len(x)))


def _read(tape: Tape, sources: list[dict[str, Array]], examples: int) -> Iterator[Layer]:
    for node, _ in tape.backward:
        if not any(name.endswith(".weight") for name in node.inputs):
            continue
        rows = rows_of(node, tape.values[node.inputs[0]])
        gradients = []
        for source in sources:
            ds = source[node.outputs[0]]
            ds = np.moveaxis(ds, 1, -1) if node.op == "Conv" else ds
            gradients.append(ds.reshape(examples, -1, ds.shape[-1]))
        yield Layer(rows.reshape(examples, -1, rows.shape[-1]), np.stack(gradients))


def _posteriors(data: Study) -> list[Posterior]:
    x, _ = data.train
    posteriors = []
    for layer in _layers(data.network, x, "exact"):
        A, G = layer.moments()
        a, U = np.ones(len(A)), np.eye(len(A))
        a[:-1], U[:-1, :-1] = np.linalg.eigh(A[:-1, :-1])
        g, W = np.linalg.eigh(G)
        count = layer.a.shape[0] * layer.a.shape[1]
        posteriors.append(Posterior(count * np.outer(a.clip(0), g.clip(0)), U, W))
    return posteriors


def _laplace_fit(**sizes: Any) -> Run:
    blocks = _posteriors(study(**sizes))
    return lambda: {
        uses.LOG_DETERMINANT: sum(np.log(block.eigenvalues + 1).sum() for block in blocks)
    }


def _evidence(**sizes: Any) -> Run:
    data = study(**sizes)
    x, targets = data.train
    z = evaluate(data.network, x).values[data.network.result]
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    fit = log_p[np.arange(len(x)), targets].sum()
    squares = sum((w.astype(np.float64) ** 2).sum() for w in data.network.weights.values())
    blocks = _posteriors(data)

    def run() -> list[Array]:
        return [
            fit - 0.5 * (prior * squares + sum(np.log1p(b.eigenvalues / prior).sum()
                                               for b in blocks))
            for prior in uses.PRIORS
        ]  # fmt: skip

    return run


def _variance(**sizes: Any) -> Run:
    data = study(**sizes)
    layers, blocks = _layers(data.network, data.queries[0], "logits"), _posteriors(data)

    def run() -> Array:
        total: Any = 0.0
        for layer, block in zip(layers, blocks, strict=True):
            jacobians = layer.gradients(block.U, block.W)
            rows = jacobians.reshape(*jacobians.shape[:2], -1).swapaxes(0, 1)
            total = total + rows / (block.eigenvalues + 1).ravel() @ rows.swapaxes(1, 2)
        return np.asarray(total)

    return run


@dataclass(frozen=True, slots=True, eq=False)
class _Eigenbasis:
    """EKFAC of a layer with the gradients of examples and queries in its basis."""

    scales: Array
    train: Array
    queries: Array


def _eigenbases(data: Study) -> Iterator[_Eigenbasis]:
    layers, queries = (
        _layers(data.network, *batch) for batch in (
            (data.train[0], "empirical", data.train[1]),
            (data.queries[0], "empirical", data.queries[1]),
        )
    )  # fmt: skip
    for layer, query in zip(layers, queries, strict=True):
        bases = [np.linalg.eigh(moment)[1] for moment in layer.moments()]
        train = layer.gradients(bases[0], bases[1])[0]
        yield _Eigenbasis((train**2).mean(0), train, query.gradients(bases[0], bases[1])[0])


def _ekfac_fit(**sizes: Any) -> Run:
    scales = [basis.scales for basis in _eigenbases(study(**sizes))]
    return lambda: {uses.EFFECTIVE_DIMENSION: sum((s / (s + uses.DAMPING)).sum() for s in scales)}


def _scores(**sizes: Any) -> Run:
    bases = list(_eigenbases(study(**sizes)))
    return lambda: np.asarray(
        sum(
            np.tensordot(basis.queries / _damped(basis.scales), basis.train, ((1, 2), (1, 2)))
            for basis in bases
        )
    )


def _self_scores(**sizes: Any) -> Run:
    bases = list(_eigenbases(study(**sizes)))
    return lambda: np.asarray(
        sum((basis.train**2 / _damped(basis.scales)).sum((1, 2)) for basis in bases)
    )


def _damped(scales: Array) -> Array:
    damped: Array = scales + uses.SHARE * scales.mean()
    return damped


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "Laplace fit": _laplace_fit,
    "variance": _variance,
    "evidence": _evidence,
    "EKFAC fit": _ekfac_fit,
    "scores": _scores,
    "self-influence": _self_scores,
}
