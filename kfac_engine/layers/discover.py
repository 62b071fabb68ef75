"""Layers in a graph: every trainable parameter belongs to one, or is listed with the reason."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from kfac_engine.graph.structure import Graph, Node
from kfac_engine.layers.views import Padding


@dataclass(frozen=True, slots=True)
class Found:
    """A layer, or a parameter without one.

    Attributes:
        kind: ``"fully_connected"``, ``"conv2d"`` or ``"generic"``.
        parameters: The weight and the bias if there is one; a single parameter if generic.
        inputs: Name of the layer's input; empty if generic.
        outputs: Name of its output before any nonlinearity; empty if generic.
        options: Keyword arguments of the registration: formats, strides, padding.
        reason: Why a parameter is generic; empty for layers.
    """

    kind: str
    parameters: tuple[str, ...]
    inputs: str = ""
    outputs: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Scene:
    """What a matcher looks at."""

    graph: Graph
    trainable: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]

    def is_weight(self, name: str, rank: int) -> bool:
        return name in self.trainable and len(self.shapes[name]) == rank

    def is_bias(self, name: str, d_out: int, channel_axes: int = 0) -> bool:
        """Whether a parameter adds one number a feature, ``channel_axes`` axes before the end."""
        if name not in self.trainable or len(self.graph.consumers[name]) != 1:
            return False
        shape = self.shapes[name]
        position = len(shape) - 1 - channel_axes
        return position >= 0 and all(
            side == (d_out if axis == position else 1) for axis, side in enumerate(shape)
        )


# A matcher returns the layer a node is, or the reason why its weight makes none.
Matcher: TypeAlias = Callable[[_Scene, Node, int], Found | str]


def discover(
    graph: Graph, trainable: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Found, ...]:
    """All layers of a graph, then the parameters without one.

    Args:
        graph: The canonical graph.
        trainable: Names of the trainable parameters.
        shapes: Shape of every value in a sample run.

    Returns:
        Layers in topological order, generic parameters after them; each parameter is in exactly
        one.
    """
    scene = _Scene(graph, frozenset(trainable), shapes)
    layers: list[Found] = []
    reasons: dict[str, str] = {}
    for node in graph.nodes:
        for index, name in enumerate(node.inputs):
            if name in scene.trainable and name not in reasons:
                found = _match(scene, node, index)
                if isinstance(found, Found):
                    layers.append(found)
                else:
                    reasons[name] = found
    claimed = {name for layer in layers for name in layer.parameters}
    generic = [
        Found("generic", (name,), reason=reasons.get(name, "no operator of the graph reads it"))
        for name in trainable
        if name not in claimed
    ]
    return (*layers, *generic)


def _match(scene: _Scene, node: Node, index: int) -> Found | str:
    """The layer whose weight is operand ``index`` of ``node``."""
    name = node.inputs[index]
    uses = scene.graph.consumers[name]
    if len(uses) > 1:
        return f"used {len(uses)} times, by {', '.join(sorted({user.op for user, _ in uses}))}"
    matcher = _MATCHERS.get((node.qualified_op, index))
    if matcher is None:
        return _ROLES.get((node.qualified_op, index), f"operand {index} of {node.qualified_op}")
    return matcher(scene, node, index)


def _gemm(scene: _Scene, node: Node, index: int) -> Found | str:
    x, weight = node.inputs[0], node.inputs[index]
    scaled = {"alpha", "beta", "transA"}.intersection(
        key
        for key, neutral in (("alpha", 1), ("beta", 1), ("transA", 0))
        if node.attributes.get(key, neutral) != neutral
    )
    if scaled:
        return f"Gemm with {', '.join(sorted(scaled))}"
    transposed = bool(node.attributes.get("transB", 0))
    d_out = scene.shapes[weight][0 if transposed else 1]
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    return Found(
        "fully_connected",
        (weight, bias) if scene.is_bias(bias, d_out) else (weight,),
        x,
        node.outputs[0],
        {"weight_format": "OI" if transposed else "IO"},
    )


def _matmul(scene: _Scene, node: Node, index: int) -> Found | str:
    weight, x = node.inputs[index], node.inputs[1 - index]
    if not scene.is_weight(weight, 2) or len(scene.shapes[x]) < 2:
        return f"MatMul of shapes {' and '.join(str(scene.shapes[n]) for n in node.inputs)}"
    left = index == 0  # s = W·x: features are the last axis but one
    d_out = scene.shapes[weight][0 if left else 1]
    outputs, bias = _with_bias(scene, node.outputs[0], d_out, channel_axes=1 if left else 0)
    options: dict[str, object] = {"weight_format": "OI" if left else "IO"}
    if left:
        options["feature_axis"] = -2
    return Found("fully_connected", (weight, *bias), x, outputs, options)


def _conv(scene: _Scene, node: Node, index: int) -> Found | str:
    x, weight = node.inputs[0], node.inputs[index]
    shape = scene.shapes[weight]
    groups = node.attributes.get("group", 1)
    if len(shape) != 4 or groups != 1:
        return f"convolution over {len(shape) - 2} axes in {groups} group(s)"
    bias: tuple[str, ...] = ()
    outputs = node.outputs[0]
    if len(node.inputs) > 2 and scene.is_bias(node.inputs[2], shape[0]):
        bias = (node.inputs[2],)
    elif len(node.inputs) < 3 or not node.inputs[2]:
        outputs, bias = _with_bias(scene, outputs, shape[0], channel_axes=2)
    return Found("conv2d", (weight, *bias), x, outputs, _conv_options(node))


def _conv_options(node: Node) -> dict[str, object]:
    return {
        "strides": node.attributes.get("strides", (1, 1)),
        "dilations": node.attributes.get("dilations", (1, 1)),
        "padding": _padding(node),
        "data_format": "NCHW",
        "weight_format": "OIHW",
    }


def _padding(node: Node) -> Padding:
    automatic = node.attributes.get("auto_pad", "NOTSET")
    if automatic != "NOTSET":
        return {"SAME_UPPER": "SAME"}.get(str(automatic), str(automatic))
    pads = cast("tuple[int, ...]", node.attributes.get("pads", (0, 0, 0, 0)))
    half = len(pads) // 2
    return tuple(zip(pads[:half], pads[half:], strict=True))


def _with_bias(
    scene: _Scene, value: str, d_out: int, channel_axes: int
) -> tuple[str, tuple[str, ...]]:
    """The pre-activation and its bias, where ``value`` goes straight into an Add with one."""
    users = scene.graph.consumers.get(value, ())
    if len(users) == 1 and users[0][0].op == "Add" and value not in scene.graph.outputs:
        add, position = users[0]
        bias = add.inputs[1 - position]
        wide = (
            len(scene.shapes[value]) >= len(scene.shapes[bias]) if bias in scene.shapes else False
        )
        if wide and scene.is_bias(bias, d_out, channel_axes):
            return add.outputs[0], (bias,)
    return value, ()


_MATCHERS: Mapping[tuple[str, int], Matcher] = {
    ("Gemm", 1): _gemm,
    ("MatMul", 0): _matmul,
    ("MatMul", 1): _matmul,
    ("Conv", 1): _conv,
}

# What a parameter without a layer is, by the operand it is.
_ROLES: Mapping[tuple[str, int], str] = {
    ("LayerNormalization", 1): "scale of LayerNormalization",
    ("LayerNormalization", 2): "shift of LayerNormalization",
    ("BatchNormalization", 1): "scale of BatchNormalization",
    ("BatchNormalization", 2): "shift of BatchNormalization",
    ("InstanceNormalization", 1): "scale of InstanceNormalization",
    ("InstanceNormalization", 2): "shift of InstanceNormalization",
    ("Gather", 0): "table of Gather (an embedding)",
    ("Gemm", 2): "added by Gemm, but not one number a column",
    ("Conv", 2): "bias of Conv, but not one number a channel",
    ("ConvTranspose", 1): "filter of a transposed convolution",
}
