"""One batch's measurements against loops over sources, towers, uses, examples and positions."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.compat.factors import (
    DiagonalKroneckerFactor,
    FullyConnectedKroneckerFactor,
    NaiveDiagonalFactor,
    NaiveFullFactor,
)
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.statistics import (
    GradientOuter,
    GradientSquare,
    KroneckerDiagonal,
    KroneckerMoment,
    LayerSquare,
)
from kfac_engine.errors import InputError, ShapeError
from kfac_engine.layers.views import RowView

ROWS = RowView()
EXACT = 1e-12  # float64, sums of a hundred products of size one
HALF = 1e-6  # float32 sums of products that float32 holds exactly, relative

BACKEND = NumpyBackend()


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape) + 0.2


def measured(statistic, values, *, dtype=np.float64, alpha=1.0, old=None, beta=0.0):
    """A measurement; what stood in its place must not matter where ``beta`` is zero."""
    out = np.full(statistic.shape(values), np.nan, dtype) if old is None else old.copy()
    statistic.add_to(out, values, BACKEND, alpha, beta)
    if out.ndim == 2 and len(out) == out.shape[1]:
        BACKEND.mirror(out)
    return out


@pytest.mark.parametrize("sizes", [[3] * 60, [3, 4, 5] * 20, [3, 20_000, 3]], ids=str)
def test_many_small_uses_are_measured_like_each_alone(sizes):
    values = {f"x{i}": draw(size, 4, 2, seed=i) for i, size in enumerate(sizes)}
    found = measured(KroneckerMoment(tuple(values), RowView(1), True), values)
    rows = np.concatenate([np.moveaxis(x, 1, -1).reshape(-1, 4) for x in values.values()])
    expected = mean_outer(list(rows), homogeneous=True)
    np.testing.assert_allclose(found, expected, atol=EXACT)


def features(x, axis):
    """Every row of features of a tensor, one by one."""
    moved = np.moveaxis(x, axis, -1)
    return [moved[index] for index in np.ndindex(moved.shape[:-1])]


def one_appended(row, homogeneous):
    return np.append(row, 1.0) if homogeneous else row


def mean_outer(rows, homogeneous=False):
    """Mean of the outer products of some rows."""
    total = 0.0
    for row in rows:
        z = one_appended(row, homogeneous)
        total = total + np.outer(z, z)
    return total / len(rows)


# -- Kronecker sides -------------------------------------------------------------------------------


@pytest.mark.parametrize("homogeneous", [False, True], ids=["plain", "with a one"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((5, 3), -1), ((4, 2, 3), -1), ((4, 3, 2), -2), ((3, 2, 2, 2), -1), ((3, 4, 2, 2), 1)],
    ids=["dense", "tokens", "weight-first", "channels-last", "channels-first"],
)
def test_a_kronecker_side_is_the_mean_outer_product_of_all_rows(shape, axis, homogeneous):
    x = draw(*shape)
    expected = mean_outer(features(x, axis), homogeneous)
    moment = KroneckerMoment(("x",), RowView(axis), homogeneous)
    np.testing.assert_allclose(measured(moment, {"x": x}), expected, atol=EXACT)
    diagonal = KroneckerDiagonal(("x",), RowView(axis), homogeneous)
    np.testing.assert_allclose(measured(diagonal, {"x": x}), np.diag(expected), atol=EXACT)


@pytest.mark.parametrize("homogeneous", [False, True], ids=["plain", "with a one"])
def test_sources_are_summed_and_towers_averaged(homogeneous):
    arrays = {f"{s}{t}": draw(4, 3, seed=10 * s + t) for s in range(3) for t in range(2)}
    names = [[f"{s}{t}" for t in range(2)] for s in range(3)]
    expected = sum(mean_outer(list(x), homogeneous) for x in arrays.values()) / 2
    dense = FullyConnectedKroneckerFactor(names, has_bias=homogeneous)
    np.testing.assert_allclose(update(dense, arrays), expected, atol=EXACT)
    diagonal = DiagonalKroneckerFactor(names, has_bias=homogeneous)
    np.testing.assert_allclose(update(diagonal, arrays), np.diag(expected), atol=EXACT)


@pytest.mark.parametrize(
    "statistic",
    [
        KroneckerMoment(("x", "y"), ROWS, True),
        KroneckerDiagonal(("x", "y"), ROWS, True),
        LayerSquare(("x",), ("y",), ROWS, ROWS, True),
        GradientSquare(("x",), (4,)),
        GradientOuter(("x", "y"), (4,)),
    ],
    ids=lambda statistic: type(statistic).__name__,
)
def test_a_measurement_is_added_to_the_scaled_old(statistic):
    values = {"x": draw(4, 3, seed=2), "y": draw(4, 3, seed=3)}
    new = measured(statistic, values)
    old = draw(*new.shape, seed=4)
    old = old + old.T if old.ndim == 2 and old.shape[0] == old.shape[1] else old
    found = measured(statistic, values, alpha=0.3, old=old, beta=0.6)
    np.testing.assert_allclose(found, 0.6 * old + 0.3 * new, atol=EXACT)


# -- diagonals of layers ---------------------------------------------------------------------------


def test_few_examples_at_a_time_give_the_same_diagonal():
    values = {"x": draw(7, 3), "d": draw(7, 2, seed=1)}
    statistic = LayerSquare(("x",), ("d",), ROWS, ROWS, True)
    out = np.zeros((4, 2))
    statistic.add_to(out, values, NumpyBackend(scratch_bytes=1), 1.0, 0.0)
    np.testing.assert_allclose(out, measured(statistic, values), atol=EXACT)


# -- element types ---------------------------------------------------------------------------------

ALL = [
    KroneckerMoment(("x",), ROWS, True),
    KroneckerDiagonal(("x",), ROWS, True),
    LayerSquare(("x",), ("x",), ROWS, ROWS, True),
    GradientSquare(("x",), (4,)),
    GradientOuter(("x",), (4,)),
]


def name_of(statistic):
    return type(statistic).__name__


def factor_of(statistic):
    if isinstance(statistic, FisherFactor):
        return statistic
    dense = isinstance(statistic, GradientOuter) or type(statistic) is KroneckerMoment
    return (DenseSquareMatrixFactor if dense else DiagonalFactor)(statistic)


def update(factor, values, decay=0.9):
    """The specification's way to average a batch in."""
    if not factor._averages_created:
        factor.instantiate_cov_variables()
    return factor.make_covariance_update_op(decay)(values)


