"""The random nodes of a model, such as Dropout, written with random numbers of the file."""

from collections.abc import Callable, Mapping

import numpy as np

from kfac_engine.autodiff.rules.attributes import integers, number
from kfac_engine.errors import UnsupportedError
from kfac_engine.graph.structure import Node
from kfac_engine.recording.operations import Draws
from kfac_engine.recording.recorded import Recorded, Shape, Symbol
from kfac_engine.training_files.parts import Evaluation

_NORMAL = ("RandomNormal", "RandomNormalLike")
_SHAPED = ("RandomNormal", "RandomUniform")


class RandomNodes:
    """Writes random nodes; a part of the batch has the numbers of its examples in the batch."""

    def __init__(self, draws: Draws) -> None:
        self._draws, self._numbers = draws, dict[str, Symbol]()

    def write(self, evaluation: Evaluation, node: Node) -> None:
        """Write the results of a random node with the names of an evaluation of the model.

        An operator that files do not have, and an input that decides whether the node draws, raise
        UnsupportedError.
        """
        if node.op not in _WRITERS:
            raise UnsupportedError(
                f"a training file cannot draw the random numbers of {node.op} (node '{node.name}')."
            )
        results = _WRITERS[node.op](evaluation, node, self._numbers_of(evaluation, node))
        for name, result in zip(node.outputs, results, strict=False):
            if name:
                dtype = evaluation.model.facts[name].dtype
                value = result.astype(dtype, copy=False)
                target = evaluation.names.get(name, name)
                evaluation.tape.level.op("Identity", value.name, result=target)

    def _numbers_of(self, evaluation: Evaluation, node: Node) -> Symbol:
        axis, shape = _form(evaluation, node)
        if evaluation.selection is not None and node.name in self._numbers:
            numbers = self._numbers[node.name]
            if axis is None:
                return numbers
            index = evaluation.selection
            return numbers.new("Gather", index.name, shape=shape, axis=axis)
        draw = self._draws.normal if node.op in _NORMAL else self._draws.uniform
        self._numbers[node.name] = numbers = draw(shape, f"noise/{node.outputs[0]}")
        return numbers


def _form(evaluation: Evaluation, node: Node) -> tuple[int | None, Shape]:
    """Return the axis of the examples in the numbers of a node, and their shape."""
    if node.op in _SHAPED:
        return None, integers(node, "shape", ())
    like = node.inputs[0]
    place = evaluation.assembly.task.batch.places.get(like)
    return None if place is None else place.axis, evaluation.shape(like)


def _dropout(evaluation: Evaluation, node: Node, numbers: Symbol) -> tuple[Symbol, Symbol]:
    x, ratio_name, training = (*node.inputs, "", "")[:3]
    constants = evaluation.model.graph.constants
    if training not in constants:
        raise UnsupportedError(
            f"the training mode of Dropout (node '{node.name}') is no constant of the model, so "
            f"that a training file cannot tell whether it drops; make it one."
        )
    ratio = evaluation[ratio_name].reshape(()) if ratio_name else 0.5
    mask = numbers >= ratio
    return np.where(mask, evaluation[x] / (1 - ratio), 0.0), mask


def _uniform(_: Evaluation, node: Node, numbers: Symbol) -> tuple[Symbol]:
    low, high = number(node, "low", 0.0), number(node, "high", 1.0)
    return (numbers * (high - low) + low,)


def _normal(_: Evaluation, node: Node, numbers: Symbol) -> tuple[Symbol]:
    return (numbers * number(node, "scale", 1.0) + number(node, "mean", 0.0),)


def _bernoulli(evaluation: Evaluation, node: Node, numbers: Symbol) -> tuple[Symbol]:
    return (numbers < evaluation[node.inputs[0]],)


_WRITERS: Mapping[str, Callable[[Evaluation, Node, Recorded], tuple[Symbol, ...]]] = {
    "Dropout": _dropout,
    "RandomUniform": _uniform,
    "RandomUniformLike": _uniform,
    "RandomNormal": _normal,
    "RandomNormalLike": _normal,
    "Bernoulli": _bernoulli,
}
