"""Sessions of ONNX Runtime: none before they are needed, all of a step after ``prepare``."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.estimation_modes import MODES
from kfac_engine.runtime import model as runtime
from tests import models


@pytest.fixture
def opened(monkeypatch):
    """Names of the functions that opened a session, in order."""
    calls = []

    def counted(function):
        def call(*args, **options):
            calls.append(function.__name__)
            return function(*args, **options)

        return call

    for name in ("open_forward", "open_backward"):
        monkeypatch.setattr(runtime, name, counted(getattr(runtime, name)))
    return calls


def case(name, **options):
    model = models.MODELS[name]()
    inputs = models.random_inputs(model, batch=4)
    engine = ke.Engine.from_onnx(model, loss="categorical", threads=1, **options)
    return engine, inputs, np.zeros(4, np.int64)


def test_an_engine_that_only_reports_opens_no_session(opened):
    engine, *_ = case("cnn")
    assert engine.layers
    assert engine.losses
    assert engine.memory(8).on_host
    assert not opened


def test_a_loss_opens_no_backward_session(opened):
    engine, inputs, targets = case("cnn")
    engine.loss(inputs, targets)
    assert opened == ["open_forward"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["cnn", "odd_ops"])
def test_a_prepared_step_opens_no_session(name, mode, opened):
    engine, inputs, targets = case(name, estimation_mode=mode)
    engine.prepare()
    before = len(opened)
    assert before
    engine.prepare()
    engine.step(inputs, targets)
    engine.step(inputs, targets)
    assert len(opened) == before
