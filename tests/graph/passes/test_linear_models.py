"""Linear models of the classical domain compute the same once their weights are operands."""

from types import MappingProxyType

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.graph.load import load_graph
from tests.graph.running import run_graph, run_model
from tests.models import one_operator

DOMAIN = "ai.onnx.ml"
# Sums of three products, in float32, by two programs.
CLOSE = 1e-5
RNG = np.random.default_rng(0)
WEIGHTS = [float(number) for number in RNG.normal(size=6)]
X = RNG.normal(size=(4, 3)).astype(np.float32)
X[1] = 0


def classical(op, results=("y",), element="float", constants=MappingProxyType({}), **attributes):
    opsets = f'"": 18, "{DOMAIN}": 3'
    return one_operator(
        op, {"x": f"{element}[n,3]"}, constants, results, opsets, domain=DOMAIN, **attributes
    )


def classifier(**attributes):
    return classical(
        "LinearClassifier",
        ("label", "y"),
        coefficients=WEIGHTS,
        intercepts=[0.1, -0.2],
        classlabels_ints=[0, 1],
        **attributes,
    )


CASES = {
    "scaler": classical("Scaler", offset=[0.1, 0.2, 0.3], scale=[1.0, 2.0, 3.0]),
    "scaler_of_whole_numbers": classical("Scaler", element="int64", offset=[0.1], scale=[2.0]),
    "regressor": classical("LinearRegressor", coefficients=WEIGHTS[:3], intercepts=[0.5]),
    "regressor_of_two": classical("LinearRegressor", coefficients=WEIGHTS, targets=2),
    "classifier": classifier(),
    "classifier_softmax": classifier(post_transform="SOFTMAX"),
    "classifier_logistic": classifier(post_transform="LOGISTIC"),
    "normalizer_l1": classical("Normalizer", norm="L1"),
    "normalizer_l2": classical("Normalizer", norm="L2"),
    "columns": classical("ArrayFeatureExtractor", constants={"places": np.array([2, 0])}),
}


@pytest.mark.parametrize("name", CASES)
def test_linear_model_equals_runtime_kernel(name):
    model = CASES[name]
    graph = load_graph(model)
    (entry,) = graph.inputs
    feeds = {"x": X.astype(entry.dtype)}
    expected = run_model(model.SerializeToString(), feeds)["y"]
    np.testing.assert_allclose(run_graph(graph, feeds)["y"], expected, CLOSE, CLOSE)
    assert all(node.domain == "" or node.outputs[0] == "label" for node in graph.nodes)


def test_classifier_weights_are_trainable():
    engine = ke.Engine.from_onnx(CASES["classifier"], loss="categorical", output="y")
    assert {layer.kind for layer in engine.layers} == {"fully_connected"}
    assert engine.parameters["node.coefficients"].shape == (2, 3)


def test_unsupported_output_function_error_names_node():
    with pytest.raises(ke.UnsupportedError, match=r"'node'.*PROBIT"):
        load_graph(classifier(post_transform="PROBIT"))


def test_wrong_number_of_coefficients_error_names_node():
    with pytest.raises(ke.ModelError, match=r"'node'.* cannot be divided into 4 rows"):
        load_graph(classical("LinearRegressor", coefficients=WEIGHTS, targets=4))
