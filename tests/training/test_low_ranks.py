"""Lengths of updates of products of two matrices of low rank, such as adapters."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.models import written

WIDE, RANK = 24, 4


def first_update(graph, constants):
    """Frobenius norms of the updates of the first step, by parameter."""
    model = written(f"n,{WIDE}", constants, graph)
    engine = ke.Engine.from_onnx(model, loss="normal", trainable=["first", "second"])
    before = {name: array.copy() for name, array in engine.parameters.items()}
    rng = np.random.default_rng(0)
    optimizer = ke.KfacOptimizer(engine, weight_decay=0)
    inputs, targets = rng.standard_normal((2, 64, WIDE)).astype("float32")
    optimizer.step(inputs, targets)
    return {n: np.linalg.norm(a - before[n]) for n, a in engine.parameters.items()}


def nodes(between):
    return (
        f"full = MatMul(input, w) low = MatMul(input, first) {between} "
        "update = MatMul(scaled, second) output = Add(full, update)"
    )


SHAPES = f"w({WIDE},{WIDE}) first({WIDE},{RANK}) second({RANK},{WIDE}) factor=2.0"


def test_the_second_matrix_of_an_adapter_moves_as_far_as_the_first():
    found = first_update(nodes("scaled = Mul(low, factor)"), SHAPES)
    assert found["second"] == pytest.approx(found["first"], rel=1e-3)


def test_other_matrices_move_by_the_root_of_their_outputs():
    cases = {
        "function": (nodes("scaled = Tanh(low)"), SHAPES),
        "wide": (
            nodes("scaled = Mul(low, factor)"),
            f"w({WIDE},{WIDE}) first({WIDE},12) second(12,{WIDE}) factor=2.0",
        ),
    }
    for name, (graph, constants) in cases.items():
        found = first_update(graph, constants)
        rank = 12 if name == "wide" else RANK
        assert found["second"] / found["first"] == pytest.approx(np.sqrt(WIDE / rank), rel=1e-3)
