"""Computes gradients of single examples, for parameters that belong to no layer.

The statistics of a layer have separate rows for each example. The gradient of a parameter
without a layer is a sum over the batch, and the square of that sum contains products of different
examples. Such products vanish only for sampled targets, and only on average. The examples are
therefore differentiated one after the other: each in a batch of one if the model allows it, else
with the cotangents of all other examples set to zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import UnsupportedError
from kfac_engine.losses.objective import Objective
from kfac_engine.runtime.batch_axis import Batch, find_coupling
from kfac_engine.runtime.example_axis import ExampleAxis
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.runtime.trace import Trace

# Changing an example changes the others by rounding errors at most, relative to its own change.
_ROUNDING = 1e-5


class ExampleGradients:
    """Differentiates the losses of a batch example by example.

    ``inputs`` is the batch of the sample run; None for generated inputs.
    """

    def __init__(
        self,
        model: OnnxModel,
        objective: Objective,
        batch: Batch,
        inputs: Mapping[str, Array] | None,
    ) -> None:
        self._model, self._objective, self._batch = model, objective, batch
        self._inputs = inputs
        self._outer: bool | None = None

    def __call__(
        self,
        trace: Trace,
        cotangents: Mapping[str, Array],
        names: Sequence[str],
        chosen: Array | None = None,
    ) -> Iterator[dict[str, Array]]:
        """Yield the gradients of one example after the other with respect to ``names``.

        They are those of all examples, or of the numbers that are ``chosen``.

        ``cotangents`` maps a loss input to its cotangent for all examples. A batch of one example,
        or whose losses depend on none of the values, yields one gradient. Rows of different
        examples that cannot be separated raise UnsupportedError.
        """
        count = self._objective.examples(trace)
        reached = self._model.backward(tuple(cotangents), names).gradients
        if count == 1 or not reached:
            yield trace.vjp(cotangents, names)
            return
        if self._batch.sets:
            yield from self._of_sets(trace, cotangents, names, chosen)
            return
        for index in range(count) if chosen is None else map(int, chosen):
            rows = {
                name: self._rows(trace, name, index, count, array.shape)
                for name, array in cotangents.items()
            }
            if self._alone:
                example = self._changed(trace, slice(index, index + 1))
                slices = {name: array[rows[name]] for name, array in cotangents.items()}
                yield example.vjp(slices, names)
            else:
                others = {name: _only(array, rows[name]) for name, array in cotangents.items()}
                yield trace.vjp(others, names)

    def _of_sets(
        self,
        trace: Trace,
        cotangents: Mapping[str, Array],
        names: Sequence[str],
        chosen: Array | None,
    ) -> Iterator[dict[str, Array]]:
        """Yield the gradients of the examples, set by set."""
        for each in self._batch.sets:
            its = {name: array for name, array in cotangents.items() if self._is_of(name, each)}
            every = range(each.examples(trace)) if chosen is None else map(int, chosen)
            for index in every if its else ():
                row = slice(index, index + 1)
                others = {name: array * 0 for name, array in cotangents.items()}
                for name, array in its.items():
                    axis = self._place(name).axis
                    others[name] = _only(array, (*(slice(None),) * axis, row))
                yield trace.vjp(others, names)

    def _is_of(self, name: str, batch: Batch) -> bool:
        return self._objective.outputs.get(name, name) in batch.places

    @cached_property
    def _alone(self) -> bool:
        """Return whether an example has the same results as a batch of one."""
        batch, model = self._batch, self._model
        if batch.fixed or batch.joint or not batch.inputs or model.draws:
            return False
        heads = self._objective.inputs
        return not find_coupling(model.graph, model.facts, heads, batch, self._inputs)

    def _rows(
        self, trace: Trace, name: str, index: int, count: int, shape: tuple[int, ...]
    ) -> tuple[slice, ...]:
        """Return the indices at which a loss input has the entries of an example."""
        axis = self._place(name).axis
        positions = shape[axis] // count
        outer = positions == 1 or self._is_outer(trace, name, count)
        rows = (
            slice(index * positions, (index + 1) * positions)
            if outer
            else slice(index, None, count)
        )
        return (*(slice(None),) * axis, rows)

    def _place(self, name: str) -> ExampleAxis:
        output = self._objective.outputs.get(name, name)
        return self._batch.places.get(name) or self._batch.places[output]

    def _is_outer(self, trace: Trace, name: str, count: int) -> bool:
        """Return whether the positions of an example are adjacent on the axis that they share.

        The axis is of the loss input ``name``. The batch, of ``count`` examples, is evaluated with
        another example in place of the first. Examples that are all equal, or depend on each other,
        raise UnsupportedError.
        """
        axis = self._place(name).axis
        for other in range(1, count) if self._outer is None else ():
            swapped = self._changed(trace, [other, *range(1, count)])
            moved = self._model.memory_space.on_host(abs(swapped[name] - trace[name]))
            rows = np.moveaxis(moved, axis, 0).reshape(moved.shape[axis], -1).max(axis=1)
            outer = float(rows.reshape(count, -1)[1:].max())
            inner = float(rows.reshape(-1, count)[:, 1:].max())
            if min(outer, inner) <= _ROUNDING * max(outer, inner) and outer != inner:
                self._outer = outer < inner
                break
        if self._outer is None:
            raise UnsupportedError(
                f"this batch does not show in which order axis {axis} of '{name}' holds examples "
                f"and positions, which the curvature of parameters without a layer requires; train "
                f"only parameters that have a layer."
            )
        return self._outer

    def _changed(self, trace: Trace, examples: slice | list[int]) -> Trace:
        """Evaluate the model on chosen examples of the batch, in the order of ``examples``."""
        axes = self._batch.inputs
        return trace.with_inputs(
            {name: trace[name][(*(slice(None),) * axes[name], examples)].copy() for name in axes}
        )


def _only(array: Array, rows: tuple[slice, ...]) -> Array:
    """Return a copy of an array whose other rows are zero."""
    result = array * 0
    result[rows] = array[rows]
    return result
