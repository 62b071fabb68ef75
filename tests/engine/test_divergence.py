"""A run that diverges says so, with its latest losses; a wrong batch does not look like one."""

import warnings

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model, digits

IMAGES, LABELS = digits()
X, Y = {"image": IMAGES[:64]}, LABELS[:64]
CURES = "clipped_rate.*damping.*refresh"


@pytest.fixture
def engine():
    return ke.Engine.from_onnx(demo_model("mlp"), loss="categorical", threads=1)


def move(engine, rate):
    result = engine.step(X, Y)
    engine.set_parameters(
        {
            name: value - np.float32(rate) * result.natural_gradients[name]
            for name, value in engine.parameters.items()
        }
    )
    return result.loss


def explode(engine, losses):
    while len(losses) < 200:
        losses.append(move(engine, 1e4))


def test_a_run_that_explodes_warns_once_and_its_error_tells_losses_and_cures(engine):
    losses = []
    told = f"The latest losses were .*If the run diverges: .*{CURES}"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(ke.NonFiniteError, match=told) as error:
            explode(engine, losses)
    assert [warning.category for warning in warned] == [ke.DivergenceWarning]
    latest = ", ".join(f"{loss:.3g}" for loss in losses[-5:])
    assert f"The latest losses were {latest}" in str(error.value)


def test_a_batch_with_nan_is_no_divergence(engine):
    move(engine, 1e-3)
    move(engine, 1e-3)
    wrong = IMAGES[:64].copy()
    wrong[3] = np.nan
    with pytest.raises(ke.NonFiniteError, match="input 'image'") as error:
        engine.step({"image": wrong}, Y)
    assert "losses" not in str(error.value)


def test_losses_of_parameters_that_never_move_are_no_run(engine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.gradients(X, Y)
        engine.gradients({"image": IMAGES[:64] * np.float32(1e5)}, Y)


def test_a_loss_of_a_hundred_times_the_first_is_no_explosion(engine):
    first = engine.gradients(X, Y).loss
    engine.set_parameters(engine.parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        later = engine.gradients({"image": IMAGES[:64] * np.float32(100)}, Y).loss
    assert 10 * first < later < 1000 * first
