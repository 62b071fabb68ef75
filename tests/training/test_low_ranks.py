"""Lengths of updates of products of two matrices of low rank, such as adapters."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.training import adaptive_lengths
from tests.models import written

WIDE, RANK = 24, 4


def first_update(graph, constants):
    """The updates of the first step, by parameter."""
    model = written(f"n,{WIDE}", constants, graph)
    engine = ke.Engine.from_onnx(model, loss="normal", trainable=["first", "second"])
    before = {name: array.copy() for name, array in engine.parameters.items()}
    rng = np.random.default_rng(0)
    optimizer = ke.KfacOptimizer(engine, weight_decay=0)
    inputs, targets = rng.standard_normal((2, 64, WIDE)).astype("float32")
    optimizer.step(inputs, targets)
    return {name: array - before[name] for name, array in engine.parameters.items()}


def length_ratio(graph, constants):
    """Frobenius norm of the update of the second matrix, divided by that of the first one."""
    found = first_update(graph, constants)
    return np.linalg.norm(found["second"]) / np.linalg.norm(found["first"])


def nodes(between):
    return (
        f"full = MatMul(input, w) low = MatMul(input, first) {between} "
        "update = MatMul(scaled, second) output = Add(full, update)"
    )


SHAPES = f"w({WIDE},{WIDE}) first({WIDE},{RANK}) second({RANK},{WIDE}) factor=2.0"


def test_the_second_matrix_of_an_adapter_moves_by_the_mean_of_two_lengths():
    found = length_ratio(nodes("scaled = Mul(low, factor)"), SHAPES)
    lengths = np.sqrt([RANK, WIDE]) / np.sqrt(RANK)  # the first matrix has RANK outputs
    assert found == pytest.approx(np.sqrt(lengths.prod()), rel=1e-3)


def test_adapters_move_by_two_thirds_of_other_matrices():
    adapter, other = (
        np.linalg.norm(first_update(nodes(f"scaled = {between}"), SHAPES)["first"])
        for between in ("Mul(low, factor)", "Tanh(low)")
    )
    assert adapter / other == pytest.approx(2 / 3, rel=1e-3)


@pytest.mark.parametrize(("between", "equal"), [("Mul(low, factor)", True), ("Tanh(low)", False)])
def test_updates_of_adapters_of_any_rank_have_equal_singular_values(between, equal, monkeypatch):
    monkeypatch.setattr(adaptive_lengths, "_ROWS_OF_SMALL", 12)  # five iterations for 64 rows
    for update in first_update(nodes(f"scaled = {between}"), SHAPES).values():
        values = np.linalg.svd(update, compute_uv=False)
        assert (values[0] < 1.7 * values[-1]) == equal  # of the polynomial: 0.7 to 1.2


def test_other_matrices_move_by_the_root_of_their_outputs():
    cases = {
        "function": (nodes("scaled = Tanh(low)"), SHAPES),
        "wide": (
            nodes("scaled = Mul(low, factor)"),
            f"w({WIDE},{WIDE}) first({WIDE},12) second(12,{WIDE}) factor=2.0",
        ),
    }
    for name, (graph, constants) in cases.items():
        found = length_ratio(graph, constants)
        rank = 12 if name == "wide" else RANK
        assert found == pytest.approx(np.sqrt(WIDE / rank), rel=1e-3)
