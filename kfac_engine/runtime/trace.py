"""Defines ``Trace``, an evaluation of a model on a batch with values and derivatives."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Protocol

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.backend.memory_space import MemorySpace
from kfac_engine.errors import NonFiniteError, ShapeError, UnknownNameError, suggestion
from kfac_engine.graph.structure import Graph
from kfac_engine.runtime.inputs import finite, naming
from kfac_engine.runtime.model_sessions import BackwardSession


class Evaluator(Protocol):
    """The part of ``OnnxModel`` that a trace uses."""

    graph: Graph
    memory_space: MemorySpace
    defined: set[str]

    def fetch(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the results of a forward pass."""

    def want(self, names: Sequence[str]) -> None:
        """Add values to the results of later forward passes."""

    def backward(
        self, outputs: Sequence[str], wrt: Sequence[str], *, independent: bool = False
    ) -> Backward:
        """Return the backward graph from ``outputs`` to ``wrt``."""

    def twice(
        self, backward: Backward, feeds: Mapping[str, Array], wrt: Sequence[str] = ()
    ) -> Backward:
        """Return the backward graph of a backward graph."""

    def fed(self, backward: Backward) -> tuple[str, ...]:
        """Return the inputs of a backward session, except cotangents and constants."""

    def backward_session(self, backward: Backward) -> BackwardSession:
        """Return the session of a backward graph."""


