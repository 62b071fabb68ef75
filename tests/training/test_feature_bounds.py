"""Rare features do not harm a run of K-FAC with its defaults: it learns as if they were not there.

A feature is rare if few rows have it: the sample that statistics are taken from has no such row.
"""

from types import SimpleNamespace

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.backend.select import select
from kfac_engine.layers.feature_powers import LayerInput
from kfac_engine.layers.packing import Packing
from kfac_engine.layers.parameter_slices import ParameterSlice, Piece
from kfac_engine.layers.views import RowView
from kfac_engine.training import adaptive_lengths
from kfac_engine.training.feature_bounds import POWERS, FeatureBounds
from tests.models import written

ROWS, COLUMNS, BATCH, EPOCHS = 1500, 8, 100, 5
ROW = 1234  # has the rare feature

DENSE = "p = MatMul(read, w) s = Add(p, b) h = Relu(s) q = MatMul(h, w1) output = Add(q, b1)"
WEIGHTS = "w(9,32) b(32) w1(32,1) b1(1)"
# Nodes from a table, whose last column is rare, to predictions; weights and other constants.
NETWORKS = {
    "table": (f"read = Identity(input) {DENSE}", WEIGHTS),
    "flattened": (f"deep = Unsqueeze(input, axis) read = Flatten(deep) {DENSE}",
                  f"{WEIGHTS} axis=2"),
    "cast": (f"wide = Cast<to = 11>(input) read = Cast<to = 1>(wide) {DENSE}", WEIGHTS),
    "behind learned scales": (f"read = Mul(input, scale) {DENSE}",
                              f"{WEIGHTS} scale=1.,1.,1.,1.,1.,1.,1.,1.,1."),
    "channels": ("deep = Unsqueeze(input, axis) s = Conv(deep, w, b) h = Relu(s) read = Flatten(h)"
                 " q = MatMul(read, w1) output = Add(q, b1)",
                 "axis=2 w(32,9,1) b(32) w1(32,1) b1(1)"),
}  # fmt: skip


def table(rare):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((ROWS, COLUMNS + 1))
    y = np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.1 * rng.standard_normal((ROWS, 1))
    flag = np.zeros(ROWS)
    flag[ROW] = rare
    x[:, -1] = (flag - flag.mean()) / (flag.std() or 1)
    return x.astype(np.float32), (y / y.std()).astype(np.float32)


def fitted(network, rare):
    """The mean squared error of a network in other rows, after a run with defaults."""
    nodes, constants = NETWORKS[network]
    model = written("n,9 -> n,1", constants, nodes)
    engine = ke.Engine.from_onnx(model, loss="normal", threads=1)
    x, y = table(rare)
    ke.fit(engine, (x, y), batch_size=BATCH, epochs=EPOCHS)
    return ((engine.predict(x) - y) ** 2)[np.arange(ROWS) != ROW].mean()


SHAPES = "w(9,9) w1(9,9) w2(9,1) zero=0 one=1"
# Nodes of a network, and the inputs of the layers whose directions have bounds.
BOUNDED = {
    "layers one after the other": (
        "a = MatMul(input, w) b = Relu(a) c = MatMul(b, w1) output = MatMul(c, w2)", {"input"}),
    "a feature multiplies others": (
        "flag = Slice(input, zero, one, one) a = MatMul(input, w) b = Mul(a, flag) "
        "c = MatMul(b, w1) output = MatMul(c, w2)", {"input", "b"}),
    "layers whose inputs are added": (
        "a = MatMul(input, w) b = Add(a, input) c = MatMul(b, w1) output = MatMul(c, w2)",
        {"input", "b"}),
    "a feature alone": (
        "a = MatMul(input, w) flag = Slice(input, zero, one, one) e = Transpose(w2) "
        "b = MatMul(flag, e) output = Mul(a, b)", {"input"}),
}  # fmt: skip


