"""Writes the gradients of each example with respect to one layer, as nodes of standard operators.

The nodes repeat ``curvature_result.example_gradients`` in ONNX: rows of inputs ``a`` and of output
gradients ``ds``, and for each example the matrices ``G = Σ_t a_t ds_tᵀ`` in the eigenvectors of the
block. Every layer yields rows ``R`` with ``R Rᵀ = J Σ Jᵀ``, up to the sum over layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.curvature.blocks.scale_shift import ScaleShiftFB
from kfac_engine.curvature_result.spectrum import Float, Spectrum
from kfac_engine.graph.node_builder import NodeBuilder
from kfac_engine.layers.broadcast import Reduction
from kfac_engine.layers.grouped import GroupedPacking
from kfac_engine.layers.layer_forms import LayerForm
from kfac_engine.layers.token_ids import TokenIdView
from kfac_engine.layers.views import PatchView, RowView, View

PREFIX = "variance/"


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a layer in the exported graph.

    Attributes:
        name: Name of the value.
        shape: Shape in the sample run.
    """

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """One use of the parameters of a layer.

    Attributes:
        inputs: The input; None for a shift, which has no input.
        outputs: The gradients of the output for ``k`` cotangents, one after the other along the
            first axis. The shape is that of one of them.
    """

    inputs: Operand | None
    outputs: Operand


class VarianceBuilder(NodeBuilder):
    """Collects the nodes of the variance.

    Args:
        dtype: Element type of the computation.
        sources: Number ``k`` of cotangents.
        prefix: Start of all new names.
    """

    def __init__(self, dtype: DType, sources: int, prefix: str = PREFIX) -> None:
        super().__init__(prefix)
        self.dtype, self.sources = dtype, sources

    def numbers(self, values: Array) -> str:
        """Add a constant in the element type of the computation; return its name."""
        return self.constant(np.asarray(values, self.dtype))

    def reshaped(self, value: str, *shape: int) -> str:
        """Add a Reshape, in which 0 stands for the size of the operand; return its result."""
        return self.op("Reshape", value, self.constant(shape))

    def transposed(self, value: str, *axes: int) -> str:
        """Add a Transpose, if it changes the order of the axes; return its result."""
        return value if axes == tuple(range(len(axes))) else self.op("Transpose", value, perm=axes)

    def by_source(self, value: str, rank: int) -> str:
        """Divide the first axis of a value by cotangents, ``(k, n, …)``; return its name.

        Args:
            value: Value whose first axis has the examples of each cotangent, ``(kn, …)``.
            rank: Number of its axes.

        Returns:
            Name of the result.
        """
        front = self.constant([self.sources, -1])
        if rank == 1:
            return self.op("Reshape", value, front)
        rest = self.op("Shape", value, start=1)
        return self.op("Reshape", value, self.op("Concat", front, rest, axis=0))


# -- layers that are read as rows ------------------------------------------------------------------


def row_gradients(
    b: VarianceBuilder,
    form: LayerForm,
    uses: Sequence[Use],
    spectrum: Spectrum | None = None,
    values: Float | None = None,
) -> str:
    """Write the gradients of a layer as they are, or in eigenvectors times roots of eigenvalues.

    Args:
        b: Collects the nodes.
        form: How the layer is read; ``is_readable`` holds for it.
        uses: The tensors of each use.
        spectrum: Eigenvectors of the block; None for gradients as they are.
        values: Eigenvalues of the covariance of the parameters, ``(g, d_in, d_out)``.

    Returns:
        Name of rows ``(n, k, entries)``.
    """
    groups = form.packing.groups if isinstance(form.packing, GroupedPacking) else 1
    inputs, outputs = [], []
    for use in uses:
        assert use.inputs is not None, "a layer that is read as rows has an input"
        inputs.append(_grouped(b, form.input_view, use.inputs, groups))
        outputs.append(_grouped(b, form.output_view, use.outputs, groups))
    a, ds = _joined(b, inputs), _joined(b, outputs)  # (n, g, t, d_in), (kn, g, t, d_out)
    if form.packing.has_bias:
        a = b.op("Pad", a, b.constant([0, 0, 0, 0, 0, 0, 0, 1]), b.numbers(np.ones(())))
    if spectrum is not None:
        a, ds = _rotated(b, a, spectrum.left), _rotated(b, ds, spectrum.right)
    ds = b.transposed(b.by_source(ds, rank=4), 1, 0, 2, 3, 4)  # (n, k, g, t, d_out)
    if values is not None and groups == 1 and _has_one_row(form, uses):
        # Σ_ij (a_i ds_j)² S_ij is the squared norm of ds ∘ √(a² S).
        spread = b.op("MatMul", b.op("Mul", a, a), b.numbers(values[0]))
        scale = b.op("Unsqueeze", b.op("Sqrt", spread), b.constant([1]))
        return b.reshaped(b.op("Mul", ds, scale), 0, 0, -1)
    columns = b.op("Unsqueeze", b.transposed(a, 0, 1, 3, 2), b.constant([1]))
    G = b.op("MatMul", columns, ds)  # (n, k, g, d_in, d_out)
    if values is not None:
        G = b.op("Mul", G, b.numbers(np.sqrt(values)))
    return b.reshaped(G, 0, 0, -1)


