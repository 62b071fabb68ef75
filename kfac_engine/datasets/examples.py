"""Selects examples of a batch along the axes of its inputs and targets."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Self, TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.namespace import array_module
from kfac_engine.distributed.agreement import raised_by_all_ranks
from kfac_engine.errors import InputError, KfacError, ShapeError, suggestion
from kfac_engine.losses.observed import Targets, Weighted
from kfac_engine.runtime import batch_axis

# Examples of a batch: a range, or an array of their numbers.
Selection: TypeAlias = slice | Array
Batch: TypeAlias = tuple[Mapping[str, Array], Targets]

TARGETS = "targets"  # name of the targets among arrays by name
WEIGHTS = "weights"  # name of their weights


class ExampleAxes:
    """The axes of the examples in the inputs and targets of a model.

    ``Engine.example_axes`` returns them.

    Args:
        batch: Where the examples are in the inputs and values of the model.
        outputs: Outputs with a loss; none if the file computes its loss from the inputs alone.
        names: Name of the targets of an output, where it is not the name of the output.
        weights: Name of the weights of the targets among arrays by name.
        sequences: Outputs whose targets are sequences, with the examples on the first axis.
        optional: Outputs whose targets may be left out.
        default: The input that has the targets if none are given, and the input with their weights;
            empty without one.

    Attributes:
        inputs: Axes of the examples, by input name.
        in_sets: Whether the examples are several sets, each with inputs of its own.
        labeled: Whether a batch needs targets.
        joint: Why some examples of a batch are not a batch; empty where they are.
        obstacle: Why a batch cannot be cut: ``joint``, or the model runs with one size only.
        fixed_size: The only number of examples that the model runs with; None where it runs with
            others, or where its targets have no parts.
    """

    def __init__(
        self,
        batch: batch_axis.Batch,
        outputs: Sequence[str],
        names: Mapping[str, str] = MappingProxyType({}),
        weights: str = WEIGHTS,
        sequences: Collection[str] = (),
        optional: Collection[str] = (),
        default: tuple[str, str] = ("", ""),
    ) -> None:
        self._weights = weights
        self.labeled = not outputs or not set(optional) >= {*outputs}
        # The set of examples of each input and output; one set has no entry.
        self.in_sets = bool(batch.sets)
        self._sets = {name: i for i, each in enumerate(batch.sets) for name in each.places}
        self.inputs = dict(batch.inputs)
        self._targets = {names.get(out, out): batch.places[out].axis for out in outputs}
        self._default = default
        self._sequences = frozenset(names.get(out, out) for out in sequences)
        folded = next((name for name in outputs if batch.places[name].repeats > 1), None)
        shared = folded and f"one axis of '{folded}' holds examples and positions"
        self.joint = batch.joint
        self.obstacle = batch.fixed or shared or batch.joint
        self.fixed_size = batch.size if batch.fixed and not folded else None

    def count(self, inputs: Mapping[str, Array]) -> int:
        """Return the number of examples of a batch.

        ``ShapeError`` is raised if the inputs differ in this number, or have no examples.
        """
        shapes = {name: np.shape(inputs[name]) for name in self.inputs if name in inputs}
        counts = {
            name: shape[self.inputs[name]]
            for name, shape in shapes.items()
            if self.inputs[name] < len(shape)
        }
        of_sets = {self._sets.get(name, 0): count for name, count in counts.items()}
        if not counts or any(of_sets[self._sets.get(n, 0)] != counts[n] for n in counts):
            listed = ", ".join(f"'{name}' {count}" for name, count in counts.items()) or "none"
            raise ShapeError(f"all inputs need the same number of examples; found: {listed}.")
        return int(sum(of_sets.values()))

    def check(self, inputs: Mapping[str, Array], targets: Targets) -> int:
        """Return the number of examples; raise ``ShapeError`` if targets have another number.

        The targets of several losses are given by output. They alone have examples if no input has
        an axis of them.
        """
        named, whole = self._named(targets), -1
        if self.inputs or not named:
            whole = self.count(inputs)
        for (kind, name), array in named.items():
            count = self._count_of(name, inputs, whole)
            axis, shape = self._target_axis(name, array, kind), np.shape(array)
            count = shape[axis] if count < 0 and axis < len(shape) else count
            whole = count if whole < 0 else whole
            if axis >= len(shape) or shape[axis] != count:
                raise ShapeError(
                    f"the {kind} have shape {shape}, but the inputs have {count} examples; axis "
                    f"{axis} of the {kind} must hold the examples."
                )
        return whole

    def _count_of(self, name: str, inputs: Mapping[str, Array], whole: int) -> int:
        """Return how many examples a target must have: those of its set, or all, ``whole``."""
        if name not in self._sets:
            return whole
        number = self._sets[name]
        pairs = ((n, axis) for n, axis in self.inputs.items() if self._sets[n] == number)
        return next(int(np.shape(inputs[n])[axis]) for n, axis in pairs)

    def arrays(
        self, inputs: Mapping[str, Array], targets: Targets
    ) -> Iterator[tuple[str, Array, int | None]]:
        """Yield name, array and axis of the examples of inputs, targets and their weights.

        The axis is None for an input without examples.
        """
        for name, array in inputs.items():
            yield name, array, self.inputs.get(name)
        for (kind, name), array in self._named(targets).items():
            yield f"{kind} {name}", array, self._target_axis(name, array, kind)

    def shapes(self, inputs: Mapping[str, Array]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the shapes of inputs without the axes of the examples, by name."""
        shapes = []
        for name in sorted(inputs):
            shape, axis = np.shape(inputs[name]), self.inputs.get(name)
            one = shape if axis is None else (*shape[:axis], *shape[axis + 1 :])
            shapes.append((name, one))
        return tuple(shapes)

    def part(self, inputs: Mapping[str, Array], targets: Targets, selection: Selection) -> Batch:
        """Return the inputs and targets of some examples of a batch.

        ``selection`` is a range of examples, or an array of their numbers. Inputs without an axis
        of examples are returned whole.
        """
        selected = {
            name: _take(array, self.inputs[name], selection) if name in self.inputs else array
            for name, array in inputs.items()
        }
        return selected, self._mapped(
            (targets,), lambda arrays, axis: _take(arrays[0], axis, selection)
        )

    def joined(self, batches: Sequence[Batch]) -> Batch:
        """Return the examples of several batches as one batch of new arrays.

        Inputs without an axis of examples come from the first batch.
        """
        inputs = {
            name: _concatenated([batch[0][name] for batch in batches], self.inputs[name])
            if name in self.inputs
            else array
            for name, array in batches[0][0].items()
        }
        return inputs, self._mapped([targets for _, targets in batches], _concatenated)

    def separated(self, arrays: Mapping[str, Array], *, labeled: bool = True) -> Batch:
        """Return the inputs and the targets among arrays by name.

        The targets are under ``targets`` or, for several losses, under the names of their outputs.
        They are None if they are absent and not ``labeled``. ``InputError`` is raised if an input
        is missing, or if targets are missing that are needed.
        """
        missing = [name for name in self.inputs if name not in arrays]
        unknown = arrays.keys() - {*self.names}
        present = ", ".join(
            f"'{name}'{suggestion(name, missing) if name in unknown else ''}" for name in arrays
        )
        present = present or "none"
        if missing:
            raise InputError(f"input '{missing[0]}' is missing; the arrays are: {present}.")
        name = self._weights
        if name in arrays and name not in {*self.inputs, *self._targets}:
            rest = {key: array for key, array in arrays.items() if key != name}
            inputs, alone = self.separated(rest, labeled=labeled)
            return inputs, None if alone is None else Weighted(alone, arrays[name])  # type: ignore[arg-type] # weights once
        if TARGETS in arrays and TARGETS not in self.inputs:
            inputs = {name: array for name, array in arrays.items() if name != TARGETS}
            return inputs, arrays[TARGETS]
        targets = {
            name: arrays[name]
            for name in self._targets
            if name in arrays and name not in self.inputs
        }
        if not targets and (not (labeled and self._targets) or self._default[0] in arrays):
            return arrays, None
        if not targets:
            names = " or ".join(f"'{name}'" for name in (TARGETS, *self._targets))
            raise InputError(
                f"the targets are missing: no array is named {names}; the arrays are: {present}."
            )
        return {name: array for name, array in arrays.items() if name not in targets}, targets

    @property
    def has_default_targets(self) -> bool:
        """Whether inputs have the targets if none are given."""
        return bool(self._default[0])

    def with_default_targets(self, inputs: Mapping[str, Array], targets: Targets) -> Targets:
        """Return the targets, or those that the inputs have if ``targets`` is None."""
        ids, mask = self._default
        if targets is not None or not isinstance(inputs, Mapping) or ids not in inputs:
            return targets
        return Weighted(inputs[ids], inputs[mask]) if mask in inputs else inputs[ids]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs with a loss."""
        return tuple(self._targets)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays of a data set."""
        return (*self.inputs, TARGETS, self._weights, *self._targets)

    def axis(self, name: str) -> int | None:
        """Return the axis of the examples in an array of a data set; None if there is none."""
        if name in self.inputs:
            return self.inputs[name]
        return self._target_axis(name, (), TARGETS) if name in self.names else None

    def named(self, inputs: object) -> Mapping[str, Array]:
        """Return inputs by name: a lone array belongs to the only input.

        ``InputError`` is raised for a lone array if the model has several inputs.
        """
        if isinstance(inputs, Mapping):
            return inputs
        if len(self.inputs) != 1:
            raise InputError(
                f"the model has several inputs; give a dictionary with arrays for "
                f"{', '.join(self.inputs)}."
            )
        return dict.fromkeys(self.inputs, inputs)  # type: ignore[arg-type] # the engine checks it

    def _named(self, targets: Targets) -> dict[tuple[str, str], Array]:
        """Return the arrays of targets and their weights, by kind and output."""
        if targets is None:
            return {}
        if isinstance(targets, Weighted):
            weights = {(WEIGHTS, name): a for (_, name), a in self._named(targets.weights).items()}
            return self._named(targets.targets) | weights
        named = targets if isinstance(targets, Mapping) else {"": targets}
        return {(TARGETS, name): array for name, array in named.items()}

    def _mapped(
        self,
        batches: Sequence[Any],
        function: Callable[[Sequence[Array], int], Array],
        kind: str = TARGETS,
    ) -> Any:
        """Return targets in the form that those of all batches have.

        Each array is ``function`` of the arrays of the batches, and of their axis of examples.
        """
        form = batches[0]
        if isinstance(form, Weighted):
            targets = self._mapped([of_batch.targets for of_batch in batches], function)
            weights = [of_batch.weights for of_batch in batches]
            return Weighted(targets, self._mapped(weights, function, WEIGHTS))
        if isinstance(form, Mapping):
            return {
                name: function(
                    [of_batch[name] for of_batch in batches], self._target_axis(name, array, kind)
                )
                for name, array in form.items()
            }
        return None if form is None else function(batches, self._target_axis("", form, kind))

    def _target_axis(self, name: str, array: Array | tuple[()], kind: str) -> int:
        """Return the axis of examples in targets; loss objects may have names of their own."""
        name = name if name in self._targets else next(iter(self._targets), "")
        first = name in self._sequences if kind == TARGETS else np.ndim(array) == 1
        return 0 if first else self._targets.get(name, 0)


