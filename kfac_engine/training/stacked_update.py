"""Stacks parameters that an update treats alike, so that a training file has few nodes for them.

A file takes longer to load with each node. A stack needs as many nodes as one of its parameters.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.layers.grouped import StackedDensePacking
from kfac_engine.layers.parameter_slices import ParameterSlice, Piece
from kfac_engine.training.adaptive_lengths import AdaptiveLengthUpdate, Together
from kfac_engine.training.kfac_updates import StepInputs
from kfac_engine.training.optimizer import SlotArrays
from kfac_engine.training.vectors import Vector

# Largest number of entries of a parameter in a stack: to copy a larger parameter takes longer than
# to load its nodes.
_LARGEST = 1 << 18


@dataclass(frozen=True, slots=True)
class Stacks:
    """Parameters that are stacked along a first axis, ``(members, …)``; weights are matrices."""

    members: Mapping[str, tuple[str, ...]]  # parameters by stack
    # The stacked weights whose arrays differ from their matrices.
    weights: Mapping[str, Piece]

    @property
    def of(self) -> dict[str, str]:
        """The stack of each parameter."""
        return {name: stack for stack, names in self.members.items() for name in names}

    def joined(self, arrays: Vector, stacks: Collection[str] | None = None) -> dict[str, Array]:
        """Return arrays by stack, for ``stacks`` or for all, and arrays outside of stacks."""
        of = self.of
        result = {name: array for name, array in arrays.items() if name not in of}
        for stack, names in self.members.items():
            if names[0] in arrays and (stacks is None or stack in stacks):
                rows = [self._rows(name, arrays[name]) for name in names]
                # In a file, a new axis for each member would take a node for each member.
                joined = array_module(rows[0]).concatenate(rows)
                result[stack] = joined.reshape(len(names), *rows[0].shape)
        return result

    def separated(self, stacks: Vector, like: Vector) -> dict[str, Array]:
        """Return arrays by parameter in the shapes of ``like``; the inverse of ``joined``."""
        result = {name: array for name, array in stacks.items() if name not in self.members}
        for stack, names in self.members.items():
            if stack in stacks:
                array = stacks[stack]
                parts = np.split(array.reshape(-1, *array.shape[2:]), len(names))
                for name, part in zip(names, parts, strict=True):
                    piece = self.weights.get(name)
                    result[name] = part if piece is None else piece.array(part[None], like[name])
        return result

    def _rows(self, name: str, array: Array) -> Array:
        piece = self.weights.get(name)
        return array if piece is None else piece.matrices(array, copy=False)[0]

    def first(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of each stack's first member by stack, and values outside of stacks."""
        of = self.of
        left = {name: value for name, value in values.items() if name not in of}
        return left | {
            s: values[names[0]] for s, names in self.members.items() if names[0] in values
        }

    def names(self, names: Sequence[str]) -> list[str]:
        """Return names of parameters, with a stack's name once in place of its members' names."""
        of = self.of
        return [*dict.fromkeys(of.get(name, name) for name in names)]


@dataclass(frozen=True, slots=True)
class StackedUpdate:
    """An update of stacks in place of their members."""

    stacks: Stacks
    update: AdaptiveLengthUpdate  # the update, with the stacks as its parameters
    like: Vector  # the parameters of the model

    def new_slots(self) -> SlotArrays:
        """Return the state before the first step."""
        return self.update.new_slots(self.stacks.joined(self.like))

    def moved(
        self,
        step: StepInputs,
        precondition: Callable[[Vector], dict[str, Array]],
        moment: Callable[[FisherBlock], Any],
    ) -> dict[str, Array]:
        """Return new parameters; the slots of the step have the form of ``new_slots``.

        ``precondition`` returns natural gradients of vectors by parameter, and ``moment`` the mean
        square of the inputs of a block.
        """
        stacks, parameters = self.stacks, step.parameters

        def natural(vectors: Vector) -> dict[str, Array]:
            directions = precondition(stacks.separated(vectors, parameters))
            return stacks.joined(directions, self.update.roots)

        step = step._replace(
            gradients=stacks.joined(step.gradients), parameters=stacks.joined(parameters)
        )
        update = replace(self.update, precondition=natural, moment=moment)
        return stacks.separated(update(step).values, parameters)


