"""Ranks draw for examples on any axis, alone or with positions, as one process does."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.engine.draw_placements import draw_placements
from kfac_engine.ranks.shards import Placement, Rows
from tests import models
from tests.engine.test_combined_engines import TwoProcesses

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
    "examples first": Placement(0),
    "steps first": Placement(1),
    "steps, classes": Placement(-1),
    "steps of each example": Placement(0),
    "examples of each step": Placement(0, positions_first=True),
}
SHAPES = {
    "examples first": (6, WIDTH),
    "steps first": (STEPS, 6, WIDTH),
    "steps, classes": (STEPS, 6, WIDTH),
}


def engine_of(name, mode="gradients", loss="categorical"):
    return ke.Engine.from_onnx(
        MODELS[name](),
        loss=loss,
        class_axis=CLASS_AXES.get(name, -1),
        estimation_mode=mode,
        batch_axes={"input": INPUT_AXES.get(name, 0)},
    )


@pytest.mark.parametrize("name", MODELS)
def test_placements_are_those_of_the_model(name):
    engine = engine_of(name)
    assert draw_placements(engine._assembly) == {"loss_0": EXPECTED[name]}


@pytest.mark.parametrize("loss", ["categorical", "normal", "multi_bernoulli"])
@pytest.mark.parametrize("mode", ["gradients", "curvature_prop"])
@pytest.mark.parametrize("name", MODELS)
def test_statistics_of_ranks_are_those_of_one_process(name, mode, loss):
    whole = engine_of(name, mode, loss)
    parts = [engine_of(name, mode, loss) for _ in range(2)]
    x = np.random.default_rng(0).normal(size=SHAPES.get(name, (6, STEPS, WIDTH)))
    whole.observe({"input": x})
    processes, shards = TwoProcesses(), np.split(x, [2], axis=INPUT_AXES.get(name, 0))
    with ThreadPoolExecutor(2) as threads:
        runs = []
        for rank, (engine, shard) in enumerate(zip(parts, shards, strict=True)):
            engine.combine = processes.of(rank)
            engine.estimator.rows = Rows.of((2, 4), rank)
            engine.estimator.place_draws(draw_placements(engine._assembly))
            runs.append(threads.submit(engine.observe, {"input": shard}))
        for run in runs:
            run.result()
    for engine in parts:
        state = engine.estimator.rng.bit_generator.state
        assert state == whole.estimator.rng.bit_generator.state
        for factor, expected in zip(engine.estimator.factors, whole.estimator.factors, strict=True):
            # Float64 rounding of tens of terms of size one.
            np.testing.assert_allclose(factor.cov, expected.cov, atol=1e-12)


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
    assert draw_placements(engine._assembly)["loss_0"].positions_first == steps_first


def test_an_order_of_equal_examples_is_not_known_and_refused():
    name = "examples of each step"
    engine = ke.Engine.from_onnx(
        MODELS[name](),
        loss="categorical",
        batch_axes={"input": 0},
        sample_inputs={"input": np.ones((3, STEPS, WIDTH))},  # equal examples
    )
    assert draw_placements(engine._assembly) == {"loss_0": Placement(0, None)}
    engine.estimator.rows = Rows(0, 2, 6)
    engine.estimator.place_draws(draw_placements(engine._assembly))
    with pytest.raises(ke.UnsupportedError, match="unknown order"):
        engine.observe({"input": np.ones((2, STEPS, WIDTH))})
    assert engine.counter == 0
