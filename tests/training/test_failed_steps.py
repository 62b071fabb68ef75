"""A step that fails after its gradients leaves parameters, running statistics and slots."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.training import kfac
from tests.training import norm_net

# Gradients are finite; the product with the rate overflows float32.
OPTIMIZERS = {
    "sgd": lambda e, **o: ke.SGD(e, 1e39, **o),
    "adam": lambda e, **o: ke.Adam(e, 1e39, **o),
    "kfac": lambda e, **o: ke.KfacOptimizer(e, 1e39, **o),
    "auto, vectors": lambda e, **o: ke.KfacOptimizer(e, adam_rate=1e39, **o),
    "auto, decay": lambda e, **o: ke.KfacOptimizer(e, weight_decay=1e42, **o),
}


def slots(optimizer):
    arrays = optimizer.state().arrays
    return {(slot, n): a.copy() for slot, members in arrays.items() for n, a in members.items()}


@pytest.mark.parametrize("small", [0, 1 << 23], ids=["in place", "two copies"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_whose_parameters_overflow_changes_nothing(
    name, policy, small, tmp_path, monkeypatch
):
    monkeypatch.setattr(kfac, "_SMALL_STATE", small)
    engine = norm_net.engine()
    optimizer = OPTIMIZERS[name](engine, non_finite=policy)
    x, y = norm_net.batch()
    assert engine.buffers
    weights, before = norm_net.weights(engine), slots(optimizer)
    engine.save(tmp_path / "before")
    if policy == "raise":
        with pytest.raises(ke.NonFiniteError):
            optimizer.step({"x": x}, y)
    else:
        assert optimizer.step({"x": x}, y).skipped
    assert all(np.array_equal(v, weights[n]) for n, v in norm_net.weights(engine).items())
    assert all(np.array_equal(v, before[key]) for key, v in slots(optimizer).items())
    engine.save(tmp_path / "after")  # averages, inverses and the generator
    assert (tmp_path / "after").read_bytes() == (tmp_path / "before").read_bytes()
    assert (optimizer.steps, optimizer.skipped) == (0, policy == "skip")


def test_the_step_after_a_failed_first_step_is_a_first_step():
    engine, fresh = norm_net.engine(), norm_net.engine()
    optimizer = ke.KfacOptimizer(engine, 1e39)
    x, y = norm_net.batch()
    with pytest.raises(ke.NonFiniteError, match="the new value of parameter"):
        optimizer.step({"x": x}, y)
    optimizer.learning_rate = 0.01
    report = optimizer.step({"x": x}, y)
    expected = ke.KfacOptimizer(fresh, 0.01).step({"x": x}, y)
    assert (report.loss, report.refreshed) == (expected.loss, expected.refreshed)
    weights = norm_net.weights(fresh)
    assert all(np.array_equal(v, weights[n]) for n, v in norm_net.weights(engine).items())
