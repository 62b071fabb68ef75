"""Batch axes found by running models whose axes are known by construction."""

import numpy as np
import pytest
from onnx import numpy_helper, parser

from kfac_engine.runtime.batch_axis import find_batch, find_coupling
from kfac_engine.runtime.example_axis import ExampleAxis
from kfac_engine.runtime.model import load_model
from tests import graph_networks, models


def time_major(symbols=("time", "examples")):
    """A running sum over axis 0, then a dense layer: examples lie on axis 1."""
    net = models.Net()
    axis = net.constant("axis", np.array(0))
    state = net.op("CumSum", "input", axis, to="state")
    net.op("MatMul", state, net.weight("w", 3, 2), to="output")
    return net.model({"input": [*symbols, 3]}, {"output": [*symbols, 2]})


def folded():
    """Tokens (n, 4, 3) flattened to rows (4n, 3), as language models end."""
    net = models.Net()
    net.op("Tanh", "input", to="tokens")
    rows = net.op("Reshape", "tokens", net.constant("rows", np.array([-1, 3])), to="rows_of")
    net.op("MatMul", rows, net.weight("w", 3, 2), to="output")
    return net.model({"input": ["batch", 4, 3]}, {"output": ["rows", 2]})


def columns(examples="examples"):
    """A weight from the left: examples are columns."""
    net = models.Net()
    net.op("MatMul", net.weight("w", 2, 3), "input", to="output")
    return net.model({"input": [3, examples]}, {"output": [2, examples]})


def attention(symbols=("s0", "s1")):
    """Tokens see each other, examples do not."""
    net = models.Net()
    keys = net.op("Transpose", "input", to="keys", perm=[0, 2, 1])
    scores = net.op("MatMul", "input", keys, to="scores")
    weights = net.op("Softmax", scores, to="weights", axis=-1)
    seen = net.op("MatMul", weights, "input", to="seen")
    net.op("MatMul", seen, net.weight("w", 3, 2), to="output")
    return net.model({"input": [*symbols, 3]}, {"output": [*symbols, 2]})


def baked(batch):
    net = models.Net()
    flat = net.op("Reshape", "input", net.constant("to", np.array([batch, 12])), to="flat")
    net.op("MatMul", flat, net.weight("w", 12, 2), to="output")
    return net.model({"input": ["batch", 4, 3]}, {"output": ["batch", 2]})


def declared():
    net = models.Net()
    net.op("MatMul", "input", net.weight("w", 3, 2), to="output")
    return net.model({"input": [5, 3]}, {"output": [5, 2]})


def centred(examples="batch"):
    """The mean over the batch is taken off: examples depend on each other."""
    net = models.Net()
    rows = net.op("MatMul", "input", net.weight("w", 3, 2), to="rows")
    mean = net.op("ReduceMean", rows, net.constant("axes", np.array([0])), to="mean", keepdims=1)
    net.op("Sub", rows, mean, to="output")
    return net.model({"input": [examples, 3]}, {"output": [examples, 2]})


def identifiers():
    net = models.Net()
    net.op("Gather", net.weight("w", 5, 2), "input", to="output")
    return net.model({"input": ["d0", 6]}, {"output": ["d0", 6, 2]}, input_dtype="int64")


def found(model, sample_inputs=None):
    loaded = load_model(model, sample_inputs=sample_inputs)
    graph, facts = loaded.graph, loaded.facts
    batch = find_batch(graph, facts, graph.outputs, sample_inputs)
    return batch, find_coupling(graph, facts, graph.outputs, batch, sample_inputs)


# -- several axes of examples ----------------------------------------------------------------------


def read(declared, body, x="n", y="n"):
    """Rows of ``x`` and what other inputs add."""
    text = (
        f"m (float[{x}, 3] x, {declared}) => (float[{y}, 2] output) {{ z = MatMul (x, w) {body} }}"
    )
    return models.parsed(text, {"w": np.eye(3, 2, dtype="f"), "last": [-1], "one": [1]})


KEYS = """p = MatMul (x, k)  q = Softmax (p)  t = Transpose <perm = [1, 0]> (k)
    r = MatMul (q, t)  s = MatMul (r, w)  output = Add (z, s)"""
