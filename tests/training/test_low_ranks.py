"""Lengths of updates of products of two matrices of low rank, such as adapters."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.training import adaptive_lengths
from tests.models import written

WIDE, OUTPUTS, RANK = 24, 32, 4


def first_update(graph, constants):
    """The updates of the first step, by parameter."""
    model = written(f"n,{WIDE} -> n,{OUTPUTS}", constants, graph)
    trained = ["learned"] if "learned" in graph else []
    engine = ke.Engine.from_onnx(model, loss="normal", trainable=["first", "second", *trained])
    before = {name: array.copy() for name, array in engine.parameters.items()}
    rng = np.random.default_rng(0)
    optimizer = ke.KfacOptimizer(engine, weight_decay=0)
    inputs, targets = (rng.standard_normal((64, d)).astype("float32") for d in (WIDE, OUTPUTS))
    optimizer.step(inputs, targets)
    return {name: array - before[name] for name, array in engine.parameters.items()}


def nodes(between, behind="update = Identity(product)"):
    return (
        f"full = MatMul(input, w) low = MatMul(input, first) {between} "
        f"product = MatMul(scaled, second) {behind} sum = Add(full, update) output = Asinh(sum)"
    )


SHAPES = (
    f"w({WIDE},{OUTPUTS}) first({WIDE},{RANK}) second({RANK},{OUTPUTS}) factor=4.0 "
    "each=3.0,3.0,0.0,1.0 "
    "learned=3.0,3.0,0.0,1.0 nothing=0.0"
)
FACTORS = {
    "none": (nodes("scaled = Identity(low)"), 1),
    "between": (nodes("scaled = Mul(low, factor)"), 4),
    "behind": (nodes("scaled = Identity(low)", "update = Mul(factor, product)"), 4),
    "both": (nodes("scaled = Mul(low, factor)", "update = Mul(product, factor)"), 16),
    "quotient": (nodes("scaled = Div(low, factor)"), 1 / 4),
    "trained": (nodes("scaled = Mul(low, learned)"), 1),
    "zero": (nodes("scaled = Mul(low, nothing)"), np.inf),  # no gradient
    "of features": (nodes("scaled = Mul(low, each)"), np.sqrt(19 / 4)),
}


@pytest.mark.parametrize(("graph", "factor"), FACTORS.values(), ids=FACTORS)
def test_matrices_of_an_adapter_move_by_their_sides_and_by_the_factor(graph, factor):
    found = first_update(graph, SHAPES)
    for name, sides in {"first": (WIDE, RANK), "second": (RANK, OUTPUTS)}.items():
        length = 0.03 * 0.8 * np.prod(sides) ** 0.25 / np.sqrt(factor)
        assert np.linalg.norm(found[name]) == pytest.approx(length, rel=1e-3)


@pytest.mark.parametrize(("between", "equal"), [("Mul(low, factor)", True), ("Tanh(low)", False)])
def test_updates_of_adapters_of_any_rank_have_equal_singular_values(between, equal, monkeypatch):
    monkeypatch.setattr(adaptive_lengths, "_ROWS_OF_SMALL", 12)  # five iterations for 64 rows
    for update in first_update(nodes(f"scaled = {between}"), SHAPES).values():
        values = np.linalg.svd(update, compute_uv=False)
        assert (values[0] < 1.7 * values[-1]) == equal  # of the polynomial: 0.7 to 1.2


def test_other_matrices_move_by_the_root_of_their_outputs():
    cases = {
        "function": (nodes("scaled = Tanh(low)"), SHAPES, RANK),
        "wide": (
            nodes("scaled = Mul(low, factor)"),
            f"w({WIDE},{OUTPUTS}) first({WIDE},12) second(12,{OUTPUTS}) factor=2.0",
            12,
        ),
    }
    for graph, constants, outputs in cases.values():
        found = first_update(graph, constants)
        for name, size in {"first": outputs, "second": OUTPUTS}.items():
            length = 0.03 * np.sqrt(size)
            assert np.linalg.norm(found[name]) == pytest.approx(length, rel=1e-3)


def test_a_constant_that_is_divided_by_values_is_no_factor():
    model = written(f"n,{WIDE} -> n,{OUTPUTS}", SHAPES, nodes("scaled = Div(factor, low)"))
    engine = ke.Engine.from_onnx(model, loss="normal", trainable=["first", "second"])
    roots = ke.KfacOptimizer(engine)._given.update.roots
    assert roots == pytest.approx({"first": np.sqrt(RANK), "second": np.sqrt(OUTPUTS)})
