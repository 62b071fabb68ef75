"""Converts convolutions to the blocked layout of ONNX Runtime's fastest kernels.

In the blocked layout, an image ``(n, c, *pixels)`` has shape ``(n, c / block, *pixels, block)``, so
that a vector register contains channels of one pixel. ONNX Runtime converts convolutions with
constant kernels to this layout. In training, kernels are inputs of the session, and ONNX Runtime
does not convert them. The operators of this layout are not documented. A trial determines whether a
build of ONNX Runtime supports them. Times in ms, for version 1.31 on two threads of a processor
with AVX-512, include the conversions of images and results:

| images, kernel | plain | blocked |
|---|---|---|
| 128 × 16 × 32 × 32, 3×3, 16 → 16 | 6.3 | 3.8 |
| 128 × 64 × 8 × 8, 3×3, 64 → 64 | 3.7 | 2.2 |
| 32 × 64 × 56 × 56, 3×3, 64 → 64 | 38 | 26 |
| 32 × 256 × 14 × 14, 3×3, 256 → 256 | 40 | 26 |
| 32 × 512 × 7 × 7, 3×3, 512 → 512 | 39 | 35 |
| 1 × 512 × 7 × 7, 3×3, 512 → 512 | 1.3 | 10.1 |
| 32 × 1024 × 14 × 14, 1×1, 1024 → 256 | 13.0 | 14.9 |
| 8 × 3 × 224 × 224, 7×7, stride 2, 3 → 64 | 11.2 | 7.5 |
| 32 × 96 × 28 × 28, 3×3, each channel alone | 2.7 | 1.4 |
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import needed
from kfac_engine.autodiff.rules.attributes import integer, integers
from kfac_engine.graph.node_builder import NodeBuilder
from kfac_engine.graph.structure import Node

DOMAIN = "com.microsoft.nchwc"

# Largest number of entries of a converted kernel. The conversion takes 1.3 ns for each entry, for
# any batch size.
_MOST_NUMBERS = 1 << 20

# Largest number of taps that a product reverses, with as many multiplications for each entry.
_MOST_TAPS = 64

_LAST = -(2**62)  # a slice with step −1 and an end below this includes index zero


@dataclass(frozen=True, slots=True)
class BlockedGraph:
    """A graph whose convolutions may use the blocked layout.

    ``constants`` are those that the conversion adds. ``copies`` maps a value in the blocked layout
    to the same value in the plain layout.
    """

    nodes: tuple[Node, ...]
    constants: Mapping[str, Array]
    copies: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LayoutContext:
    """Results, shapes and constants of a graph."""

    results: Collection[str]  # names of the results of the graph
    # Shapes of float32 inputs that are the same for every batch, such as parameters.
    kernels: Mapping[str, tuple[int, ...]]
    shapes: Mapping[str, tuple[int, ...]]  # known shapes of other values in a sample run
    constants: Mapping[str, Array]  # constants by name


def convert_to_blocked(nodes: Sequence[Node], context: LayoutContext, block: int) -> BlockedGraph:
    """Return a graph whose convolutions use the blocked layout where it is faster.

    A convolution in this layout includes an ``Add`` and a ``Relu`` that follow it. The graph has
    the same results, and only ONNX Runtime can evaluate it. ``block`` is the number of channels of
    a block, or 0 if ONNX Runtime has no blocked layout.
    """
    kernels = _shapes_of_kernels(nodes, context) if block else {}
    if not any(node.op == "Conv" and node.inputs[1] in kernels for node in nodes):
        return BlockedGraph(tuple(nodes), {}, {})
    builder = _LayoutBuilder(nodes, replace(context, kernels=kernels), block)
    for node in nodes:
        builder.visit(node)
    used = needed(builder.nodes, context.results)
    copies = {there: value for value, there in builder.blocks.items()}
    return BlockedGraph(used, builder.constants, copies)


# -- kernels ---------------------------------------------------------------------------------------


def _shapes_of_kernels(nodes: Sequence[Node], context: LayoutContext) -> dict[str, tuple[int, ...]]:
    """Return the shapes of kernels, and of views of kernels that a backward graph reads."""
    shapes = dict(context.kernels)
    for node in nodes:
        if node.op in _SHAPE_AFTER and not node.domain and node.inputs[0] in shapes:
            shape = _SHAPE_AFTER[node.op](node, shapes[node.inputs[0]], context.constants)
            if shape:
                shapes[node.outputs[0]] = shape
    return shapes


def _transposed(
    node: Node, shape: tuple[int, ...], constants: Mapping[str, Array]
) -> tuple[int, ...]:
    """Return the shape of a kernel after a Transpose."""
    return tuple(shape[axis] for axis in integers(node, "perm", range(len(shape))[::-1]))


def _reversed(
    node: Node, shape: tuple[int, ...], constants: Mapping[str, Array]
) -> tuple[int, ...] | None:
    """Return the shape of a kernel after a Slice that reverses all taps; None for other slices."""
    arrays = [constants.get(name) for name in node.inputs[1:5]]
    if len(arrays) < 4 or any(array is None for array in arrays):
        return None
    start, end, axes, step = (tuple(array) for array in arrays if array is not None)
    taps = tuple(range(2, len(shape)))
    whole = start == step == (-1,) * len(taps) and all(last < _LAST for last in end)
    return shape if axes == taps and whole else None


def _reshaped(
    node: Node, shape: tuple[int, ...], constants: Mapping[str, Array]
) -> tuple[int, ...] | None:
    """Return the shape of a kernel after a Reshape; None if the shape is not constant."""
    sizes = constants.get(node.inputs[1])
    return tuple(int(n) for n in sizes) if sizes is not None and (sizes > 0).all() else None


_SHAPE_AFTER: Mapping[
    str, Callable[[Node, tuple[int, ...], Mapping[str, Array]], tuple[int, ...] | None]
] = {"Reshape": _reshaped, "Slice": _reversed, "Transpose": _transposed}


def _inner(node: Node, shape: Sequence[int], block: int) -> int:
    """Return the block size of the input channels of a kernel; 0 if the plain layout is faster."""
    outs, ins, *kernel = shape
    group = integer(node, "group", 1)
    small = prod(kernel) > 1 and prod(shape) <= _MOST_NUMBERS
    if len(kernel) != 2 or outs % block or not small:
        return 0
    if group == 1:
        return 1 if ins < block else block * (ins % block == 0)
    return int(ins == 1 and group == outs)


# -- images ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Draft:
    """A convolution that may be fused with the Add and the Relu that follow it."""

    node: Node  # the convolution
    inner: int  # block size of the input channels of its kernel
    result: str  # name of the result of the fused convolution
    # Name of a value in the blocked layout to add to the result; empty without an Add.
    added: str = ""
    rectified: bool = False  # whether a Relu is applied to the result


class _LayoutBuilder(NodeBuilder):
    """Builds the nodes of a graph whose convolutions use the blocked layout.

    ``blocks`` maps the name of a value in the plain layout to its name in the blocked layout.
    """

    def __init__(self, nodes: Sequence[Node], context: LayoutContext, block: int) -> None:
        super().__init__(prefix="nchwc/")
        self.blocks: dict[str, str] = {}
        self._context, self._block = context, block
        self._drafts: dict[str, _Draft] = {}
        self._kernels: dict[tuple[str, int], str] = {}
        self._splits: set[str] = set()
        self._readers: dict[str, list[Node]] = {}
        for node in nodes:
            for name in (*node.inputs, *node.captures):
                self._readers.setdefault(name, []).append(node)

    def visit(self, node: Node) -> None:
        """Add a node, or fuse it with a convolution before it."""
        shape = self._context.kernels.get(node.inputs[1]) if node.op == "Conv" else None
        inner = _inner(node, shape, self._block) if shape and not node.domain else 0
        if inner:
            self._write_or_wait(_Draft(node, inner, node.outputs[0]))
        elif node.domain or node.op not in _FUSED or not _FUSED[node.op](self, node):
            for name in (*node.inputs, *node.captures):
                if name in self._drafts:
                    self._write(self._drafts.pop(name))
            self.nodes.append(node)

    def relu(self, node: Node) -> bool:
        """Return whether a Relu was fused with a convolution before it."""
        draft = self._drafts.pop(node.inputs[0], None)
        if draft:
            self._write(replace(draft, result=node.outputs[0], rectified=True))
        return draft is not None

    def add(self, node: Node) -> bool:
        """Return whether an Add was fused with the convolution of an operand."""
        for mine, other in (node.inputs, node.inputs[::-1]):
            draft = self._drafts.get(mine)
            if draft and not draft.added and self._is_blocked_like(mine, other):
                del self._drafts[mine]
                if other in self._drafts:
                    self._write(self._drafts.pop(other))
                self._write_or_wait(
                    replace(draft, result=node.outputs[0], added=self.blocks[other])
                )
                return True
        return False

    def _is_blocked_like(self, mine: str, other: str) -> bool:
        """Return whether two values have equal shapes and ``other`` is in the blocked layout."""
        shapes = self._context.shapes
        same = mine in shapes and shapes[mine] == shapes.get(other)
        return same and (other in self.blocks or other in self._drafts)

    def _write_or_wait(self, draft: _Draft) -> None:
        """Write a convolution, or wait if its only reader may be fused with it."""
        readers = self._readers.get(draft.result, [])
        alone = len(readers) == 1 and draft.result not in self._context.results
        if alone and readers[0].op in _FUSED and not readers[0].domain:
            self._drafts[draft.result] = draft
        else:
            self._write(draft)

    def _write(self, draft: _Draft) -> None:
        """Write the nodes of a fused convolution, with its result in both layouts."""
        x, weight, *bias = draft.node.inputs
        outs, ins, *kernel = self._context.kernels[weight]
        # Images of few channels remain in the plain layout, which the convolution reads.
        if ins >= self._block or integer(draft.node, "group", 1) > 1:
            x = self._image(x)
        operands = [x, self._kernel(weight, draft.inner), *(bias or [""]), draft.added]
        while not operands[-1]:
            operands.pop()
        attributes = {**draft.node.attributes, "kernel_shape": tuple(kernel)}
        if draft.rectified:
            attributes["activation"] = "Relu"
        result = f"{draft.result} in blocks"
        self.write("Conv", operands, (result,), attributes, DOMAIN)
        self.op("ReorderOutput", result, result=draft.result, domain=DOMAIN, channels=outs)
        self.blocks[draft.result] = result

    def _image(self, x: str) -> str:
        """Write an image in the blocked layout; return its name."""
        if x not in self.blocks:
            self.blocks[x] = f"{x} in blocks"
            self.op("ReorderInput", x, result=self.blocks[x], domain=DOMAIN)
        return self.blocks[x]

    def _kernel(self, weight: str, inner: int) -> str:
        """Write a kernel in the blocked layout, with the output channels of a block last."""
        if (weight, inner) not in self._kernels:
            outs, ins, *kernel = shape = self._context.kernels[weight]
            name, size, taps = f"{weight} in blocks of {inner}", self._block, prod(kernel)
            rows = self._split(weight, outs // size, size, ins * taps)
            # A product with the unit matrix and a Transpose of whole blocks take a third of the
            # time of a Transpose of single entries.
            ones = self.constant(np.eye(size, dtype=np.float32), label=f"ones of {size}")
            blocks = f"{name}, transposed"
            self.op("FusedMatMul", rows, ones, result=blocks, domain="com.microsoft", transA=1)
            if inner > 1:
                parts = self._split(blocks, outs // size, ins // inner, inner, taps, size)
                blocks = f"{name}, moved"
                self.op("Transpose", parts, result=blocks, perm=(0, 1, 3, 2, 4))
            self.op("Reshape", blocks, self._shape_constant(*shape), result=name)
            self._kernels[weight, inner] = name
        return self._kernels[weight, inner]

    def flip(self, node: Node) -> bool:
        """Write a kernel with reversed taps by a product, in a fifth of the time of a Slice.

        Return False, without new nodes, for a kernel with too many taps.
        """
        shape = self._context.kernels.get(node.inputs[0], ())
        taps = prod(shape[2:])
        if node.outputs[0] not in self._context.kernels or not 1 < taps <= _MOST_TAPS:
            return False
        flip = self.constant(np.eye(taps, dtype=np.float32)[::-1], label=f"flip of {taps}")
        lines = self._split(node.inputs[0], -1, taps)
        flipped = f"{node.outputs[0]}, in lines"
        self.op("MatMul", lines, flip, result=flipped)
        self.op("Reshape", flipped, self._shape_constant(*shape), result=node.outputs[0])
        return True

    def _split(self, value: str, *shape: int) -> str:
        """Write a Reshape of a value to a shape, once; return the name of the result."""
        result = f"{value} as {'×'.join(map(str, shape))}"
        if result not in self._splits:
            self.op("Reshape", value, self._shape_constant(*shape), result=result)
        self._splits.add(result)
        return result

    def _shape_constant(self, *shape: int) -> str:
        return self.constant(np.array(shape, np.int64), label=f"shape {'×'.join(map(str, shape))}")


_FUSED: Mapping[str, Callable[[_LayoutBuilder, Node], bool]] = {
    "Add": _LayoutBuilder.add,
    "Relu": _LayoutBuilder.relu,
    "Slice": _LayoutBuilder.flip,
}
