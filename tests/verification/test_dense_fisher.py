"""Slices of the Fisher matrix against brute force, and differences against calculus."""

import numpy as np
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from kfac_engine.verification import dense_fisher as module
from kfac_engine.verification.dense_fisher import Entries, dense_fisher
from kfac_engine.verification.differences import differentiate_along
from kfac_engine.verification.specimen import Specimen
from tests import models, oracle

NAMES = ("fc0.weight", "fc1.bias")


class Double:
    """The part of a copy that differences read."""

    is_double = True


@pytest.mark.parametrize("loss", ["categorical", "normal", "multi_bernoulli"])
@pytest.mark.parametrize("method", ["backward passes", "differences"])
def test_a_slice_is_that_of_the_dense_fisher(loss, method, monkeypatch):
    if method == "differences":
        monkeypatch.setattr(module, "MOST_ROWS", 0)
    model = models.mlp((4, 5, 3))
    inputs = models.random_inputs(model, 4)
    targets = {"categorical": np.zeros(4, int)}.get(loss, np.zeros((4, 3), np.float32))
    engine = ke.Engine.from_onnx(model, loss=loss, reduction="batch_mean")
    specimen = Specimen.of_batch(engine, inputs, targets, 8)
    rows = Entries.draw(specimen.parameters, NAMES, 9, 0)
    rng = np.random.default_rng(0)
    vector = {name: rng.standard_normal(specimen.parameters[name].shape) for name in NAMES}
    dense = dense_fisher(specimen, rows, [vector])
    assert method in dense.method
    F = oracle.dense_fisher(model, inputs, "output", NAMES, loss)
    starts = {"fc0.weight": 0, "fc1.bias": 20}
    index = [starts[name] + entry for name in NAMES for entry in rows.positions[name]]
    flat = np.concatenate([vector[name].ravel() for name in NAMES])
    # Backward passes are in float32, differences are accepted at 1e-4.
    close = {"rtol": 0, "atol": 2e-5 * abs(F).max()}
    np.testing.assert_allclose(dense.diagonal(), np.diag(F)[index], **close)
    np.testing.assert_allclose(dense.products()[0], (F @ flat)[index], **close)


@pytest.mark.parametrize("gap", [2.0, 10.0, 18.0])
def test_products_of_certain_predictions_are_in_float64(gap):
    """One layer of ones with the bias ``gap``, in which 1 - p is down to 3e-8."""
    model = models.linear(2, 3, bias=True)
    values = {"weight": np.zeros((2, 3)), "bias": np.array([gap, 0.0, 0.0])}
    for entry, value in zip(model.graph.initializer, values.values(), strict=True):
        entry.CopyFrom(numpy_helper.from_array(value.astype(np.float32), entry.name))
    engine = ke.Engine.from_onnx(model, loss="categorical")
    specimen = Specimen.of_batch(engine, {"input": np.ones((1, 2), np.float32)}, np.array([0]), 1)
    name = model.graph.initializer[1].name
    rows = Entries({name: (0, 1, 2)})
    v = np.array([1.0, 2.0, -1.0])
    rest = np.exp(-gap) / (1 + 2 * np.exp(-gap))
    p = np.array([1 - 2 * rest, rest, rest])
    # F v without the cancellation in diag(p) - p pᵀ: the differences of the entries of v.
    expected = p * np.array([p @ (v[k] - v) for k in range(3)])
    found = dense_fisher(specimen, rows, [{name: v}]).products()[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=module.CURVED_ERROR)


def test_differences_of_a_smooth_function_are_its_derivative():
    along = differentiate_along(
        Double(), lambda p: np.asarray(np.sin(p["x"]).sum()), {"x": np.array([0.5, 1.0])},
        {"x": np.array([1.0, -2.0])}, relative=1e-8,
    )  # fmt: skip
    # Central differences of 4e-6: an error of 1e-11 of the third derivative.
    assert float(along.value) == pytest.approx(np.cos(0.5) - 2 * np.cos(1.0), rel=1e-9)
    assert along.doubt < 1e-8


@pytest.mark.parametrize("place", [0.0, 1e-9])
def test_a_kink_is_a_doubt(place):
    along = differentiate_along(
        Double(), lambda p: np.asarray(abs(p["x"]).sum()), {"x": np.array([place])},
        {"x": np.array([1.0])}, relative=1e-6,
    )  # fmt: skip
    assert along.doubt > 0.5
