"""Wrong data, options and vectors of a curvature raise one clear error each."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models
from tests.analysis.fisher_matrix.dense import measured

MODEL = models.mlp(dtype="float64")
INPUTS = models.random_inputs(MODEL, batch=4)
LABELS = np.array([0, 1, 2, 0])


@pytest.fixture(scope="module")
def curvature():
    return measured(MODEL, (INPUTS, LABELS))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no example"),
        (3, "iterable of batches, got int"),
        ({"inputs": INPUTS["input"]}, "no input 'inputs'|'input' is missing"),
        ([INPUTS, INPUTS, 3], "batch 3 is int"),
        ([(INPUTS, LABELS), (INPUTS, None)], "batch 2 has no targets"),
        ([(INPUTS, None), (INPUTS, LABELS)], "batch 2 has targets"),
        ([({"input": np.zeros((4, 5))}, None)], "shape"),
        ([({"input": np.zeros((0, 6))}, None)], "empty"),
        ([({"input": np.full((4, 6), np.nan)}, None)], "NaN"),
        ([(INPUTS, np.array([0, 1, 2, 7]))], "7"),
    ],
)
def test_wrong_batches_are_refused(batches, message):
    with pytest.raises(ke.InputError, match=message):
        measured(MODEL, batches)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "block"}, "structure must be one of kron, ekfac, diagonal, full"),
        ({"fisher": "type-2"}, "fisher must be one of"),
        ({"biases": "none"}, "biases must be one of"),
        ({"layers": "first"}, "layers must be one of"),
        ({"draws": LABELS}, "draws are targets of fisher='sampled'"),
        ({"fisher": "sampled", "draws": LABELS[:3]}, "fewer targets than the data"),
        ({"fisher": "sampled", "draws": np.zeros(6, int)}, "2 more targets"),
        ({"fisher": "empirical"}, "target"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ke.InputError, match=message):
        measured(MODEL, (INPUTS, None), **options)


def test_unknown_option_names_the_nearest():
    with pytest.raises(ke.UnknownNameError, match="did you mean 'structure'"):
        measured(MODEL, (INPUTS, None), structur="kron")


def test_block_without_closed_eigenvalues_names_its_parameter():
    model = models.tied(dtype="float64")
    with pytest.raises(ke.UnsupportedError, match=r"shared.weight.*kron_indep"):
        measured(
            model,
            (models.random_inputs(model), None),
            "normal",
            approximations={"fully_connected_multi": "kron_series_1"},
        )


VECTOR = {"fc0.weight": np.ones((5, 6)), "fc0.bias": np.ones(5)}


@pytest.mark.parametrize(
    ("vectors", "error", "message"),
    [
        ({}, ke.InputError, "no vector"),
        (np.ones(3), ke.InputError, "must be a mapping"),
        ({"fc9.weight": np.ones(3)}, ke.UnknownNameError, "fc9.weight.*they are: fc0.weight"),
        ({"fc0.weight": np.ones((5, 6))}, ke.InputError, "missing: fc0.bias"),
        (VECTOR | {"fc0.bias": np.ones(6)}, ke.ShapeError, "fc0.bias.*shape"),
        (VECTOR | {"fc0.bias": np.ones((2, 5))}, ke.ShapeError, "different numbers of vectors"),
        (VECTOR | {"fc0.bias": np.full(5, np.inf)}, ke.NonFiniteError, "fc0.bias"),
        (VECTOR | {"fc0.bias": np.array(list("abcde"))}, ke.InputError, "numbers"),
    ],
)
def test_wrong_vectors_are_refused(curvature, vectors, error, message):
    with pytest.raises(error, match=message):
        curvature.multiply(vectors, damping=1.0)


@pytest.mark.parametrize(
    ("damping", "error", "message"),
    [
        (-1.0, ke.InputError, "must not be negative"),
        (np.nan, ke.InputError, "finite"),
        (0.0, ke.InputError, "raise the damping"),
        ({"fc0.weight": 1.0}, ke.InputError, "no number for fc0.bias"),
        ({"w": 1.0}, ke.UnknownNameError, "'w'"),
    ],
)
def test_wrong_damping_is_refused(curvature, damping, error, message):
    with pytest.raises(error, match=message):
        curvature.log_determinant(damping)


def test_parameters_of_one_block_share_their_damping(curvature):
    damping = dict.fromkeys(curvature.model.parameters, 1.0) | {"fc0.bias": 2.0}
    with pytest.raises(ke.InputError, match=r"fc0.weight, fc0.bias share a block"):
        curvature.log_determinant(damping)


def test_input_moment_of_a_bias_is_refused(curvature):
    with pytest.raises(ke.UnknownNameError, match=r"'fc0.bias' is not the weight"):
        curvature.input_moment("fc0.bias")
