"""One evaluation of a model: any value by name, and products with its derivatives."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.backend.memory_space import MemorySpace
from kfac_engine.errors import ShapeError, UnknownNameError
from kfac_engine.graph.structure import Graph
from kfac_engine.runtime.backward_session import BackwardSession


class Evaluator(Protocol):
    """The part of ``OnnxModel`` that a trace uses; see there for each member."""

    graph: Graph
    memory_space: MemorySpace
    draws: tuple[str, ...]
    defined: set[str]

    def fetch(
        self, feeds: Mapping[str, Array], drawn: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Run one forward pass."""

    def want(self, names: Sequence[str]) -> None:
        """Add values to all forward passes from now on."""

    def backward(
        self, outputs: Sequence[str], wrt: Sequence[str], *, independent: bool = False
    ) -> Backward:
        """Return the backward graph from ``outputs`` to ``wrt``."""

    def twice(
        self, backward: Backward, feeds: Mapping[str, Array], wrt: Sequence[str] = ()
    ) -> Backward:
        """Return the backward graph of a backward graph."""

    def fed(self, backward: Backward) -> tuple[str, ...]:
        """Return the inputs of a backward session besides cotangents."""

    def backward_session(self, backward: Backward) -> BackwardSession:
        """Return the session of a backward graph."""


