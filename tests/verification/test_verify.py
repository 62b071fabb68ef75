"""``verify`` passes on correct results, and each check fails by name on a result that is broken."""

from functools import partial

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from kfac_engine.autodiff.rules import load_rules
from kfac_engine.backend.cpu.backend import NumpyBackend
from kfac_engine.backend.cpu.linear_algebra import NumpyLinearAlgebra
from kfac_engine.engine import model_arrays
from kfac_engine.losses.objective import Objective
from kfac_engine.runtime.trace import Trace
from kfac_engine.verification import exports, specimen, verify as verification
from kfac_engine.verification.checks import FAINT, MOST_TOLERANCE
from tests import models
from tests.comparing import assert_arrays_equal
from tests.engine.test_train_form import network

CHECKS = ("gradients", "curvature products", "blocks", "inverses", "export")


def data_of(model, loss="normal", batch=5):
    """A batch and targets for the only output of a model."""
    inputs = models.random_inputs(model, batch)
    shape = ke.Engine.from_onnx(model, loss=loss).predict(inputs).shape
    rng = np.random.default_rng(1)
    if loss == "categorical":
        return inputs, rng.integers(0, shape[-1], shape[:-1])
    return inputs, rng.standard_normal(shape).astype(np.float32)


def verified(model=None, loss="normal", **options):
    model = model or models.mlp()
    return ke.verify(model, *data_of(model, loss), loss=loss, **options)


def failed(result):
    return {check.name for check in result.checks if check.outcome == "fail"}


# -- correct results -------------------------------------------------------------------------------

# Name to model, loss, options, and the checks that do not apply.
CORRECT = {
    "dense": (models.mlp, "normal", {}, set()),
    "classes": (models.mlp, "categorical", {}, set()),
    "convolutions": (models.cnn, "normal", {}, set()),
    "residual block": (models.resnet_block, "normal", {}, set()),
    "layer normalization": (models.layer_norm, "categorical", {}, set()),
    "embedding": (models.embedding, "normal", {}, set()),
    "tokens": (models.token_mlp, "normal", {"reduction": "sum"}, {"blocks"}),
    "tied weights": (models.tied, "normal", {"tie_weights": True}, {"blocks"}),
    "half precision": (partial(models.mlp, dtype="float16"), "normal", {}, set()),
    "double precision": (partial(models.mlp, dtype="float64"), "normal", {}, set()),
    "diagonal": (models.mlp, "normal", {"approximations": {"fully_connected": "diagonal"}}, set()),
    "many classes": (partial(models.mlp, (6, 5, 60)), "categorical", {}, set()),
    "normalization in training form": (network, "categorical", {}, {"blocks"}),
    "train form": (partial(network, False), "categorical", {"train_form": True}, {"blocks"}),
}


@pytest.mark.parametrize("name", CORRECT)
def test_correct_results_pass(name):
    make, loss, options, skipped = CORRECT[name]
    result = verified(make(), loss, **options)
    assert tuple(check.name for check in result.checks) == CHECKS
    assert not failed(result), [check.failures for check in result.checks]
    assert {check.name for check in result.checks if check.outcome == "skip"} == skipped
    assert result.passed
    assert "float64" in result["gradients"].detail


def test_differences_are_in_float32_where_the_onnx_package_lacks_an_operator(monkeypatch):
    def refused(*_):
        raise ke.ModelError("the reference implementation of onnx cannot read the model: Rare.")

    monkeypatch.setattr(specimen, "ReferenceModel", refused)
    result = verified()
    assert "central differences in float32" in result["gradients"].detail
    assert "no float64: the reference implementation" in result["gradients"].detail
    assert result.passed


def test_operators_under_the_parameters_need_no_float64():
    result = verified(models.odd_ops())
    assert "central differences in float64" in result["gradients"].detail
    assert result.passed


