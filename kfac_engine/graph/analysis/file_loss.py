"""Recognizes losses that a graph computes itself, from logits and an input of labels.

Two operators of ONNX are losses, and exporters write others in a few nodes:

- ``SoftmaxCrossEntropyLoss``, and ``NegativeLogLikelihoodLoss`` of a ``LogSoftmax``;
- the entries of a ``LogSoftmax`` that ``GatherElements`` takes at the labels;
- the sigmoid cross-entropy, in two forms;
- the square of a difference.

A mean or a sum over all entries follows, a mean weighted by an input, or no reduction. Logits and
labels that are flattened together, position by position, are recognized in the form before.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from kfac_engine._types import Array
from kfac_engine.graph.analysis.subgraph import SubGraph, read_by
from kfac_engine.graph.structure import Graph, Node

Distribution = Literal["categorical", "multi_bernoulli", "normal"]
_SAME = {"Identity", "Squeeze"}
_REDUCTIONS = {"ReduceMean": "mean", "ReduceSum": "sum"}


@dataclass(frozen=True, slots=True)
class FileLoss:
    """A loss that the file itself computes."""

    distribution: Distribution  # distribution of the labels
    output: str  # name of the output with the loss
    value: str  # the logits or means of the distribution
    labels: str  # name of the input of the labels
    targets: str  # the value of the labels that the loss reads; a function of ``labels``
    class_axis: int  # axis of the classes or features in ``value``
    reduction: str  # reduction over all entries; ``"none"`` if the output has a loss for each entry
    # Options of the distribution: ``ignore_index`` and ``class_weights``.
    options: Mapping[str, int | Array | None] = field(default_factory=dict)
    # The number of axes that ``value`` must have, so that ``class_axis`` has the classes; 0 for any
    # number.
    rank: int = 0
    # Name of an input with the weights of the labels, of their shape; empty for none.
    weights: str = ""

    def logits_graph(self, graph: Graph) -> Graph:
        """Return the graph whose only output is ``value``, without labels and their weights."""
        nodes, _ = _ancestors(graph, self.value)
        inputs = tuple(e for e in graph.inputs if e.name not in {self.labels, self.weights})
        return _part(graph, nodes, inputs={entry.name for entry in inputs}, output=self.value)

    def labels_graph(self, graph: Graph) -> Graph:
        """Return the graph from ``labels`` to ``targets``, without constants of the network."""
        nodes, _ = _ancestors(graph, self.targets)
        part = _part(graph, nodes, inputs={self.labels}, output=self.targets)
        return replace(part, constants=read_by(nodes, graph.constants, excluded=()))


def file_loss(graph: Graph, output: str) -> FileLoss | None:
    """Return the loss that an output of a canonical graph contains, before the graph is lowered.

    None stands for an output that is none of the known losses, or whose labels are computed from
    other inputs or read by the network as well.
    """
    inner, reduction, sign = _reduced(graph, output)
    mask = ""
    if reduction == "none" and (masked := _masked(graph, inner)) is not None:
        (inner, none, inner_sign), mask = _reduced(graph, masked[0]), masked[1]
        if none != "none":
            return None
        reduction, sign = "mean", sign * inner_sign * masked[2]
    maker = graph.producers.get(inner)
    if maker is None or maker.domain or maker.outputs[0] != inner:
        return None
    loss = None
    if maker.op in {"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"} and sign > 0:
        loss = _operator(graph, maker, reduction, output)
    elif maker.op == "GatherElements" and sign < 0:
        loss = _gathered(graph, maker, reduction, output)
    elif mask:
        return None
    elif maker.op == ("Sub" if sign > 0 else "Add") and reduction != "none":
        loss = _sigmoid(graph, maker, reduction, output)
    elif maker.op in {"Mul", "Pow"} and sign > 0 and reduction != "none":
        loss = _square(graph, maker, reduction, output)
    if loss is None or (mask and (loss.targets != loss.labels or loss.labels == mask)):
        return None
    _, of_value = _ancestors(graph, loss.value)
    return None if {loss.labels, mask} & of_value else replace(loss, weights=mask)


def _masked(graph: Graph, name: str) -> tuple[str, str, int] | None:
    """Return a weighted mean as its terms, the input with their weights, and its sign."""
    node = graph.producers.get(name)
    if node is None or node.op != "Div":
        return None
    (product, first, sign), (total, second, positive) = (_reduced(graph, n) for n in node.inputs)
    maker = graph.producers.get(product)
    if maker is None or maker.op != "Mul" or (first, second, positive) != ("sum", "sum", 1):
        return None
    if total not in maker.inputs:
        return None
    terms = maker.inputs[1 - maker.inputs.index(total)]
    weights = _argument(graph, total, "Cast") or total
    names = {entry.name for entry in graph.inputs}
    return (terms, weights, sign) if weights in names else None


def _reduced(graph: Graph, name: str) -> tuple[str, str, int]:
    """Return the value that an output is the mean or the sum of, up to its sign."""
    reduction, sign = "none", 1
    while (node := graph.producers.get(name)) is not None and not node.domain:
        axes = node.operand(1)
        if node.op == "Neg":
            sign = -sign
        elif node.op in _REDUCTIONS and not axes and reduction == "none":
            if node.attributes.get("noop_with_empty_axes", 0) or "axes" in node.attributes:
                break
            reduction = _REDUCTIONS[node.op]
        elif node.op not in _SAME:
            break
        name = node.inputs[0]
    return name, reduction, sign


def _operator(graph: Graph, node: Node, outer: str, output: str) -> FileLoss | None:
    """Return the loss of one of ONNX's operators."""
    scores, labels, weights = (*node.inputs, "")[:3]
    inner = str(node.attributes.get("reduction", "mean"))
    constant = graph.constants.get(weights) if weights else None
    if weights and constant is None:
        return None
    ignored = node.attributes.get("ignore_index")
    reduction = inner
    if inner == "none" and outer != "none":
        # A mean of the single terms divides by those that are ignored, and not by the weights.
        if constant is not None and outer == "mean":
            return None
        ignored = None if outer == "mean" else ignored
        reduction = outer
    axis, rank = 1, 0
    if node.op == "NegativeLogLikelihoodLoss":
        source = graph.producers.get(scores)
        if source is None or source.op != "LogSoftmax":
            return None
        scores, axis = source.inputs[0], int(str(source.attributes.get("axis", -1)))
        rank = 2 if axis < 0 else 0
        if axis not in (-1, 1):
            return None
    options: dict[str, int | Array | None] = {
        "ignore_index": None if ignored is None else int(str(ignored)),
        "class_weights": constant,
    }
    loss = _with_labels(graph, "categorical", output, scores, labels, axis, reduction, options)
    if loss is None or loss.value != scores:
        return loss
    return replace(loss, rank=rank)