@pytest.mark.parametrize("statistic", ALL, ids=name_of)
@pytest.mark.parametrize(
    ("given", "kept"),
    [("float16", "float32"), ("float32", "float32"), ("float64", "float64"), ("int64", "float32")],
)
def test_statistics_are_as_exact_as_the_data_and_at_least_single(statistic, given, kept):
    # Multiples of 20 up to 300: their squares are whole numbers that float16 cannot hold.
    x = (20 * np.random.default_rng(5).integers(-15, 16, (4, 3))).astype(given)
    found = update(factor_of(statistic), {"x": x})
    assert found.dtype == kept
    expected = measured(statistic, {"x": x.astype(np.float64)})
    np.testing.assert_allclose(found, expected, rtol=HALF, atol=HALF * abs(expected).max())


def test_a_side_of_mixed_types_is_as_exact_as_the_better():
    statistic = LayerSquare(("x",), ("d",), ROWS, ROWS, False)
    values = {"x": draw(4, 3).astype(np.float32), "d": draw(4, 2, seed=1)}
    assert update(factor_of(statistic), values).dtype == np.float64


# -- what is shared --------------------------------------------------------------------------------


def test_statistics_of_the_same_tensors_are_equal_and_others_are_not():
    def moment(name="x", homogeneous=True, axis=-1):
        return KroneckerMoment((name,), RowView(axis), homogeneous)

    assert moment() == moment()
    assert hash(moment()) == hash(moment())
    others = [moment("y"), moment(homogeneous=False), moment(axis=1)]
    others.append(KroneckerDiagonal(("x",), ROWS, True))
    assert all(moment() != other for other in others)


# -- refusals --------------------------------------------------------------------------------------

GOOD = {"x": draw(4, 3), "y": draw(4, 3, seed=1), "t": draw(4, 2, 3), "g": draw(3)}


@pytest.mark.parametrize(("statistic", "values", "error", "says"), [
        (FullyConnectedKroneckerFactor([["x", "y"]]), {"y": draw(3, 3)}, ValueError, "examples"),
        (FullyConnectedKroneckerFactor([["x", "y"]]), {"y": draw(4, 2)}, ValueError, "shapes"),
        (KroneckerMoment(("x", "y"), ROWS), {"y": draw(4, 2)}, ValueError, "features"),
        (FullyConnectedKroneckerFactor([["x"], ["y"]]), {"y": draw(5, 3)}, ValueError, "examp"),
        (KroneckerMoment(("x",), ROWS), {"x": np.zeros((0, 3))}, ValueError, "no example"),
        (KroneckerMoment(("x",), ROWS), {"x": np.zeros(3)}, ValueError, "axes"),
        (KroneckerMoment(("x",), RowView(1, 4)), {}, ValueError, "4 axes"),
        (KroneckerMoment(("x",), RowView(-2)), {}, ValueError, "batch"),
        (KroneckerMoment(("x",), ROWS, num_uses=3), {}, ValueError, "3 uses"),
        (KroneckerMoment(("z",), ROWS), {}, KeyError, "'z'"),
        (DiagonalKroneckerFactor([["x", "y"]]), {"y": draw(3, 3)}, ValueError, "examples"),
        (LayerSquare(("x",), ("y",), ROWS, ROWS, True), {"y": draw(5, 3)}, ValueError, "rows"),
        (LayerSquare(("t",), ("y",), ROWS, ROWS, True), {}, ValueError, "rows"),
        (NaiveDiagonalFactor(["x", "g"], 4), {}, ValueError, "shapes"),
        (GradientSquare(("x", "g"), (4,)), {}, ValueError, "one parameter"),
        (GradientSquare(("x",), ("batch",)), {}, KeyError, "batch"),
        (NaiveFullFactor(["x", "g"], 4), {}, ValueError, "shapes"),
        (GradientOuter(("x",), (0,)), {}, ValueError, "no example"),
    ])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_before_anything_moves(statistic, values, error, says):
    factor = factor_of(statistic)
    factor.instantiate_cov_variables()
    with pytest.raises(error, match=says) as caught:
        factor.make_covariance_update_op(0.9)(GOOD | values)
    assert isinstance(caught.value, ke.KfacError)
    assert factor.arrays() == {}
    assert factor.average.weight == 0


@pytest.mark.parametrize(
    ("shape", "error", "says"),
    [
        ((4, 5), ShapeError, r"has shape \(3, 3\), this batch gives \(5, 5\)"),
        ((0, 3), InputError, "holds no example"),
    ],
    ids=["other features", "no example"],
)
def test_a_batch_that_does_not_fit_an_average_is_refused(shape, error, says):
    factor = DenseSquareMatrixFactor(KroneckerMoment(("x",), ROWS))
    factor.update({"x": draw(4, 3)}, 0.9)
    before = factor.average.value.copy()
    with pytest.raises(error, match=says):
        factor.check({"x": np.zeros(shape)})
    np.testing.assert_array_equal(factor.average.value, before)
