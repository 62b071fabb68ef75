"""The whole line: gradients against finite differences, natural gradients against dense algebra."""

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from tests import models, oracle
from tests.comparing import assert_arrays_close

# Relative to the largest entry: float32 forward and backward passes of small networks.
GRADIENT = 2e-5

LOSSES = {
    "mlp": "categorical",
    "token_mlp": "categorical",
    "cnn": "categorical",
    "conv_linear": "normal",
    "resnet_block": "categorical",
    "layer_norm": "multi_bernoulli",
    "tied": "normal",
    "embedding": "categorical",
}
# Sizes with few parameters, each of which takes two runs.
SMALL = {"cnn": {"channels": 1, "side": 5}, "resnet_block": {"channels": 2, "side": 4}}


def random_targets(model, inputs, loss, seed=1):
    (z,) = oracle.evaluate(model, inputs, "output")
    rng = np.random.default_rng(seed)
    if loss == "categorical":
        return rng.integers(0, z.shape[-1], z.shape[:-1])
    if loss == "multi_bernoulli":
        return rng.integers(0, 2, z.shape).astype(np.float32)
    return rng.standard_normal(z.shape).astype(np.float32)


@pytest.fixture
def case():
    model = models.mlp()
    inputs = models.random_inputs(model, batch=6)
    return model, inputs, random_targets(model, inputs, "categorical")


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_finite_differences_of_the_mean_loss(name):
    model, loss = models.MODELS[name](**SMALL.get(name, {})), LOSSES[name]
    inputs = models.random_inputs(model, batch=3)
    targets = random_targets(model, inputs, loss)
    engine = ke.Engine.from_onnx(model, loss=loss)
    result = engine.gradients(inputs, targets)
    value, gradients = oracle.loss_and_gradient(
        model, inputs, "output", list(engine.parameters), loss, targets
    )
    assert result.loss == pytest.approx(value, rel=1e-5)
    scale = max(np.abs(g).max() for g in gradients.values())
    assert_arrays_close(result.gradients, gradients, atol=GRADIENT * scale)


@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
def test_reductions_are_those_documented(reduction):
    model = models.token_mlp(dtype="float64")
    inputs = models.random_inputs(model, batch=3)
    targets = random_targets(model, inputs, "categorical")
    engine = ke.Engine.from_onnx(model, loss="categorical", reduction=reduction)
    result = engine.gradients(inputs, targets)
    value, gradients = oracle.loss_and_gradient(
        model,
        inputs,
        "output",
        list(engine.parameters),
        "categorical",
        targets,
        reduction=reduction,
    )
    assert result.loss == pytest.approx(value, rel=1e-10)
    assert_arrays_close(result.gradients, gradients, atol=1e-8)


def test_natural_gradient_solves_the_damped_block():
    model = models.mlp(dtype="float64")
    inputs = models.random_inputs(model, batch=6)
    engine = ke.Engine.from_onnx(model, loss="categorical", damping=0.3)
    result = engine.step(inputs, random_targets(model, inputs, "categorical"))
    for key, block in engine.collection.fisher_blocks.items():
        A, G = block.input_factor.cov, block.output_factor.cov
        pi = np.sqrt(np.trace(A) / len(A) / (np.trace(G) / len(G)))
        damped = np.kron(
            A + pi * np.sqrt(0.3) * np.eye(len(A)), G + np.sqrt(0.3) / pi * np.eye(len(G))
        )
        weight, bias = (result.gradients[name] for name in key)
        packed = np.vstack([weight.T, bias]).ravel()
        expected = np.linalg.solve(damped, packed).reshape(len(A), len(G))
        np.testing.assert_allclose(result.natural_gradients[key[0]], expected[:-1].T, atol=1e-9)
        np.testing.assert_allclose(result.natural_gradients[key[1]], expected[-1], atol=1e-9)


def test_export_writes_the_model_with_current_parameters(case, tmp_path):
    model, inputs, _ = case
    engine = ke.Engine.from_onnx(model, loss="categorical")
    engine.set_parameters({"fc1.bias": np.full(4, 7.0, np.float32)})
    engine.export(tmp_path / "new.onnx")
    written = onnx.load(tmp_path / "new.onnx")
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in written.graph.initializer}
    np.testing.assert_array_equal(arrays["fc1.bias"], np.full(4, 7.0))
    (old,), (new,) = (oracle.evaluate(m, inputs, "output") for m in (model, written))
    assert not np.allclose(old, new)


def test_gradients_of_any_library_are_taken(case):
    model, inputs, targets = case

    class Foreign:
        """An array of another library: only DLPack is known of it."""

        def __init__(self, array):
            self._array = array

        def __dlpack__(self, **options):
            return self._array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self._array.__dlpack_device__()

    engine = ke.Engine.from_onnx(model, loss="categorical")
    result = engine.step(inputs, targets)
    foreign = {name: Foreign(gradient) for name, gradient in result.gradients.items()}
    for name, natural in engine.precondition(foreign).items():
        np.testing.assert_allclose(natural, result.natural_gradients[name], rtol=1e-6)


def test_gradients_whose_squares_overflow_are_preconditioned(case):
    model, inputs, targets = case
    engine = ke.Engine.from_onnx(model, loss="categorical")
    result = engine.step(inputs, targets)
    large = {name: array * np.float32(1e24) for name, array in result.gradients.items()}
    for name, found in engine.precondition(large).items():
        expected = result.natural_gradients[name].astype(np.float64) * 1e24
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    large[name] = np.full_like(large[name], np.nan)
    with pytest.raises(ke.NonFiniteError, match=name):
        engine.precondition(large)
