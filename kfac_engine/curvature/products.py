"""Multiplies the curvature of a whole network by vectors without forming a matrix.

With J the Jacobian of the loss inputs, F the Fisher matrix of a loss with respect to its inputs, B
its factor (``B Bᵀ = F``) and k the coefficient of the loss times the weights of the predictions,
summed over the losses and their parts::

    multiply_fisher                   Jᵀ k F J v
    multiply_fisher_factor            Jᵀ √k B u
    multiply_fisher_factor_transpose  √k Bᵀ J v, one for each loss
    multiply_hessian                  the Hessian matrix of the total loss, times v

All are sums over the batch: nothing is divided by its size, nothing is damped.
Source: Martens 2014, arXiv:1412.1193, sections 8 and 9.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Protocol, TypeAlias

from kfac_engine._types import Array
from kfac_engine.backend.namespace import as_array
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.errors import InputError, ShapeError, UnknownNameError
from kfac_engine.losses.observed import root, times

# A vector over the values of interest: one array each, in their order.
Vectors: TypeAlias = Sequence[Array]


class DifferentiableTrace(Protocol):
    """The part of an evaluation that products use; ``kfac_engine.Trace`` implements it."""

    def __getitem__(self, name: str, /) -> Array:
        """Return a value by name."""

    def __contains__(self, name: object, /) -> bool:
        """Return whether a value has this name."""

    def vjp(
        self, cotangents: Mapping[str, Array], wrt: Sequence[str], *, independent: bool
    ) -> Mapping[str, Array]:
        """Return products with the transposed Jacobian matrix, by value."""

    def jvp(
        self, tangents: Mapping[str, Array], outputs: Sequence[str], *, independent: bool
    ) -> Mapping[str, Array]:
        """Return products with the Jacobian matrix, by output."""

    def second_derivative(
        self, cotangents: Mapping[str, Array], tangents: Mapping[str, Array]
    ) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
        """Return ``jvp`` by output and the change of ``vjp`` by value, for Hessian products."""


@dataclass(frozen=True, slots=True)
class TermWeight:
    """The weight of a part of a loss in a curvature matrix."""

    number: float  # factor of the Fisher matrix of the part, at least 0
    # Weights of its predictions, which broadcast to an input of the loss; None for ones.
    rows: Array | None = None

    def times(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return arrays by loss input times the weight."""
        return {name: self.number * times(array, self.rows) for name, array in arrays.items()}

    def root(self) -> "TermWeight":
        """Return the square root of the weight."""
        return TermWeight(sqrt(self.number), None if self.rows is None else root(self.rows))


