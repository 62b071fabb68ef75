"""Computes products with the Jacobian and second derivatives by applying reverse mode twice.

The backward graph is a linear map from a cotangent c to ``Jᵀ c``. Its vector–Jacobian product with
respect to c is ``v ↦ J v``, for any c. Its vector–Jacobian product with respect to the variables is
the second derivative of ``⟨c, outputs⟩`` times v. All three products use the same table of
derivative rules.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import Backward, differentiate, needed
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.graph.structure import Fact, Graph, Input, Node


def joint_graph(graph: Graph, backward: Backward) -> Graph:
    """Return the forward and backward graph as one, from data and cotangents to gradients.

    Each gradient is one output, even if several values share it.
    """
    cotangents = (Input(name, dtype, None) for name, dtype in backward.dtypes.items())
    return Graph(
        nodes=(*graph.nodes, *backward.forward_nodes, *backward.nodes),
        inputs=(*graph.inputs, *cotangents),
        outputs=tuple(dict.fromkeys(backward.gradients.values())),
        constants={**graph.constants, **backward.constants},
        opset=graph.opset,
        name=graph.name,
        domains=graph.domains,
    )


def differentiate_twice(
    graph: Graph, backward: Backward, facts: Mapping[str, Fact], wrt: Sequence[str] = ()
) -> Backward:
    """Return the graph that maps tangents to derivatives of outputs and of gradients.

    ``facts`` are of every value of ``joint_graph``, from a run on a batch. The result is valid for
    batches of this shape only, because convolutions with cotangents as kernels depend on the batch.
    ``wrt`` are the independent variables of the second derivative.

    The inputs of the graph are the cotangents of ``backward`` and, as cotangents of the
    *gradients*, tangents. Its gradients with respect to the cotangents are ``J v``; those with
    respect to ``wrt`` are the second derivative times v.
    """
    joint = joint_graph(graph, backward)
    variables = (*backward.cotangents.values(), *wrt)
    second = differentiate(joint, facts, joint.outputs, variables, independent=True)
    shapes = _shapes((*backward.nodes, *second.forward_nodes), facts)
    outer, inner = _divide(
        second.forward_nodes, {*_results(backward.nodes), *backward.dtypes, *shapes}
    )
    every = (*backward.nodes, *inner, *second.nodes)
    rest = [node for node in every if shapes.keys().isdisjoint(node.outputs)]
    nodes = needed(rest, second.gradients.values())
    constants = {**backward.constants, **second.constants, **shapes}
    return Backward(
        nodes=nodes,
        constants=constants,
        forward_nodes=(*backward.forward_nodes, *outer),
        saved=_read_from_outside(nodes, {*constants, *second.dtypes, *backward.dtypes}),
        cotangents={**backward.cotangents, **second.cotangents},
        gradients=second.gradients,
        dtypes={**backward.dtypes, **second.dtypes},
    )


def _shapes(nodes: Sequence[Node], facts: Mapping[str, Fact]) -> dict[str, Array]:
    """Return the results of the Shape nodes, so that no value is computed for its size only."""
    known = (node for node in nodes if node.op == "Shape" and node.inputs[0] in facts)
    return {node.outputs[0]: _shape_result(node, facts[node.inputs[0]].shape) for node in known}


def _shape_result(node: Node, shape: tuple[int, ...]) -> Array:
    start, end = integer(node, "start", 0), integer(node, "end", len(shape))
    return np.array(shape[start:end], np.int64)


def _divide(nodes: Sequence[Node], behind: set[str]) -> tuple[list[Node], list[Node]]:
    """Return the nodes that read forward values only, and the nodes that depend on ``behind``."""
    outer: list[Node] = []
    inner: list[Node] = []
    for node in nodes:
        if behind.isdisjoint(node.inputs):
            outer.append(node)
        else:
            inner.append(node)
            behind.update(node.outputs)
    return outer, inner


def _results(nodes: Sequence[Node]) -> set[str]:
    return {name for node in nodes for name in node.outputs}


def _read_from_outside(nodes: Sequence[Node], excluded: set[str]) -> tuple[str, ...]:
    results = _results(nodes)
    reads = dict.fromkeys(name for node in nodes for name in node.inputs if name)
    return tuple(name for name in reads if name not in results and name not in excluded)