class Trace(Mapping[str, Array]):
    """A batch that went through a model.

    Reading a value that was not computed yet runs the forward pass again, with that value wanted
    from then on: the next batch brings it at once.

    Args:
        model: The model.
        feeds: Checked inputs and parameters.
        extra: Arrays of the caller's own: targets.
    """

    def __init__(
        self, model: Evaluator, feeds: Mapping[str, Array], extra: Mapping[str, Array]
    ) -> None:
        self._model = model
        self._feeds = feeds
        self._values: dict[str, Array] = {**model.graph.constants, **feeds, **extra}
        self._known = dict.fromkeys((*model.graph.values(), *model.defined))
        found = model.fetch(feeds)
        self._values |= found
        self._forgettable = found.keys() - set(model.draws)

    def __getitem__(self, name: str) -> Array:
        if name not in self._values:
            if name not in self._known:
                raise UnknownNameError(
                    f"'{name}' is neither a value of model '{self._model.graph.name}' nor a target."
                )
            self._fetch([name])
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._values, *self._known)))

    def __len__(self) -> int:
        return len(self._known.keys() | self._values.keys())

    def with_inputs(self, inputs: Mapping[str, Array]) -> "Trace":
        """The evaluation of the same model with other inputs; others stay as they are."""
        return Trace(self._model, {**self._feeds, **inputs}, {})

    def release(self, names: Collection[str]) -> None:
        """Forget computed values; one that is read after all is computed again."""
        for name in self._forgettable.intersection(names):
            self._values.pop(name, None)

    def vjp(
        self, cotangents: Mapping[str, Array], wrt: Sequence[str], *, independent: bool = False
    ) -> dict[str, Array]:
        """Gradients of ``Σ ⟨cotangent, value⟩``: products ``Jᵀ c``.

        Args:
            cotangents: Value name to an array of that value's shape.
            wrt: Names of values: activations, parameters, inputs; also a value that has a
                cotangent.
            independent: Whether the gradient of one holds all other values of ``wrt`` fixed, where
                one depends on another.

        Returns:
            Name to gradient, each in the shape of its value; zeros where nothing depends on it.

        Raises:
            UnknownNameError: A name is not a value of the graph.
            UnsupportedOpError: An operator in between has no derivative rule.
            ShapeError: A cotangent has another shape than its value.
        """
        backward = self._model.backward(tuple(cotangents), wrt, independent=independent)
        found = self._run(backward, self._cotangents(backward, cotangents))
        return {name: found[name] if name in found else np.zeros_like(self[name]) for name in wrt}

    def writable_vjp(self, cotangents: Mapping[str, Array], wrt: Sequence[str]) -> dict[str, Array]:
        """As ``vjp``, in arrays that are the caller's own, to write into.

        ``vjp`` hands over memory of ONNX Runtime, which cannot be written; a copy of every gradient
        would double their memory, so the runtime writes into the caller's at once.

        Args:
            cotangents: Value name to an array of that value's shape.
            wrt: Names of values.

        Returns:
            Name to gradient; no two share memory.

        Raises:
            UnknownNameError: A name is not a value of the graph.
            UnsupportedOpError: An operator in between has no derivative rule.
            ShapeError: A cotangent has another shape than its value.
        """
        return self.vjp_pair(cotangents, wrt, ())[0]

    def vjp_pair(
        self, cotangents: Mapping[str, Array], own: Sequence[str], others: Sequence[str]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """``writable_vjp`` of some values and ``vjp`` of others by one backward pass.

        Args:
            cotangents: Value name to an array of that value's shape.
            own: Names of values whose gradients are to be the caller's own.
            others: Names of values.

        Returns:
            Name to gradient, of ``own`` and of ``others``; none of ``own`` shares memory.

        Raises:
            UnknownNameError: A name is not a value of the graph.
            UnsupportedOpError: An operator in between has no derivative rule.
            ShapeError: A cotangent has another shape than its value.
        """
        backward = self._model.backward(tuple(cotangents), tuple(dict.fromkeys((*own, *others))))
        gradients = backward.gradients
        feeds = self._saved(backward) | self._cotangents(backward, cotangents)
        made = {
            gradients[name]: self._model.memory_space.empty(self[name].shape, self[name].dtype)
            for name in own
            if name in gradients and gradients[name] not in feeds
        }
        read = dict.fromkeys(gradients[name] for name in others if name in gradients)
        rest = tuple(gradient for gradient in read if gradient not in feeds | made)
        if made or rest:
            feeds |= self._model.backward_session(backward).run_into(made, feeds, rest) | made
        shared = {name: feeds[gradients[name]] for name in others if name in gradients}
        found: dict[str, Array] = {}
        for name in own:
            gradient = gradients.get(name)
            if gradient is None:
                found[name] = np.zeros_like(self[name])
            elif gradient in made and gradient not in read:
                found[name] = made.pop(gradient)
            else:  # it was fed, or another name has it as well
                found[name] = feeds[gradient].copy()
        zeros = {name: np.zeros_like(self[name]) for name in others if name not in gradients}
        return found, shared | zeros

    def jvp(
        self, tangents: Mapping[str, Array], outputs: Sequence[str], *, independent: bool = False
    ) -> dict[str, Array]:
        """How ``outputs`` change as values move along ``tangents``: products ``J v``.

        The adjoint of ``vjp``, computed by differentiating the backward pass, which is linear in
        its cotangents, with respect to them. The first product on a batch of a new shape takes the
        time of building a session.

        Args:
            tangents: Value name to an array of that value's shape.
            outputs: Names of values.
            independent: Whether moving one value leaves the others that have a tangent in place,
                where one depends on another.

        Returns:
            Name to change, each in the shape of its value; zeros where it does not change.

        Raises:
            UnknownNameError: A name is not a value of the graph.
            UnsupportedOpError: An operator of the forward or the backward pass has no derivative
                rule.
            ShapeError: A tangent has another shape than its value.
        """
        backward = self._model.backward(outputs, tuple(tangents), independent=independent)
        anywhere = {name: np.zeros_like(self[name]) for name in backward.cotangents}
        moved, _ = self._run_twice(backward, anywhere, tangents, ())
        return moved

    def second_derivative(
        self, cotangents: Mapping[str, Array], tangents: Mapping[str, Array]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """How ``vjp`` changes as values move along ``tangents``, with the cotangents held fixed.

        That is the Hessian matrix of ``Σ ⟨cotangent, value⟩`` times v, plus J v as a by-product.
        Values with a tangent are independent variables, even where one depends on another.

        Args:
            cotangents: Output name to an array of that value's shape.
            tangents: Value name to an array of that value's shape.

        Returns:
            ``J v`` by output, and the change of the gradient by value; zeros where there is none.

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

    def _run_twice(
        self,
        backward: Backward,
        cotangents: Mapping[str, Array],
        tangents: Mapping[str, Array],
        wrt: Sequence[str],
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        shaped = {name: self._shaped("tangent", name, array) for name, array in tangents.items()}
        feeds = self._cotangents(backward, cotangents)
        moved: dict[str, Array] = {}
        found: dict[str, Array] = {}
        if backward.gradients:
            second = self._model.twice(backward, {**self._feeds, **feeds}, wrt)
            for name, gradient in backward.gradients.items():
                # Values may share a gradient: then their tangents act on it together.
                tangent = second.cotangents[gradient]
                feeds[tangent] = feeds[tangent] + shaped[name] if tangent in feeds else shaped[name]
            found = self._run(second, feeds)
            moved = {
                name: found[cotangent]
                for name, cotangent in backward.cotangents.items()
                if cotangent in found
            }
        outputs = {name: np.zeros_like(self[name]) for name in backward.cotangents}
        values = {name: np.zeros_like(self[name]) for name in wrt}
        return outputs | moved, {name: found.get(name, zero) for name, zero in values.items()}

    def _run(self, backward: Backward, cotangents: Mapping[str, Array]) -> dict[str, Array]:
        """All gradients of a backward graph, by value."""
        feeds = self._saved(backward) | dict(cotangents)
        made = {name for name in backward.gradients.values() if name not in feeds}
        if made:
            feeds |= self._model.backward_session(backward).run(tuple(made), feeds)
        return {name: feeds[gradient] for name, gradient in backward.gradients.items()}

    def _saved(self, backward: Backward) -> dict[str, Array]:
        """What a backward graph reads of the forward pass."""
        fed = self._model.fed(backward)
        self._fetch([name for name in fed if name not in self._values])
        return {name: self._values[name] for name in fed}

    def _cotangents(self, backward: Backward, cotangents: Mapping[str, Array]) -> dict[str, Array]:
        return {
            backward.cotangents[name]: self._shaped("cotangent", name, array)
            for name, array in cotangents.items()
        }

    def _shaped(self, what: str, value: str, array: Array) -> Array:
        expected, array = self[value], self._model.memory_space.as_feed(array)
        if array.shape != expected.shape:
            raise ShapeError(
                f"the {what} of '{value}' has shape {array.shape}, the value {expected.shape}."
            )
        return array.astype(expected.dtype, copy=False)

    def _fetch(self, names: Sequence[str]) -> None:
        if names:
            self._model.want(names)
            drawn = {name: self._values[name] for name in self._model.draws}
            self._values |= self._model.fetch(self._feeds, drawn)
