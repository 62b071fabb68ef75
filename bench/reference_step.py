"""The result of a step of K-FAC by definition: the truth of the suite ``step``.

Plain NumPy in float64 evaluates the operators of the file one by one, without the package's graphs,
derivatives and factors: forward, backward, second moments, inverses.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.jobs import DAMPING, GRADIENT, NATURAL, STEPS, Run
from kfac_engine.bench.reference_operators import OPERATORS, Backward, rows_of
from kfac_engine.bench.step_networks import NETWORKS, Network
from kfac_engine.graph.structure import Node


def step(network: str, batch: int, kind: str) -> Run:
    """Return a function that computes gradients and the natural gradients of layers."""
    net = NETWORKS[network]()

    def run() -> dict[str, list[Array]]:
        tape = evaluate(net, net.inputs(batch)["x"])
        _, sums = differentiate(net, tape, net.targets(batch))
        count = net.targets(batch).size
        gradients = {name: sums[name] / count for name in net.compared}
        result = {GRADIENT: list(gradients.values())}
        if STEPS[kind]:
            natural = natural_gradients(net, tape, sums, gradients)
            result[NATURAL] = [natural[name] for name in net.preconditioned]
        return result

    return run


@dataclass(frozen=True, slots=True)
class Tape:
    """The record of an evaluation, for the backward pass.

    ``backward`` has each node with the function from its cotangent to those of its operands.
    """

    values: dict[str, Array]
    backward: list[tuple[Node, Backward]]


def evaluate(net: Network, x: Array, weights: Mapping[str, Array] | None = None) -> Tape:
    """Run a network in float64, with other weights than its own if they are given."""
    known = {**net.constants, **(weights or net.weights), "x": x}
    values = {n: v.astype(np.float64) if v.dtype.kind == "f" else v for n, v in known.items()}
    backward = []
    for node in net.nodes:
        operands = [values[name] for name in node.inputs]
        values[node.outputs[0]], back = OPERATORS[node.op](node.attributes, *operands)
        backward.append((node, back))
    return Tape(values, backward)


def differentiate(net: Network, tape: Tape, targets: Array) -> tuple[float, dict[str, Array]]:
    """Differentiate the loss, summed over examples and positions."""
    z = tape.values[net.result]
    z = z - z.max(-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    hit = np.arange(z.shape[-1]) == targets[..., None]
    return -float(log_p[hit].sum()), propagate(tape, net.result, np.exp(log_p) - hit)


def propagate(tape: Tape, result: str, cotangent: Array) -> dict[str, Array]:
    """Return the derivatives of ``⟨cotangent, result⟩`` with respect to every value."""
    cotangents = {result: cotangent}
    for node, back in reversed(tape.backward):
        for name, term in zip(node.inputs, back(cotangents[node.outputs[0]]), strict=False):
            cotangents[name] = cotangents[name] + term if name in cotangents else term
    return cotangents


def natural_gradients(
    net: Network, tape: Tape, sums: Mapping[str, Array], gradients: Mapping[str, Array]
) -> dict[str, Array]:
    """Return ``c⁻¹ (A + λ_A)⁻¹ V (G + λ_G)⁻¹`` of each dense layer and convolution.

    ``G`` contains the mean over positions of the loss. ``sums`` are gradients of the loss summed
    over examples and positions, ``gradients`` those of the mean loss.

    Source: Martens & Grosse 2015, arXiv:1503.05671, section 6.3; Grosse & Martens 2016,
    arXiv:1602.01407.
    """
    natural = {}
    predictions = net.positions or 1
    for node, _ in tape.backward:
        weight = next((name for name in node.inputs if name.endswith(".weight")), "")
        if weight not in net.preconditioned:
            continue
        a, s = rows_of(node, tape.values[node.inputs[0]]), sums[node.outputs[0]]
        examples, W, bias = len(s), gradients[weight], f"{weight.removesuffix('.weight')}.bias"
        filters = W.ndim == 4
        ds = (np.moveaxis(s, 1, -1) if filters else s).reshape(len(a), -1)
        V = np.vstack([W.reshape(len(W), -1).T if filters else W, gradients[bias]])
        A = a.T @ a / len(a)
        G = ds.T @ ds / len(ds) / predictions
        root = np.sqrt(DAMPING / (len(a) / examples))
        pi = np.sqrt(np.trace(A) / len(A) / (np.trace(G) / len(G)))
        left = np.linalg.solve(A + root * pi * np.eye(len(A)), V)
        U = np.linalg.solve(G + root / pi * np.eye(len(G)), left.T).T / (len(a) / examples)
        natural[weight] = U[:-1].T.reshape(W.shape) if filters else U[:-1]
        natural[bias] = U[-1]
    return natural
