"""Batch axes found by running models whose axes are known by construction."""

import numpy as np
import pytest

from kfac_engine.runtime.batch_axis import find_batch, find_coupling
from kfac_engine.runtime.example_axis import ExampleAxis
from kfac_engine.runtime.load import load_model
from tests import models


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


def columns():
    """A weight from the left: examples are columns."""
    net = models.Net()
    net.op("MatMul", net.weight("w", 2, 3), "input", to="output")
    return net.model({"input": [3, "examples"]}, {"output": [2, "examples"]})


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


def centred():
    """The mean over the batch is taken off: examples depend on each other."""
    net = models.Net()
    rows = net.op("MatMul", "input", net.weight("w", 3, 2), to="rows")
    mean = net.op("ReduceMean", rows, net.constant("axes", np.array([0])), to="mean", keepdims=1)
    net.op("Sub", rows, mean, to="output")
    return net.model({"input": ["batch", 3]}, {"output": ["batch", 2]})


def identifiers():
    net = models.Net()
    net.op("Gather", net.weight("w", 5, 2), "input", to="output")
    return net.model({"input": ["d0", 6]}, {"output": ["d0", 6, 2]}, input_dtype="int64")


def found(model, sample_inputs=None):
    loaded = load_model(model, sample_inputs=sample_inputs)
    graph, facts = loaded.graph, loaded.facts
    batch = find_batch(graph, facts, graph.outputs, sample_inputs)
    return batch, find_coupling(graph, facts, graph.outputs, batch, sample_inputs)


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
