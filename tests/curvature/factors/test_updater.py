"""How long values of a batch are kept: until the last factor that reads them has measured them."""

import weakref

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.runtime.trace import Trace
from tests import models


def test_values_are_gone_when_the_factor_after_their_last_reader_measures(monkeypatch):
    proto = models.mlp((6, 5, 4, 3))
    engine = ke.Engine.from_onnx(proto, loss="categorical", backend="numpy")
    commit = FisherFactor.commit
    seen, gone = {}, set()

    def watched(self, measurement, *args, **options):
        values = measurement.values
        for name in seen.keys() - values.keys():
            assert seen[name]() is None, name
            gone.add(name)
        seen.update((name, weakref.ref(values[name])) for name in self.statistic.names())
        return commit(self, measurement, *args, **options)

    inputs = models.random_inputs(proto, batch=7)
    engine.observe(inputs)
    monkeypatch.setattr(FisherFactor, "commit", watched)
    engine.observe(inputs)
    read = {name for factor in engine.estimator.factors for name in factor.statistic.names()}
    assert len(read) == 6
    # All but the input, which tells how many examples there are, and what is read last.
    assert len(gone - {"input"}) == 4


@pytest.mark.parametrize("classes", [3, 10])
def test_gradients_of_one_source_are_held_at_a_time(classes, monkeypatch):
    proto = models.mlp((6, 5, classes))
    engine = ke.Engine.from_onnx(
        proto, loss="categorical", estimation_mode="exact", backend="numpy"
    )
    vjp = Trace.vjp
    alive = []

    def watched(self, *args, **options):
        assert not any(reference() is not None for reference in alive)
        found = vjp(self, *args, **options)
        alive.extend(weakref.ref(array) for array in found.values())
        return found

    monkeypatch.setattr(Trace, "vjp", watched)
    engine.observe(models.random_inputs(proto, batch=7))
    assert len(alive) == 2 * classes


def evaluated():
    proto = models.mlp((6, 5, 3))
    model = ke.load_model(proto)
    model.want(["act0"])
    return model.run(models.random_inputs(proto, batch=4), np.arange(4))


def test_released_values_are_freed():
    trace = evaluated()
    value = weakref.ref(trace["act0"])
    trace.release(["act0"])
    assert value() is None


@pytest.mark.parametrize("name", ["input", "fc0.weight", "targets"])
def test_values_that_no_forward_pass_computes_are_not_released(name):
    trace = evaluated()
    value = trace[name]
    trace.release([name])
    assert trace[name] is value


def test_random_values_are_not_released():
    """They would be drawn anew, and differ from those that other values were computed from."""
    net = models.Net()
    noise = net.op("RandomNormalLike", "input", to="noise")
    product = net.op("Mul", "input", net.weight("w", 3), to="product")
    net.op("Add", product, noise, to="output")
    model = ke.load_model(net.model({"input": ["batch", 3]}, {"output": ["batch", 3]}))
    trace = model.run({"input": np.ones((4, 3), np.float32)})
    drawn = trace["noise"].copy()
    trace.release(["noise"])
    np.testing.assert_array_equal(trace["noise"], drawn)
    expected = model.parameters["w"] + drawn
    np.testing.assert_allclose(trace["output"], expected, rtol=1e-6, atol=1e-6)


def test_values_let_go_are_computed_again_for_who_reads_them():
    trace = evaluated()
    before = np.array(trace["act0"])
    trace.release(["act0", "input", "fc0.weight", "nothing of that name"])
    np.testing.assert_array_equal(trace["act0"], before)
