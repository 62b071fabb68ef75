"""Finds the roles of weights in a model: what its graph and its blocks tell of them."""

from collections.abc import Mapping
from math import inf, sqrt

import numpy as np

from kfac_engine.curvature.blocks.base import FisherBlock, uses
from kfac_engine.curvature.blocks.kronecker import LARGEST_DIVIDED
from kfac_engine.engine.engine import Engine
from kfac_engine.graph.structure import RELAYS, Node
from kfac_engine.losses.categorical import CategoricalLogitsNegativeLogProbLoss
from kfac_engine.training.feature_bounds import model_of
from kfac_engine.training.predictions import Prediction
from kfac_engine.training.units import Units
from kfac_engine.training.vectors import Vector

# Kinds of layers whose arrays are updated by Adam: their updates have few entries that are not
# zero, or scale single features.
BY_ADAM = {
    "embedding", "embedding_multi", "tied_embedding", "scale_and_shift", "shift", "generic"
}  # fmt: skip

# Largest number of entries that are few numbers, by kind: vectors of a normalization are no such.
_FEW_NUMBERS = {"scale_and_shift": 1, "shift": 8, "generic": 8}

# Number of features above which the rate of a table that computes logits falls.
_FEW_FEATURES = 256

# Adam updates the weight that computes the logits of more classes, as it does embeddings: few rows
# of a batch have each class, and the factor of the outputs would be a diagonal.
_MOST_CLASSES = LARGEST_DIVIDED

# Operators that may be between the matrices of a product of low rank.
_SCALES = RELAYS | {"Mul", "Div"}


def wide_heads(engine: Engine, predictions: Mapping[str, Prediction]) -> dict[str, int]:
    """Return the features of each weight that computes logits of more than ``_MOST_CLASSES``.

    Tables that embed tokens, too, are left out. Weights have the names of their blocks.
    """
    facts, heads = model_of(engine).facts, dict[str, int]()
    logits = {
        term.inputs[0]: facts[term.inputs[0]].shape[term.class_axis]
        for term in engine.objective.terms
        if isinstance(term, CategoricalLogitsNegativeLogProbLoss)
    }
    for layer in engine.layers:
        name, packing = uses(layer.key)[0], engine.collection.fisher_blocks[layer.key].packing
        prediction = predictions.get(layer.parameters[0])
        if layer.kind in BY_ADAM or prediction is None or prediction.loss not in logits:
            continue
        assert packing is not None, "a layer that is not in BY_ADAM has a matrix"
        inputs, outputs = packing.matrix_shape(engine.collection.require_shape(name))
        if outputs == logits[prediction.loss] > _MOST_CLASSES:
            heads[name] = inputs - packing.has_bias
    return heads


def widths_of(engine: Engine, blocks: Mapping[str, FisherBlock]) -> dict[str, float]:
    """Return the sum of the sides of the dense factors of each block."""
    widths = {}
    for name, block in blocks.items():
        shapes = [engine.collection.require_shape(n) for n in uses(block.params or ())]
        sides = [shape[-1] for shape in block.factor_shapes(shapes) if len(shape) > 1]
        widths[name] = float(sum(sides))
    return widths


def joined_by_blocks(engine: Engine, units: Units) -> dict[str, int]:
    """Return a group number for each weight, and for each parameter that contains weights.

    Parameters that share a block of the Fisher matrix are in one group.
    """
    pieces = {n: ps for n, ps in engine.pieces.items() if any(p.kind not in BY_ADAM for p in ps)}
    owners = {piece.weight or piece.part.name: n for n, ps in pieces.items() for piece in ps}
    first = {name: name for name in pieces}

    def find(name: str) -> str:
        while first[name] != name:
            name = first[name] = first[first[name]]
        return name

    for key in engine.collection.fisher_blocks:
        name, *others = [find(owners[part]) for part in uses(key) if part in owners] or [""]
        first |= dict.fromkeys(others, name)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(map(find, pieces)))}
    of_weights = {name: owners[weight.weight] for name, weight in units.weights.items()}
    owners_of = {name: name for name in of_weights.values()} | of_weights
    return {name: numbers[find(owner)] for name, owner in owners_of.items()}


