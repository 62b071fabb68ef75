"""Sizes that follow from shapes alone, against those of a run on a batch of the size."""

import numpy as np
import pytest
from onnx import numpy_helper, parser

import kfac_engine as ke
from kfac_engine.runtime import memory
from kfac_engine.runtime.memory import value_bytes
from kfac_engine.runtime.sample_run import SampleRun, measured_facts, open_run, sample_batch
from tests import models

NAMES = sorted(models.MODELS)
# Values that follow from constants are small, and are not counted.
SMALL = 4096


def measured(model, backward, feeds):
    known = open_run(model.graph, model.facts).facts(feeds)
    cotangents = {
        cotangent: np.zeros(known[name].shape, known[name].dtype)
        for name, cotangent in backward.cotangents.items()
    }
    facts = measured_facts(memory._joint(model, backward), {**feeds, **cotangents})
    return {name: value_bytes(fact) for name, fact in facts.items()}


@pytest.mark.parametrize("name", NAMES)
def test_sizes_of_a_batch_are_those_of_a_run(name):
    output = "mean" if name == "two_outputs" else None
    engine = ke.Engine.from_onnx(models.MODELS[name](), loss="normal", output=output, threads=1)
    check_sizes(engine)


def check_sizes(engine, inputs=None):
    model, batch = engine._model, engine._task.batch
    feeds = sample_batch(model.graph, model.facts, inputs)
    size = batch.size if batch.fixed else 7
    feeds = feeds if batch.fixed else batch.resized(feeds, size)
    for backward in model.backwards():
        found = memory._sizes_at(model, backward, batch, size)
        truth = measured(model, backward, feeds)
        wrong = {n: (found.get(n), b) for n, b in truth.items() if found.get(n, b) != b}
        assert not wrong
        assert all(truth[value] <= SMALL for value in truth.keys() - found.keys())


# Inputs without an axis of examples, as voice models have them, and nodes that read them. Only a
# run, or shape inference, knows the sizes of the results.
X, RATE, STATE = {"x": np.ones((5, 4))}, {"rate": np.int64(2)}, {"h": np.zeros((2, 5, 3))}
WITHOUT_EXAMPLES = {
    "scalar": ("int64 rate", RATE, "s = CastLike (rate, x)  y = Mul (z, s)"),
    "scalar and state": (
        "int64 rate, float[2, n, 3] h",
        RATE | STATE,
        "s = CastLike (rate, x)  i = Constant <value_int = 0> ()  first = Gather (h, i)"
        "  a = Add (z, first)  y = Mul (a, s)",
    ),
    "state of one length": (
        "float[2, 1, 3] h",
        {"h": np.zeros((2, 1, 3))},
        "i = Constant <value_int = 0> ()  first = Gather (h, i)  y = Add (z, first)",
    ),
    "unused": ("int64 rate, float[2, 7] rest", RATE | {"rest": np.ones((2, 7))}, "y = Relu (z)"),
    "unused text": ("string[1] name", {"name": np.array(["a"], object)}, "y = Relu (z)"),
    "flag": ("bool flag", {"flag": np.bool_(1)}, "k = Neg (z)  y = Where (flag, z, k)"),
    "shape": ("int64[2] to", {"to": np.array([-1, 3])}, "r = Tanh (z)  y = Reshape (r, to)"),
    "length": (
        "int64 rate",
        RATE,
        "zero = Constant <value_int = 0> ()  one = Constant <value_int = 1> ()"
        "  steps = Range (zero, rate, one)  real = Cast <to = 1> (steps)"
        "  sum = ReduceSum <keepdims = 0> (real)  y = Add (z, sum)",
    ),
    "open axis": (
        "float[m, 3] keys",
        {"keys": np.ones((6, 3))},
        "k = Transpose <perm = [1, 0]> (keys)  scores = MatMul (z, k)  p = Softmax (scores)"
        "  read = MatMul (p, keys)  y = Add (z, read)",
    ),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", WITHOUT_EXAMPLES)
def test_sizes_with_inputs_without_examples_are_those_of_a_run(name, given):
    declared, arrays, body = WITHOUT_EXAMPLES[name]
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g (float[n, 4] x, {declared}) => (float[n, 3] y)'
        f" {{ z = MatMul (x, W)  {body} }}"
    )
    weight = np.random.default_rng(0).standard_normal((4, 3)).astype("f")
    model.graph.initializer.append(numpy_helper.from_array(weight, "W"))
    inputs = {n: a.astype("f") if a.dtype == "d" else a for n, a in (X | arrays).items()}
    given |= name in {"shape", "length"}  # generated values are not valid
    engine = ke.Engine.from_onnx(model, loss="normal", sample_inputs=inputs if given else None)
    check_sizes(engine, inputs if given else None)
    assert engine.memory(64).activations > engine.memory(4).activations


def test_memory_of_any_batch_is_computed_without_a_run(monkeypatch):
    engine = ke.Engine.from_onnx(models.cnn(), loss="categorical", threads=1)
    monkeypatch.setattr(SampleRun, "facts", lambda *_: pytest.fail("the model has run"))
    few, many = (engine.memory(count).activations for count in (10, 10_000_000))
    assert many == pytest.approx(1e6 * few, rel=0.5)
