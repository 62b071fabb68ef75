"""Several uses of one layer in one tensor, and how many rows they make of an example."""

from collections.abc import Sequence

from kfac_engine.errors import ShapeError
from kfac_engine.layers.views import View

_DENSE_RANK = 2


def folded_shape(shape: tuple[int, ...], view: View, num_uses: int) -> tuple[int, ...]:
    """The shape a tensor has once its uses are folded into the batch axis, use by use.

    Args:
        shape: ``(num_uses · n, …)`` or ``(num_uses, n, …)``; for one use anything the view reads.
        view: Reads the tensor of one use; where it leaves the rank open, two axes are meant.
        num_uses: Uses in the tensor.

    Returns:
        ``(num_uses · n, …)``.

    Raises:
        ShapeError: The shape is neither.
    """
    if num_uses == 1:
        return shape
    rank = view.rank or _DENSE_RANK
    if len(shape) == rank + 1 and shape[0] == num_uses:
        return shape[0] * shape[1], *shape[2:]
    if len(shape) == rank and shape[0] % num_uses == 0:
        return shape
    raise ShapeError(
        f"a tensor of {num_uses} uses has shape {shape}; it needs {rank} axes, the first a "
        f"multiple of {num_uses}, or {rank + 1} axes, the first of them {num_uses}."
    )


def examples(
    shapes: Sequence[tuple[int, ...]],
    view: View,
    num_uses: int,
    batch: int | None = None,
    *,
    exact: bool = False,
) -> int:
    """Examples behind the tensors of one tower.

    Args:
        shapes: One for each listed use, or one of a tensor that holds all uses.
        view: Reads the tensor of one use.
        num_uses: Uses of the layer.
        batch: Length of a value known to have the batch axis first. A shorter one means that
            positions are folded into the tensors' first axis; a longer one has positions itself.
            Not asked where uses are folded: their number tells.
        exact: Whether ``batch`` is the number of examples, wherever the tensors have them.

    Returns:
        Their number.
    """
    folded = num_uses if len(shapes) == 1 else 1
    own = folded_shape(shapes[0], view, folded)[0] // folded
    if batch is None or folded > 1:
        return own
    return batch if exact else min(own, batch)


def rows_per_example(
    shapes: Sequence[tuple[int, ...]],
    view: View,
    num_uses: int,
    batch: int | None = None,
    *,
    exact: bool = False,
) -> int:
    """Uses × positions: rows that the tensors of one tower make of each example.

    Args:
        shapes: As in ``examples``.
        view: As in ``examples``.
        num_uses: As in ``examples``.
        batch: As in ``examples``.
        exact: As in ``examples``.

    Returns:
        Their number.
    """
    folded = num_uses if len(shapes) == 1 else 1
    rows = sum(view.count(folded_shape(shape, view, folded)) for shape in shapes)
    return rows // examples(shapes, view, num_uses, batch, exact=exact)
