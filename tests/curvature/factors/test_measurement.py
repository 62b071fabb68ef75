"""Measure, combine, commit: the measurements of parts of a batch are combined to that of all."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.statistics import ReducedMoment
from kfac_engine.curvature.factors.updater import FactorUpdater
from kfac_engine.errors import NonFiniteError
from kfac_engine.layers.views import RowView

EXACT = 1e-12  # float64, sums of a hundred products of size one

FILTER, STRIDES = (2, 2, 3, 4), (1, 1, 1, 1)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape) + 0.3


def batch(seed):
    """Values of six examples."""
    return {
        "x": draw(6, 4, seed=seed),
        "y": draw(6, 4, seed=seed + 1),
        "ds": draw(6, 3, seed=seed + 2),
        "tokens": draw(6, 5, 4, seed=seed + 3),
        "images": draw(6, 4, 4, 3, seed=seed + 4),
        "dimages": draw(6, 3, 3, 4, seed=seed + 5),
        "ids": np.random.default_rng(seed).integers(0, 7, (6, 2)),
    }


def tokens_reduced():
    return DenseSquareMatrixFactor(ReducedMoment(((("tokens",),),), RowView(), True, mean=True))


ADDITIVE = {
    "dense": lambda: ke.FullyConnectedKroneckerFactor([["x"]], has_bias=True),
    "dense, two sources": lambda: ke.FullyConnectedKroneckerFactor([["x"], ["y"]]),
    "positions": lambda: ke.FullyConnectedKroneckerFactor([["tokens"]]),
    "diagonal": lambda: ke.DiagonalKroneckerFactor([["x"]], has_bias=True),
    "squares of gradients": lambda: ke.FullyConnectedDiagonalFactor(["x"], [["ds"]], has_bias=True),
    "patches": lambda: ke.ConvInputKroneckerFactor(["images"], FILTER, "VALID", has_bias=True),
    "output of a convolution": lambda: ke.ConvOutputKroneckerFactor([["dimages"]]),
    "squares of filter gradients": lambda: ke.ConvDiagonalFactor(
        ["images"], [["dimages"]], FILTER, STRIDES, "VALID"
    ),
    "token ids": lambda: ke.EmbeddingInputKroneckerFactor(["ids"], 7, np.float64),
    "scale and shift": lambda: ke.ScaleAndShiftFullFactor(["x"], [["y"]], []),
    "reduced": tokens_reduced,
    "pixels around their mean": lambda: ke.ConvInputSUAKroneckerFactor(["images"], FILTER),
    "square of a sum": lambda: ke.NaiveDiagonalFactor(["g"], "x"),
    "outer product of a sum": lambda: ke.NaiveFullFactor(["g"], "x"),
    "outer product of two sums": lambda: ke.NaiveFullFactor(["g", "h"], "x"),
}


def rows(values, start, stop):
    """A part of a batch; ``g`` and ``h`` are sums over the examples of the part."""
    part = {name: array[start:stop] for name, array in values.items()}
    return part | {"g": part["x"].sum(axis=0), "h": part["y"].sum(axis=0)}


def mean_with(other):
    """A combination of two processes: this one and that of ``other``, a computed measurement."""

    def combine(measurements):
        (measurement,) = measurements
        array = measurement.array
        total = measurement.examples + other.examples
        array *= measurement.examples / total
        array += other.array * (other.examples / total)
        measurement.examples = total

    return combine


@pytest.mark.parametrize("make", ADDITIVE.values(), ids=ADDITIVE)
def test_two_parts_combined_are_the_whole_batch(make):
    whole, part = make(), make()
    for seed in (0, 10):
        values = rows(batch(seed), 0, 6)
        whole.update(values, 0.75)
        other = make().measure(rows(values, 2, 6), combined=True)
        assert other.array.any()
        part.update(rows(values, 0, 2), 0.75, combine=mean_with(other))
    np.testing.assert_allclose(part.cov, whole.cov, atol=EXACT)


def test_a_measurement_leaves_the_average_as_it_is():
    factor = ke.FullyConnectedKroneckerFactor([["x"]])
    factor.update(batch(0), 0.75)
    before, weight = factor.cov, factor.average.weight
    measurement = factor.measure(batch(1))
    assert measurement.array.shape == before.shape
    np.testing.assert_array_equal(factor.cov, before)
    assert factor.average.weight == weight


@pytest.mark.parametrize("make", ADDITIVE.values(), ids=ADDITIVE)
def test_a_deferred_measurement_gives_the_average_of_a_computed_one(make):
    deferred, computed = make(), make()
    for seed in (0, 10):
        values = rows(batch(seed), 0, 6)
        deferred.commit(deferred.measure(values), 0.75)
        measurement = computed.measure(values)
        assert measurement.array.any()
        assert not measurement.deferred
        computed.commit(measurement, 0.75)
    np.testing.assert_allclose(computed.cov, deferred.cov, atol=EXACT)


def updater(factors, combine):
    return FactorUpdater(factors, NumpyBackend(), (), None, "", combine)


def average(factors, combine, values, release=None):
    of = updater(factors, combine)
    of.combined(of.measure(dict(values), release)).commit(0.9, 1.0)


def two_factors():
    return ke.FullyConnectedKroneckerFactor([["x"]]), ke.FullyConnectedKroneckerFactor([["ds"]])


def test_all_measurements_are_combined_in_one_call_before_any_average_moves():
    factors, calls = two_factors(), []

    def combine(measurements):
        calls.append([measurement.factor for measurement in measurements])
        assert all(factor.average.value is None for factor in factors)
        for measurement in measurements:
            measurement.array[...] *= 2.0

    values = {name: batch(0)[name] for name in ("x", "ds")}
    released = []
    average(factors, combine, values, released.extend)
    assert calls == [list(factors)]
    assert set(released) == set(values)
    for factor, name in zip(factors, values, strict=True):
        x = values[name]
        np.testing.assert_allclose(factor.cov, 2 * x.T @ x / len(x), atol=EXACT)


def test_an_error_of_the_combination_leaves_all_averages_unchanged():
    factors = two_factors()
    values = {name: batch(0)[name] for name in ("x", "ds")}
    average(factors, None, values)
    before = [factor.cov for factor in factors]

    def refuse(measurements):
        assert len(measurements) == len(factors)
        raise NonFiniteError("another process refused the batch")

    with pytest.raises(NonFiniteError, match="another process"):
        average(factors, refuse, values)
    for factor, old in zip(factors, before, strict=True):
        np.testing.assert_array_equal(factor.cov, old)
        assert isinstance(factor, FisherFactor)
        assert factor.average.weight == 1.0
