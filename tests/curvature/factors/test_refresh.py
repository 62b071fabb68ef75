"""Many factors refreshed at once: each as alone, all or none, the device read for all at once."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cpu.linear_algebra import NumpyLinearAlgebra
from kfac_engine.backend.cuda.backend import CupyBackend
from kfac_engine.curvature.factors.base import refresh
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.statistics import KroneckerMoment
from kfac_engine.errors import InputError, NonFiniteError, NotReadyError
from kfac_engine.layers.views import RowView
from tests.backend import cupy_standin

SIDES = (3, 5, 3, 4, 5)


class CountingAlgebra(NumpyLinearAlgebra):
    """Records the operation and the number of matrices of each call."""

    calls: list[tuple[str, int]]

    def begin_damped_inverses(self, matrices, dampings):
        self.calls.append(("inverses", len(matrices)))
        return super().begin_damped_inverses(matrices, dampings)

    def eighs(self, matrices):
        self.calls.append(("eighs", len(matrices)))
        return super().eighs(matrices)


class Counting(NumpyBackend):
    """Backend with a record of the calls of its linear algebra."""

    def __init__(self):
        super().__init__()
        self.linalg = CountingAlgebra(self.workers, self.scratch_bytes)
        self.calls = self.linalg.calls = []


def factors(backend, exps):
    made = []
    for index, side in enumerate(SIDES):
        statistic = KroneckerMoment((f"x{index}",), RowView())
        factor = DenseSquareMatrixFactor(statistic, backend=backend)
        rows = np.random.default_rng(index).normal(size=(20, side)).astype(np.float32)
        factor.update({f"x{index}": backend.asarray(rows)}, 0.9)
        for exp in exps:
            factor.register_matpower(exp, lambda index=index: 0.1 * (index + 1))
        made.append(factor)
    return made


@pytest.mark.parametrize("exps", [(-1,), (-1, -0.5), (0.5,)])
def test_together_they_are_as_each_alone(exps):
    backend = Counting()
    together, alone = factors(backend, exps), factors(NumpyBackend(), exps)
    refresh(together, backend)
    assert backend.calls == [("inverses" if exps == (-1,) else "eighs", len(SIDES))]
    for one, other in zip(together, alone, strict=True):
        other.refresh()
        for found, wanted in zip(one.stored.values(), other.stored.values(), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_nothing_is_stored_where_one_of_them_fails():
    made = factors(NumpyBackend(), (-1,))
    refresh(made, made[0].backend)
    before = [dict(factor.stored) for factor in made]
    made[3].average.value[0, 0] = np.nan
    with pytest.raises(NonFiniteError, match=r"average of KroneckerMoment\(x3\)"):
        refresh(made, made[0].backend)
    made[3].average.value[0, 0] = 1.0
    made[4].register_matpower(-1, lambda: -1.0)
    with pytest.raises(InputError, match=r"got -1\.0"):
        refresh(made, made[0].backend)
    for factor, old in zip(made, before, strict=True):
        assert all(factor.stored[key] is array for key, array in old.items())


@pytest.mark.parametrize("above", [np.nan, 7.0])
def test_inverses_and_roots_are_those_of_the_lower_triangles(above):
    made, as_expected = factors(NumpyBackend(), (-1,)), factors(NumpyBackend(), (-1,))
    for factor in made:
        factor.register_cholesky(lambda: 0.5)
        factor.average.value[np.triu_indices(len(factor.average.value), 1)] = above
    for factor in as_expected:
        factor.register_cholesky(lambda: 0.5)
        factor.complete(factor.average.value)
    for group in (made, as_expected):
        refresh(group, group[0].backend)
    for one, other in zip(made, as_expected, strict=True):
        for found, wanted in zip(one.stored.values(), other.stored.values(), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_factor_without_an_average_is_named():
    made = factors(NumpyBackend(), (-1,))
    empty = DenseSquareMatrixFactor(KroneckerMoment(("y",), RowView()))
    empty.register_matpower(-1, lambda: 0.1)
    with pytest.raises(NotReadyError, match="y"):
        refresh([*made, empty], made[0].backend)


def test_dampings_depend_on_the_traces_of_the_current_averages():
    collection = ke.LayerCollection(backend="numpy")
    collection.register_normal_predictive_distribution("z", name="loss")
    collection.register_fully_connected("w", "a", "z")
    estimator = ke.FisherEstimator(["w"], 0.5, 0.1, collection)
    sides = estimator.factors
    rng = np.random.default_rng(0)
    dampings = []
    for scale in (1.0, 10.0):
        for factor in sides:
            (name,) = factor.statistic.names()
            factor.update({name: scale * rng.normal(size=(9, 4))}, 0.0)
            assert factor.trace() == pytest.approx(np.trace(factor.cov), rel=1e-12)
        estimator.update_inverses()
        assert sides[0].trace() == pytest.approx(np.trace(sides[0].cov), rel=1e-12)
        dampings.append(estimator.blocks[0].split_damping())
    assert dampings[0] != dampings[1]


@pytest.mark.parametrize("exps", [(-1,), (-0.5,)])
def test_the_device_is_read_as_often_for_many_layers_as_for_one(exps, monkeypatch):
    cupy_standin.install(monkeypatch)
    counts = []
    for layers in (1, 7):
        collection = ke.LayerCollection(backend="numpy")
        collection.backend = CupyBackend()
        collection.register_normal_predictive_distribution("z", name="loss")
        names = [f"w{i}" for i in range(layers)]
        for index, name in enumerate(names):
            collection.register_fully_connected(name, f"a{index}", f"s{index}")
        estimator = ke.FisherEstimator(names, 0.5, 0.1, collection, exps=exps)
        rng = np.random.default_rng(0)
        for factor in estimator.factors:
            (name,) = factor.statistic.names()
            rows = rng.normal(size=(9, 4)).astype(np.float32)
            factor.update({name: collection.backend.asarray(rows)}, 0.0)
        cupy_standin.COUNTS.clear()
        estimator.update_inverses()
        counts.append((cupy_standin.COUNTS["downloads"], cupy_standin.COUNTS["reads"]))
    # Traces with the finite checks; then the codes; for roots also the smallest eigenvalues.
    assert counts == [(2 if exps == (-1,) else 3, 0)] * 2
