"""Finds the layers that compute predictions: their updates have the unit of the targets."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from math import inf, sqrt
from typing import Any, NamedTuple

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.forward_rules import SUMS
from kfac_engine.backend.namespace import array_module, is_recorded
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.engine.engine import Engine
from kfac_engine.engine.report import LayerReport
from kfac_engine.graph.structure import RELAYS, Fact, Graph, Node
from kfac_engine.training.feature_bounds import model_of
from kfac_engine.training.kfac_updates import Correction
from kfac_engine.training.vectors import Vector

_ONE = np.ones(1)

# Operators that add a bias along the last axis of the outputs, among those of a ``shift``.
_SHIFTS = {"Add", "Gemm", "Sub"}


class Bias(NamedTuple):
    """A bias b of predictions ``c b + d + …``."""

    factor: Array  # c, one number or one for each feature; infinite if another bias is corrected
    offset: Array  # d, the sum of the constants

    def corrected(self, value: Array, correction: Correction, *, whole: bool) -> Array:
        """Return the corrected bias.

        If the predictions are not ``whole``, it shifts them. Otherwise, ``c b + d`` may be divided
        as the weights are, or become the ``centre``.
        """
        xp = array_module(value)
        shift, centre, factor, offset, multiple = (
            xp.asarray(array, value.dtype)
            for array in (
                correction.shift,
                correction.centre,
                self.factor,
                self.offset,
                correction.weights if whole else 1.0,
            )
        )
        moved: Array = multiple * value + ((multiple - 1) * offset + shift) / factor
        replaced: Any = np.logical_and(correction.divides, correction.due) if whole else False
        if is_recorded(replaced):
            chosen: Array = np.where(replaced, (centre - offset) / factor, moved)
            return chosen
        return (centre - offset) / factor if replaced else moved


class Prediction(NamedTuple):
    """How a layer's outputs o enter predictions ``Σ c o + d``, a sum over layers."""

    loss: str  # the loss's input that has the predictions
    scale: float  # root mean square of c
    # The weights of all layers in the sum; None if there are other values that are not constant.
    weights: frozenset[str] | None
    bias: Bias | None = None  # for a bias that has an entry for each feature

    def is_whole(self, divisible: Container[str]) -> bool:
        """Return whether all of the sum but its biases and constants can be divided."""
        return self.weights is not None and all(map(divisible.__contains__, self.weights))


class _Addend(NamedTuple):
    """An addend ``c o`` of predictions: a layer's outputs o, or 1 for a constant, times c."""

    factor: Array  # c, one number or one for each feature
    layer: LayerReport | None = None  # with a ``shift``, o is the bias
    # Whether o is the outputs of the layer, or 1, and is read in the sum only.
    is_known: bool = True
    along: bool = True  # whether the last axis of the outputs is that of the predictions


def predictions_of(engine: Engine) -> dict[str, Prediction]:
    """Return the predictions that the layer of each parameter enters; others have no entry.

    Between a layer and the loss there may be views, such as that of ``Squeeze``, sums with other
    values, and arithmetic with constants.
    """
    facts, predictions = model_of(engine).facts, dict[str, Prediction]()
    shapes = {loss: facts[loss].shape for loss in engine.objective.inputs}
    along_last = {
        term.inputs[0]
        for term in engine.objective.terms
        if term.class_axis in (-1, len(shapes[term.inputs[0]]) - 1)
    }
    parameters = engine.parameters
    for loss, shape in shapes.items():
        features = _features(shape)
        addends = [*_addends(engine, loss, features, parameters)]
        offset = sum((a.factor for a in addends if a.is_known and a.layer is None), 0 * _ONE)
        weights = None
        if all(addend.is_known for addend in addends):
            layers = [a.layer for a in addends if a.layer and a.layer.kind != "shift"]
            weights = frozenset(layer.parameters[0] for layer in layers)
        biases = _biases(addends, features, parameters) if loss in along_last else {}
        corrected = next((name for name, factor in biases.items() if factor.all()), None)
        for factor, layer, *_ in addends:
            scale = sqrt(np.mean(factor**2))
            for name in layer.parameters if layer and scale else ():
                if name in parameters and parameters[name].size:
                    c = biases[name] if name == corrected else inf * _ONE
                    bias = Bias(c, offset) if corrected and name in biases else None
                    predictions.setdefault(name, Prediction(loss, scale, weights, bias))
    return predictions


