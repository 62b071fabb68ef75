"""Curvatures against the results of laplace-torch, kronfluence and curvlinops in float64.

``python -m scripts.measure_peers`` writes the results; ``about`` of each file has the versions and
the conventions. ``F`` is the mean over examples in all tests.
"""

import json

import numpy as np
import pytest

from tests.analysis.fisher_matrix.dense import measured, uneven
from tests.comparing import assert_near
from tests.uses_of_peers.cases import (
    DAMPING,
    DAMPINGS,
    EXAMPLES,
    FOLDER,
    OUTPUTS,
    QUERIES,
    cases,
    settings,
    wave,
)

CASES = cases()
# Relative to the largest entry. float64: sums of 24 examples and eigendecompositions, in other
# orders. The convolutions of ONNX Runtime are in float32, and those of the other libraries are not.
TOLERANCE = {"mlp": 1e-6, "regression": 1e-6, "cnn": 1e-4}


def results(library):
    with np.load(FOLDER / f"{library}.npz", allow_pickle=False) as file:
        return dict(file)


LAPLACE, KRONFLUENCE, CURVLINOPS = map(results, ("laplace_torch", "kronfluence", "curvlinops"))


def curvature_of(name, **options):
    """The curvature of a case, from batches whose sizes are not those of the other libraries."""
    case = CASES[name]
    batches = uneven({"input": case.inputs}, case.targets, (1, 16))
    return measured(case.model, batches, case.loss, **options)


def sum_over_data(name, noise=1.0):
    """``H / F`` of laplace-torch: H is a sum over examples, of squared errors over 2 σ².

    The loss "normal" has the variance ½: its F is that of σ² = ½.
    """
    return EXAMPLES * (0.5 / noise**2 if CASES[name].loss == "normal" else 1.0)


def sorted_eigenvalues(curvature):
    return np.sort(np.concatenate(list(curvature.eigenvalues().values())))


@pytest.mark.parametrize("library", [LAPLACE, KRONFLUENCE, CURVLINOPS])
def test_results_name_versions_and_conventions(library):
    about = json.loads(str(library["about"]))
    assert "torch" in about["versions"]
    assert about["conventions"]
    assert {key.partition(".")[0] for key in library} == {"about", *CASES}


# -- laplace-torch: H = n F, weight and bias in blocks of their own --------------------------------

STRUCTURES = {"kron": "kron", "diag": "diagonal", "full": "full"}
POSTERIORS = [("all", "kron"), ("last_layer", "kron"), ("all", "diag"), ("all", "full")]


def posterior_of(name, subset, structure):
    """The curvature of a posterior, and its results by name."""
    biases = "separate" if structure == "kron" else "joint"
    curvature = curvature_of(name, structure=STRUCTURES[structure], biases=biases,
                             layers=subset.removesuffix("_layer"))  # fmt: skip
    key = f"{name}.{subset}.{structure}."
    return curvature, {k.removeprefix(key): v for k, v in LAPLACE.items() if k.startswith(key)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("subset", "structure"), POSTERIORS)
def test_eigenvalues_equal_those_of_laplace_torch(name, subset, structure):
    curvature, expected = posterior_of(name, subset, structure)
    actual = sum_over_data(name) * sorted_eigenvalues(curvature)
    assert_near(actual, expected["eigenvalues"], TOLERANCE[name])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("subset", "structure"), POSTERIORS)
def test_log_determinants_equal_those_of_laplace_torch(name, subset, structure):
    """``log det(c F + δ) = P log c + log det(F + δ/c)``."""
    curvature, expected = posterior_of(name, subset, structure)
    actual = []
    for prior, noise in settings(CASES[name].loss):
        scale = sum_over_data(name, noise)
        rest = curvature.log_determinant(prior / scale)
        actual.append(curvature.vector.size * np.log(scale) + rest)
    assert_near(np.array(actual), expected["log_determinant"], TOLERANCE[name])


@pytest.mark.parametrize("name", CASES)
def test_log_likelihood_equals_that_of_laplace_torch(name):
    curvature, expected = posterior_of(name, "all", "kron")
    actual = curvature.log_likelihood
    if CASES[name].loss == "normal":
        # -Σ(f-y)² - ½ log π a value, to -½ Σ(f-y)² - ½ log 2π.
        constant = 0.5 * CASES[name].targets.size
        actual = 0.5 * (actual + constant * np.log(np.pi)) - constant * np.log(2 * np.pi)
    # The noise of laplace-torch is 1 before the first setting.
    assert actual == pytest.approx(float(expected["log_likelihood"]), rel=TOLERANCE[name])


def derivatives(tiles):
    """Parameter name to the derivatives of all examples, from tiles of examples."""
    parts = {}
    for tile in tiles:
        for name, array in tile.arrays.items():
            parts.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def as_rows(arrays, count):
    """The entries of all parameters side by side, ``(count, P)``."""
    return np.hstack([array.reshape(count, -1) for array in arrays.values()])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("subset", "structure"), POSTERIORS)
