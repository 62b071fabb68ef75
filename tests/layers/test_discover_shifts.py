"""What makes a parameter a shift, a slope or the scale of a norm, and what does not."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models


def layers(build, sides, outputs=None, **options):
    """Parameters to the kind of their layer, or to the reason why they have none."""
    net = models.Net()
    build(net)
    proto = net.model({"input": sides}, {"output": outputs or sides})
    found = ke.Engine.from_onnx(proto, loss="normal", **options).layers
    return {layer.parameters: layer.reason or layer.kind for layer in found}


def rows(net, value):
    return net.op("Reshape", value, net.constant("rows", np.array([-1, 3])), to="rows of examples")


def back(net, value):
    net.op("Reshape", value, net.constant("back", np.array([-1, 4, 3])), to="output")


FOLDED = ["batch", 4, 3]
AS_FOLDED = "no axis of 'y' contains the examples alone"


def test_position_table_is_shift_of_read_rows():
    net = models.Net()
    at = net.constant("at", np.arange(4))
    table = net.op("Gather", net.weight("table", 6, 3), at, to="positions")
    net.op("Add", "input", table, to="output")
    proto = net.model({"input": FOLDED}, {"output": FOLDED})
    (layer,) = ke.Engine.from_onnx(proto, loss="normal").layers
    assert (layer.kind, layer.parameters, layer.parts) == ("shift", ("table",), ("[0:4, :]",))
    assert (layer.inputs, layer.outputs) == ("", "output")


@pytest.mark.parametrize("op", ["Add", "PRelu"])
def test_shift_with_positions_in_batch_axis_is_not_layer(op):
    def build(net):
        back(net, net.op(op, rows(net, "input"), net.weight("b", 3), to="y"))

    role = "slope of PRelu" if op == "PRelu" else f"operand 1 of {op}"
    assert layers(build, FOLDED) == {("b",): f"{role}, {AS_FOLDED}"}


@pytest.mark.parametrize("op", ["Add", "Mul", "PRelu"])
def test_shift_per_example_is_not_layer(op):
    def build(net):
        net.op(op, "input", net.weight("b", 2, 3), to="output")

    ((parameters, found),) = layers(build, [2, 3]).items()
    assert parameters == ("b",)
    assert found.endswith("different for each example, on axis 0 of 'output'")


def test_repeated_shift_is_not_layer():
    def build(net):
        batch = net.op("Shape", "input", to="batch size", end=1)
        two = net.constant("two", np.array([2, 1]))
        times = net.op("Concat", batch, two, to="times", axis=0)
        rows = net.op("Tile", net.weight("b", 1, 2, 3), times, to="rows")
        net.op("Mul", "input", rows, to="output")

    found = layers(build, ["batch", 4, 3])
    assert found == {("b",): "operand 0 of Tile, shape (1, 2, 3) with data of shape (2, 4, 3)"}


def test_shift_of_result_without_examples_is_not_layer():
    def build(net):
        axis = net.constant("axis", np.array([0]))
        mean = net.op("ReduceMean", "input", axis, to="mean", keepdims=1)
        net.op("Mul", "input", net.op("Add", mean, net.weight("b", 3), to="y"), to="output")

    assert layers(build, ["batch", 3]) == {("b",): f"operand 1 of Add, {AS_FOLDED}"}


def test_shift_of_parameter_is_not_layer():
    def build(net):
        b = net.op("Add", net.weight("b0", 3), net.weight("b1", 3), to="y")
        net.op("Mul", "input", b, to="output")

    found = layers(build, ["batch", 3])
    assert found == {(f"b{i}",): f"operand {i} of Add, {AS_FOLDED}" for i in range(2)}


def test_shift_with_both_signs_is_layer():
    def build(net):
        b = net.weight("b", 3)
        net.op("Sub", net.op("Sin", net.op("Add", "input", b, to="y"), to="x"), b, to="output")

    assert layers(build, ["batch", 3]) == {("b",): "shift"}


def test_scaled_shift_is_not_layer():
    def build(net):
        w = net.constant("w", np.ones((3, 3), np.float32))
        net.op("Gemm", "input", w, net.weight("b", 3), to="output", beta=2.0)

    found = layers(build, ["batch", 3], trainable=["b"])
    assert found == {("b",): "operand 2 of Gemm, which is multiplied by beta"}


def test_slope_used_as_shift_is_not_layer():
    def build(net):
        b = net.weight("b", 3)
        net.op("PRelu", net.op("Add", "input", b, to="y"), b, to="output")

    assert layers(build, ["batch", 3]) == {("b",): "used 2 times, by Add, PRelu"}


def test_shift_along_two_axes_is_not_layer():
    def build(net):
        b = net.weight("b", 3, 1)
        x = net.op("Add", "input", b, to="y")
        turned = net.op("Reshape", b, net.constant("sides", np.array([1, 3])), to="turned")
        net.op("Add", net.op("Sin", x, to="x"), turned, to="output")

    assert layers(build, ["batch", 3, 3]) == {("b",): "used 2 times, by Add, in several layouts"}


def test_bias_of_trained_layer_is_not_shift():
    def build(net):
        x = net.op("MatMul", "input", net.weight("w", 3, 3), to="product")
        net.op("Add", x, net.weight("b", 3), to="output")

    assert layers(build, ["batch", 3]) == {("w", "b"): "fully_connected"}
    assert layers(build, ["batch", 3], trainable=["b"]) == {("b",): "shift"}


def test_broadcasting_shift_is_separate_layer():
    def build(net):
        x = net.op("Mul", "input", net.positive("scale", 3), to="scaled")
        x = net.op("Add", x, net.weight("b", 4, 3), to="y")
        net.op("ReduceSum", x, net.constant("axis", np.array([1])), to="output", keepdims=1)

    found = layers(build, ["batch", 1, 3])
    assert found == {("scale",): "scale_and_shift", ("b",): "shift"}


def test_shift_on_other_axis_than_scale_is_separate_layer():
    def build(net):
        axis = net.constant("axis", np.array([1]))
        scale = net.op("Unsqueeze", net.positive("scale", 3), axis, to="wide")
        x = net.op("Mul", "input", scale, to="scaled")
        net.op("Add", x, net.weight("b", 3), to="output")

    found = layers(build, ["batch", 3, 3])
    assert found == {("scale",): "scale_and_shift", ("b",): "shift"}


# -- scales that are multiplied by deviations ------------------------------------------------------


def normalised(net, z="input", shift="b"):
    """``z ∘ (r ∘ scale) + b`` as Flax has it, ``r`` one number a row."""
    net.op("ReduceMax", "input", net.constant("axis", np.array([1])), to="r")
    net.op("Mul", "r", net.positive("scale", 1, 3), to="scaled")
    net.op("Mul", z, "scaled", to="product")
    net.op("Add", "product", net.weight(shift, 1, 3) if shift == "b" else shift, to="y")


def test_scale_multiplied_by_deviations_has_shift():
    def build(net):
        normalised(net)
        net.op("Tanh", "y", to="output")

    assert layers(build, ["batch", 3]) == {("scale", "b"): "scale_and_shift"}


def test_scale_read_twice_after_deviations_is_separate_layer():
    def build(net):
        normalised(net)
        net.op("Mul", "y", "scaled", to="output")

    assert layers(build, ["batch", 3]) == {("scale",): "scale_and_shift", ("b",): "shift"}


def test_two_scales_of_one_product_have_no_common_shift():
    def build(net):
        normalised(net)
        net.op("Mul", "r", net.positive("other", 1, 3), to="scaled as well")
        net._nodes[2].input[0] = "scaled as well"
        net._nodes.insert(2, net._nodes.pop())
        net.op("Tanh", "y", to="output")

    found = layers(build, ["batch", 3])
    assert set(found.values()) == {"scale_and_shift"}
    assert sorted(map(len, found)) == [1, 2]


def test_output_product_has_separate_scale_and_shift():
    net = models.Net()
    normalised(net)
    sides = ["batch", 3]
    proto = net.model({"input": sides}, {"y": sides, "product": sides})
    engine = ke.Engine.from_onnx(proto, loss="normal", output="y")
    kinds = {layer.parameters: layer.kind for layer in engine.layers}
    assert kinds == {("scale",): "scale_and_shift", ("b",): "shift"}


def test_broadcasting_scale_has_separate_shift():
    def build(net):
        axis = net.constant("axis", np.array([1]))
        r = net.op("ReduceMax", "input", axis, to="r")
        scaled = net.op("Mul", r, net.positive("scale", 1, 3), to="scaled")
        z = net.op("ReduceMin", "input", axis, to="z")
        x = net.op("Mul", z, scaled, to="product")
        net.op("Add", x, net.weight("b", 1, 3), to="output")

    found = layers(build, ["batch", 3])
    assert found == {("scale",): "scale_and_shift", ("b",): "shift"}


def test_shift_per_example_is_not_part_of_scale():
    def build(net):
        x = net.op("Mul", "input", net.positive("scale", 3), to="scaled")
        net.op("Add", x, net.weight("b", 2, 3), to="output")

    found = layers(build, [2, 3])
    assert found.pop(("scale",)) == "scale_and_shift"
    assert found.pop(("b",)).endswith("different for each example, on axis 0 of 'output'")


# -- biases behind views ---------------------------------------------------------------------------


def cut(net, value, start, end, step, axis):
    bounds = [
        net.constant(f"{name} of cut", np.array([number]))
        for name, number in (("start", start), ("end", end), ("axis", axis), ("step", step))
    ]
    return net.op("Slice", value, *bounds, to="cut")


def convolved(*bounds, channels=2):
    """A convolution to (n, 2, 1, 5), cut, squeezed, with a number a channel added."""

    def build(net):
        x = net.op("Conv", "input", net.weight("w", 2, 1, 1, 1), to="s")
        x = net.op("Squeeze", cut(net, x, *bounds), net.constant("two", np.array([2])), to="line")
        net.op("Add", x, net.weight("b", 1, channels, 1), to="output")

    return build


@pytest.mark.parametrize("bounds", [(0, 2**62, 1, 3), (1, 5, 2, 3), (0, 2, 1, 1)])
def test_bias_after_slice_of_all_channels_belongs_to_layer(bounds):
    places = len(range(5)[bounds[0] : bounds[1] : bounds[2]]) if bounds[3] == 3 else 5
    found = layers(convolved(*bounds), ["batch", 1, 1, 5], ["batch", 2, places])
    assert found == {("w", "b"): "conv2d"}


def test_bias_after_channel_reversal_is_shift():
    found = layers(convolved(1, -(2**62), -1, 1), ["batch", 1, 1, 5], ["batch", 2, 5])
    assert found == {("w",): "conv2d", ("b",): "shift"}


def test_bias_after_slice_of_channels_is_shift():
    build = convolved(0, 1, 1, 1, channels=1)
    found = layers(build, ["batch", 1, 1, 5], ["batch", 1, 5], trainable=["w", "b"])
    assert found == {("w",): "conv2d", ("b",): "shift"}


def test_bias_after_slice_of_unknown_length_is_shift():
    def build(net):
        x = net.op("Conv", "input", net.weight("w", 2, 1, 1), to="s")
        start, axis = net.constant("start", np.array([0])), net.constant("axis", np.array([2]))
        end = net.op("Shape", "input", to="end", start=2)
        x = net.op("Slice", x, start, end, axis, to="cut")
        net.op("Add", x, net.weight("b", 1, 2, 1), to="output")

    found = layers(build, ["batch", 1, "time"], ["batch", 2, "time"])
    assert found == {("w",): "conv1d", ("b",): "shift"}


def _behind_a_transpose(net):
    x = net.op("Conv", "input", net.weight("w", 2, 1, 1), to="s")
    x = net.op("Transpose", x, to="turned", perm=[0, 2, 1])
    return net.op("Add", x, net.weight("b", 2), to="y")


@pytest.mark.parametrize(
    ("trainable", "found"),
    [(["w", "b"], {("w", "b"): "conv1d"}), (["w"], {("w",): "conv1d"})],
    ids=["trained", "frozen"],
)
def test_trained_bias_after_transpose_belongs_to_layer(trainable, found):
    def build(net):
        net.op("Tanh", _behind_a_transpose(net), to="output")

    shape = ["batch", 1, 4], ["batch", 4, 2]
    assert layers(build, *shape, trainable=trainable) == found


def test_reused_bias_after_transpose_is_not_bias():
    def build(net):
        net.op("Mul", net.op("Sin", _behind_a_transpose(net), to="bent"), "b", to="output")

    found = layers(build, ["batch", 1, 4], ["batch", 4, 2])
    assert found == {("w",): "conv1d", ("b",): "used 2 times, by Add, Mul"}


# -- scales and shifts in one array ----------------------------------------------------------------


def test_concatenated_scale_and_shift_may_be_used_twice():
    def build(net):
        names = net.positive("scale", 3), net.weight("b", 3)
        joined = net.op("Concat", *names, to="joined", axis=0)
        s, b = (cut_line(net, joined, start) for start in (0, 3))
        x = net.op("Sin", net.op("Add", net.op("Mul", "input", s, to="x0"), b, to="y0"), to="x1")
        net.op("Add", net.op("Mul", x, s, to="x2"), b, to="output")

    assert layers(build, ["batch", 3]) == {("scale", "b"): "scale_and_shift"}


def cut_line(net, value, start):
    bounds = [net.constant(f"{k} {start}", np.array([start + k])) for k in (0, 3)]
    return net.op("Slice", value, *bounds, to=f"cut at {start}")