@pytest.mark.parametrize("network", BOUNDED)
def test_layers_that_data_reach_without_other_layers_have_bounds(network):
    nodes, names = BOUNDED[network]
    sides = "n,9 -> n,m"
    engine = ke.Engine.from_onnx(written(sides, SHAPES, nodes), loss="normal", threads=1)
    inputs = ke.KfacOptimizer(engine).feature_inputs
    assert {name for source in inputs for name in source.names} == names


@pytest.mark.parametrize("network", NETWORKS)
def test_a_rare_feature_does_not_harm_a_run(network):
    assert fitted(network, rare=1) < 1.3 * fitted(network, rare=0)


def test_other_features_change_nothing(monkeypatch):
    bounded = fitted("table", rare=0)
    monkeypatch.setattr(adaptive_lengths, "feature_bounds", lambda *_: FeatureBounds())
    assert fitted("table", rare=0) == bounded


def test_one_hot_columns_of_a_long_tail_are_learned(monkeypatch):
    rng = np.random.default_rng(2)
    shares = 1 / (1 + np.arange(100))
    ids = rng.choice(100, ROWS, p=shares / shares.sum())
    x, effects = rng.standard_normal((ROWS, 4)), rng.standard_normal(100)
    y = (x[:, :1] + effects[ids, None]).astype(np.float32)
    hot = np.eye(100)[ids]
    table = np.concatenate([x, (hot - hot.mean(axis=0)) / (hot.std(axis=0) + 1e-9)], axis=1)
    nodes = "s = MatMul(input, w) h = Relu(s) output = MatMul(h, w1)"

    def error():
        model = written("n,104 -> n,1", "w(104,32) w1(32,1)", nodes)
        engine = ke.Engine.from_onnx(model, loss="normal", threads=1)
        ke.fit(engine, (table.astype(np.float32), y), batch_size=BATCH, epochs=EPOCHS)
        return ((engine.predict(table.astype(np.float32)) - y) ** 2).mean()

    bounded = error()
    monkeypatch.setattr(adaptive_lengths, "feature_bounds", lambda *_: FeatureBounds())
    assert bounded < 0.5 * error()


def words(rng):
    """Which of 200 words a row has, from 0.4 down to 0.01 of the rows."""
    return rng.random((ROWS, 200)) < 2 / np.arange(5, 205)


# Columns that are mostly 0, and half the error that updates of the usual norm leave, or less.
SPARSE = {
    "one-hot": (lambda rng: np.eye(100)[rng.integers(0, 100, ROWS)], 0.008),
    "two of them": (lambda rng: np.hstack(
        [np.eye(50)[rng.integers(0, 50, ROWS)] for _ in range(2)]), 0.008),
    "words": (words, 0.008),
    "counts of words": (lambda rng: words(rng) * rng.geometric(0.5, (ROWS, 200)), 0.1),
    "small one-hot": (lambda rng: 0.1 * np.eye(100)[rng.integers(0, 100, ROWS)], 0.008),
}  # fmt: skip


@pytest.mark.parametrize("columns", SPARSE)
def test_columns_that_are_mostly_zero_are_learned(columns):
    rng, (draw, limit) = np.random.default_rng(4), SPARSE[columns]
    sparse = draw(rng)
    x = np.hstack([rng.standard_normal((ROWS, 4)), sparse]).astype(np.float32)
    y = np.sin(x[:, :1]) + (sparse > 0) @ rng.standard_normal((sparse.shape[1], 1))
    y = ((y - y.mean()) / y.std()).astype(np.float32)
    side = x.shape[1]
    nodes = "s = MatMul(input, w) t = Add(s, b) h = Relu(t) output = MatMul(h, w1)"

    model = written(f"n,{side} -> n,1", f"w({side},32) b(32) w1(32,1)", nodes)
    engine = ke.Engine.from_onnx(model, loss="normal", threads=1)
    ke.fit(engine, (x, y), batch_size=50, epochs=10)
    assert ((engine.predict(x) - y) ** 2).mean() < limit


