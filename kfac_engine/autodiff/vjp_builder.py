"""Builds the nodes of a backward graph for the derivative rules.

A rule may read any forward value. The forward session *saves* the forward values that rules read,
and the backward session receives them. If a rule needs only a size, ``shape`` saves eight bytes for
each axis instead of the value.

A rule of a convolution also records the operands of the gradient of its kernel. A session on
the CPU may remove the nodes and compute the product with BLAS (``runtime.cpu``). Exported graphs,
graphs on a GPU and graphs that are differentiated again contain the nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array, DType
from kfac_engine.backend.window import SlidingWindow
from kfac_engine.graph.node_builder import FLOAT_CODES, NodeBuilder, digest_of
from kfac_engine.graph.structure import AttributeValue, Fact, Graph, Node


@dataclass(frozen=True, slots=True)
class KernelGradient:
    """The gradient of a convolution kernel."""

    images: str  # name of the input of the convolution, ``(n, channels, *spatial)``
    cotangents: str  # name of the cotangent of the result
    window: SlidingWindow  # window of the convolution
    outs: int  # number of channels of the cotangent
    ins: int  # number of channels of the input in each group

    @property
    def operands(self) -> tuple[str, str]:
        """The names of the two factors of the product."""
        return self.images, self.cotangents

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        return self.outs, self.ins, *self.window.kernel


_INT64 = 7  # TensorProto.INT64


class VjpBuilder(NodeBuilder):
    """Collects nodes for the backward graph and extra nodes for the forward graph.

    ``graph`` is the forward graph, whose values are operands for rules, and ``facts`` are of every
    forward value, from a sample run. ``nodes`` belong to the backward graph, ``forward_nodes`` to
    the forward graph, and nodes of both read ``constants``.
    """

    def __init__(self, graph: Graph, facts: Mapping[str, Fact]) -> None:
        super().__init__(prefix="")
        self.graph = graph
        self.forward_nodes: list[Node] = []
        # Results of backward nodes that can be computed outside the graph, with the computation;
        # rules add entries.
        self.leaves: dict[str, KernelGradient] = {}
        # Results that are products ``leftᵀ · right`` of matrices with few rows, with the matrices;
        # rules add entries.
        self.row_products: dict[str, tuple[str, str]] = {}
        self._facts = facts
        self._forward_values = set(graph.values())
        self._count = 0

    # -- adding nodes -----------------------------------------------------------------------------

    def forward(self, op: str, *inputs: str, **attributes: AttributeValue) -> str:
        """Add a node to the *forward* graph and return the name of its result.

        Its operands are forward values and constants. Names are hashes of the content, so equal
        calls share one node, also of different builders. Only results that backward nodes read are
        saved. Attributes must be hashable (numbers, strings, tuples).
        """
        return self._forward(op, inputs, 1, attributes)[0]

    def repeat(self, node: Node, *inputs: str, outputs: int = 1) -> tuple[str, ...]:
        """Add ``node`` with other operands to the forward graph; return the result names."""
        return self._forward(node.op, inputs, outputs, node.attributes)

    def append(self, node: Node, constants: Mapping[str, Array]) -> None:
        """Add a complete node to the *forward* graph, unless the graph contains its results.

        The node reads forward values and ``constants``, and its results have names.
        """
        if node.outputs[0] not in self._forward_values:
            self.constants.update(constants)
            self.forward_nodes.append(node)
            self._forward_values.update(node.outputs)

    def constant(
        self, value: Array | Sequence[int] | int, dtype: str | None = None, label: str = ""
    ) -> str:
        """Add a constant for both graphs, once for equal constants; return its name."""
        array = np.asarray(value, dtype=dtype)
        digest = digest_of(array.dtype.name, array.shape, array.tobytes())
        return super().constant(array, label=label or f"constant_{digest}")

    def scalar(self, value: float, like: str) -> str:
        """Add a 0-d constant in the type of the forward value ``like``; return its name."""
        return self.constant(np.asarray(value, dtype=self.dtype(like)))

    def value_name(self, op: str, index: int) -> str:
        """Return a name for a result that no forward value has."""
        self._count += 1
        name = f"vjp_{op}_{self._count}"
        return name if name not in self._forward_values else self.value_name(op, index)

    def node_name(self, op: str, results: Sequence[str]) -> str:
        """Return the name of a node, derived from the name of its first result."""
        return f"node_{results[0]}"

    # -- facts about forward values ---------------------------------------------------------------

    def is_forward(self, name: str) -> bool:
        """Return whether ``name`` is a value of the forward graph or of its extra nodes."""
        return name in self._forward_values

    def dtype(self, name: str) -> DType:
        """Return the element type of a forward value."""
        return self._facts[name].dtype

    def rank(self, name: str) -> int:
        """Return the number of axes of a forward value."""
        return len(self._facts[name].shape)

    def sample_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a forward value in the sample run.

        The shape of a constant or parameter is fixed. For other values, only the rank and the *axes
        of size one* are the same in every batch. Read their sizes from ``shape`` or ``count``.
        """
        return self._facts[name].shape

    def shape(self, name: str) -> str:
        """Write the run-time shape of a forward value, ``(rank,)``, int64."""
        if name in self.graph.constants:
            return self.constant(self.sample_shape(name), "int64")
        return self.forward("Shape", name)

    def count(self, name: str, axes: Sequence[int]) -> str:
        """Write the run-time number of entries of a value along ``axes``, 0-d, in its type."""
        sizes = self.forward("Gather", self.shape(name), self.constant(axes, "int64"))
        product = self.forward("ReduceProd", sizes, keepdims=0)
        return self.forward("Cast", product, to=FLOAT_CODES[self.dtype(name).name])

    def indices(self, size: str) -> str:
        """Write the integers from zero up to, but without, a 0-d size, in the forward graph."""
        return self.forward("Range", self.constant(0), size, self.constant(1))

    def halves(self, vector: str) -> tuple[str, ...]:
        """Write the halves of a forward vector."""
        return self._forward("Split", (vector,), 2, {"axis": 0, "num_outputs": 2})

    # -- shared pieces of rules --------------------------------------------------------------------

    def reshape_like(self, g: str, like: str) -> str:
        """Write ``g`` in the run-time shape of the forward value ``like``."""
        # Without `allowzero`, a size of zero would mean the size of ``g``.
        return self.op("Reshape", g, self.shape(like), allowzero=1)

    def reshape(self, value: str, sizes: Sequence[int]) -> str:
        """Write a value in another shape; the size -1 is computed."""
        return self.op("Reshape", value, self.constant(sizes))

    def pad(self, value: str, pads: str, axes: str, rank: int) -> str:
        """Write ``value`` with zeros before and after it, as many as ``pads`` has for ``axes``."""
        # ONNX Runtime 1.31 ignores the operand `axes` when it moves a Transpose past a Pad, and
        # permutes wrong entries. The node therefore has pads for all axes, in order.
        known = self.constants.get(axes, self.graph.constants.get(axes))
        if known is None:
            begin = self.forward("Mod", self.forward("Cast", axes, to=_INT64), self.constant(rank))
            end = self.forward("Add", begin, self.constant(rank))
            places = self.forward("Concat", begin, end, axis=0)
        else:
            places = self.constant([*(known % rank), *(known % rank + rank)])
        none = self.constant([0] * 2 * rank)
        return self.op("Pad", value, self.op("ScatterElements", none, places, pads, axis=0))

    def sum_of_products(self, products: Sequence[str]) -> str:
        """Write the sum of ``row_products`` of one shape as one product of all their rows."""
        if len(products) == 1:
            return products[0]
        sides = zip(*(self.row_products[name] for name in products), strict=True)
        left, right = (self.op("Concat", *names, axis=0) for names in sides)
        return self.op("Gemm", left, right, transA=1)

    def cast_like(self, value: str, like: str) -> str:
        """Write ``value`` in the element type of the forward value ``like``; True becomes one."""
        return self.op("Cast", value, to=FLOAT_CODES[self.dtype(like).name])

    def zeros(self, like: str) -> str:
        """Write zeros in the run-time shape and the type of the forward value ``like``."""
        zero = np.zeros(1, dtype=self.dtype(like))
        return self.op("ConstantOfShape", self.shape(like), value=zero)

    def unbroadcast(self, g: str, result: str, operand: str) -> str:
        """Write the sum of ``g`` over the axes along which ``operand`` was broadcast to ``result``.

        This is the adjoint of a broadcast. It is ``g`` itself if no axis was broadcast.
        """
        axes = self.broadcast_axes(result, operand)
        if not axes:
            return g
        summed = self.op("ReduceSum", g, self.constant(axes, "int64"), keepdims=1)
        return (
            self.reshape_like(summed, operand) if self.rank(operand) < self.rank(result) else summed
        )

    def broadcast_axes(self, result: str, operand: str) -> list[int]:
        """Return the axes of ``result`` along which ``operand`` was broadcast, from the last."""
        wide, narrow = self.sample_shape(result), self.sample_shape(operand)
        return [
            axis
            for axis in range(-len(wide), 0)
            if axis < -len(narrow) or (narrow[axis] == 1 and wide[axis] != 1)
        ]

    # -- private ----------------------------------------------------------------------------------

    def _forward(
        self,
        op: str,
        inputs: tuple[str, ...],
        outputs: int,
        attributes: Mapping[str, AttributeValue],
    ) -> tuple[str, ...]:
        for name in inputs:
            assert not name or name in self._forward_values or name in self.constants, name
        digest = digest_of(op, inputs, outputs, sorted(attributes.items()))
        names = tuple(f"forward_{op}_{digest}_{index}" for index in range(outputs))
        if names[0] not in self._forward_values:
            self.forward_nodes.append(Node(op, inputs, names, attributes, name=f"node_{names[0]}"))
            self._forward_values.update(names)
        return names
