"""How much each row of a layer counts in a factor of its inputs.

A batch whose targets have weights has rows that no target that counts depends on: the gradient of
the loss with respect to the output of the layer is zero there. Such a row adds nothing to the
Fisher matrix, ``Σ_rows a aᵀ ⊗ ds dsᵀ``, whatever ``a`` is, so that the mean of ``a aᵀ`` leaves it
out. This holds behind an attention as well: the row of a token that another token reads has a
gradient. The other rows have the weight of their example, the mean weight of its predictions that
count. Factors of gradients need no weights of rows: sources are multiplied by the roots of the
weights of their predictions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module, as_array
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.statistics import Uses, rows_name
from kfac_engine.errors import UnsupportedError
from kfac_engine.layers.uses import folded_shape
from kfac_engine.layers.views import View
from kfac_engine.losses.base import LossFunction
from kfac_engine.losses.checks import Named


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The tensors of a layer, whose rows belong to each other.

    Attributes:
        inputs: Names of the input, over uses.
        outputs: Names of the output, over uses.
        view: Reads an output as rows.
        num_uses: Number of uses.
    """

    inputs: Uses
    outputs: Uses
    view: View
    num_uses: int


@dataclass(frozen=True, slots=True)
class ExampleWeights:
    """The weights of the examples of a batch whose targets have weights.

    Attributes:
        weights: A number for each example; None for ones.
        axes: Name of a value to its axis of examples; 0 where absent.
    """

    weights: Array | None = None
    axes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        losses: Iterable[tuple[LossFunction, Array | None]],
        values: Named,
        examples: int,
        axes: Mapping[str, int],
    ) -> "ExampleWeights | None":
        """Return the weights of the examples of a batch; None if no target has a weight.

        Args:
            losses: The losses, with the weights of their predictions; None for ones.
            values: The values of the batch.
            examples: Number of examples.
            axes: As in the class.

        Raises:
            UnsupportedError: Examples with different weights share an axis with positions.
        """
        pairs = list(losses)
        if all(weights is None for _, weights in pairs):
            return None
        if all(weights is None or weights.dtype.kind == "b" for _, weights in pairs):
            return cls(None, axes)
        total = number = None
        for loss, weights in pairs:
            like = as_array(values[loss.inputs[0]])
            axis = axes.get(loss.inputs[0], 0)
            if like.shape[axis] != examples:
                raise UnsupportedError(
                    f"an axis of '{loss.inputs[0]}' holds examples and positions, so that weights "
                    f"other than 0 and 1 cannot be assigned to examples; give them an axis of "
                    f"their own, or use a mask."
                )
            xp = array_module(like)
            ones = xp.ones((1,) * like.ndim) if weights is None else weights
            rows = xp.moveaxis(xp.broadcast_to(ones, like.shape), axis, 0).reshape(examples, -1)
            sums, counts = rows.sum(axis=1, dtype="float64"), (rows > 0).sum(axis=1)
            total = sums if total is None else total + sums
            number = counts if number is None else number + counts
        assert total is not None, "there is a loss"
        return cls(total / array_module(total).maximum(number, 1), axes)

    def of_rows(
        self, layers: Sequence[LayerRows], gradients: Values, b: Backend
    ) -> dict[str, Array]:
        """Return the weights of the rows of the inputs of layers.

        Args:
            layers: The layers.
            gradients: Name of an output to its gradient.
            b: Array library.

        Returns:
            Name, as factors read it, to a weight for each row. A row that several layers read has
            a weight if one of them has a gradient there.
        """
        found: dict[str, Array] = {}
        for layer in layers:
            rows = [self._of_output(layer, name, gradients[name], b) for name in layer.outputs]
            if len(layer.inputs) < len(rows):
                rows = [b.xp.concatenate(rows)]
            elif len(layer.inputs) > len(rows):
                rows = b.xp.split(rows[0], len(layer.inputs))
            for name, weights in zip(layer.inputs, rows, strict=True):
                key = rows_name(name)
                found[key] = b.xp.maximum(found[key], weights) if key in found else weights
        return found

    def _of_output(self, layer: LayerRows, name: str, ds: Array, b: Backend) -> Array:
        """Return the weight of each row of an output of a layer."""
        xp, folded = b.xp, layer.num_uses if len(layer.outputs) == 1 else 1
        counts = (ds != 0).astype(ds.dtype)
        if self.weights is not None:
            axis, v = self.axes.get(name, 0), b.asarray(self.weights).astype(ds.dtype)
            copies = ds.shape[axis] // len(v)
            if copies > 1:  # all uses, one after the other, or the positions of each example
                v = xp.tile(v, copies) if folded > 1 else xp.repeat(v, copies)
            counts = counts * v.reshape([-1, *[1] * (ds.ndim - 1 - axis)])
        counts = counts.reshape(folded_shape(counts.shape, layer.view, folded))
        weights: Array = layer.view.rows(counts, b).max(axis=-1).reshape(-1)
        return weights