def is_readable(form: LayerForm, inputs: int, outputs: int) -> bool:
    """Return whether ``row_gradients`` reads a layer with these numbers of tensors."""
    views = (form.input_view, form.output_view)
    crops = any(
        isinstance(v, PatchView) and min(v.window.begins + v.window.ends) < 0 for v in views
    )
    if (
        crops
        or type(form.output_view) is TokenIdView
        or any(type(v) not in _READERS for v in views)
    ):
        return False
    return inputs == outputs and (form.num_uses == 1 or outputs > 1)


def _has_one_row(form: LayerForm, uses: Sequence[Use]) -> bool:
    """Return whether an example has one row for every size of the inputs."""
    (first, *others) = uses
    assert first.inputs is not None
    dense = type(form.input_view) is RowView and type(form.output_view) is RowView
    operands = (first.inputs, first.outputs)
    return dense and not others and all(len(operand.shape) == 2 for operand in operands)


def _grouped(b: VarianceBuilder, view: View, operand: Operand, groups: int) -> str:
    """Write rows ``(n, g, t, d / g)``; the features of a row are ``(taps, g, channels / g)``."""
    rows = _READERS[type(view)](b, view, operand)
    if groups == 1:
        return b.op("Unsqueeze", rows, b.constant([1]))
    taps = view.window.taps if isinstance(view, PatchView) else 1
    channels = view.width(operand.shape) // taps
    split = b.reshaped(rows, 0, 0, taps, groups, channels // groups)
    return b.reshaped(b.transposed(split, 0, 3, 1, 2, 4), 0, 0, -1, taps * channels // groups)


def _rows(b: VarianceBuilder, view: RowView, operand: Operand) -> str:
    """Write the rows of ``RowView.rows``, ``(n, t, d)``."""
    axis, rank = view.feature_axis % len(operand.shape), len(operand.shape)
    width = operand.shape[axis]
    if rank == 2:
        return b.op("Unsqueeze", operand.name, b.constant([1]))
    order = (*(i for i in range(rank) if i != axis), axis)
    moved = b.transposed(operand.name, *order)
    return moved if rank == 3 else b.reshaped(moved, 0, -1, width)


def _patches(b: VarianceBuilder, view: PatchView, operand: Operand) -> str:
    """Write the patches of ``PatchView.rows``, ``(n, t, taps · channels)``."""
    # A convolution with a group for each channel and a filter for each tap copies the pixels.
    rank, window = len(operand.shape), view.window
    images, channels = operand.name, operand.shape[1 if view.channels_first else -1]
    if not view.channels_first:
        images = b.transposed(images, 0, rank - 1, *range(1, rank - 1))
    taps = np.eye(window.taps).reshape(window.taps, 1, *window.kernel)
    padding = {"auto_pad": window.same} if window.same else {"pads": window.begins + window.ends}
    copies = b.write(
        "Conv",
        (images, b.numbers(np.tile(taps, (channels, *(1,) * (rank - 1))))),
        ("",),
        {
            "group": channels,
            "kernel_shape": window.kernel,
            "strides": window.strides,
            "dilations": window.dilations,
            **padding,
        },
    )
    split = b.reshaped(copies[0], 0, channels, window.taps, -1)
    return b.reshaped(b.transposed(split, 0, 3, 2, 1), 0, 0, -1)


def _units(b: VarianceBuilder, view: TokenIdView, operand: Operand) -> str:
    """Write unit vectors of token ids, ``(n, t, vocabulary)``; their sum without positions."""
    ids = b.reshaped(operand.name, 0, -1) if len(operand.shape) > 1 else operand.name
    if len(operand.shape) == 1:
        ids = b.op("Unsqueeze", ids, b.constant([1]))
    depth = b.constant(view.vocabulary)
    units = b.op("OneHot", ids, depth, b.numbers(np.array([0, 1])))
    if view.positions:
        return units
    return b.op("ReduceSum", units, b.constant([1]), keepdims=1)


_READERS: dict[type, Callable[..., str]] = {
    RowView: _rows,
    PatchView: _patches,
    TokenIdView: _units,
}


def _joined(b: VarianceBuilder, rows: Sequence[str]) -> str:
    """Write the rows of all uses, one after the other."""
    return rows[0] if len(rows) == 1 else b.op("Concat", *rows, axis=2)


def _rotated(b: VarianceBuilder, rows: str, basis: Float | None) -> str:
    """Write rows ``(…, g, t, d)`` in a basis ``(g, d, d)``; None stands for the identity."""
    if basis is None:
        return rows
    return b.op("MatMul", rows, b.numbers(basis[0] if len(basis) == 1 else basis))


# -- gradients as whole matrices -------------------------------------------------------------------


def weighted(b: VarianceBuilder, gradients: str, spectrum: Spectrum, values: Float) -> str:
    """Write whole gradients in the eigenvectors of a block, times roots of eigenvalues.

    Args:
        b: Collects the nodes.
        gradients: Name of packed gradients in row-major order, ``(n, k, entries)``.
        spectrum: Eigenvectors of the block.
        values: Eigenvalues of the covariance of the parameters, ``(g, d_in, d_out)``.

    Returns:
        Name of rows ``(n, k, entries)``.
    """
    roots = np.sqrt(values)
    if spectrum.left is None and spectrum.right is None:
        return b.op("Mul", gradients, b.numbers(roots.reshape(-1)))
    G = b.reshaped(gradients, 0, 0, *values.shape)
    if spectrum.left is not None:
        G = b.op("MatMul", b.numbers(spectrum.left.swapaxes(1, 2)), G)
    if spectrum.right is not None:
        G = b.op("MatMul", G, b.numbers(spectrum.right))
    return b.reshaped(b.op("Mul", G, b.numbers(roots)), 0, 0, -1)


def packed_gradients(
    b: VarianceBuilder, parameters: Sequence[tuple[str, int]], places: Array
) -> str:
    """Write the gradients of several parameters in the order of a packed vector.

    Args:
        b: Collects the nodes.
        parameters: Name of the gradients ``(n, k, size)`` of each parameter, and the size.
        places: Places of the entries of the packed vector in the concatenation of the parameters.

    Returns:
        Name of rows ``(n, k, entries)``.
    """
    names = [name for name, _ in parameters]
    joined = names[0] if len(names) == 1 else b.op("Concat", *names, axis=2)
    if np.array_equal(places, np.arange(sum(size for _, size in parameters))):
        return joined
    return b.op("Gather", joined, b.constant(places, "int64"), axis=2)


# -- scales and shifts -----------------------------------------------------------------------------


def scale_shift_gradients(b: VarianceBuilder, block: ScaleShiftFB, uses: Sequence[Use]) -> str:
    """Write ``[Σ x∘ds, Σ ds]`` over positions and uses; return its name.

    Args:
        b: Collects the nodes.
        block: How scale and shift are broadcast to the data.
        uses: The tensors of each use.

    Returns:
        Name of rows ``(n, k, entries)``.
    """
    totals = []
    for use in uses:
        shape = use.outputs.shape
        ds = b.by_source(use.outputs.name, len(shape))
        columns = []
        if block.form.scale and use.inputs is not None:
            product = b.op("Mul", ds, use.inputs.name)
            columns.append(_summed(b, product, shape, block.form.scale))
        if block.form.shift:
            columns.append(_summed(b, ds, shape, block.form.shift))
        totals.append(columns[0] if len(columns) == 1 else b.op("Concat", *columns, axis=2))
    return totals[0] if len(totals) == 1 else b.op("Sum", *totals)


def _summed(b: VarianceBuilder, gradient: str, shape: tuple[int, ...], reduction: Reduction) -> str:
    """Write the sums of ``layers.broadcast.per_example``, ``(n, k, entries)``."""
    summed, batch = reduction.summed(shape), reduction.batch_axis % len(shape)
    if summed:
        axes = b.constant([axis + 1 for axis in summed])
        gradient = b.op("ReduceSum", gradient, axes, keepdims=0)
    place = 1 + batch - sum(axis < batch for axis in summed)
    others = (i for i in range(1, 1 + len(shape) - len(summed)) if i != place)
    moved = b.transposed(gradient, place, 0, *others)
    entries = [size for axis, size in enumerate(shape) if axis not in (*summed, batch)]
    return b.reshaped(moved, 0, 0, int(np.prod(entries)))