def _gathered(graph: Graph, node: Node, reduction: str, output: str) -> FileLoss | None:
    """Return the cross-entropy that is written as entries of a LogSoftmax."""
    source, axis = graph.producers.get(node.inputs[0]), node.attributes.get("axis", 0)
    if source is None or source.op != "LogSoftmax":
        return None
    if source.attributes.get("axis", -1) != axis:
        return None
    index = graph.producers.get(node.inputs[1])
    if index is None or index.op != "Unsqueeze":
        return None
    axes = graph.constants.get(index.inputs[1])
    added = None if axes is None or axes.size != 1 else int(axes.reshape(-1)[0])
    if added is None or (added != axis and not (axis == -1 and added > 0)):
        return None
    options: dict[str, int | Array | None] = {"ignore_index": None}
    loss = _with_labels(
        graph, "categorical", output, source.inputs[0], index.inputs[0], int(str(axis)), reduction,
        options,
    )  # fmt: skip
    # The added axis is the last one of values with one axis more.
    return loss if loss is None or added == axis else replace(loss, rank=added + 1)


def _sigmoid(graph: Graph, node: Node, reduction: str, output: str) -> FileLoss | None:
    """Return the sigmoid cross-entropy of logits z, with s = sigmoid(z).

    Exporters write ``(1 − t)·z − log s``, or the negative of ``t·log s + (1 − t)·log(1 − s)``.
    """
    terms = [graph.producers.get(name) for name in node.inputs]
    products = [term for term in terms if term is not None and term.op == "Mul"]
    operands = [product.inputs for product in products]
    for pair in [*operands, *(names[::-1] for names in operands)]:
        labels, logits = _complement(graph, pair[0]), pair[1]
        if labels is None:
            continue
        if node.op == "Sub" and terms[0] in products:
            value = _argument(graph, node.inputs[1], "Log", "Sigmoid")
            matches = value == logits
        else:
            inner = _argument(graph, logits, "Log")
            value = _argument(graph, _complement(graph, inner or "") or "", "Sigmoid")
            others = [names for names in operands if set(names) != set(pair)]
            matches = len(others) == 1 and any(
                name == labels and _argument(graph, other, "Log", "Sigmoid") == value
                for name, other in (others[0], others[0][::-1])
            )
        if value is not None and matches:
            options: dict[str, int | Array | None] = {"ignore_index": None}
            return _with_labels(
                graph, "multi_bernoulli", output, value, labels, -1, reduction, options
            )
    return None


