"""Models whose results for an example are others in another batch are refused, by name."""

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from tests import models
from tests.distributed.threads import run

SHAPES = {"w": (4, 5), "head": (5, 3), "other": (5, 5)}
# Name to nodes between the hidden values ``h`` and the features, and the words of the error.
REFUSED = {
    "normalization": (
        "f, m, v = BatchNormalization<training_mode = 1>(h, one, nought, nought, one)",
        "depend on other examples, by BatchNormalization"),
    "dropout": ("f = Dropout(h, ratio, yes)", "depend on random numbers, by Dropout"),
    "mask with a seed": (
        """u = RandomUniformLike<seed = 1.0>(h)  k = Less(u, ratio)  c = Cast<to = 11>(k)
        f = Mul(h, c)""",
        "depend on random numbers, by RandomUniformLike",
    ),
    "sum of the batch": (
        "s = ReduceSum<keepdims = 1>(h, first)  f = Add(h, s)",
        "depend on other examples, first by ReduceSum"),
    # The mean moves results by less than rounding, and the threshold lets nothing pass.
    "mean that hardly matters": (
        "s = ReduceMean<keepdims = 1>(h, first)  g = Mul(s, tiny)  f = Add(h, g)",
        "depend on other examples, first by ReduceMean"),
    "threshold on the largest": (
        """s = ReduceMax<keepdims = 1>(h, first)  d = Sub(s, many)  g = Relu(d)
        f = Add(h, g)""",
        "depend on other examples, first by ReduceMax",
    ),
    "size of the batch": (
        "n = Shape<start = 0, end = 1>(h)  c = Cast<to = 11>(n)  f = Div(h, c)",
        "depend on the number of examples, or on its place among them, first by"),
    "number of the row": (
        """n = Shape<start = 0, end = 1>(h)  k = Squeeze(n)  r = Range(start, k, step)
        c = Cast<to = 11>(r)  d = Unsqueeze(c, last)  f = Mul(h, d)""",
        "depend on the number of examples, or on its place among them, first by",
    ),
}  # fmt: skip
ACCEPTED = {
    "mean of the features": "s = ReduceMean<keepdims = 1>(h, last)  f = Sub(h, s)",
    "softmax of the features": "f = Softmax(h)",
    "rows and back": """n = Shape(h)  r = Reshape(h, flat)  t = Tanh(r)  f = Reshape(t, n)""",
    "dropout at rest": "f = Dropout(h, ratio)",
    # A table that is computed from weights alone has no examples, and none reach it.
    "mean of a weight": "s = ReduceMean<keepdims = 1>(other, first)  f = Add(h, s)",
    # Read by no loss.
    "an unused mean": "s = ReduceMean<keepdims = 1>(h, first)  f = Identity(h)",
}


def model_of(nodes, head=True):
    text = f"""<ir_version: 8, opset_import: ["": 18]>
    net (double[batch, 4] input) => (double[batch, 3] output) {{
      x = MatMul(input, w)  h = Tanh(x)
      {nodes}
      output = MatMul(f, head)
    }}"""
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    if not head:
        arrays["head"][:] = 0.0
    constants = {
        "one": np.ones(5), "nought": np.zeros(5), "ratio": np.array(0.02), "yes": np.array(True),
        "first": np.array([0]), "last": np.array([1]), "tiny": np.array(1e-9),
        "many": np.array(1e3), "start": np.array(0), "step": np.array(1), "flat": np.array([-1]),
    }  # fmt: skip
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for name, array in (arrays | constants).items()
    )
    return model


def engine_of(model, communicator=None):
    return ke.Engine.from_onnx(
        model, loss="categorical", trainable=["w", "head"], communicator=communicator
    )


@pytest.mark.parametrize("name", REFUSED)
def test_models_with_dependent_examples_are_refused_by_all_ranks(name):
    nodes, words = REFUSED[name]

    def work(communicator):
        with pytest.raises(ke.UnsupportedError) as refused:
            engine_of(model_of(nodes), communicator)
        return str(refused.value)

    for text in run(2, work):
        assert f"the results of an example {words} " in text
    assert engine_of(model_of(nodes)).losses  # one process trains it


@pytest.mark.parametrize("name", ["normalization", "mask with a seed"])
def test_a_head_of_zeros_hides_no_dependence(name):
    nodes, words = REFUSED[name]

    def work(communicator):
        with pytest.raises(ke.UnsupportedError, match=words):
            engine_of(model_of(nodes, head=False), communicator)

    run(2, work)


@pytest.mark.parametrize("name", ACCEPTED)
def test_models_with_independent_examples_are_accepted(name):
    model, rng = model_of(ACCEPTED[name]), np.random.default_rng(1)
    inputs, targets = rng.standard_normal((6, 4)), rng.integers(0, 3, 6)

    def work(communicator):
        engine, rows = engine_of(model, communicator), slice(3 * communicator.rank, None)
        rows = slice(rows.start, rows.start + 3)
        return engine.loss({"input": inputs[rows]}, targets[rows])

    expected = engine_of(model).loss({"input": inputs}, targets)
    for loss in run(2, work):
        assert loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_models_of_the_tests_are_accepted(name):
    model = models.MODELS[name](dtype="float32")
    output = model.graph.output[0].name

    def work(communicator):
        return ke.Engine.from_onnx(
            model, loss="categorical", output=output, communicator=communicator
        )

    assert len(run(2, work)) == 2