@pytest.mark.parametrize("scale", [1.0, 0.2])
def test_updates_along_rare_features_have_the_length_of_their_change(scale):
    """The inner product for lengths is the mean square of the change of the outputs."""
    rng = np.random.default_rng(5)
    x = scale * np.eye(40, dtype=np.float32)[rng.integers(0, 40, 4000)]
    direction = rng.standard_normal((40, 6)).astype(np.float32)
    powers = np.stack([(x**k).mean(axis=0) for k in (0, 2, 4)]).astype(np.float32)
    old, new = ({POWERS: {POWERS: np.zeros((3, 40), np.float32)}} for _ in range(2))
    step = SimpleNamespace(slots=old, new_slots=new, features=powers * 50, examples=50, step=0)
    rule = bounds("IO", 40)
    assert not rule.most_are_rare(old)
    found = rule.shortened({"w": direction}, step, select("numpy"))
    assert rule.most_are_rare(new)
    change = ((x @ found.directions["w"]) ** 2).sum(axis=1).mean()
    np.testing.assert_allclose(np.vdot(found.directions["w"], found.active["w"]), change, rtol=1e-4)


def bounds(layout, features):
    weight = Piece(ParameterSlice("w"), "dense", Packing(layout, has_bias=False), "w")
    inputs = (LayerInput(("x",), RowView()),)
    return FeatureBounds({"w": weight}, inputs, {"w": slice(0, features)}, ("w",))


@pytest.mark.parametrize("layout", ["IO", "OI"])
def test_directions_move_active_rows_no_farther_than_all_rows(layout):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1000, 5))
    x[:, 3:] = 0
    x[7, 3] = x[8, 4] = 30.0
    direction = rng.standard_normal((5, 4))
    powers = np.stack([(x**k).mean(axis=0) for k in (0, 2, 4)]).astype(np.float32)
    old, new = ({POWERS: {POWERS: np.zeros((3, 5), np.float32)}} for _ in range(2))
    step = SimpleNamespace(slots=old, new_slots=new, features=powers * 50, examples=50, step=0)
    given = direction if layout == "IO" else direction.T
    result = bounds(layout, 5).shortened({"w": given.astype(np.float32)}, step, select("numpy"))
    shorter = result.directions["w"] if layout == "IO" else result.directions["w"].T
    np.testing.assert_array_equal(shorter[:3], direction[:3].astype(np.float32))
    everywhere = ((x @ shorter) ** 2).sum(axis=1).mean()
    for row, feature in ((7, 3), (8, 4)):
        alone = ((x[row, feature] * shorter[feature]) ** 2).sum()
        # Bounds are computed in four passes, and the change of all rows as if features were
        # uncorrelated.
        assert 0.8 * everywhere < alone < 1.2 * everywhere
        ratio = shorter[feature] / direction[feature]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)  # the row is shortened, not turned


# Mean squares and fourth powers of a layer's features: of 0 and 1 in a hundredth of the rows, and
# of Gaussian features.
FEATURES = {"rare": (0.01, 0.01), "usual": (1.0, 3.0)}


@pytest.mark.parametrize(
    ("sides", "features", "whole"),
    [("n,9 -> n,1", "rare", True), ("n,9 -> n,1", "usual", False),
     ("n,5,9 -> n,5,1", "rare", False)],
)  # fmt: skip
def test_statistics_have_whole_batches_of_tables_only(sides, features, whole):
    """A part of a batch has rows enough where an example has several."""
    nodes = "s = MatMul(input, w) h = Relu(s) output = MatMul(h, w1)"
    model = written(sides, "w(9,32) w1(32,1)", nodes)
    optimizer = ke.KfacOptimizer(ke.Engine.from_onnx(model, loss="normal", threads=1))
    slots = optimizer.state().arrays
    slots[POWERS][POWERS][...] = np.array([1.0, *FEATURES[features]])[:, None]
    assert optimizer.measures_whole(slots) == whole
