"""Inverses begun in one call and used from the next: the same numbers, one call later."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.factors.base import begin_refresh
from tests import models
from tests.backend import cupy_standin
from tests.comparing import assert_arrays_equal
from tests.engine.test_engine import random_targets

MODEL, LOSS = models.mlp(), "categorical"


@pytest.fixture(params=["numpy", "cupy"])
def backend(request, monkeypatch):
    if request.param == "cupy":
        cupy_standin.install(monkeypatch)
    return request.param


def engine(backend, **schedule):
    return ke.Engine.from_onnx(
        MODEL, loss=LOSS, backend=backend, damping=1e-2, schedule=ke.Schedule(**schedule)
    )


def batch(seed):
    inputs = models.random_inputs(MODEL, batch=6, seed=seed)
    return inputs, random_targets(MODEL, inputs, LOSS, seed)


def host(arrays):
    return {n: v if isinstance(v, np.ndarray) else v.get() for n, v in arrays.items()}


def assert_equal(found, wanted):
    assert_arrays_equal(host(found), host(wanted))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("policy", ["all_at_once", "round_robin"])
def test_a_step_uses_the_inverses_of_the_call_before(backend, policy, every):
    overlapped = engine(backend, refresh_every=every, policy=policy, overlap=True)
    plain = engine(backend, refresh_every=every, policy=policy)
    for seed in range(4):
        found = overlapped.step(*batch(seed)).natural_gradients
        gradients = plain.gradients(*batch(seed)).gradients
        if seed == 0:  # there are none before
            plain.observe(*batch(seed))
            assert_equal(found, plain.precondition(gradients))
            continue
        before = plain.precondition(gradients)
        plain.observe(*batch(seed))
        assert_equal(found, before)


def test_what_was_begun_is_saved_and_goes_on_where_it_was(backend, tmp_path):
    schedule = {"refresh_every": 1, "overlap": True}
    first, second = engine(backend, **schedule), engine(backend, **schedule)
    for seed in range(2):
        first.step(*batch(seed))
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    for seed in (2, 3):
        found, wanted = (e.step(*batch(seed)).natural_gradients for e in (second, first))
        assert_equal(found, wanted)


@pytest.mark.parametrize("change", ["update", "measure and commit"])
def test_a_factor_settles_before_it_moves(backend, change):
    one = engine(backend, refresh_every=1)
    one.observe(*batch(0))
    factor = one.estimator.factors[0]
    old = {name: array.copy() for name, array in host(factor.arrays()).items()}
    (name,) = factor.statistic.names()
    side = factor.side - factor.statistic.homogeneous
    rows = np.random.default_rng(5).normal(size=(6, side)).astype(np.float32)
    values = {name: one.collection.backend.asarray(rows)}
    one.estimator.damping = 3.0
    begun, _ = one.estimator.blocks[0].split_damping()
    begin_refresh([factor], one.collection.backend)
    np.testing.assert_array_equal(host(factor.arrays())["power/0"], old["power/0"])
    if change == "update":
        factor.update(values, 0.0)
    else:
        factor.commit(factor.measure(values), 0.0)
    # The average moved; the inverse is the one that was begun, of the old average.
    found = host(factor.arrays())
    assert not np.array_equal(found["average"], old["average"])
    assert not np.array_equal(found["power/0"], old["power/0"])
    undone = found["power/0"] @ (old["average"] + begun * np.eye(len(old["average"])))
    np.testing.assert_allclose(undone, np.eye(len(undone)), atol=1e-5)