def test_dropouts_in_training_form_skip_the_checks_that_repeat_passes():
    result = verified(network(False, True), "categorical", train_form=True)
    skipped = [check for check in result.checks if check.outcome == "skip"]
    assert [check.name for check in skipped] == ["gradients", "curvature products", "blocks"]
    assert all("draws random numbers" in check.skipped[""] for check in skipped)


def test_an_engine_keeps_its_state():
    model = models.mlp()
    inputs, targets = data_of(model)
    engine = ke.Engine.from_onnx(model, loss="normal")
    engine.step(inputs, targets)
    moved = {name: array + np.float32(0.1) for name, array in engine.parameters.items()}
    engine.set_parameters(moved)
    before = [factor.cov.copy() for factor in engine.estimator.factors]
    generator = engine.estimator.rng.bit_generator.state
    result = ke.verify(engine, inputs, targets)
    assert result.passed
    assert "predictions of the engine" in result["export"].detail
    assert engine.counter == 1
    assert engine.estimator.rng.bit_generator.state == generator
    for factor, array in zip(engine.estimator.factors, before, strict=True):
        np.testing.assert_array_equal(factor.cov, array)
    assert_arrays_equal(engine.parameters, moved)
    with pytest.raises(ke.InputError, match="leave out: damping"):
        ke.verify(engine, inputs, targets, damping=0.1)


# Multiplications of all passes: enough, enough for two examples, and too few for any.
@pytest.mark.parametrize(
    ("most", "examples", "parameters"), [(1e9, 6, 8), (3e7, 2, 3), (1e3, 1, 3)], ids=str
)
def test_large_models_are_checked_on_fewer_examples_and_parameters(
    most, examples, parameters, monkeypatch
):
    """A pass of one example multiplies 12,480 times, and moves 12,675 numbers."""
    monkeypatch.setattr(verification, "_MOST_MULTIPLICATIONS", most)
    model = models.mlp((64, 64, 64, 64, 3))
    result = ke.verify(model, *data_of(model, batch=6), loss="normal", parameters=8)
    assert result.passed
    assert result.examples == examples
    assert len(result.parameters) == parameters


def test_the_slice_bounds_examples_parameters_and_passes(monkeypatch):
    passes = []
    run = Trace.__init__
    monkeypatch.setattr(Trace, "__init__", lambda self, *a: passes.append(a) or run(self, *a))
    model = models.mlp((6, *[5] * 12, 3))
    inputs, targets = data_of(model, batch=20)
    result = ke.verify(model, inputs, targets, loss="normal", examples=3, parameters=4)
    assert result.examples == 3
    assert len(result.parameters) == 4
    assert result.parameters[0] == "fc0.weight"
    assert result.parameters[-1] == "fc12.bias"
    subjects = [m.subject for m in result["gradients"].measurements]
    assert subjects == ["all parameters", *result.parameters]
    assert len(result["inverses"].measurements) == 4
    assert len(passes) < 30


def test_results_repeat_with_a_seed():
    first, second, other = (verified(seed=seed) for seed in (3, 3, 4))
    assert first == second
    assert first != other


# -- broken results --------------------------------------------------------------------------------


def times(factor):
    """A derivative rule of Tanh whose result is multiplied by a factor."""
    rule = load_rules()["Tanh"]

    def wrong(b, node, g, wanted):
        (right,) = rule(b, node, g, wanted).values()
        return {0: b.op("Mul", right, b.scalar(factor, node.inputs[0]))}

    return wrong


@pytest.mark.parametrize("factor", [1.02, -1.0, 0.0])
def test_a_wrong_derivative_fails_the_gradients_of_the_layers_before_it(monkeypatch, factor):
    monkeypatch.setitem(load_rules()._rows, "Tanh", times(factor))
    check = verified(models.mlp((6, 5, 3)), examples=4)["gradients"]
    assert check.outcome == "fail"
    subjects = {m.subject for m in check.failures}
    assert subjects == {"all parameters", "fc0.weight", "fc0.bias"}
    assert "freeze" in check.remedy
    if factor == 1.02:
        # The gradient is 2 % too long, and the error relates to the wrong gradient.
        worst = {m.subject: m.error for m in check.measurements}
        assert 0.02 / 1.02 / 2 < worst["fc0.weight"] < 4 * 0.02


