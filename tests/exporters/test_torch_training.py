"""Adam in PyTorch on the tasks of the suite ``train``: the same model, loss and steps."""

import numpy as np
import pytest

pytest.importorskip("torch")

import kfac_engine as ke
from kfac_engine.bench.peers.torch_training import FORWARD, trainer
from kfac_engine.bench.training.data import load_digits
from kfac_engine.bench.training.tasks import TASKS
from kfac_engine.errors import BackendError


def start(name):
    task, images = TASKS[name], load_digits()
    rng = np.random.default_rng(0)
    if name == "transformer":
        x, y = (rng.integers(0, 96, (6, 64)) for _ in range(2))
    else:
        data = task.data(images)
        x, y = data.x[:6], data.y[:6]
    model = task.model(images.side, 0)
    engine = ke.Engine.from_onnx(model.data, loss=task.loss, threads=1)
    return engine, trainer(name, model, 0.01), {"x": x}, y


@pytest.mark.parametrize("name", FORWARD)
def test_gradients_and_loss_are_those_of_the_engine(name):
    engine, peer, inputs, targets = start(name)
    expected = engine.gradients(inputs, targets)
    assert peer.gradients(inputs, targets) == pytest.approx(expected.loss, rel=1e-5)
    for parameter, gradient in expected.gradients.items():
        # Float32 in two orders of operations; ReLUs at zero are not met by these data.
        atol = 1e-4 * abs(gradient).max()
        np.testing.assert_allclose(peer.gradient(parameter), gradient, rtol=1e-3, atol=atol + 1e-7)


@pytest.mark.parametrize("name", FORWARD)
def test_steps_and_evaluations_are_those_of_the_engine(name):
    engine, peer, inputs, targets = start(name)
    adam = ke.Adam(engine, 0.01)
    for scale in (1.0, 0.5, 0.25):
        peer.step(inputs, targets, scale)
        adam.step(inputs, targets, scale)
    loss, _ = peer.evaluate([(inputs, targets)])
    # Adam divides by gradients: where they are near zero, rounding decides the sign of a step.
    assert loss == pytest.approx(engine.loss(inputs, targets), rel=0.02)


def test_accuracy_is_the_share_of_the_examples():
    engine, peer, inputs, targets = start("mlp")
    hits = np.argmax(engine.predict(inputs), axis=1) == targets
    _, accuracy = peer.evaluate([({"x": inputs["x"][:4]}, targets[:4]),
                                 ({"x": inputs["x"][4:]}, targets[4:])])  # fmt: skip
    assert accuracy == pytest.approx(hits.mean())


def test_other_tasks_are_refused():
    with pytest.raises(BackendError, match="task 'cnn' is not implemented in PyTorch"):
        trainer("cnn", TASKS["cnn"].model(8, 0), 0.01)
