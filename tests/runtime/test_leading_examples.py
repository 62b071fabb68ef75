"""How much of a user's batch goes through the sample run."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.graph.structure import Input
from kfac_engine.runtime.example_axis import first_examples
from tests import models

F32 = np.dtype(np.float32)

# Declared shapes, shapes given, shapes of the sample.
CASES = {
    "batch first": ({"x": ("batch", 3)}, {"x": (64, 3)}, {"x": (5, 3)}),
    "fewer than that": ({"x": ("batch", 3)}, {"x": (4, 3)}, {"x": (4, 3)}),
    "time first": ({"x": ("time", "N", 3)}, {"x": (9, 64, 3)}, {"x": (9, 5, 3)}),
    "two inputs": (
        {"x": ("batch_size", 3), "y": (7, "batch_size")}, {"x": (64, 3), "y": (7, 64)},
        {"x": (5, 3), "y": (7, 5)}),
    "one of fixed size": (
        {"x": ("batch", 3), "mask": (64,)}, {"x": (64, 3), "mask": (64,)},
        {"x": (5, 3), "mask": (64,)}),
    "no name": ({"x": (None, 3)}, {"x": (64, 3)}, {"x": (64, 3)}),
    "another name": ({"x": ("time", 3)}, {"x": (64, 3)}, {"x": (64, 3)}),
    "not shared": (
        {"x": ("batch", 3), "y": ("rows", 3)}, {"x": (64, 3), "y": (64, 3)},
        {"x": (64, 3), "y": (64, 3)}),
    "of two sizes": (
        {"x": ("batch_0", 3), "y": ("batch_1", 3)}, {"x": (64, 3), "y": (32, 3)},
        {"x": (64, 3), "y": (32, 3)}),
    "pairs of examples": ({"x": ("batch", "batch")}, {"x": (64, 64)}, {"x": (64, 64)}),
    "no shape": ({"x": None}, {"x": (64, 3)}, {"x": (64, 3)}),
}  # fmt: skip


@pytest.mark.parametrize(("declared", "passed_inputs", "expected"), CASES.values(), ids=CASES)
def test_first_examples_need_declared_batch_axes(declared, passed_inputs, expected):
    inputs = [Input(name, F32, shape) for name, shape in declared.items()]
    arrays = {name: np.zeros(shape, F32) for name, shape in passed_inputs.items()}
    found = first_examples(inputs, arrays)
    assert {name: array.shape for name, array in found.items()} == expected
    assert all(np.shares_memory(found[name], arrays[name]) for name in found)


def test_facts_of_large_sample_equal_facts_of_few_examples():
    proto = models.cnn()
    model = ke.load_model(proto, sample_inputs=models.random_inputs(proto, 512))
    assert max(fact.shape[0] for fact in model.facts.values() if len(fact.shape) == 4) < 10


def test_model_with_fixed_batch_runs_on_whole_sample():
    net = models.Net()
    rows = net.op("Reshape", "input", net.constant("shape", np.array([12, 3])), to="rows")
    net.op("MatMul", rows, net.weight("weight", 3, 2), to="output")
    model = net.model({"input": ["batch", 2, 3]}, {"output": [12, 2]})
    inputs = {"input": np.ones((6, 2, 3), np.float32)}
    assert ke.load_model(model, sample_inputs=inputs).facts["output"].shape == (12, 2)
