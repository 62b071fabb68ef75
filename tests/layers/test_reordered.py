"""Weights whose rows are put in another order, or joined, before a layer reads them."""

import numpy as np
import pytest
from onnx import helper

import kfac_engine as ke
from tests import models, oracle

# float32 sums of a few dozen terms, relative to the largest entry.
SINGLE = 1e-4
# float64 throughout; the oracle itself is good to 1e-11.
DOUBLE = 1e-9
BATCH, STEPS, WIDTH, STATE = 6, 3, 4, 3

# Operator to the order in which ONNX wants PyTorch's gates (i, f, g, o and r, z, n).
GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}


class Net(models.Net):
    """A net whose nodes may have several results."""

    def several(self, op, *inputs, to, **attributes):
        self._nodes.append(helper.make_node(op, inputs, to, name=f"node_{to[0]}", **attributes))


def by_slices(net, name, gates, to):
    pieces = []
    for place in gates:
        bounds = [
            net.constant(f"{to} {k} {place}", np.array([v]))
            for k, v in (("start", place * STATE), ("end", (place + 1) * STATE), ("axis", 0))
        ]
        pieces.append(net.op("Slice", name, *bounds, to=f"{to} gate {place}"))
    return net.op("Concat", *pieces, to=to, axis=0)


def by_split(net, name, gates, to):
    pieces = [f"{to} gate {place}" for place in range(len(gates))]
    net.several("Split", name, to=pieces, axis=0, num_outputs=len(gates))
    return net.op("Concat", *(pieces[place] for place in gates), to=to, axis=0)


def by_gather(net, name, gates, to):
    return net.op("Gather", name, net.constant(f"{to} order", rows(gates)), to=to, axis=0)


def rows(gates):
    return np.concatenate([np.arange(place * STATE, (place + 1) * STATE) for place in gates])


def recurrence(op, reorder=None):
    """A recurrence with weights in PyTorch's order, or as ONNX wants them where not reordered."""
    net, gates = Net(), GATES[op]
    made = {
        name: net._constants.pop(net.weight(name, len(gates) * STATE, *sides))
        for name, sides in (("w", (WIDTH,)), ("r", (STATE,)), ("bw", ()), ("br", ()))
    }
    first = net.constant("first", np.array([0]))
    for name, values in made.items():
        if reorder is None:
            net.constant(f"{name} in order", values[rows(gates)])
        else:
            reorder(net, net.constant(name, values), gates, f"{name} in order")
    net.op("Concat", "bw in order", "br in order", to="b in order", axis=0)
    operands = [
        net.op("Unsqueeze", f"{name} in order", first, to=f"{name} for ONNX") for name in "wrb"
    ]
    steps = net.op("Transpose", "input", to="steps", perm=[1, 0, 2])
    net.several(op, steps, *operands, to=("all", "last"), hidden_size=STATE)
    state = net.op("Squeeze", "last", first, to="state")
    net.op("Gemm", state, net.weight("head", STATE, 2), to="output")
    return net.model({"input": ["batch", STEPS, WIDTH]}, {"output": ["batch", 2]})


def step(model):
    engine = ke.Engine.from_onnx(model, loss="normal", estimation_mode="exact")
    feeds = models.random_inputs(model, BATCH)
    return engine, engine.step(feeds, np.zeros((BATCH, 2), np.float32))


@pytest.mark.parametrize(
    ("op", "reorder"),
    [("LSTM", by_slices), ("LSTM", by_gather), ("GRU", by_slices), ("GRU", by_split)],
)
def test_reordered_gates_have_natural_gradients_of_ordered_gates(op, reorder):
    engine, found = step(recurrence(op, reorder))
    _, expected = step(recurrence(op))
    (w, *_), (r, *_) = (
        next(entry.parameters for entry in engine.layers if name in entry.parameters)
        for name in ("w", "r")
    )
    assert (w, r) == ("w", "r")
    kinds = {entry.kind for entry in engine.layers}
    assert kinds == {"fully_connected_multi", "fully_connected"}
    for name in ("w", "r", "bw", "br"):
        wanted = expected.natural_gradients[f"{name} in order"]
        np.testing.assert_allclose(
            found.natural_gradients[name][rows(GATES[op])],
            wanted,
            atol=SINGLE * np.abs(wanted).max(),
            err_msg=name,
        )


