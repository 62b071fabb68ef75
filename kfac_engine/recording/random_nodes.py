"""Converts a caller's uniform or normal numbers to the results of random nodes."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from kfac_engine.autodiff.rules.attributes import integer, number
from kfac_engine.graph.structure import Node
from kfac_engine.recording.operations import Draws
from kfac_engine.recording.recorded import Recorded, Shape, Symbol

# Returns a value that a random node reads.
Read: TypeAlias = Callable[[str], Recorded]

# Begins the names of inputs with the random numbers of nodes.
OF_NODES = "noise/"

_NORMAL = ("RandomNormal", "RandomNormalLike")


def shape_of_numbers(node: Node, like: Shape) -> Shape:
    """Return the shape of the numbers of a node, from the shape of its first operand."""
    if node.op == "Multinomial":
        return (like[0], integer(node, "sample_size", 1), like[1])
    return like


def drawn(draws: Draws, node: Node, shape: Shape) -> Symbol:
    """Return numbers for a node, in the shape of ``shape_of_numbers``."""
    draw = draws.normal if node.op in _NORMAL else draws.uniform
    return draw(shape, f"{OF_NODES}{node.outputs[0]}")


def _dropout(node: Node, numbers: Symbol, read: Read) -> tuple[Symbol, Symbol]:
    """Drop elements; a node without training mode drops always."""
    x, ratio_name, mode = (*node.inputs, "", "")[:3]
    ratio = read(ratio_name).reshape(()) if ratio_name else 0.5
    mask: Symbol = numbers >= ratio
    dropped = np.where(mask, read(x) / (1 - ratio), 0.0)
    if not mode:
        return dropped, mask
    training = read(mode).reshape(())
    return np.where(training, dropped, read(x)), mask | ~training


def _uniform(node: Node, numbers: Symbol, _: Read) -> tuple[Symbol]:
    low, high = number(node, "low", 0.0), number(node, "high", 1.0)
    return (numbers * (high - low) + low,)


def _normal(node: Node, numbers: Symbol, _: Read) -> tuple[Symbol]:
    return (numbers * number(node, "scale", 1.0) + number(node, "mean", 0.0),)


def _bernoulli(node: Node, numbers: Symbol, read: Read) -> tuple[Symbol]:
    return (numbers < read(node.inputs[0]),)


def _multinomial(node: Node, numbers: Symbol, read: Read) -> tuple[Symbol]:
    """Draw classes: the largest of the logits plus numbers of Gumbel's distribution."""
    logits = np.expand_dims(read(node.inputs[0]), 1)
    return ((logits - np.log(-np.log(numbers))).argmax(-1),)


# Each function returns the results of a node from its numbers.
RESULTS: Mapping[str, Callable[[Node, Symbol, Read], tuple[Symbol, ...]]] = {
    "Dropout": _dropout,
    "RandomUniform": _uniform,
    "RandomUniformLike": _uniform,
    "RandomNormal": _normal,
    "RandomNormalLike": _normal,
    "Bernoulli": _bernoulli,
    "Multinomial": _multinomial,
}