ENTRIES = """p = ReduceMean <keepdims = 0> (k)  output = Add (z, p)"""
GRAPH, FEW = graph_networks.graph_network, graph_networks.graphs([3, 4, 2])[0]
NAN = {**FEW, "feat": FEW["feat"] * np.nan}
# Model, inputs of the sample run, axes of the examples, and the beginning of the reason why some
# examples of a batch are no batch.
SEVERAL = {
    "graphs": (GRAPH, None, {"slots": 0}, "the examples are along axis 0 of 'slots'"),
    "graphs of a batch": (GRAPH, FEW, {"slots": 0}, "the examples are along axis 0 of 'slots'"),
    "graphs called B and nodes N": (
        lambda: GRAPH("N", "E", "B"), None, {"slots": 0}, "the examples are along"),
    "graphs with equal outputs": (lambda: GRAPH(head=0), FEW, {"slots": 0}, "the examples are"),
    "graphs with NaN": (GRAPH, NAN, {"slots": 0}, "the examples are along axis 0 of 'slots'"),
    "as many graphs as numbers say": (
        lambda: GRAPH(count="largest"), None, {}, "the number of examples of 'y' follows"),
    "adjacency": (
        graph_networks.adjacency, None, {"x": 0, "adj": 0}, "'adj' has an entry for each pair"),
    "adjacency without one symbol": (
        lambda: graph_networks.adjacency(("a", "b", "c")), graph_networks.one_graph(4)[0],
        {"x": 0, "adj": 0}, "'adj' has an entry for each pair"),
    "matrices of examples with own symbols": (
        lambda: read(
            "float[c, p, q] k",
            "p = ReduceMax <keepdims = 0> (k, last)  a = ReduceMax <keepdims = 1> (p, one)"
            "  output = Add (z, a)",
            "b", "d",
        ),
        {"x": np.ones((6, 3), "f"), "k": np.ones((6, 4, 4), "f")}, {"x": 0, "k": 0}, "",
    ),
    "a number of graphs": (
        lambda: GRAPH(count="number"), graph_networks.graphs([3, 4, 2], 0, "number")[0], {},
        "the number of examples of 'y' follows from 'number'"),
    "pairs": (
        graph_networks.contrastive, None, {"image": 0, "text": 0}, "'logits' has an entry for each"
    ),
    # Ids that all sums share, and the last id of each: other numbers of ids run.
    "sums of ids": (
        lambda: models.parsed(
            """sums (int64[m] ids, int64[n] ends) => (float[n, 2] output) {
                rows = Gather (table, ids)  sums = CumSum (rows, zero)
                output = Gather (sums, ends) }""",
            {"table": np.eye(5, 2, dtype="f"), "zero": np.array(0)},
        ),
        None, {"ends": 0}, "",
    ),
    # Inputs that all examples share, and other symbols of the same axis: parts are batches.
    "keys": (lambda: read("float[3, m] k", KEYS), None, {"x": 0}, ""),
    "keys of a batch": (
        lambda: read("float[3, m] k", KEYS), {"x": np.ones((4, 3), "f"), "k": np.ones((3, 6), "f")},
        {"x": 0}, ""),
    "entries of any number": (lambda: read("float[m] k", ENTRIES), None, {"x": 0}, ""),
    "unknown shape": (lambda: read("float k", ENTRIES), None, {"x": 0}, ""),
    "two symbols of the examples": (
        lambda: read("float[m, 2] k", "output = Add (z, k)"), None, {"x": 0, "k": 0}, ""),
    "two symbols of the batch": (
        lambda: read("float[batch_k, 2] k", "output = Add (z, k)", "batch_x", "batch_y"), None,
        {"x": 0, "k": 0}, ""),
}  # fmt: skip


@pytest.mark.parametrize(("make", "sample", "axes", "joint"), SEVERAL.values(), ids=SEVERAL)
def test_axes_of_the_examples_are_found_among_several(make, sample, axes, joint):
    batch, _ = found(make(), sample)
    assert batch.inputs == axes
    assert batch.joint.startswith(joint)
    assert bool(batch.joint) == bool(joint)
    assert batch.fixed == ""
    (output,) = set(batch.places) & {"output", "y", "logits"}
    assert batch.places[output] == ExampleAxis(0, 1)


def test_a_fixed_batch_size_names_its_node_and_no_remedy_that_was_tried():
    loaded = load_model(baked(2))
    arguments = loaded.graph, loaded.facts, ["output"], None
    fixed = [find_batch(*arguments, axes).fixed for axes in (None, {"input": 0})]
    for reason in fixed:
        assert reason.startswith("Reshape node 'node_flat' fixes the batch size at 2")
    assert ["batch_axes" in reason for reason in fixed] == [True, False]


# -- one axis of examples --------------------------------------------------------------------------

# Model, axis in the input, place in the output.
CASES = {
    "dense": (models.mlp, 0, ExampleAxis(0, 1)),
    "images": (models.cnn, 0, ExampleAxis(0, 1)),
    "tokens": (models.token_mlp, 0, ExampleAxis(0, 1)),
    "time first": (time_major, 1, ExampleAxis(1, 1)),
    "time first, without symbols": (lambda: time_major((None, None)), 1, ExampleAxis(1, 1)),
    "time first, the batch says so": (lambda: time_major(("T", "batch")), 1, ExampleAxis(1, 1)),
    "tokens folded into rows": (folded, 0, ExampleAxis(0, 4)),
    "batch in columns": (columns, 1, ExampleAxis(1, 1)),
    "attention": (attention, 0, ExampleAxis(0, 1)),
    "attention without symbols": (lambda: attention((None, None)), 0, ExampleAxis(0, 1)),
    "identifiers": (identifiers, 0, ExampleAxis(0, 1)),
}


@pytest.mark.parametrize(("make", "axis", "place"), CASES.values(), ids=CASES)
def test_batch_axes_of_inputs_and_outputs_are_found(make, axis, place):
    batch, coupling = found(make())
    assert batch.inputs == {"input": axis}
    assert batch.places["output"] == place
    assert (batch.fixed, coupling) == ("", "")