def test_reordered_rows_have_exact_block_for_one_example():
    net = Net("float64")
    w, b = net.weight("w", 2 * STATE, WIDTH), net.weight("b", 2 * STATE)
    order = by_slices(net, w, (1, 0), "w turned"), by_gather(net, b, (1, 0), "b turned")
    net.op("Tanh", net.op("Gemm", "input", *order, to="s", transB=1), to="output")
    model = net.model({"input": ["batch", WIDTH]}, {"output": ["batch", 2 * STATE]})
    feeds = models.random_inputs(model, batch=1)
    engine = ke.Engine.from_onnx(
        model, loss="normal", estimation_mode="exact", reduction="batch_mean"
    )
    engine.observe(feeds)
    (layer,) = engine.layers
    assert (layer.parameters, layer.parts) == (("w", "b"), ("", ""))
    F = oracle.dense_fisher(model, feeds, "output", ["w", "b"], "normal")
    entries = np.arange(w_size := 2 * STATE * WIDTH).reshape(2 * STATE, WIDTH)
    packed = np.concatenate([entries[rows((1, 0))].T.ravel(), w_size + rows((1, 0))])
    block = engine.collection.fisher_blocks[layer.key].full_fisher_block()
    np.testing.assert_allclose(block, F[np.ix_(packed, packed)], atol=DOUBLE)


# -- what makes no layer ---------------------------------------------------------------------------


def reasons(build, columns):
    """Why the parameters of a model are generic, by parameter; empty for layers."""
    net = Net()
    build(net)
    model = net.model({"input": ["batch", WIDTH]}, {"output": ["batch", columns]})
    layers = ke.Engine.from_onnx(model, loss="normal").layers
    return {name: layer.reason for layer in layers for name in layer.parameters}


def test_weight_with_repeated_entries_is_not_layer():
    def build(net):
        w = net.weight("w", WIDTH, 1)
        net.op("MatMul", "input", net.op("Concat", w, w, to="both", axis=1), to="output")

    assert reasons(build, 2) == {"w": "used 2 times, by Concat"}


def test_weight_with_constant_columns_is_not_layer():
    def build(net):
        counts = net.constant("counts", np.arange(WIDTH).reshape(WIDTH, 1))
        other = net.op("CastLike", counts, "input", to="other")
        w = net.op("Concat", net.weight("w", WIDTH, 1), other, to="wide", axis=1)
        net.op("MatMul", "input", w, to="output")

    assert reasons(build, 2) == {"w": "operand 0 of Concat"}


def test_concatenated_parameters_of_one_weight_are_generic():
    def build(net):
        w = net.weight("w0", WIDTH, 1), net.weight("w1", WIDTH, 2)
        net.op("MatMul", "input", net.op("Concat", *w, to="wide", axis=1), to="output")

    assert reasons(build, 3) == {"w0": "operand 0 of Concat", "w1": "operand 1 of Concat"}


def cut(net, joined, *sizes):
    at = net.constant("sizes", np.array(sizes))
    net.several("Split", joined, at, to=("left", "right"), axis=1)
    x, y = (net.op("MatMul", "input", piece, to=f"s {piece}") for piece in ("left", "right"))
    net.op("Mul", x, y, to="output")


def test_concatenated_parameters_split_at_border_are_layers():
    def build(net):
        w = net.weight("w0", WIDTH, 2), net.weight("w1", WIDTH, 1)
        cut(net, net.op("Concat", *w, to="joined", axis=1), 2, 1)

    assert reasons(build, 2) == {"w0": "", "w1": ""}


def test_concatenated_parameters_split_elsewhere_are_generic():
    """One piece holds entries of both."""

    def build(net):
        w = net.weight("w0", WIDTH, 2), net.weight("w1", WIDTH, 1)
        cut(net, net.op("Concat", *w, to="joined", axis=1), 1, 2)

    found = reasons(build, 2)
    assert found.keys() == {"w0", "w1"}
    assert all(found.values())


def test_concatenated_parameters_also_read_whole_are_generic():
    def build(net):
        w = net.weight("w0", WIDTH, 2), net.weight("w1", WIDTH, 1)
        joined = net.op("Concat", *w, to="joined", axis=1)
        cut(net, joined, 2, 1)
        net._nodes[-1].output[0] = "product"
        x = net.op("MatMul", "input", joined, to="s joined")
        net.op("Mul", "product", net.op("Gemm", x, net.constant("last", np.ones((3, 1), "f4")),
                                        to="sum"), to="output")  # fmt: skip

    found = reasons(build, 2)
    assert found.pop("last") == ""
    assert found.keys() == {"w0", "w1"}
    assert all(found.values())