def test_a_wrong_gradient_of_one_entry_fails_the_gradients(monkeypatch):
    wrong = Trace.writable_vjp

    def without_an_entry(self, *arguments):
        gradients = wrong(self, *arguments)
        gradient = gradients["fc1.weight"].reshape(-1)
        gradient[abs(gradient).argmax()] = 0
        return gradients

    monkeypatch.setattr(Trace, "writable_vjp", without_an_entry)
    result = verified()
    assert failed(result) == {"gradients"}
    subjects = {m.subject for m in result["gradients"].failures}
    assert "fc1.weight" in subjects
    assert "fc0.weight" not in subjects


@pytest.mark.parametrize("outputs", [3, 60], ids=["rows", "columns"])
def test_a_wrong_product_with_the_jacobian_fails_the_curvature_products(monkeypatch, outputs):
    right = Trace.jvp
    monkeypatch.setattr(
        Trace, "jvp", lambda self, *a, **k: {n: 1.01 * y for n, y in right(self, *a, **k).items()}
    )
    result = verified(models.mlp((6, 5, outputs)), "categorical")
    assert failed(result) == {"curvature products"}
    assert "backward passes" in result["curvature products"].detail or outputs == 60


def test_a_wrong_factor_fails_the_blocks(monkeypatch):
    right = Objective.fisher_scales
    monkeypatch.setattr(
        Objective,
        "fisher_scales",
        lambda self, *a, **k: {n: 1.01 * y for n, y in right(self, *a, **k).items()},
    )
    result = verified()
    assert failed(result) == {"blocks"}
    assert "fc0.weight, fc0.bias" in {m.subject for m in result["blocks"].failures}
    assert "--approx" in result["blocks"].remedy


@pytest.mark.parametrize("mode", ["exact", "empirical"])
def test_a_wrong_statistic_fails_the_blocks(monkeypatch, mode):
    right = NumpyBackend.second_moment

    def scaled(self, x, *arguments, **options):
        return right(self, 1.01 * x, *arguments, **options)

    monkeypatch.setattr(NumpyBackend, "second_moment", scaled)
    result = verified(models.mlp((6, 5, 3 if mode == "exact" else 300)), "categorical")
    assert failed(result) == {"blocks"}
    assert f"mode {mode}" in result["blocks"].detail


def test_a_wrong_inverse_fails_the_inverses(monkeypatch):
    stacked = NumpyLinearAlgebra.begin_damped_inverses

    def scaled(self, *arguments):
        finish = stacked(self, *arguments)
        return lambda: [1.05 * array for array in finish()]

    monkeypatch.setattr(NumpyLinearAlgebra, "begin_damped_inverses", scaled)
    result = verified(damping=0.1)
    assert failed(result) == {"inverses"}
    # Both factors are inverted, so that the product is 1.05² times the vector.
    errors = [m.error for m in result["inverses"].measurements]
    np.testing.assert_allclose(errors, 1.05**2 - 1, rtol=1e-3)
    assert "increase damping" in result["inverses"].remedy


def test_a_wrong_file_fails_the_export(monkeypatch):
    right = model_arrays.export_files

    def moved(model, values, location):
        values = {n: a + np.float32(0.01) if n == "fc2.bias" else a for n, a in values.items()}
        return right(model, values, location)

    monkeypatch.setattr(model_arrays, "export_files", moved)
    result = verified()
    assert failed(result) == {"export"}
    model = models.mlp()
    engine = ke.Engine.from_onnx(model, loss="normal")
    assert failed(ke.verify(engine, *data_of(model))) == {"export"}


