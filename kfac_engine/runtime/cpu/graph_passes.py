"""Lists the graph passes that reduce a session's time or memory on a CPU.

A model runs any subset of the passes, with the same results. A pass that saves time must save 5 %
of a step; docs/performance.md lists the measured ratios.

ONNX Runtime also fuses a Transpose with the MatMul or the Gemm that reads or computes it. It then
runs the fused node after all other nodes that are ready, so that hundreds of results remain in
memory. If no Transpose remains to be fused, it runs nodes in the order of the graph.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_texts
from kfac_engine.autodiff.differentiate import Backward
from kfac_engine.backend.memory_space import HOST
from kfac_engine.errors import BackendError
from kfac_engine.graph.structure import Input, Node, values_read
from kfac_engine.graph.write import compact_model
from kfac_engine.registry import Registry
from kfac_engine.runtime.context import SessionContext
from kfac_engine.runtime.cpu.nchwc_layout import (
    DOMAIN,
    BlockedGraph,
    LayoutContext,
    convert_to_blocked,
)
from kfac_engine.sessions.session import Session

_FLOAT = np.dtype(np.float32)

# A multiple of the block size of ONNX Runtime on every processor.
_CHANNELS = 32


def to_blocked_layout(
    context: SessionContext,
    nodes: Sequence[Node],
    results: Collection[str],
    constants: Mapping[str, Array],
) -> BlockedGraph:
    """Return a graph with the same results whose convolutions use the blocked layout.

    The nodes do not change on a GPU or without the pass. The constants may include parameters.
    """
    if context.memory_space is not HOST or BLOCKED_LAYOUT not in context.graph_passes:
        return BlockedGraph(tuple(nodes), {}, {})
    facts = context.facts
    fixed = {name: array for name, array in constants.items() if name not in context.parameters}
    kernels = {
        name: facts[name].shape
        for name in {name for node in nodes for name in node.inputs}.difference(fixed)
        if name in facts and facts[name].dtype == _FLOAT and context.is_static(name)
    }
    shapes = {name: fact.shape for name, fact in facts.items()}
    return convert_to_blocked(
        nodes, LayoutContext(results, kernels, shapes, fixed), channel_block()
    )


@cache
def channel_block() -> int:
    """Return the number of channels in a block of ONNX Runtime; 0 without a blocked layout."""
    x = np.arange(2 * _CHANNELS, dtype=_FLOAT).reshape(1, _CHANNELS, 1, 2)
    try:
        (reordered,) = _tried([Node("ReorderInput", ("x",), ("y",), {}, "reorder", DOMAIN)], x)
        # The second pixel of the first channel, with the value 1, comes after the first block.
        block = int(np.argmax(reordered.ravel() == 1))
        if block < 2 or _CHANNELS % block:
            return 0
        conv = Node("Conv", ("x", "w"), ("c",), {"pads": (1, 0, 1, 0)}, "conv")
        nodes = [conv, Node("Add", ("c", "c"), ("y",), {}, "add")]
        layout = LayoutContext({"y"}, {"w": _trial_kernel().shape}, {}, {})
        blocked = convert_to_blocked(nodes, layout, block)
        pair = [
            _tried(trial, x, constants)
            for trial, constants in ((nodes, {}), (blocked.nodes, blocked.constants))
        ]
    except BackendError:
        return 0
    return block if np.array_equal(pair[0][0], pair[1][0]) else 0


def _trial_kernel() -> Array:
    """Return a kernel of small integers, for which sums are exact in every order."""
    return (np.arange(_CHANNELS**2 * 3) % 5).astype(_FLOAT).reshape(_CHANNELS, _CHANNELS, 3, 1)


def _tried(
    nodes: Sequence[Node], x: Array, constants: Mapping[str, Array] | None = None
) -> list[Array]:
    inputs = [Input(name, _FLOAT, (None,) * 4) for name in ("x", "w")]
    model = compact_model(nodes, inputs, ("y",), constants or {}, 18, name="trial", once=True)
    session = Session(model, threads=1, once=True, what="a trial of layouts")
    return list(session.run(("y",), {"x": x, "w": _trial_kernel()}).values())


BLOCKED_LAYOUT: Final = "blocked_layout"
FUSED_TRANSPOSES: Final = "fused_transposes"
WEIGHT_GRADIENTS: Final = "weight_gradients"

# Map from the name of a pass to its purpose.
PASSES = Registry(
    "graph pass",
    {
        BLOCKED_LAYOUT: "convolutions on images in ONNX Runtime's blocked layout NCHWc",
        FUSED_TRANSPOSES: "transposes within the products that read them",
        WEIGHT_GRADIENTS: "gradients of convolution kernels by BLAS, outside ONNX Runtime",
    },
)


def chosen_passes(names: Sequence[str] | None) -> frozenset[str]:
    """Return the checked names of the passes that a model runs; all names if ``names`` is None.

    ``InputError`` is raised if ``names`` is not a list of strings, and ``UnknownNameError`` if a
    name is not in ``PASSES``.
    """
    if names is None:
        return frozenset(PASSES)
    check_texts("graph_passes", names, "['blocked_layout']")
    for name in names:
        PASSES[name]
    return frozenset(names)


_DOMAIN = "com.microsoft"


def fused_forward(
    context: SessionContext, nodes: Sequence[Node], results: Collection[str]
) -> tuple[Node, ...]:
    """Return nodes of the forward graph, with transposes fused with the products that read them.

    The nodes have the same results in the same order, and only ONNX Runtime can run them. Products
    are not fused if they are not float32, because the fused operator supports no other type. Pairs
    of inverse transposes are removed even without the pass, because ONNX Runtime fails on some of
    them.
    """
    facts = context.facts

    def fuses(node: Node) -> bool:
        return node.outputs[0] in facts and facts[node.outputs[0]].dtype == _FLOAT

    return _fused_products(context, nodes, results, fuses)


def fused_backward(context: SessionContext, backward: Backward) -> tuple[Node, ...]:
    """Return the nodes of a backward graph; as ``fused_forward``."""
    single = {*backward.dtypes.values()} == {_FLOAT}
    results = {*backward.gradients.values()}
    return _fused_products(context, backward.nodes, results, lambda _: single)


def _fused_products(
    context: SessionContext,
    nodes: Sequence[Node],
    results: Collection[str],
    fuses: Callable[[Node], bool],
) -> tuple[Node, ...]:
    nodes = tuple(_without_round_trips(nodes, results))
    if FUSED_TRANSPOSES in context.graph_passes:
        operands = {node.outputs[0]: node.inputs[0] for node in nodes if _swaps_last(node)}
        nodes = tuple(
            _fused(n, operands) if n.op == "Gemm" or (n.op == "MatMul" and fuses(n)) else n
            for n in nodes
        )
        nodes = tuple(_with_transposed_results(nodes, results))
    read = values_read(nodes).union(results)
    return tuple(node for node in nodes if node.op != "Transpose" or node.outputs[0] in read)


def _without_round_trips(nodes: Sequence[Node], results: Collection[str]) -> Iterator[Node]:
    """Yield the nodes, which read a value itself instead of the transpose of its transpose."""
    # ONNX Runtime removes both, and fails if the second transpose computes a result of the graph.
    transposes = {node.outputs[0]: node for node in nodes if node.op == "Transpose"}
    read_elsewhere = {name for node in nodes for name in node.captures}.union(results)
    sources: dict[str, str] = {}
    for node in nodes:
        result = node.outputs[0]
        first = transposes.get(node.inputs[0]) if node.op == "Transpose" else None
        if first and _undoes(node.attributes.get("perm"), first.attributes.get("perm")):
            sources[result] = source = sources.get(first.inputs[0], first.inputs[0])
            if result in read_elsewhere:
                yield Node("Identity", (source,), (result,), {}, node.name)
        elif sources.keys().isdisjoint(node.inputs):
            yield node
        else:
            yield replace(node, inputs=tuple(sources.get(name, name) for name in node.inputs))


def _with_transposed_results(nodes: Sequence[Node], results: Collection[str]) -> Iterator[Node]:
    """Yield the nodes; a Gemm computes the transpose of its result where nothing else is read."""
    reads = Counter(name for node in nodes for name in (*node.inputs, *node.captures))
    products = {
        node.outputs[0]: node
        for node in nodes
        if node.op == "Gemm" and len(node.inputs) == 2 and reads[node.outputs[0]] == 1
    }
    fused = {
        node.outputs[0]: products[node.inputs[0]]
        for node in nodes
        if _swaps_last(node) and node.inputs[0] in products.keys() - {*results}
    }
    dropped = {product.outputs[0] for product in fused.values()}
    for node in nodes:
        product = fused.get(node.outputs[0])
        if product:
            flags = product.attributes
            swapped = {
                "transA": 1 - int(bool(flags.get("transB"))),
                "transB": 1 - int(bool(flags.get("transA"))),
            }
            inputs = (product.inputs[1], product.inputs[0])
            yield replace(
                product, inputs=inputs, outputs=node.outputs, attributes={**flags, **swapped}
            )
        elif node.outputs[0] not in dropped:
            yield node


def _undoes(perm: object, first: object) -> bool:
    if not (isinstance(perm, tuple | list) and isinstance(first, tuple | list)):
        return perm is None and first is None  # both reverse all axes
    return [first[axis] for axis in perm] == [*range(len(perm))]


def _swaps_last(node: Node) -> bool:
    perm = node.attributes.get("perm")
    if node.op != "Transpose" or not isinstance(perm, tuple | list) or len(perm) < 2:
        return False
    return [*perm] == [*range(len(perm) - 2), len(perm) - 1, len(perm) - 2]


def _fused(node: Node, transposed: Mapping[str, str]) -> Node:
    operands, others = node.inputs[:2], node.inputs[2:]
    names = [transposed.get(name, name) for name in operands]
    if names == [*operands]:
        return node
    flags = {
        flag: int(bool(node.attributes.get(flag)) != (name != old))
        for flag, name, old in zip(("transA", "transB"), names, operands, strict=True)
    }
    fused = replace(node, inputs=(*names, *others), attributes={**node.attributes, **flags})
    return fused if node.op == "Gemm" else replace(fused, op="FusedMatMul", domain=_DOMAIN)
