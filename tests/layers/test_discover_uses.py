"""Weights used several times: what is registered, and that the block is the one of all uses."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models

# float32 sums of a few dozen terms, relative to the largest entry.
SINGLE = 2e-5


# Two uses of a layer: sides, constants and nodes, its parameters, kind and outputs.
DENSE, CONV = "fully_connected_multi", "Conv<pads=[1, 1, 1, 1]>"
CASES = {
    "dense": (
        "batch,3", "w(3,3) b(3)",
        "s0 = Gemm<transB=1>(input, w, b)  a1 = Tanh(s0)  output = Gemm<transB=1>(a1, w, b)",
        ("w", "b"), DENSE, ("s0", "output")),
    # A bias of its own in each use.
    "bias outside": (
        "batch,3", "w(3,3) b0(3) b1(3)",
        """p0 = MatMul(input, w)  s0 = Add(p0, b0)  a1 = Tanh(s0)
           p1 = MatMul(a1, w)  output = Add(p1, b1)""",
        ("w",), DENSE, ("p0", "p1"),
    ),
    # On every token, then on their mean.
    "tokens": (
        "batch,4,3 -> batch,3", "w(3,3) axis=1",
        """s0 = MatMul(input, w)  act = Tanh(s0)  a1 = ReduceMean<keepdims=0>(act, axis)
           output = MatMul(a1, w)""",
        ("w",), DENSE, ("s0", "output"),
    ),
    "conv": (
        "batch,2,4,5", "w(2,2,3,3) b(2)",
        f"s0 = {CONV}(input, w, b)  a1 = Tanh(s0)  output = {CONV}(a1, w, b)", ("w", "b"),
        "conv2d_multi", ("s0", "output")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_weight_used_twice_is_layer_with_two_uses(name):
    sides, constants, nodes, *expected = CASES[name]
    model = models.written(sides, constants, nodes)
    layer, *rest = ke.Engine.from_onnx(model, loss="normal").layers
    assert [layer.parameters, layer.kind, layer.outputs] == expected
    assert layer.inputs == ("input", "a1")
    assert {other.kind for other in rest} <= {"shift"}


def test_uses_without_influence_on_loss_are_ignored():
    nodes = "output = MatMul(input, w)  act = Tanh(output)  aside = MatMul(act, w)"
    proto = models.written("batch,3", "w(3,3)", nodes)
    proto.graph.output.add().CopyFrom(proto.graph.output[0])
    proto.graph.output[1].name = "aside"
    (layer,) = ke.Engine.from_onnx(proto, loss="normal", output="output").layers
    assert (layer.kind, layer.inputs, layer.outputs) == ("fully_connected", "input", "output")


# -- other kinds, by the layers that the uses make alone -------------------------------------------

# A use, sides of the data, of the weight and the bias, kinds of one use and of two.
KINDS = {
    "line": (
        "Conv<pads=[1, 1]>({x}, {w}, {b})", "2,6", ("2,2,3", "2"), "conv1d", "convolution_multi"),
    "volume": (
        "Conv<pads=[1, 1, 1, 1, 1, 1]>({x}, {w}, {b})", "2,2,3,2", ("2,2,3,3,3", "2"),
        "convolution", "convolution_multi"),
    "groups": (
        "Conv<pads=[1, 1, 1, 1], group=2>({x}, {w}, {b})", "4,3,3", ("4,2,3,3", "4"),
        "grouped_convolution", "grouped_convolution_multi"),
    "transposed": (
        "ConvTranspose<pads=[1, 1, 1, 1]>({x}, {w})", "2,4,3", ("2,2,3,3",), "conv_transpose",
        "conv_transpose_multi"),
    "left": ("MatMul({w}, {x})", "3,4", ("3,3",), "fully_connected", "fully_connected_multi"),
}  # fmt: skip


def used_twice(name, shared):
    """A layer behind itself, or behind one of its own with the same numbers."""
    use, sides, shapes, *_ = KINDS[name]
    own = [("w", "b"), ("w", "b") if shared else ("w1", "b1")]
    first, second = (
        use.format(x=x, w=w, b=b) for x, (w, b) in zip(("input", "a"), own, strict=True)
    )
    model = models.written(
        f"batch,{sides}",
        " ".join(f"{key}({shape})" for key, shape in zip("wb", shapes, strict=False)),
        f"s0 = {first}  a = Tanh(s0)  s1 = {second}  output = Tanh(s1)",
    )
    for entry in list(model.graph.initializer) if not shared else ():
        model.graph.initializer.add().CopyFrom(entry)
        model.graph.initializer[-1].name += "1"
    return model


@pytest.mark.parametrize("name", KINDS)
def test_factors_of_two_uses_are_means_of_single_uses(name):
    *_, single, several = KINDS[name]
    factors = []
    for shared in (True, False):
        proto = used_twice(name, shared)
        feeds = models.random_inputs(proto, 4)
        engine = ke.Engine.from_onnx(
            proto, loss="normal", estimation_mode="empirical", reduction="batch_mean"
        )
        engine.observe(feeds, np.zeros_like(feeds["input"]))
        layers = [layer for layer in engine.layers if layer.parameters[0].startswith("w")]
        assert {layer.kind for layer in layers} == {several if shared else single}
        blocks = [engine.collection.fisher_blocks[layer.key] for layer in layers]
        factors.append([[f.average.read() for f in block.factors] for block in blocks])
        repeats = {block.repeats for block in blocks}
        assert len(repeats) == 1
        factors[-1].append(repeats.pop())
    ((both, uses), (first, second, positions)) = factors
    assert uses == 2 * positions
    for shared, *alone in zip(both, first, second, strict=True):
        np.testing.assert_allclose(shared, sum(alone) / 2, atol=SINGLE * np.abs(shared).max())