def recurrent(inputs, output, node, head):
    """An LSTM with time first and all sizes fixed, as exporters write it for a batch."""
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        m ({inputs}) => (float{output} output) <int64[1] zero = {{0}}, int64[1] one = {{1}}>
        {{ all, last = LSTM <hidden_size = 5> ({node})  h = {head}  output = MatMul (h, v) }}""")
    rng = np.random.default_rng(0)
    for name, *shape in (("w", 1, 20, 4), ("r", 1, 20, 5), ("start", 1, 3, 5), ("v", 5, 2)):
        weight = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
    return model


X, LAST, ALL = "float[6,3,4] input", "Squeeze (last, zero)", "Squeeze (all, one)"
# Models with all sizes fixed: the axes in the inputs, and the place in the output.
FIXED = {
    "dense": (declared, {"input": 0}, ExampleAxis(0, 1)),
    "one time step": (lambda: time_major((1, 3)), {"input": 0}, ExampleAxis(0, 1)),
    "running sum": (lambda: time_major((6, 3)), {"input": 1}, ExampleAxis(1, 1)),
    "as many steps as examples": (lambda: time_major((3, 3)), {"input": 1}, ExampleAxis(1, 1)),
    "tokens": (lambda: attention((3, 4)), {"input": 0}, ExampleAxis(0, 1)),
    "columns": (lambda: columns(4), {"input": 1}, ExampleAxis(1, 1)),
    "last state": (
        lambda: recurrent(X, "[3,2]", "input, w, r", LAST), {"input": 1}, ExampleAxis(0, 1)),
    "all states": (
        lambda: recurrent(X, "[6,3,2]", "input, w, r", ALL), {"input": 1}, ExampleAxis(1, 1)),
    "stored state": (
        lambda: recurrent(X, "[3,2]", "input, w, r, , , start", LAST), {"input": 1},
        ExampleAxis(0, 1)),
    "given state": (
        lambda: recurrent(f"{X}, float[1,3,5] s", "[6,3,2]", "input, w, r, , , s", ALL),
        {"input": 1, "s": 1}, ExampleAxis(1, 1)),
    "lengths": (
        lambda: recurrent(f"{X}, int32[3] ends", "[3,2]", "input, w, r, , ends", LAST),
        {"input": 1, "ends": 0}, ExampleAxis(0, 1)),
}  # fmt: skip


@pytest.mark.parametrize(("make", "axes", "place"), FIXED.values(), ids=FIXED)
def test_batch_axes_of_fixed_sizes_are_found(make, axes, place):
    batch, coupling = found(make())
    assert (batch.inputs, batch.places["output"], batch.doubt) == (axes, place, "")
    assert "file declares" in batch.fixed
    assert coupling == ""


def test_fixed_sizes_of_dependent_examples_have_a_note():
    """The mean over axis 0 couples the examples, and entries of axis 1 are not examples."""
    batch, _ = found(centred(5))
    assert batch.inputs == {"input": 0}
    assert "name it with batch_axes" in batch.note


def test_values_without_batch_have_no_batch_axis():
    batch, _ = found(attention())
    assert "w" not in batch.places
    assert batch.places["scores"] == ExampleAxis(0, 1)


def test_user_batch_is_used_for_search():
    inputs = {"input": np.random.default_rng(0).standard_normal((3, 7, 3)).astype(np.float32)}
    batch, _ = found(time_major(), inputs)
    assert (batch.size, batch.places["output"]) == (7, ExampleAxis(1, 1))


def test_batch_size_in_reshape_is_reported_as_fixed():
    inputs = {"input": np.zeros((4, 4, 3), np.float32)}
    batch, _ = found(baked(4), inputs)
    assert batch.size == 4
    assert "fixes the batch size at 4" in batch.fixed
    assert batch.places["output"] == ExampleAxis(0, 1)


def test_batch_of_one_in_reshape_is_found_from_generated_inputs():
    batch, _ = found(baked(1))
    assert batch.size == 1
    assert "fixes the batch size at 1" in batch.fixed


def test_declared_batch_size_is_reported_as_fixed():
    batch, _ = found(declared())
    assert (batch.size, batch.places["output"]) == (5, ExampleAxis(0, 1))
    assert "declares 5 examples in 'input'" in batch.fixed


def test_coupled_examples_are_traced_to_node():
    _, coupling = found(centred())
    assert coupling == "ReduceMean node 'node_mean'"


def test_batch_axes_with_different_symbols_grow_together():
    """One of them alone may grow as well here: a batch of one is stretched to the other."""
    net = models.Net()
    net.op("MatMul", "input", net.weight("w", 3, 4), to="scores")
    net.op("Add", "scores", "offsets", to="output")
    model = net.model({"input": ["s21", 3], "offsets": ["s35", 4]}, {"output": ["s35", 4]})
    loaded = load_model(model)
    batch = find_batch(loaded.graph, loaded.facts, ["output"])
    assert batch.inputs == {"input": 0, "offsets": 0}
    assert batch.places["output"] == ExampleAxis(0, 1)
    assert not batch.fixed