class NumberedBatch(tuple[Mapping[str, Array], Targets]):
    """A batch with the numbers of its examples in the data, from 0."""

    _numbers: Array
    _axes: ExampleAxes

    def __new__(cls, batch: Batch, numbers: Array, axes: ExampleAxes) -> Self:
        """Return the pair of inputs and targets."""
        self = super().__new__(cls, batch)
        self._numbers, self._axes = numbers, axes
        return self

    def located(self, error: KfacError) -> KfacError:
        """Return the error; an error about one example also names its number in the data."""
        name, index = error.place or ("", ())
        axis = self._axes.axis(name)
        if axis is None or axis >= len(index) or raised_by_all_ranks(error):
            return error
        example = index[axis]
        message = f"Example {example} of the batch is example {self._numbers[example]} of the data."
        return type(error)(f"{error} {message}").at(name, index)


@contextmanager
def numbered_in_data(batches: Sequence[Batch]) -> Iterator[None]:
    """Return a context whose errors say which example of the data is wrong.

    The last entry of ``batches`` is the batch of an error.
    """
    try:
        yield
    except KfacError as error:
        located = numbered(error, batches[-1] if batches else None)
        if located is error:
            raise
        raise located from error


def numbered(error: KfacError, batch: Batch | None) -> KfacError:
    """Return an error of a batch that says which example of the data is wrong, if that is known."""
    return batch.located(error) if isinstance(batch, NumberedBatch) else error


def _concatenated(arrays: Sequence[Array], axis: int) -> Array:
    whole: Array = array_module(arrays[0]).concatenate(arrays, axis=axis)
    return whole


def _take(array: Array, axis: int, selection: Selection) -> Array:
    index: tuple[slice | Array, ...] = (*(slice(None),) * axis, selection)
    part: Array = array[index]
    return part