def _biases(
    addends: Sequence[_Addend], shape: tuple[int, ...], parameters: Vector
) -> dict[str, Array]:
    """Return the factor of each bias of a shape, which is a sum over the layer's uses."""
    factors = dict[str, Array]()
    for factor, layer, is_known, along in addends:
        first = {"fully_connected": 1, "shift": 0}.get(layer.kind) if layer else None
        for name in layer.parameters[first:] if layer and first is not None else ():
            fits = is_known and along and name in parameters and parameters[name].shape == shape
            if fits:
                factors[name] = factors.get(name, 0.0) + factor
    return factors


def _addends(
    engine: Engine, loss: str, features: tuple[int, ...], parameters: Vector
) -> Iterator[_Addend]:
    """Yield the addends of the predictions that are an input of a loss."""
    graph, facts = model_of(engine).graph, model_of(engine).facts
    layers = {output: layer for layer in engine.layers for output in uses(layer.outputs)}

    def constant(name: str) -> Array | None:
        """Return a constant with one number or one for each feature; None for other values."""
        value = None if name in parameters else graph.constants.get(name)
        if value is None or (
            value.size != 1 and (value.shape[-1:], value.size) != (features, *features)
        ):
            return None
        return value.reshape(-1).astype(np.float64)

    factors, moved, inside = {loss: _ONE}, set[str](), set[int]()
    others = {name for name in engine.objective.inputs if name != loss}
    readers = _readers(graph, engine.objective.inputs)
    for node in reversed(graph.nodes):
        for output in factors.keys() & node.outputs:
            factor, layer = factors.pop(output), layers.get(output)
            inside.add(id(node))
            is_known = output not in others and readers.get(output, set()) <= inside
            if layer is not None:
                along = layer.kind != "shift" or node.op in _SHIFTS
                yield _Addend(factor, layer, is_known, along and output not in moved)
                terms = _data(node, layer, graph)
            else:
                terms = _linear(node, constant)
            if not is_known:
                terms = [("", _ONE)]
            elif output in moved or _moves(node, facts):
                factor = np.sqrt(np.mean(factor**2, keepdims=True))
                moved.update(name for name, _ in terms)
            for name, c in terms:
                factors[name] = factors.get(name, 0.0) + factor * c
    for name, factor in factors.items():
        number = constant(name)
        is_known = number is not None and (number.size == 1 or name not in moved)
        yield _Addend(factor if number is None else factor * number, None, is_known)


def _readers(graph: Graph, results: Iterable[str]) -> dict[str, set[int]]:
    """Return the ``id`` of each node that reads a value and that ``results`` need, by value."""
    needed, readers = set(results), dict[str, set[int]]()
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            for name in (*node.inputs, *node.captures):
                needed.add(name)
                readers.setdefault(name, set()).add(id(node))
    return readers


def _moves(node: Node, facts: Mapping[str, Fact]) -> bool:
    """Return whether a node is a view, such as a Transpose, with another last axis."""
    if node.qualified_op not in RELAYS:
        return False
    before, after = (facts[name].shape for name in (node.inputs[0], node.outputs[0]))
    if node.op == "Transpose":
        permutation: Any = node.attributes.get("perm", range(len(before))[::-1])
        return [*permutation][-1:] != [len(before) - 1]
    return _features(before) != _features(after)


def _features(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[-1:] if len(shape) > 1 else (1,)


def _data(node: Node, layer: LayerReport, graph: Graph) -> list[tuple[str, Array]]:
    """Return the value that a layer shifts, with its factor; its name is empty unless it is added.

    Other layers shift no value.
    """
    names = node.inputs if layer.kind == "shift" else ()
    data = [name for name in names if graph.source(name, RELAYS) not in layer.parameters]
    return [(name if node.op == "Add" else "", _ONE) for name in data]


def _linear(node: Node, constant: Callable[[str], Array | None]) -> list[tuple[str, Array]]:
    """Return the operands of which a node is the sum, with their factors; a name may be empty."""
    op, operands = node.qualified_op, node.inputs
    if op in RELAYS:
        return [(operands[0], _ONE)]
    if op in SUMS:
        share = _ONE / (len(operands) if op == "Mean" else 1)
        return [(name, share * (SUMS[op] if i else 1)) for i, name in enumerate(operands)]
    numbers = [constant(name) for name in operands] if op in ("Mul", "Div") else [None, None]
    if numbers[1] is not None and (op == "Mul" or numbers[1].all()):
        return [(operands[0], numbers[1] if op == "Mul" else 1 / numbers[1])]
    if numbers[0] is not None and op == "Mul":
        return [(operands[1], numbers[0])]
    return [("", _ONE)]
