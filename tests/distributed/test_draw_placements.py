"""Ranks draw for examples on any axis, alone or with positions, as one process does."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.distributed.shards import DrawAxis, RowRange
from tests import models
from tests.distributed.threads import run

STEPS, WIDTH, CLASSES = 4, 3, 2


FOLD = ("Reshape", [[-1, WIDTH]], {})
STEPS_FIRST = ("Transpose", [], {"perm": [1, 0, 2]})
CLASSES_SECOND = ("Transpose", [], {"perm": [0, 2, 1]})


def network(before, after, shape, output):
    """A weight in float64 between operators that arrange its rows."""
    net = models.Net("float64")
    value = net.op("Tanh", "input", to="bent")
    dense = ("MatMul", [], {})
    for index, (op, constants, attributes) in enumerate((*before, dense, *after)):
        operands = [net.constant(f"c{index}", np.array(c)) for c in constants]
        if op == "MatMul":
            operands = [net.weight("w", WIDTH, CLASSES)]
        value = net.op(op, value, *operands, to=f"value{index}", **attributes)
    net.op("Identity", value, to="output")
    return net.model({"input": shape}, {"output": output})


MODELS = {
    "examples first": lambda: network([], [], ["batch", WIDTH], ["batch", CLASSES]),
    "steps first": lambda: network([], [], ["t", "batch", WIDTH], ["t", "batch", CLASSES]),
    "steps, classes": lambda: network(
        [], [CLASSES_SECOND], ["t", "batch", WIDTH], ["t", CLASSES, "batch"]
    ),
    "steps of each example": lambda: network(
        [FOLD], [], ["batch", STEPS, WIDTH], ["rows", CLASSES]
    ),
    "examples of each step": lambda: network(
        [STEPS_FIRST, FOLD], [], ["batch", STEPS, WIDTH], ["rows", CLASSES]
    ),
}
INPUT_AXES = {"steps first": 1, "steps, classes": 1}
CLASS_AXES = {"steps, classes": 1}
EXPECTED = {
    "examples first": DrawAxis(0),
    "steps first": DrawAxis(1),
    "steps, classes": DrawAxis(-1),
    "steps of each example": DrawAxis(0),
    "examples of each step": DrawAxis(0, positions_first=True),
}
CUTS = [0, 1, 4, 6]
# From (examples, steps, …) to the axes of the model.
ARRANGED = {
    "examples first": lambda x: x[:, 0],
    "steps first": lambda x: x.swapaxes(0, 1),
    "steps, classes": lambda x: np.moveaxis(x, 0, -1),
    "steps of each example": lambda x: x.reshape(-1, *x.shape[2:]),
    "examples of each step": lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]),
}


def batch_of(name, loss, rows):
    """Inputs and targets of some of six examples."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, STEPS, WIDTH))[rows]
    bits = rng.integers(0, CLASSES, (6, STEPS, CLASSES))[rows]
    targets = ARRANGED[name](bits[..., 0] if loss == "categorical" else 1.0 * bits)
    arranged = {"examples first": x[:, 0], "steps first": x.swapaxes(0, 1)}
    arranged["steps, classes"] = arranged["steps first"]
    return {"input": arranged.get(name, x)}, targets


def engine_of(name, mode="gradients", loss="categorical", communicator=None):
    return ke.Engine.from_onnx(
        MODELS[name](),
        loss=loss,
        class_axis=CLASS_AXES.get(name, -1),
        estimation_mode=mode,
        batch_axes={"input": INPUT_AXES.get(name, 0)},
        communicator=communicator,
    )


@pytest.mark.parametrize("name", MODELS)
def test_placements_are_those_of_the_model(name):
    engine = engine_of(name)
    assert engine._assembly.draw_placements() == {"loss_0": EXPECTED[name]}


MODES = ["gradients", "curvature_prop", "empirical"]


@pytest.mark.parametrize("loss", ["categorical", "normal", "multi_bernoulli"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_steps_of_ranks_are_those_of_one_process(name, mode, loss):
    whole = engine_of(name, mode, loss)
    expected = whole.step(*batch_of(name, loss, slice(0, 6)))

    def work(communicator):
        engine = engine_of(name, mode, loss, communicator)
        result = engine.step(*batch_of(name, loss, slice(*CUTS[communicator.rank :][:2])))
        return result, engine.estimator.rng.bit_generator.state

    for result, state in run(3, work):
        assert state == whole.estimator.rng.bit_generator.state
        assert result.loss == pytest.approx(expected.loss, rel=1e-12)
        for key, gradient in expected.natural_gradients.items():
            # Float64 rounding of tens of terms; the inverse multiplies it by its condition.
            close = 1e-10 * abs(gradient).max()
            np.testing.assert_allclose(result.natural_gradients[key], gradient, atol=close)


@pytest.mark.parametrize("steps_first", [False, True])
def test_the_order_is_known_for_generated_identifiers(steps_first):
    net = models.Net()
    value = net.op("Gather", net.weight("table", 5, WIDTH), "input", to="tokens")
    if steps_first:
        value = net.op("Transpose", value, to="moved", perm=[1, 0, 2])
    value = net.op("Reshape", value, net.constant("rows", np.array([-1, WIDTH])), to="rows_of")
    net.op("MatMul", value, net.weight("w", WIDTH, 5), to="output")
    model = net.model({"input": ["batch", STEPS]}, {"output": ["rows", 5]}, input_dtype="int64")
    engine = ke.Engine.from_onnx(model, loss="categorical")
    assert engine._assembly.draw_placements()["loss_0"].positions_first == steps_first


def test_an_order_of_equal_examples_is_not_known_and_refused():
    name = "examples of each step"
    engine = ke.Engine.from_onnx(
        MODELS[name](),
        loss="categorical",
        batch_axes={"input": 0},
        sample_inputs={"input": np.ones((3, STEPS, WIDTH))},  # equal examples
    )
    assert engine._assembly.draw_placements() == {"loss_0": DrawAxis(0, None)}
    engine.estimator.set_rows(RowRange(0, 2, 6))
    engine.fisher.sources.placements = engine._assembly.draw_placements
    with pytest.raises(ke.UnsupportedError, match="unknown order"):
        engine.observe({"input": np.ones((2, STEPS, WIDTH))})
    assert engine.counter == 0
