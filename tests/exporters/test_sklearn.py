"""Models of scikit-learn, as skl2onnx writes them, against their gradients written out in NumPy."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from skl2onnx import to_onnx
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, PolynomialFeatures, StandardScaler

import kfac_engine as ke

Array = NDArray[np.float64]

RELATIVE = 1e-4  # float32 through five operators, against float64
SMALL = {"hidden_layer_sizes": (8, 6), "max_iter": 20, "random_state": 0}

# scikit-learn's name of an activation to its value and its derivative by that value.
ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "relu": (lambda s: np.maximum(s, 0), lambda y: (y > 0).astype(float)),
    "tanh": (np.tanh, lambda y: 1 - y**2),
    "logistic": (lambda s: 1 / (1 + np.exp(-s)), lambda y: y * (1 - y)),
    "identity": (lambda s: s, np.ones_like),
}

TRAINED = {
    "classes": (MLPClassifier(**SMALL), 3, "categorical"),
    "classes-tanh": (MLPClassifier(**SMALL, activation="tanh"), 4, "categorical"),
    "two-classes": (MLPClassifier(**SMALL, activation="logistic"), 2, "multi_bernoulli"),
    "numbers": (MLPRegressor(**SMALL, activation="logistic"), 0, "normal"),
    "numbers-identity": (MLPRegressor(**SMALL, activation="identity"), 0, "normal"),
    "scaled-classes": (make_pipeline(StandardScaler(), MLPClassifier(**SMALL)), 3, "categorical"),
    "ranged-numbers": (make_pipeline(MinMaxScaler(), MLPRegressor(**SMALL)), 0, "normal"),
    "components": (make_pipeline(PCA(3, whiten=True), MLPClassifier(**SMALL)), 3, "categorical"),
    "powers": (make_pipeline(PolynomialFeatures(2), MLPRegressor(**SMALL)), 0, "normal"),
}

# One layer, whose weights are attributes of one operator in the file.
LINEAR = {
    "logistic-regression": (LogisticRegression(), 3, "categorical"),
    "linear-regression": (LinearRegression(), 0, "normal"),
}

# Thresholds of trees are no weights.
WITHOUT_WEIGHTS = {"forest": (RandomForestClassifier(3, random_state=0), 3)}


def fitted(model, classes):
    """The exported model, inputs and targets."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(60, 5)).astype(np.float32)
    targets = rng.integers(0, classes, 60) if classes else rng.normal(size=60)
    model.fit(inputs, targets)
    options = {id(_last(model)): {"zipmap": False}} if classes else None
    return to_onnx(model, inputs[:1], options=options), inputs, targets


def _last(model):
    return model[-1] if hasattr(model, "steps") else model


def _network_output(exported):
    """What the last layer gives, before probabilities are made of it."""
    return [node.output[0] for node in exported.graph.node if node.op_type == "Add"][-1]


def _truth(network, inputs, targets, loss):
    """Gradients of the mean loss: weights of every layer, then biases of every layer."""
    value, slope = ACTIVATIONS[network.activation]
    rows = [inputs]
    layers = list(zip(network.coefs_, network.intercepts_, strict=True))
    for weight, bias in layers[:-1]:
        rows.append(value(rows[-1] @ weight + bias))
    out = rows[-1] @ layers[-1][0] + layers[-1][1]
    back = _output_gradient(out, targets, loss) / len(inputs)
    weights, biases = [], []
    for (weight, _), row in zip(layers[::-1], rows[::-1], strict=True):
        weights.insert(0, row.T @ back)
        biases.insert(0, back.sum(0))
        back = (back @ weight.T) * slope(row)
    return weights + biases


def _output_gradient(out, targets, loss):
    if loss == "categorical":
        p = np.exp(out - out.max(1, keepdims=True))
        return p / p.sum(1, keepdims=True) - np.eye(out.shape[1])[targets]
    if loss == "multi_bernoulli":
        return 1 / (1 + np.exp(-out)) - targets[:, None]
    return 2 * (out - targets[:, None])


@pytest.mark.quick
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_networks_equal_closed_form(name, record_property):
    model, classes, loss = TRAINED[name]
    exported, inputs, targets = fitted(model, classes)
    _record(record_property, name)
    engine = ke.Engine.from_onnx(exported, loss=loss, output=_network_output(exported), damping=0.1)
    expected_targets = targets if loss == "categorical" else targets[:, None].astype(np.float32)
    result = engine.step({"X": inputs}, expected_targets)
    rows = model[:-1].transform(inputs) if hasattr(model, "steps") else inputs
    expected = _truth(_last(model), rows.astype(np.float64), targets, loss)
    names = [n for n in engine.parameters if "coefficient" in n]
    names += [n for n in engine.parameters if "intercepts" in n]
    assert set(names) == set(engine.parameters)
    worst = 0.0
    for parameter, gradient in zip(names, expected, strict=True):
        found = result.gradients[parameter].reshape(gradient.shape)
        worst = max(worst, np.abs(found - gradient).max() / np.abs(gradient).max())
        assert np.isfinite(result.natural_gradients[parameter]).all()
    record_property("worst", float(worst))
    record_property("outcome", "passed")
    assert worst < RELATIVE
    assert {report.kind for report in engine.layers} == {"fully_connected"}


@pytest.mark.quick
@pytest.mark.parametrize("name", LINEAR)
def test_gradients_of_linear_models_equal_closed_form(name, record_property):
    model, classes, loss = LINEAR[name]
    exported, inputs, fitted_to = fitted(model, classes)
    _record(record_property, name)
    # At the targets it was fitted to, the gradient is nearly zero.
    targets = (fitted_to + 1) % classes if classes else fitted_to + 1
    output = exported.graph.output[-1].name
    engine = ke.Engine.from_onnx(exported, loss=loss, output=output, damping=0.1)
    expected_targets = targets if classes else targets[:, None].astype(np.float32)
    result = engine.step({"X": inputs}, expected_targets)
    weight, bias = np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)
    back = _output_gradient(inputs @ weight.T + bias, targets, loss) / len(inputs)
    worst = 0.0
    for parameter, gradient in zip(engine.parameters, (back.T @ inputs, back.sum(0)), strict=True):
        found = result.gradients[parameter].reshape(gradient.shape)
        worst = max(worst, np.abs(found - gradient).max() / np.abs(gradient).max())
    record_property("worst", float(worst))
    record_property("outcome", "passed")
    assert worst < RELATIVE


@pytest.mark.quick
@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_models_without_layer_weights_raise_error(name, record_property):
    exported, _, _ = fitted(*WITHOUT_WEIGHTS[name])
    _record(record_property, name)
    with pytest.raises(ke.ModelError, match="no trainable parameter") as refused:
        ke.Engine.from_onnx(exported, loss="normal", output=exported.graph.output[-1].name)
    record_property("outcome", "refused")
    record_property("reason", " ".join(str(refused.value).split()))


def _record(record_property, name):
    for key, value in (("family", "scikit-learn"), ("exporter", "skl2onnx"), ("case", name)):
        record_property(key, value)