def test_variances_of_outputs_equal_those_of_laplace_torch(name, subset, structure):
    """``J (c F + δ)⁻¹ Jᵀ = J (F + δ/c)⁻¹ Jᵀ / c``."""
    curvature, expected = posterior_of(name, subset, structure)
    jacobians = derivatives(curvature.example_jacobians({"input": CASES[name].queries}))
    vectors = {key: array.reshape(-1, *array.shape[2:]) for key, array in jacobians.items()}
    count, shape = QUERIES * OUTPUTS, (QUERIES, OUTPUTS, -1)
    actual = []
    for prior, noise in settings(CASES[name].loss):
        scale = sum_over_data(name, noise)
        products = curvature.multiply(vectors, power=-1, damping=prior / scale)
        left, right = (as_rows(rows, count).reshape(shape) for rows in (vectors, products))
        actual.append(left @ right.swapaxes(1, 2) / scale)
    assert_near(np.array(actual), expected["variance"], TOLERANCE[name])


# -- kronfluence: means over examples, a bias joint with its weight --------------------------------


def influence_of(name, strategy, fisher):
    """The curvature of a strategy, and its results by name."""
    structure = {"kfac": "kron", "diagonal": "diagonal", "ekfac": "ekfac"}[strategy]
    draws = CASES[name].draws if fisher == "sampled" else None
    curvature = curvature_of(name, structure=structure, fisher=fisher, draws=draws)
    key = f"{name}.{strategy}.{fisher}."
    return curvature, {k.removeprefix(key): v for k, v in KRONFLUENCE.items() if k.startswith(key)}


def positions(block, strategy):
    """Positions of an example, which the K-FAC eigenvalues of kronfluence leave out."""
    return block.inputs.positions if strategy == "kfac" else 1


STRATEGIES = [("ekfac", "empirical"), ("ekfac", "sampled"), ("kfac", "empirical"),
              ("diagonal", "empirical")]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("strategy", "fisher"), STRATEGIES)
def test_eigenvalues_equal_those_of_kronfluence(name, strategy, fisher):
    curvature, expected = influence_of(name, strategy, fisher)
    modules = dict.fromkeys(key.split(".")[0] for key in CASES[name].parameters)
    for module, block in zip(modules, curvature.blocks, strict=True):
        actual = np.sort(block.spectrum.eigenvalues, axis=None) / positions(block, strategy)
        assert_near(actual, expected[f"eigenvalues.{module}"], TOLERANCE[name])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("strategy", "fisher"), STRATEGIES[:2])
def test_products_of_gradients_equal_the_scores_of_kronfluence(name, strategy, fisher):
    """A score is ``gᵀ (F + λ)⁻¹ g`` with a plus, and without 1/n."""
    curvature, expected = influence_of(name, strategy, fisher)
    case = CASES[name]
    train = derivatives(curvature.example_gradients({"input": case.inputs}, case.targets))
    query = derivatives(curvature.example_gradients({"input": case.queries}, case.query_targets))
    rows = as_rows(train, EXAMPLES)
    for number, level in enumerate(DAMPINGS):
        damping = {
            parameter: 0.1 * block.spectrum.eigenvalues.mean() if level is None else level
            for block in curvature.blocks
            for parameter in block.parameters
        }
        products = as_rows(curvature.multiply(train, power=-1, damping=damping), EXAMPLES)
        scores = as_rows(query, QUERIES) @ products.T
        assert_near(scores, expected["scores"][number], TOLERANCE[name])
        assert_near((rows * products).sum(1), expected["self_scores"][number], TOLERANCE[name])


# -- curvlinops: means over examples ---------------------------------------------------------------

MATRICES = sorted({key.rpartition(".")[0] for key in CURVLINOPS if key != "about"})


@pytest.mark.parametrize("key", MATRICES)
def test_curvature_equals_that_of_curvlinops(key):
    name, fisher, structure, *biases = key.split(".")
    options = {"structure": structure, "fisher": fisher, "biases": (*biases, "joint")[0]}
    curvature = curvature_of(name, **options)
    tolerance, shapes = TOLERANCE[name], curvature.vector.shapes
    assert curvature.trace() == pytest.approx(float(CURVLINOPS[f"{key}.trace"]), rel=tolerance)
    actual = curvature.log_determinant(DAMPING)
    assert actual == pytest.approx(float(CURVLINOPS[f"{key}.log_determinant"]), rel=tolerance)
    ends = np.cumsum([np.prod(shape) for shape in shapes.values()])
    parts = np.split(wave(curvature.vector.size), ends[:-1])
    vector = {n: part.reshape(shapes[n]) for n, part in zip(shapes, parts, strict=True)}
    product = curvature.multiply(vector, power=-1, damping=DAMPING)
    assert_near(
        np.concatenate([product[n].ravel() for n in shapes]), CURVLINOPS[f"{key}.product"],
        tolerance,
    )  # fmt: skip