def test_outputs_of_another_shape_or_with_nan_fail_the_export():
    compare = partial(exports._compared, "y", tolerance=1e-3)
    x = np.array([1.0, np.inf, np.nan])
    assert compare(x, x).passed
    assert not compare(x, x[:2]).passed
    assert not compare(np.array([1.0, np.nan, np.nan]), x).passed


def test_activations_on_kinks_do_not_fail_the_gradients():
    """Biases of zero behind inputs of zero: at the parameters of the file, a Relu is at zero."""
    model = models.mlp((6, 5, 3), activation="Relu")
    for entry in model.graph.initializer:
        if entry.name == "fc0.bias":
            entry.CopyFrom(numpy_helper.from_array(np.zeros(5, np.float32), entry.name))
    inputs, targets = data_of(model)
    inputs["input"][:2] = 0
    result = ke.verify(model, inputs, targets, loss="normal")
    assert result["gradients"].outcome == "pass"
    assert not result["gradients"].skipped


# -- certain predictions ---------------------------------------------------------------------------


def certain(factor, loss):
    """A model whose predictions are the targets, and certain with a large factor of the logits."""
    model = models.mlp((6, 5, 3))
    for entry in model.graph.initializer:
        if entry.name.startswith("fc1"):
            array = np.float32(factor) * numpy_helper.to_array(entry)
            entry.CopyFrom(numpy_helper.from_array(array, entry.name))
    inputs = models.random_inputs(model, 5)
    logits = ke.Engine.from_onnx(model, loss=loss).predict(inputs)
    return model, inputs, logits.argmax(1) if loss == "categorical" else (logits > 0).astype("f")


LOSSES = ["categorical", "multi_bernoulli"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("factor", [1, 10, 30, 100, 1000, 1e6])
def test_certain_predictions_pass(factor, loss):
    result = ke.verify(*certain(factor, loss), loss=loss)
    assert not failed(result), [check.failures for check in result.checks]
    if factor <= 10:
        assert all(check.outcome == "pass" for check in result.checks)
    for check in result.checks:
        assert all(m.tolerance <= MOST_TOLERANCE for m in check.measurements)
    assert result["gradients"].outcome == "pass" or FAINT in result["gradients"].skipped.values()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("factor", [1, 10, 20])
def test_wrong_results_of_certain_predictions_fail(monkeypatch, factor, loss):
    model, inputs, targets = certain(factor, loss)
    scales, jvp = Objective.fisher_scales, Trace.jvp
    monkeypatch.setattr(
        Objective,
        "fisher_scales",
        lambda self, *a, **k: {n: 1.01 * y for n, y in scales(self, *a, **k).items()},
    )
    monkeypatch.setattr(
        Trace, "jvp", lambda self, *a, **k: {n: 1.2 * y for n, y in jvp(self, *a, **k).items()}
    )
    monkeypatch.setitem(load_rules()._rows, "Tanh", times(1.5))
    result = ke.verify(model, inputs, targets, loss=loss)
    assert failed(result) == {"gradients", "curvature products", "blocks"}
    subjects = {m.subject for m in result["blocks"].failures}
    assert subjects == {"fc0.weight, fc0.bias", "fc1.weight, fc1.bias"}


def test_wrong_arguments_are_errors():
    model = models.mlp()
    inputs, targets = data_of(model)
    with pytest.raises(ke.InputError, match="examples"):
        ke.verify(model, inputs, targets, loss="normal", examples=0)
    with pytest.raises(ke.UnknownNameError, match="dampin"):
        ke.verify(model, inputs, targets, loss="normal", dampin=0.1)
    with pytest.raises(ke.NonFiniteError):
        ke.verify(model, {"input": inputs["input"] * np.nan}, targets, loss="normal")
    assert onnx.load_from_string(model.SerializeToString()) == model