class Trace(Mapping[str, Array]):
    """One evaluation of a model on a batch: a mapping from value names to arrays.

    Reading a value that was not computed repeats the forward pass. Later forward passes then
    compute it.

    Args:
        model: The model.
        feeds: Checked inputs and parameters, and the start of random numbers, by name. A repeated
            pass over them draws the same numbers.
        extra: Further arrays by name, such as targets.
        suspects: Inputs with NaN or infinity, with the first index of one.
    """

    def __init__(
        self,
        model: Evaluator,
        feeds: Mapping[str, Array],
        extra: Mapping[str, Array],
        suspects: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        self._model = model
        self._suspects = suspects
        self._feeds = feeds
        self._values: dict[str, Array] = {**feeds, **extra}
        computed = model.fetch(feeds)
        self._values |= computed
        self._releasable = frozenset(computed)

    def __repr__(self) -> str:
        return f"<Trace of {self._model.graph.name!r:.80}: {len(self):,} values>"

    def __getitem__(self, name: str) -> Array:
        array = self._values.get(name)
        return self._found(name) if array is None else array

    def __contains__(self, name: object) -> bool:
        return name in self._values or self._is_known(name)

    def __iter__(self) -> Iterator[str]:
        model = self._model
        return iter(dict.fromkeys((*self._values, *model.graph.names, *model.defined)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def with_inputs(self, inputs: Mapping[str, Array]) -> "Trace":
        """Return a new evaluation of the model, with arrays of its memory space for some inputs."""
        return Trace(self._model, {**self._feeds, **inputs}, {}, self._suspects)

    def explain(self) -> AbstractContextManager[None]:
        """Return a context that adds inputs with NaN or infinity to a ``NonFiniteError``."""
        return naming(self._suspects)

    def require_finite(self, names: Sequence[str]) -> "Trace":
        """Return the trace; raise a NonFiniteError if a value and an input have NaN or infinity."""
        bad = [name for name in names if not finite(self[name])] if self._suspects else []
        if bad:
            with self.explain():
                raise NonFiniteError(f"'{bad[0]}' holds NaN or infinity.")
        return self

    def release(self, names: Collection[str]) -> None:
        """Release the memory of computed values; reading a released value computes it again."""
        for name in self._releasable.intersection(names):
            self._values.pop(name, None)

    def vjp(
        self, cotangents: Mapping[str, Array], wrt: Sequence[str], *, independent: bool = False
    ) -> dict[str, Array]:
        """Return gradients of ``Σ ⟨cotangent, value⟩``, the products ``Jᵀ c``.

        Args:
            cotangents: Arrays by value name, in the shape of the value.
            wrt: Names of activations, parameters or inputs, which may have a cotangent.
            independent: Whether values in ``wrt`` are independent variables, even if one depends on
                another.

        Returns:
            Gradients by name, in the shape of the value; zeros for values without influence.

        Raises:
            UnknownNameError: A name is not a value of the graph.
            UnsupportedOpError: An operator between them has no derivative rule.
            ShapeError: A cotangent has another shape than its value.
        """
        return self.vjp_pair(cotangents, (), wrt, independent=independent)[1]

    def writable_vjp(self, cotangents: Mapping[str, Array], wrt: Sequence[str]) -> dict[str, Array]:
        """Return the gradients of ``vjp`` in writable arrays that do not share memory.

        ``vjp`` returns read-only memory of ONNX Runtime. This method allocates arrays, to which
        ONNX Runtime writes without a copy. Arguments and errors are those of ``vjp``.
        """
        return self.vjp_pair(cotangents, wrt, ())[0]

    def vjp_pair(
        self,
        cotangents: Mapping[str, Array],
        writable: Sequence[str],
        others: Sequence[str],
        *,
        independent: bool = False,
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return ``writable_vjp`` of some values and ``vjp`` of others, from one backward pass."""
        wrt = tuple(dict.fromkeys((*writable, *others)))
        backward = self._model.backward(tuple(cotangents), wrt, independent=independent)
        gradients = backward.gradients
        feeds = self._saved(backward) | self._cotangents(backward, cotangents)
        empty = self._model.memory_space.empty
        results = {
            gradients[name]: empty((value := self[name]).shape, value.dtype)
            for name in writable
            if name in gradients and gradients[name] not in feeds
        }
        read = {gradients[name]: name for name in others if name in gradients}
        rest = [g for g in read if g not in feeds and g not in results]
        if results:
            session = self._model.backward_session(backward)
            feeds |= session.run_into(results, feeds, rest) | results
        elif rest:
            feeds |= self._model.backward_session(backward).run(rest, feeds)
        shared = {
            name: feeds[gradients[name]] if name in gradients else np.zeros_like(self[name])
            for name in others
        }
        arrays: dict[str, Array] = {}
        for name in writable:
            gradient = gradients.get(name)
            if gradient is None:
                arrays[name] = np.zeros_like(self[name])
            elif gradient in results and gradient not in read:
                arrays[name] = results.pop(gradient)
            else:  # the gradient is a feed, or the gradient of another value, too
                arrays[name] = feeds[gradient].copy()
        return arrays, shared

    def jvp(
        self, tangents: Mapping[str, Array], outputs: Sequence[str], *, independent: bool = False
    ) -> dict[str, Array]:
        """Return directional derivatives of ``outputs`` along ``tangents``, the products ``J v``.

        ``jvp`` is the adjoint of ``vjp``: the backward pass is linear in its cotangents, and is
        differentiated with respect to them. The first product for each shape of the batch builds a
        session.

        Args:
            tangents: Arrays by value name, in the shape of the value.
            outputs: Names of values.
            independent: Whether values with a tangent are independent variables, even if one
                depends on another.

        Returns:
            Derivatives by output name, in the shape of the output.

        Raises:
            UnknownNameError: A name is not a value of the graph.
            UnsupportedOpError: An operator of the forward or the backward pass has no derivative
                rule.
            ShapeError: A tangent has another shape than its value.
        """
        backward = self._model.backward(outputs, tuple(tangents), independent=independent)
        zeros = {name: np.zeros_like(self[name]) for name in backward.cotangents}
        derivatives, _ = self._run_twice(backward, zeros, tangents, ())
        return derivatives

    def second_derivative(
        self, cotangents: Mapping[str, Array], tangents: Mapping[str, Array]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return ``J v``, and ``v`` times the Hessian matrix of ``Σ ⟨cotangent, value⟩``.

        The cotangents are constant. Values with a tangent are independent variables, even if one
        depends on another.

        Args:
            cotangents: Arrays by output name, in the shape of the output.
            tangents: Arrays by value name, in the shape of the value.

        Returns:
            ``J v`` by output name, and the product with the Hessian matrix by value name.

        Raises:
            UnknownNameError: A name is not a value of the graph.
            UnsupportedOpError: An operator of the forward or the backward pass has no derivative
                rule.
            ShapeError: An array has another shape than its value.
        """
        wrt = tuple(tangents)
        backward = self._model.backward(tuple(cotangents), wrt, independent=True)
        return self._run_twice(backward, cotangents, tangents, wrt)

    # -- private ----------------------------------------------------------------------------------

    def _found(self, name: str) -> Array:
        """Return a value that the forward pass has not returned."""
        constants = self._model.graph.constants
        if name in constants:
            self._values[name] = constants[name]
        elif self._is_known(name):
            self._fetch([name])
        else:
            raise UnknownNameError(
                f"'{name}'{suggestion(name, self)} is neither a value of model "
                f"'{self._model.graph.name}' nor a target."
            )
        return self._values[name]

    def _is_known(self, name: object) -> bool:
        return name in self._model.graph.names or name in self._model.defined

    def _run_twice(
        self,
        backward: Backward,
        cotangents: Mapping[str, Array],
        tangents: Mapping[str, Array],
        wrt: Sequence[str],
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        shaped = {name: self._shaped("tangent", name, array) for name, array in tangents.items()}
        feeds = self._cotangents(backward, cotangents)
        derivatives: dict[str, Array] = {}
        products: dict[str, Array] = {}
        if backward.gradients:
            second = self._model.twice(backward, {**self._feeds, **feeds}, wrt)
            for name, gradient in backward.gradients.items():
                # The tangents of values that share a gradient are added.
                tangent = second.cotangents[gradient]
                feeds[tangent] = feeds[tangent] + shaped[name] if tangent in feeds else shaped[name]
            products = self._run(second, feeds)
            derivatives = {
                name: products[cotangent]
                for name, cotangent in backward.cotangents.items()
                if cotangent in products
            }
        outputs = {name: np.zeros_like(self[name]) for name in backward.cotangents}
        values = {name: np.zeros_like(self[name]) for name in wrt}
        return outputs | derivatives, {
            name: products.get(name, zero) for name, zero in values.items()
        }

    def _run(self, backward: Backward, cotangents: Mapping[str, Array]) -> dict[str, Array]:
        """Return all gradients of a backward graph, by value name."""
        feeds = self._saved(backward) | dict(cotangents)
        missing = {name for name in backward.gradients.values() if name not in feeds}
        if missing:
            feeds |= self._model.backward_session(backward).run(tuple(missing), feeds)
        return {name: feeds[gradient] for name, gradient in backward.gradients.items()}

    def _saved(self, backward: Backward) -> dict[str, Array]:
        """Return the values of the forward pass that a backward graph reads."""
        fed, values = self._model.fed(backward), self._values
        if not values.keys() >= {*fed}:
            self._fetch([name for name in fed if name not in values])
        return dict(zip(fed, map(values.__getitem__, fed), strict=True))

    def _cotangents(self, backward: Backward, cotangents: Mapping[str, Array]) -> dict[str, Array]:
        return {
            backward.cotangents[name]: self._shaped("cotangent", name, array)
            for name, array in cotangents.items()
        }

    def _shaped(self, what: str, value: str, array: Array) -> Array:
        expected, array = self[value], self._model.memory_space.as_feed(array)
        if array.shape != expected.shape:
            raise ShapeError(
                f"the {what} of '{value}' has shape {array.shape}, but the value has shape "
                f"{expected.shape}."
            )
        return array.astype(expected.dtype, copy=False)

    def _fetch(self, names: Sequence[str]) -> None:
        self._model.want(names)
        self._values |= self._model.fetch(self._feeds)
