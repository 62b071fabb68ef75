"""The file of ``differentiate`` computes the loss of an engine, for every option of the loss."""

import numpy as np
import onnxruntime
import pytest

import kfac_engine as ke
from tests import models

OPTIONS = {
    "ignored": ("categorical", {"ignore_index": -100}),
    "another index": ("categorical", {"ignore_index": 1}),
    "class weights": ("categorical", {"class_weights": [0.5, 2.0, 1.0]}),
    "smoothing": ("categorical", {"label_smoothing": 0.2}),
    "all of them": ("categorical", {"class_weights": [0.5, 2.0, 1.0], "label_smoothing": 0.2}),
    "binary, ignored": ("multi_bernoulli", {"ignore_index": -1}),
    "positive weights": ("multi_bernoulli", {"positive_weights": [0.5, 2.0, 1.0]}),
    "one positive weight": ("multi_bernoulli", {"positive_weights": 3.0}),
    "binary smoothing": ("multi_bernoulli", {"label_smoothing": 0.2}),
    "normal": ("normal", {"ignore_index": 7}),
}


@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
@pytest.mark.parametrize("name", ["mlp", "token_mlp"])
@pytest.mark.parametrize("case", OPTIONS.values(), ids=OPTIONS)
def test_file_computes_the_loss_of_an_engine(case, name, reduction):
    loss, options = case
    model, rng = models.MODELS[name](), np.random.default_rng(0)
    inputs = models.random_inputs(model, batch=6)
    engine = ke.Engine.from_onnx(model, loss=loss, reduction=reduction, threads=1, **options)
    z = engine.trace(inputs)["output"]
    shape = z.shape[:-1] if loss == "categorical" else z.shape
    targets = rng.integers(0, 3 if loss == "categorical" else 2, shape)
    targets[rng.random(shape) < 0.3] = options.get("ignore_index", 0)
    targets = targets if loss == "categorical" else targets.astype(np.float32)
    expected = engine.gradients(inputs, targets)
    file = ke.differentiate(model, loss, reduction=reduction, **options)
    session = onnxruntime.InferenceSession(file.SerializeToString())
    names = [entry.name for entry in session.get_outputs()]
    found = dict(zip(names, session.run(None, {**inputs, "targets": targets}), strict=True))
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-5)
    for key, array in expected.gradients.items():
        np.testing.assert_allclose(found[f"gradient/{key}"], array, rtol=1e-4, atol=1e-6)
