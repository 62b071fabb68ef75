"""One evaluation of a model: any value by name, and vector–Jacobian products."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kfac_engine._types import Array
from kfac_engine.errors import ShapeError, UnknownNameError

if TYPE_CHECKING:
    from kfac_engine.autodiff.model import OnnxModel


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
        self, model: "OnnxModel", feeds: Mapping[str, Array], extra: Mapping[str, Array]
    ) -> None:
        self._model = model
        self._feeds = feeds
        self._values: dict[str, Array] = {**model.graph.constants, **feeds, **extra}
        self._known = set(model.graph.values())
        self._values |= model.fetch(feeds)

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
        return iter(dict.fromkeys((*self._values, *self._model.graph.values())))

    def __len__(self) -> int:
        return len(self._known | self._values.keys())

    def vjp(self, cotangents: Mapping[str, Array], wrt: Sequence[str]) -> dict[str, Array]:
        """Gradients of ``Σ ⟨cotangent, value⟩``.

        Args:
            cotangents: Value name to an array of that value's shape.
            wrt: Names of values: activations, parameters, inputs; also a value that has a
                cotangent.

        Returns:
            Name to gradient, each in the shape of its value; zeros where nothing depends on it.

        Raises:
            UnknownNameError: A name is not a value of the graph.
            UnsupportedOpError: An operator in between has no derivative rule.
            ShapeError: A cotangent has another shape than its value.
        """
        backward = self._model.backward(tuple(cotangents), wrt)
        fed = self._model.fed(backward)
        self._fetch([name for name in fed if name not in self._values])
        feeds = {name: self._values[name] for name in fed}
        for value, array in cotangents.items():
            feeds[backward.cotangents[value]] = self._cotangent(value, array)
        made = {name for name in backward.gradients.values() if name not in feeds}
        if made:
            feeds |= self._model.backward_session(backward).run(tuple(made), feeds)
        return {
            name: feeds[backward.gradients[name]]
            if name in backward.gradients
            else np.zeros_like(self[name])
            for name in wrt
        }

    def _cotangent(self, value: str, array: Array) -> Array:
        expected = self[value]
        if array.shape != expected.shape:
            raise ShapeError(
                f"the cotangent of '{value}' has shape {array.shape}, the value {expected.shape}."
            )
        return array.astype(expected.dtype, copy=False)

    def _fetch(self, names: Sequence[str]) -> None:
        if names:
            self._model.want(names)
            self._values |= self._model.fetch(self._feeds)