class CurvatureMatrixVectorProductComputer:
    """Fisher, Gauss–Newton and Hessian products of the registered losses on one batch.

    Args:
        layer_collection: The losses. Its layers are not used.
        wrt_tensors: Names of the values that vectors belong to, usually parameters. They are
            independent variables, even if one is computed from another.
        trace: The evaluation of the batch.
        weights: Weight of each part of each loss; None for the coefficients of the losses, times
            the weights of the predictions.

    Raises:
        InputError: There is no loss or no value, or the trace cannot be differentiated forward.
        UnknownNameError: A name is not a value of the trace.
    """

    def __init__(
        self,
        layer_collection: LayerCollection,
        wrt_tensors: Sequence[str],
        trace: DifferentiableTrace,
        weights: Sequence[TermWeight] | None = None,
    ) -> None:
        losses = layer_collection.registered_losses
        self._wrt = (wrt_tensors,) if isinstance(wrt_tensors, str) else tuple(wrt_tensors)
        self._trace = trace
        self._inputs = tuple(dict.fromkeys(n for loss in losses for n in loss.function.inputs))
        if not self._wrt:
            raise InputError("wrt_tensors is empty; name the values that the vectors belong to.")
        for name in (*self._wrt, *self._inputs):
            if name not in trace:
                raise UnknownNameError(f"'{name}' is not a value of the trace.")
        self._require("vjp", "jvp")
        weights = weights or [
            TermWeight(loss.coefficient, loss.function.row_weights(trace)) for loss in losses
        ]
        self._losses = tuple(zip(weights, (loss.function for loss in losses), strict=True))

    # -- Fisher -----------------------------------------------------------------------------------

    def multiply_fisher(self, vecs: Vectors) -> tuple[Array, ...]:
        """Return the Fisher matrix times a vector with one array for each of ``wrt_tensors``."""
        changes = self._jacobian(vecs)
        return self._transposed_jacobian(
            (k, loss.fisher(loss.read(self._trace), changes)) for k, loss in self._losses
        )

    def multiply_fisher_factor(self, loss_vecs: Vectors) -> tuple[Array, ...]:
        """Return ``B`` times a vector of the inner space; the vector has one array for each loss.

        Args:
            loss_vecs: Arrays of the shapes ``fisher_factor_inner_shapes``.

        Returns:
            One array for each of ``wrt_tensors``.

        Raises:
            ShapeError: Number or shapes of the arrays do not fit.
        """
        inner = self._checked(loss_vecs, self.fisher_factor_inner_shapes, "losses")
        return self._transposed_jacobian(
            (k.root(), loss.fisher_factor(loss.read(self._trace), u))
            for (k, loss), u in zip(self._losses, inner, strict=True)
        )

    def multiply_fisher_factor_transpose(self, vecs: Vectors) -> tuple[Array, ...]:
        """Return ``Bᵀ`` times a vector: one array of the inner shape for each loss."""
        changes = self._jacobian(vecs)
        return tuple(
            loss.fisher_factor_transpose(loss.read(self._trace), k.root().times(changes))
            for k, loss in self._losses
        )

    @property
    def fisher_factor_inner_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that ``multiply_fisher_factor`` multiplies, one for each loss."""
        return tuple(loss.inner_shape(loss.read(self._trace)) for _, loss in self._losses)

    # -- generalised Gauss–Newton: the Fisher, where inputs are natural parameters ----------------

    def multiply_ggn(self, vecs: Vectors) -> tuple[Array, ...]:
        """Return the Gauss–Newton matrix times a vector; UnsupportedError if a loss has none."""
        self._require_ggn()
        return self.multiply_fisher(vecs)

    def multiply_ggn_factor(self, loss_vecs: Vectors) -> tuple[Array, ...]:
        """Return a factor of the Gauss–Newton matrix times one array for each loss."""
        self._require_ggn()
        return self.multiply_fisher_factor(loss_vecs)

    def multiply_ggn_factor_transpose(self, vecs: Vectors) -> tuple[Array, ...]:
        """Return the transposed Gauss–Newton factor times a vector: one array for each loss."""
        self._require_ggn()
        return self.multiply_fisher_factor_transpose(vecs)

    @property
    def ggn_factor_inner_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that ``multiply_ggn_factor`` multiplies, one for each loss."""
        self._require_ggn()
        return self.fisher_factor_inner_shapes

    # -- Hessian ----------------------------------------------------------------------------------

    def multiply_hessian(self, vecs: Vectors) -> tuple[Array, ...]:
        """Return the Hessian matrix of the total loss on the observed targets, times a vector.

        It is ``Jᵀ H J`` with the losses' own Hessian matrices H, plus the second derivative of the
        network weighted by the gradients of the losses. The Hessian may be indefinite.

        Args:
            vecs: One array for each of ``wrt_tensors``.

        Returns:
            Arrays of the same shapes.

        Raises:
            InputError: A loss has no targets, or the trace lacks ``second_derivative``.
            UnsupportedOpError: An operator of the graph or of its derivative has no rule.
        """
        self._require("second_derivative")
        cases = [(k, loss, loss.read(self._trace, targets=True)) for k, loss in self._losses]
        gradients = _added(
            (TermWeight(k.number), loss.gradient(values)) for k, loss, values in cases
        )
        changes, bent = self._trace.second_derivative(gradients, self._named(vecs))
        straight = self._transposed_jacobian(
            (k, loss.hessian(values, changes)) for k, loss, values in cases
        )
        return tuple(part + bent[name] for name, part in zip(self._wrt, straight, strict=True))

    # -- private ----------------------------------------------------------------------------------

    def _jacobian(self, vecs: Vectors) -> Mapping[str, Array]:
        """Return ``J v`` by loss input."""
        return self._trace.jvp(self._named(vecs), self._inputs, independent=True)

    def _transposed_jacobian(
        self, parts: Iterable[tuple[TermWeight, Mapping[str, Array]]]
    ) -> tuple[Array, ...]:
        """Return ``Jᵀ`` times the weighted sum of arrays by loss input."""
        products = self._trace.vjp(_added(parts), self._wrt, independent=True)
        return tuple(products[name] for name in self._wrt)

    def _named(self, vecs: Vectors) -> dict[str, Array]:
        shapes = [self._trace[name].shape for name in self._wrt]
        return dict(zip(self._wrt, self._checked(vecs, shapes, "values"), strict=True))

    def _checked(
        self, vecs: Vectors, shapes: Sequence[tuple[int, ...]], what: str
    ) -> tuple[Array, ...]:
        arrays = tuple(as_array(vec) for vec in vecs)
        if [array.shape for array in arrays] != list(shapes):
            raise ShapeError(
                f"a vector over the {what} has the shapes {', '.join(map(str, shapes))}; got "
                f"{', '.join(str(array.shape) for array in arrays)}."
            )
        return arrays

    def _require(self, *methods: str) -> None:
        for method in methods:
            if not callable(getattr(self._trace, method, None)):
                raise InputError(
                    f"{type(self._trace).__name__} has no method '{method}', which curvature "
                    f"products need; evaluate the model with kfac_engine.load_model(…).run(…)."
                )

    def _require_ggn(self) -> None:
        for _, loss in self._losses:
            loss.require_ggn()


def _added(parts: Iterable[tuple[TermWeight, Mapping[str, Array]]]) -> dict[str, Array]:
    """Return weighted sums by name, because losses may share an input."""
    total: dict[str, Array] = {}
    for weight, arrays in parts:
        for name, array in weight.times(arrays).items():
            total[name] = total[name] + array if name in total else array
    return total