def rates_of_logits(engine: Engine, heads: Mapping[str, int]) -> dict[str, float]:
    """Return a factor of Adam's rate for each weight that computes logits, by ``wide_heads``.

    A table that embeds tokens may be one, too. Adam moves the entries of a class e by about its
    rate. A logit ``s h·e`` of features h, which the graph multiplies by constants of the size s,
    then changes by up to the rate times ``s Σ |h|``. The factor is that of a change as large as
    ``_FEW_FEATURES`` features have with s = 1.
    """
    graph, factors = model_of(engine).graph, dict[str, float]()
    for layer in engine.layers:
        name, features = layer.parameters[0], heads.get(uses(layer.key)[0])
        if layer.kind == "tied_embedding":
            features = engine.collection.require_shape(name)[-1]
        if features:
            value, scale = uses(layer.inputs)[-1], 1.0
            while value in graph.producers:
                value, of_node = _scaled(engine, graph.producers[value])
                scale *= of_node
            factors[name] = min(1.0, _FEW_FEATURES / (scale * features))
    return factors


def few_numbers(engine: Engine, values: Vector) -> set[str]:
    """Return the parameters of at most eight entries that have no weight, such as a temperature.

    Each entry scales or shifts many values at once, and its gradient, a sum over them, has little
    noise. The biases of layers with weights, embeddings, and the scales and shifts of several
    features, such as those of a normalization, are others.
    """
    return {
        name
        for name, pieces in engine.pieces.items()
        if name in values
        and all(values[name].size <= _FEW_NUMBERS.get(piece.kind, 0) for piece in pieces)
    }


def adapters(engine: Engine, units: Units, values: Vector) -> dict[str, float]:
    """Return the factor of each product of two low-rank matrices, by the names of both weights.

    In such a product ``s A B``, as in an adapter, the other side of each matrix is at least four
    times the rank, and only constants are between the matrices. The factor s is that of all
    constants between and behind them: of arrays, the root of the mean square.
    """
    graph, sides = model_of(engine).graph, dict[str, tuple[int, ...]]()
    for name, weight in units.weights.items():
        count, *shape = weight.matrices(values[name]).shape
        if count == 1:
            sides[name] = tuple(shape)
    weights = {
        name: layer
        for layer in engine.layers
        for name in layer.parameters
        if name in sides and len(layer.parameters) == 1
    }
    weight_of = {output: name for name, layer in weights.items() for output in uses(layer.outputs)}
    factors = dict[str, float]()
    for name, layer in weights.items():
        value, factor = uses(layer.inputs)[0], 1.0
        while value not in weight_of and value in graph.producers:
            value, of_node = _scaled(engine, graph.producers[value])
            factor *= of_node
        (rank, outputs), before = sides[name], sides.get(weight_of.get(value, ""), (0, 0))
        if before[1] == rank and 4 * rank <= min(before[0], outputs):
            readers = graph.consumers.get(uses(layer.outputs)[0], ())
            while len(readers) == 1 and _scaled(engine, readers[0][0])[0]:
                factor *= _scaled(engine, readers[0][0])[1]
                readers = graph.consumers.get(readers[0][0].outputs[0], ())
            factors |= dict.fromkeys((weight_of[value], name), factor)
    return factors


def _scaled(engine: Engine, node: Node) -> tuple[str, float]:
    """Return the operand that a node multiplies by a constant, and the size of the constant.

    The operand is empty for other nodes. A trained constant has the size 1.
    """
    constants = model_of(engine).graph.constants
    rest = [operand for operand in node.inputs if operand not in constants]
    if node.op not in _SCALES or len(rest) != 1 or (node.op == "Div" and rest[0] != node.inputs[0]):
        return "", 1.0
    fixed = [n for n in node.inputs if n in constants and n not in engine.parameters]
    if node.op in RELAYS or not fixed:
        return rest[0], 1.0
    size = sqrt(np.mean(np.square(constants[fixed[0]], dtype=np.float64)))
    if not 0 < size < inf:
        return rest[0], 1.0
    return rest[0], 1 / size if node.op == "Div" else size
