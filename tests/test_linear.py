"""Building, and first and later steps, take work in proportion to the nodes and arrays."""

import sys

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import kfac_engine as ke
from kfac_engine.training.units import Units

# What is linear doubles; what is quadratic, even with a small constant, comes nearer to four.
GROWTH = 2.3
RNG = np.random.default_rng(0)


def weight(*shape):
    return RNG.uniform(-0.5, 0.5, shape).astype(np.float32)


def chain(count):
    """Layers with parameters of their own."""
    nodes, constants = [], {}
    for i in range(count):
        constants |= {f"w{i}": weight(4, 4), f"b{i}": weight(4)}
        nodes += [
            helper.make_node("MatMul", [f"r{i}", f"w{i}"], [f"h{i}"]),
            helper.make_node("Add", [f"h{i}", f"b{i}"], [f"a{i}"]),
            helper.make_node("Relu", [f"a{i}"], [f"r{i + 1}"]),
        ]
    return nodes, constants, f"r{count}"


def elementwise(count):
    """One layer and a chain without parameters."""
    nodes = [helper.make_node("MatMul", ["r0", "w"], ["t0"])]
    nodes += [helper.make_node("Tanh", [f"t{i}"], [f"t{i + 1}"]) for i in range(2 * count)]
    return nodes, {"w": weight(4, 4)}, f"t{2 * count}"


def heads(count):
    """Many layers on one input, concatenated."""
    nodes = [helper.make_node("MatMul", ["r0", f"w{i}"], [f"h{i}"]) for i in range(count)]
    nodes.append(helper.make_node("Concat", [f"h{i}" for i in range(count)], ["y"], axis=1))
    return nodes, {f"w{i}": weight(4, 2) for i in range(count)}, "y"


def fan_out(count):
    """Many readers of one value."""
    nodes = [helper.make_node("MatMul", ["r0", "w"], ["h"])]
    nodes += [helper.make_node("Tanh", ["h"], [f"t{i}"]) for i in range(count)]
    nodes.append(helper.make_node("Sum", [f"t{i}" for i in range(count)], ["y"]))
    return nodes, {"w": weight(4, 4)}, "y"


def shared(count):
    """Many uses of one weight."""
    nodes = []
    for i in range(count):
        nodes.append(helper.make_node("MatMul", [f"r{i}", "w"], [f"h{i}"]))
        nodes.append(helper.make_node("Tanh", [f"h{i}"], [f"r{i + 1}"]))
    return nodes, {"w": weight(4, 4)}, f"r{count}"


def norms(count):
    """Normalizations with scales and shifts."""
    nodes, constants = [], {}
    for i in range(count):
        constants |= {f"g{i}": 1 + weight(4), f"b{i}": weight(4)}
        operands = [f"r{i}", f"g{i}", f"b{i}"]
        nodes.append(helper.make_node("LayerNormalization", operands, [f"h{i}"]))
        nodes.append(helper.make_node("Tanh", [f"h{i}"], [f"r{i + 1}"]))
    return nodes, constants, f"r{count}"


def branch(name, nodes, result):
    value = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, name, [], [value])


def decided():
    """Nodes and constants of a condition that a size decides."""
    nodes = [
        helper.make_node("Shape", ["r0"], ["sizes"], start=1),
        helper.make_node("Greater", ["sizes", "one"], ["several"]),
        helper.make_node("Squeeze", ["several", "axis"], ["condition"]),
    ]
    return nodes, {"one": np.ones(1, np.int64), "axis": np.zeros(1, np.int64)}


def branches(count):
    """Many If nodes, each around a layer."""
    nodes, constants = decided()
    for i in range(count):
        constants[f"w{i}"] = weight(4, 4)
        product = helper.make_node("MatMul", [f"r{i}", f"w{i}"], ["h"])
        bodies = {
            "then_branch": branch("t", [product, helper.make_node("Tanh", ["h"], ["t"])], "t"),
            "else_branch": branch("e", [helper.make_node("Tanh", [f"r{i}"], ["t"])], "t"),
        }
        nodes.append(helper.make_node("If", ["condition"], [f"r{i + 1}"], **bodies))
    return nodes, constants, f"r{count}"


def large_branch(count):
    """One If node around all layers."""
    nodes, constants = decided()
    inner, weights, result = chain(count)
    bodies = {
        "then_branch": branch("t", inner, result),
        "else_branch": branch("e", [helper.make_node("Tanh", ["r0"], ["t"])], "t"),
    }
    nodes.append(helper.make_node("If", ["condition"], ["y"], **bodies))
    return nodes, constants | weights, "y"


SHAPES = (chain, elementwise, heads, fan_out, shared, norms, branches, large_branch)


def calls(action):
    """How many functions ``action`` calls: the same number on every machine."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def model(shape, count):
    """The bytes of a model, and a batch with targets."""
    nodes, constants, output = shape(count)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("r0", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    version = helper.make_opsetid("", 18)
    data = helper.make_model(graph, opset_imports=[version], ir_version=10).SerializeToString()
    inputs = {"r0": RNG.uniform(0.1, 0.9, (4, 4)).astype(np.float32)}
    return data, (inputs, np.zeros(4, np.int64))


def counted(shape, count):
    """Calls of a build and of the second step."""
    data, batch = model(shape, count)
    built = []
    build = calls(lambda: built.append(ke.Engine.from_onnx(data, loss="categorical", threads=1)))
    built[0].step(*batch)
    return build, calls(lambda: built[0].step(*batch))


def counted_training(optimizer, shape, count):
    """Calls that make an optimizer, and of its first and its second step."""
    data, batch = model(shape, count)
    engine = ke.Engine.from_onnx(data, loss="categorical", threads=1)
    made = []
    make = calls(lambda: made.append(optimizer(engine)))
    return make, *(calls(lambda: made[0].step(*batch)) for _ in range(2))


class Name(str):
    """A name that counts its comparisons with other names."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Name.compared += 1
        return str.__eq__(self, other)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_calls_of_build_and_step_grow_linearly(shape):
    counted(shape, 4)  # imports and caches
    small, large = counted(shape, 100), counted(shape, 200)
    for before, after in zip(small, large, strict=True):
        assert after <= GROWTH * before


@pytest.mark.parametrize("shape", [fan_out, shared], ids=lambda shape: shape.__name__)
def test_uses_above_recursion_limit_are_supported(shape):
    uses = 1200
    assert uses > sys.getrecursionlimit()
    assert min(counted(shape, uses)) > uses  # every use is visited, and no call overflows the stack


@pytest.mark.parametrize("shape", [chain, norms], ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("optimizer", [ke.AdamW, ke.KfacOptimizer])
def test_calls_of_first_steps_grow_linearly_with_arrays(optimizer, shape):
    counted_training(optimizer, shape, 4)  # imports and caches
    small, large = (counted_training(optimizer, shape, count) for count in (60, 120))
    for before, after in zip(small, large, strict=True):
        assert after <= GROWTH * before


def test_comparisons_of_names_grow_linearly_with_arrays():
    def comparisons(count):
        engine = ke.Engine.from_onnx(model(norms, count)[0], loss="categorical", threads=1)
        names = tuple(map(Name, engine.parameters))
        Name.compared = 0
        assert len(Units(engine, names, lambda _: False).split(engine.parameters)) == 2 * count
        return Name.compared

    assert comparisons(100) <= GROWTH * comparisons(50)