def _argument(graph: Graph, name: str, *ops: str) -> str | None:
    """Return the operand of nested functions; ``ops`` starts with the outermost function."""
    for op in ops:
        node = graph.producers.get(name)
        if node is None or node.op != op:
            return None
        name = node.inputs[0]
    return name


def _complement(graph: Graph, name: str) -> str | None:
    """Return x for the value ``1 − x``."""
    node = graph.producers.get(name)
    if node is None or node.op != "Sub":
        return None
    one = graph.constants.get(node.inputs[0])
    return node.inputs[1] if one is not None and one.size == 1 and (one == 1).all() else None


def _square(graph: Graph, node: Node, reduction: str, output: str) -> FileLoss | None:
    """Return the squared error."""
    if node.op == "Pow":
        power = graph.constants.get(node.inputs[1])
        if power is None or power.size != 1 or float(power.reshape(-1)[0]) != 2:
            return None
    differences = [
        graph.producers.get(name) for name in node.inputs[: 2 if node.op == "Mul" else 1]
    ]
    operands = {
        tuple(_unexpanded(graph, name) for name in difference.inputs)
        for difference in differences
        if difference is not None and difference.op == "Sub"
    }
    if len(operands) != 1 or None in differences:
        return None
    first, second = next(iter(operands))
    sides = ((first, second), (second, first))
    losses = (_with_labels(graph, "normal", output, *side, -1, reduction, {}) for side in sides)
    return next((loss for loss in losses if loss is not None), None)


def _with_labels(  # noqa: PLR0913 (the fields of a loss)
    graph: Graph,
    distribution: Distribution,
    output: str,
    value: str,
    targets: str,
    axis: int,
    reduction: str,
    options: Mapping[str, int | Array | None],
) -> FileLoss | None:
    """Return a loss if its targets are a function of one input."""
    flat, labels = graph.producers.get(value), graph.producers.get(targets)
    if flat is not None and labels is not None and flat.op == labels.op == "Reshape":
        sizes = [graph.constants.get(node.inputs[1]) for node in (flat, labels)]
        if [None if s is None else s.size for s in sizes] == [2, 1]:
            # Rows of classes and their labels, position by position.
            value, targets, axis = flat.inputs[0], labels.inputs[0], -1
    nodes, read = _ancestors(graph, targets)
    operands = {name for node in nodes for name in node.inputs}
    weights = (graph.constants[name] for name in operands if name in graph.constants)
    # A network that computes the targets has weights.
    if len(read) != 1 or any(a.dtype.kind == "f" and a.size > 1 for a in weights):
        return None
    return FileLoss(
        distribution, output, value, next(iter(read)), targets, axis, reduction, options
    )


def _unexpanded(graph: Graph, name: str) -> str:
    """Return the operand of an ``Expand``, which the squared error of PyTorch's exporter has."""
    node = graph.producers.get(name)
    return node.inputs[0] if node is not None and node.op == "Expand" else name


def _ancestors(graph: Graph, name: str) -> tuple[tuple[Node, ...], set[str]]:
    """Return the nodes that compute a value, in order, and the inputs that it depends on."""
    part = SubGraph(graph, [name])
    return part.nodes, set(part.filter_list(entry.name for entry in graph.inputs))


def _part(graph: Graph, nodes: tuple[Node, ...], *, inputs: Collection[str], output: str) -> Graph:
    """Return some nodes of a graph, with all its constants."""
    entries = tuple(entry for entry in graph.inputs if entry.name in inputs)
    return replace(graph, nodes=nodes, inputs=entries, outputs=(output,))
