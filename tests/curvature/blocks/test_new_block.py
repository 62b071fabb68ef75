"""A block of a new kind needs a class and a row of its table; everything else works with it."""

import json
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.curvature.approximations import KINDS, Approximation
from kfac_engine.curvature.blocks.single import SingleFactorFB
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.statistics import LayerPairs
from kfac_engine.layers.layer_forms import LayerForm
from tests import models, oracle
from tests.analysis.fisher_matrix.dense import DOUBLE, dense, measured
from tests.analysis.laplace.test_posterior import jacobian
from tests.comparing import assert_arrays_equal, assert_near

APPROXIMATIONS = {"fully_connected": "whole"}
OPTIONS = {"loss": "categorical", "reduction": "batch_mean", "threads": 1, "backend": "numpy"}
DAMPING = 0.1
EXAMPLES, PRECISION = 7, 0.7


@dataclass(frozen=True, slots=True)
class WholeMoment(LayerPairs):
    """The second moment of the gradients of examples, without structure."""

    form: LayerForm

    def shape(self, values):
        ((a, ds),) = self.products()
        bias = self.form.packing.has_bias
        size = (values[a].shape[-1] + bias) * values[ds].shape[-1]
        return size, size

    def repeats(self, values):
        return 1

    def add_to(self, out, values, backend, alpha, beta):
        a, ds = (values[name].astype(out.dtype) for name in self.names())
        a, ds = (x.reshape(len(x), -1, x.shape[-1]) for x in (a, ds))
        layout = self.form.packing.weight_format.lower()
        parts = [np.einsum(f"nti,nto->n{layout}", a, ds)]
        if self.form.packing.has_bias:
            parts.append(ds.sum(axis=1))
        v = np.concatenate([part.reshape(len(ds), -1) for part in parts], axis=1)
        backend.second_moment(v, out, Accumulation(alpha=alpha / len(v), beta=beta))


class WholeLayerFB(SingleFactorFB):
    """The Fisher matrix of a dense layer, without structure."""

    def __init__(self, collection, form):
        super().__init__(collection)
        self.form = form

    def factor_shapes(self, shapes):
        size = sum(map(prod, shapes))
        return ((size, size),)

    def _make_factors(self, grads_list):
        self._factor = self._make_factor(
            DenseSquareMatrixFactor, lambda x, ds: WholeMoment(x, ds, self.form), grads_list
        )


@pytest.fixture(autouse=True)
def row(monkeypatch):
    """The row of the table."""
    new = Approximation(WholeLayerFB, "W", "this test", examples_first=True)
    monkeypatch.setitem(KINDS["fully_connected"].approximations, "whole", new)


@pytest.fixture(scope="module", params=[models.mlp, models.token_mlp], ids=["rows", "positions"])
def model(request):
    return request.param(widths=(4, 3, 2), dtype="float64")


def engine_of(model):
    return ke.Engine.from_onnx(
        model, damping=DAMPING, approximations=APPROXIMATIONS, estimation_mode="exact", **OPTIONS
    )


def blocks_of(matrix, model, groups):
    """``matrix`` without the entries between different groups of parameters."""
    group = {name: number for number, names in enumerate(groups) for name in names}
    sizes = {name: value.size for name, value in ke.load_model(model).parameters.items()}
    owner = np.concatenate([np.full(size, group[name]) for name, size in sizes.items()])
    return np.where(owner[:, None] == owner, matrix, 0.0)


@pytest.fixture(scope="module")
def truth(model):
    """A batch with its labels, and the dense Fisher matrix of its layers."""
    inputs = models.random_inputs(model, batch=EXAMPLES)
    shape = oracle.evaluate(model, inputs, "output")[0].shape
    labels = np.random.default_rng(3).integers(0, shape[-1], shape[:-1])
    names = list(ke.load_model(model).parameters)
    fisher = oracle.dense_fisher(model, inputs, "output", names, "categorical")
    groups = [names[i : i + 2] for i in range(0, len(names), 2)]
    assert all(weight.partition(".")[0] == bias.partition(".")[0] for weight, bias in groups)
    return inputs, labels, blocks_of(fisher, model, groups)


def flat(arrays):
    return np.concatenate([np.ravel(array) for array in arrays.values()])


def test_steps_and_checkpoints_multiply_by_the_inverse_of_the_dense_matrix(model, truth, tmp_path):
    inputs, labels, F = truth
    engine = engine_of(model)
    result = engine.step(inputs, labels)
    expected = np.linalg.solve(F + DAMPING * np.eye(len(F)), flat(result.gradients))
    assert_near(flat(result.natural_gradients), expected, DOUBLE)
    engine.save(tmp_path / "state.npz")
    restored = engine_of(model)
    restored.load(tmp_path / "state.npz")
    again = restored.precondition(result.gradients)
    assert_arrays_equal(again, engine.precondition(result.gradients))


def test_the_inspection_shows_the_formula_and_the_sizes_of_the_factors(model, tmp_path, capsys):
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    command = ["inspect", str(path), "--approx", "fully_connected=whole"]
    assert main([*command, "--json"]) == 0
    sizes = {name: value.size for name, value in ke.load_model(model).parameters.items()}
    for layer in json.loads(capsys.readouterr().out)["layers"]:
        size = sum(sizes[name] for name in layer["parameters"])
        assert (layer["approximation"], layer["factor_shapes"]) == ("whole", [[size, size]])
    assert main(command) == 0
    assert "whole" in capsys.readouterr().out


def test_a_curvature_and_a_posterior_are_those_of_the_dense_matrix(model, truth, tmp_path):
    inputs, labels, F = truth
    curvature = measured(model, (inputs, labels), approximations=APPROXIMATIONS)
    assert_near(dense(curvature), F, DOUBLE)
    curvature.save(tmp_path / "curvature.npz")
    loaded = ke.Curvature.load(tmp_path / "curvature.npz", model)
    np.testing.assert_array_equal(dense(loaded), dense(curvature))
    posterior = ke.Laplace(curvature, prior_precision=PRECISION)
    batch = models.random_inputs(model, batch=2, seed=5)
    jac, P = jacobian(curvature, model, batch), EXAMPLES * F + PRECISION * np.eye(len(F))
    variance = jac @ np.linalg.solve(P, jac.swapaxes(1, 2))
    assert_near(posterior.predict(batch).variance.reshape(variance.shape), variance, 100 * DOUBLE)
