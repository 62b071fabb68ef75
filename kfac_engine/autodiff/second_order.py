"""Reverse mode twice: products with the Jacobian itself, and second derivatives.

The backward graph takes a cotangent c to Jᵀ c. Being linear in c, it has ``v ↦ J v`` as its own
vector–Jacobian product with respect to c, at any c; and its vector–Jacobian product with respect to
the values that J belongs to is the second derivative of ``⟨c, outputs⟩``, times v. So one table of
derivative rules serves all three products.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from kfac_engine._types import Array
from kfac_engine.autodiff.differentiate import Backward, differentiate, needed
from kfac_engine.autodiff.rules.attributes import integer
from kfac_engine.graph.structure import Fact, Graph, Input, Node


def joint_graph(graph: Graph, backward: Backward) -> Graph:
    """Forward and backward graph in one: data inputs and cotangents in, gradients out.

    Args:
        graph: The forward graph.
        backward: A backward graph of it.

    Returns:
        A graph whose outputs are the gradients, each once: values may share one.
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
    """The graph that maps tangents to changes of outputs, and to changes of gradients.

    Args:
        graph: The forward graph.
        backward: Its backward graph, from some outputs to some values.
        facts: Element type and shape of every value of ``joint_graph``, from a run on a batch. The
            result serves batches of this shape: kernels that are cotangents have sides that
            depend on the batch.
        wrt: Values of which the second derivative is asked for as well, independent variables.

    Returns:
        A backward graph of its own. It takes the cotangents of ``backward`` and, as cotangents of
        the *gradients*, tangents. Its gradients with respect to the cotangents are ``J v`` by the
        name of the cotangent; with respect to ``wrt``, the second derivative times v.

    Raises:
        UnsupportedOpError: An operator in ``backward`` has no derivative rule.
    """
    joint = joint_graph(graph, backward)
    variables = (*backward.cotangents.values(), *wrt)
    second = differentiate(joint, facts, joint.outputs, variables, independent=True)
    shapes = _shapes((*backward.nodes, *second.forward_nodes), facts)
    outer, inner = _parted(
        second.forward_nodes, {*_made(backward.nodes), *backward.dtypes, *shapes}
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
    """What the Shape nodes among ``nodes`` give: without them no value is computed for its size."""
    known = (node for node in nodes if node.op == "Shape" and node.inputs[0] in facts)
    return {node.outputs[0]: _shape_result(node, facts[node.inputs[0]].shape) for node in known}


def _shape_result(node: Node, shape: tuple[int, ...]) -> Array:
    start, end = integer(node, "start", 0), integer(node, "end", len(shape))
    return np.array(shape[start:end], np.int64)


def _parted(nodes: Sequence[Node], behind: set[str]) -> tuple[list[Node], list[Node]]:
    """Nodes that read forward values alone, and those that read ``behind`` or each other."""
    outer: list[Node] = []
    inner: list[Node] = []
    for node in nodes:
        if behind.isdisjoint(node.inputs):
            outer.append(node)
        else:
            inner.append(node)
            behind.update(node.outputs)
    return outer, inner


def _made(nodes: Sequence[Node]) -> set[str]:
    return {name for node in nodes for name in node.outputs}


def _read_from_outside(nodes: Sequence[Node], given: set[str]) -> tuple[str, ...]:
    results = _made(nodes)
    reads = dict.fromkeys(name for node in nodes for name in node.inputs if name)
    return tuple(name for name in reads if name not in results and name not in given)
