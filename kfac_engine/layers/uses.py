"""Counts the examples and rows in the tensors of a layer with several uses."""

from collections.abc import Sequence

from kfac_engine.errors import ShapeError
from kfac_engine.layers.views import View

_DENSE_RANK = 2


def folded_shape(shape: tuple[int, ...], view: View, num_uses: int) -> tuple[int, ...]:
    """Return the shape of a tensor after its uses are folded into the batch axis.

    The result is ``(num_uses · n, …)``. ``shape`` is of this form or ``(num_uses, n, …)``; it can
    be any shape for one use. A view of one use without a fixed rank has two axes.
    """
    if num_uses == 1:
        return shape
    rank = view.rank or _DENSE_RANK
    if len(shape) == rank + 1 and shape[0] == num_uses:
        return shape[0] * shape[1], *shape[2:]
    if len(shape) == rank and shape[0] % num_uses == 0:
        return shape
    raise ShapeError(
        f"a tensor of {num_uses} uses has shape {shape}; it needs {rank} axes with a multiple of "
        f"{num_uses} first, or {rank + 1} axes with {num_uses} first."
    )


def examples(
    shapes: Sequence[tuple[int, ...]],
    view: View,
    num_uses: int,
    batch: int | None = None,
    *,
    exact: bool = False,
) -> int:
    """Return the number of examples in the tensors of one part of a batch.

    Args:
        shapes: Shape of the tensor of each use, or the shape of one tensor with all uses.
        view: View of the tensor of one use.
        num_uses: Number of uses of the layer.
        batch: Length of a value whose first axis is the batch. If it is shorter than the first axis
            of the tensors, that axis includes positions; if it is longer, the value has positions.
            Not read for one tensor with several uses.
        exact: Whether ``batch`` is the number of examples.
    """
    folded = num_uses if len(shapes) == 1 else 1
    length = folded_shape(shapes[0], view, folded)[0] // folded
    if batch is None or folded > 1:
        return length
    return batch if exact else min(length, batch)


def rows_per_example(
    shapes: Sequence[tuple[int, ...]],
    view: View,
    num_uses: int,
    batch: int | None = None,
    *,
    exact: bool = False,
) -> int:
    """Return the number of rows for each example: uses × positions.

    The arguments are as in ``examples``.
    """
    folded = num_uses if len(shapes) == 1 else 1
    rows = sum(view.count(folded_shape(shape, view, folded)) for shape in shapes)
    return rows // examples(shapes, view, num_uses, batch, exact=exact)
