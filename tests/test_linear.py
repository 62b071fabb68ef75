"""Building, and first and later steps, take work in proportion to the nodes and arrays."""

import sys

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.training.units import Units
from tests import models

# What is linear doubles; what is quadratic, even with a small constant, comes nearer to four.
GROWTH = 2.3

START, END = "r0 = Identity(input)  ", "output = Identity(r{n})"
CHAIN = "h{i} = MatMul(r{i}, w{i})  a{i} = Add(h{i}, b{i})  r{next} = Relu(a{i})  "
# A condition that a size decides.
DECIDED = """sizes = Shape<start=1>(input)  several = Greater(sizes, one)
    condition = Squeeze(several, axis)  """
ELSE = "else_branch = e () => (float[n, 4] t) {{ t = Tanh(r{i}) }}>(condition)  "

# What a model of ``n`` layers has once, n times and at its end.
SHAPES = {
    # Layers with parameters of their own.
    "chain": ("w{i}(4,4) b{i}(4)", START, CHAIN, END),
    # One layer and a chain without parameters.
    "elementwise": (
        "w(4,4)", "r0 = MatMul(input, w)  ", "t{i} = Tanh(r{i})  r{next} = Tanh(t{i})  ", END),
    # Many layers on one input, concatenated.
    "heads": ("w{i}(4,2)", "", "h{i} = MatMul(input, w{i})  ", "output = Concat<axis=1>({all})"),
    # Many readers of one value.
    "fan out": ("w(4,4)", "h = MatMul(input, w)  ", "h{i} = Tanh(h)  ", "output = Sum({all})"),
    # Many uses of one weight.
    "shared": ("w(4,4)", START, "h{i} = MatMul(r{i}, w)  r{next} = Tanh(h{i})  ", END),
    # Normalizations with scales and shifts, and residual branches: gradients do not vanish.
    "norms": (
        "g{i}(4) b{i}(4)", START,
        "h{i} = LayerNormalization(r{i}, g{i}, b{i})  r{next} = Add(r{i}, h{i})  ", END),
    # Many If nodes, each around a layer.
    "branches": (
        "w{i}(4,4) one=1 axis=0",
        START + DECIDED,
        """r{next} = If<then_branch = t () => (float[n, 4] t) {{
            h = MatMul(r{i}, w{i})  t = Tanh(h) }}, """
        + ELSE,
        END,
    ),
    # One If node around all layers.
    "large branch": (
        "w{i}(4,4) b{i}(4) one=1 axis=0",
        START + DECIDED + "output = If<then_branch = t () => (float[n, 4] r{n}) {{ ", CHAIN,
        "}}, " + ELSE.replace("{i}", "0")),
}  # fmt: skip


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
    constants, start, each, end = SHAPES[shape]
    ends = {"n": count, "all": ", ".join(f"h{i}" for i in range(count))}
    constants, each = (
        [text.format(i=i, next=i + 1) for i in range(count)] for text in (constants, each)
    )
    nodes = "".join([start.format(**ends), *each, end.format(**ends)])
    constants = " ".join(dict.fromkeys(" ".join(constants).split()))
    x = np.random.default_rng(0).uniform(0.1, 0.9, (4, 4)).astype(np.float32)
    proto = models.written("n,4 -> n,classes", constants, nodes)
    return proto.SerializeToString(), ({"input": x}, np.zeros(4, np.int64))


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


@pytest.mark.parametrize("shape", SHAPES)
def test_calls_of_build_and_step_grow_linearly(shape):
    counted(shape, 4)  # imports and caches
    small, large = counted(shape, 100), counted(shape, 200)
    for before, after in zip(small, large, strict=True):
        assert after <= GROWTH * before


@pytest.mark.parametrize("shape", ["fan out", "shared"])
def test_uses_above_recursion_limit_are_supported(shape):
    uses = 1200
    assert uses > sys.getrecursionlimit()
    assert min(counted(shape, uses)) > uses  # every use is visited, and no call overflows the stack


@pytest.mark.parametrize("shape", ["chain", "norms"])
@pytest.mark.parametrize("optimizer", [ke.AdamW, ke.KfacOptimizer])
def test_calls_of_first_steps_grow_linearly_with_arrays(optimizer, shape):
    counted_training(optimizer, shape, 4)  # imports and caches
    small, large = (counted_training(optimizer, shape, count) for count in (60, 120))
    for before, after in zip(small, large, strict=True):
        assert after <= GROWTH * before


def test_comparisons_of_names_grow_linearly_with_arrays():
    def comparisons(count):
        engine = ke.Engine.from_onnx(model("norms", count)[0], loss="categorical", threads=1)
        names = tuple(map(Name, engine.parameters))
        Name.compared = 0
        assert len(Units(engine, names, lambda _: False).split(engine.parameters)) == 2 * count
        return Name.compared

    assert comparisons(100) <= GROWTH * comparisons(50)