def stacked_update(
    update: AdaptiveLengthUpdate, parameters: Vector, repeats: Mapping[str, float]
) -> StackedUpdate:
    """Return an update of stacks for the update of a training file.

    Args:
        update: The update.
        parameters: The parameters that are trained.
        repeats: Rows of each example in the factors of each weight.
    """
    alike: dict[Any, list[str]] = {}
    for name, kind in _kinds(update, parameters, repeats):
        alike.setdefault(kind, []).append(name)
    members = {
        f"{names[0]} and {len(names) - 1} more": tuple(names)
        for names in alike.values()
        if len(names) > 1
    }
    units = update.units
    stacked = [name for names in members.values() for name in names if name in units.weights]
    pieces = {name: units.weights[name] for name in stacked}
    others = {n: p for n, p in pieces.items() if not _is_matrix(p, parameters[n])}
    stacks = Stacks(members, others)
    packing = StackedDensePacking("IO", has_bias=False)
    pieces = {
        stack: Piece(ParameterSlice(stack), units.weights[names[0]].kind, packing, stack)
        for stack, names in members.items()
        if names[0] in units.weights
    }
    units = units.stacked(members, pieces)
    of, places = stacks.of, update.features.places
    bounds = {name: place for name, place in places.items() if name not in of}
    bounds |= {s: tuple(places[n] for n in members[s]) for s in pieces if members[s][0] in places}
    every = (update.together.means, update.together.by_adam, update.together.lengths)
    alone = ([(n,) for n in stacks.names([*chain(*names)])] for names in every)
    update = replace(
        update,
        units=units,
        together=Together(*alone),
        roots=stacks.first(update.roots),
        sides=stacks.first(update.sides),
        equal=set(stacks.names([*update.equal])),
        widths=stacks.first(update.widths),
        turns={
            name: np.array([update.turns[n] for n in members[name]])
            if name in members
            else update.turns[name]
            for name in stacks.first(update.turns)
        },
        blocks=stacks.first(update.blocks),
        # A file computes all natural gradients together.
        groups=dict.fromkeys(stacks.names([*update.groups]), 0),
        moved=stacks.names(update.moved),
        matmul=np.matmul,
        repeats=stacks.first(repeats),
        factors=stacks.first(update.factors),
        numbers=set(stacks.names([*update.numbers])),
        features=replace(update.features, weights=units.weights, places=bounds),
        independent=pieces.keys(),
    )
    return StackedUpdate(stacks, update, parameters)


def _is_matrix(piece: Piece, value: Array) -> bool:
    """Return whether the array of a weight is its matrix ``(inputs, outputs)``."""
    packing = piece.packing
    assert packing is not None, "a weight has a packing"
    return packing.one_matrix and packing.weight_format == "IO" and value.ndim == 2


def _kinds(
    update: AdaptiveLengthUpdate, parameters: Vector, repeats: Mapping[str, float]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the parameters that may be stacked, each with the key that its stack shares."""
    weights, places = update.units.weights, update.features.places
    for name, value in parameters.items():
        if not update.units.is_whole(name) or name in update.predictions:
            continue
        if not (value.ndim and 0 < value.size <= _LARGEST):
            continue
        if name not in weights:
            factor, alone = update.factors.get(name, 1.0), name in update.numbers
            yield name, (value.shape, value.dtype, name in update.groups, factor, alone)
            continue
        matrices = weights[name].matrices(value, copy=False)
        if len(matrices) == 1:
            yield (
                name,
                (
                    matrices.shape,
                    value.dtype,
                    update.sides[name],
                    name in update.equal,
                    update.roots[name],
                    update.widths[name],
                    repeats[name],
                    places[name].stop - places[name].start if name in places else 0,
                ),
            )
