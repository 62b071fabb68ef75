"""EKFAC, diagonal, separate and last-layer curvature against the dense Fisher matrix."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.losses import LOSSES
from tests import models, oracle
from tests.analysis.fisher_matrix.dense import (
    DOUBLE,
    SINGLE,
    dense,
    exact_fisher,
    measured,
    uneven,
    within,
)
from tests.analysis.fisher_matrix.test_kronecker_curvature import LABELS, LAYERS, input_rows, mlp
from tests.comparing import assert_near

FISHERS = ("exact", "empirical")


def fisher_of(curvature, model, inputs, fisher, loss="categorical"):
    return exact_fisher(
        curvature, model, inputs, loss, targets=LABELS if fisher == "empirical" else None
    )


def order_of(curvature, weight, bias):
    """Places of the packed matrix of a dense layer, the bias last, among all parameters."""
    shapes = {name: value.shape for name, value in curvature.model.parameters.items()}
    starts = np.cumsum([0, *(np.prod(shape) for shape in shapes.values())])
    start = dict(zip(shapes, starts, strict=False))
    places = start[weight] + np.arange(np.prod(shapes[weight])).reshape(shapes[weight])
    return np.vstack([places.T, start[bias] + np.arange(shapes[bias][0])]).ravel()


def eigenbasis_of(A, separate):
    """Eigenvectors of A; without the row of the ones where the bias is separate."""
    if not separate:
        return np.linalg.eigh(A)[1]
    U = np.zeros_like(A)
    U[:-1, :-1], U[-1, -1] = np.linalg.eigh(A[:-1, :-1])[1], 1
    return U


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("biases", ["joint", "separate"])
def test_ekfac_has_the_diagonal_of_the_fisher_in_the_eigenbasis_of_all_data(fisher, biases):
    model, inputs = mlp()
    batches = uneven(inputs, LABELS)
    curvature = measured(model, batches, structure="ekfac", fisher=fisher, biases=biases)
    F, actual = fisher_of(curvature, model, inputs, fisher), dense(curvature)
    for (weight, bias), source in zip(LAYERS, ("input", "act0", "act1"), strict=True):
        order = order_of(curvature, weight, bias)
        block = F[np.ix_(order, order)]
        a, d_out = input_rows(model, inputs, source), len(curvature.model.parameters[bias])
        W = np.linalg.eigh(block[-d_out:, -d_out:])[1]
        Q = np.kron(eigenbasis_of(a.T @ a / 7, biases == "separate"), W)
        expected = (Q * np.diag(Q.T @ block @ Q)) @ Q.T
        assert_near(actual[np.ix_(order, order)], expected, DOUBLE)


# Every name of a loss to the name that the oracle knows.
ORACLES = dict.fromkeys(("categorical", "softmax_cross_entropy", "cross_entropy"), "categorical")
ORACLES |= dict.fromkeys(("multi_bernoulli", "sigmoid_cross_entropy", "bce"), "multi_bernoulli")
ORACLES |= dict.fromkeys(("normal", "squared_error", "mse"), "normal")
ORACLES |= dict.fromkeys(("laplace", "absolute_error", "l1"), "laplace")
ORACLES |= {"huber": "huber", "poisson": "poisson"}
# Losses of whole sequences, which have tests of their own beside sums over all sequences.
SEQUENCES = {"causal_lm", "ctc"}


@pytest.mark.parametrize("structure", ["full", "diagonal"])
@pytest.mark.parametrize("loss", sorted({*LOSSES} - SEQUENCES))
def test_curvature_of_every_loss_with_positions_is_that_of_the_fisher(loss, structure):
    model, rng = models.token_mlp("tokens", (2, 3), dtype="float64"), np.random.default_rng(0)
    batches = [({"input": rng.normal(size=(3, t, 2))}, None) for t in (1, 4)]
    for order in (batches, batches[::-1]):
        curvature = measured(model, order, loss, structure=structure)
        fishers = (exact_fisher(curvature, model, x, ORACLES[loss]) for x, _ in batches)
        F = sum(fishers) / 2
        assert_near(dense(curvature), F if structure == "full" else np.diag(np.diag(F)), DOUBLE)


def test_scales_and_shifts_have_the_full_block_of_the_fisher():
    model = models.layer_norm()
    inputs = models.random_inputs(model, batch=7)
    for biases in ("joint", "separate"):
        curvature = measured(model, uneven(inputs), biases=biases)
        F = exact_fisher(curvature, model, inputs, "categorical")
        keys = [key for key in curvature.eigenvalues() if "norm" in str(key)]
        assert keys == ([("norm.weight", "norm.bias")] if biases == "joint" else
                        ["norm.weight", "norm.bias"])  # fmt: skip
        shapes = {name: value.size for name, value in curvature.model.parameters.items()}
        names = np.repeat(list(shapes), list(shapes.values()))
        norm = np.isin(names, ["norm.weight", "norm.bias"])
        expected = F[np.ix_(norm, norm)]
        if biases == "separate":
            expected = np.where(names[norm][:, None] == names[norm], expected, 0)
        assert_near(dense(curvature)[np.ix_(norm, norm)], expected, SINGLE)


def test_separate_biases_drop_the_cross_terms_of_kronecker_blocks():
    model, inputs = mlp()
    joint, separate = (
        measured(model, uneven(inputs), biases=biases) for biases in ("joint", "separate")
    )
    names = [name for layer in LAYERS for name in layer]
    assert list(separate.eigenvalues()) == names
    assert_near(dense(separate), within(dense(joint), joint, *([name] for name in names)), DOUBLE)
    damping = {name: 0.1 * (i + 1) for i, name in enumerate(names)}
    levels = [
        np.full(separate.model.parameters[name].size, damping[name])
        for name in separate.model.parameters
    ]
    inverse = np.linalg.inv(dense(separate) + np.diag(np.concatenate(levels)))
    assert_near(dense(separate, power=-1, damping=damping), inverse, DOUBLE)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal"])
def test_last_layer_has_the_block_of_the_whole_model(structure):
    model, inputs = mlp()
    whole, last = (
        measured(model, uneven(inputs), structure=structure, layers=layers)
        for layers in ("all", "last")
    )
    assert list(last.model.parameters) == list(LAYERS[-1])
    order = order_of(whole, *LAYERS[-1])
    assert_near(dense(last), dense(whole)[np.ix_(sorted(order), sorted(order))], DOUBLE)


def test_ekfac_refuses_an_iterator_that_is_read_once():
    model, inputs = mlp()
    with pytest.raises(ke.InputError, match=r"read 2 times.*generator"):
        measured(model, (pair for pair in uneven(inputs)), structure="ekfac")
    with pytest.raises(ke.InputError, match=r"read 2 times"):
        measured(model, iter(uneven(inputs)), structure="ekfac")
    assert measured(model, iter(uneven(inputs))).examples == 7


class Shrinking:
    """Batches with one example less in each pass."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        self.batches = self.batches[1:]
        return iter(self.batches)


def test_ekfac_refuses_data_that_change_between_passes():
    model, inputs = mlp()
    with pytest.raises(ke.InputError, match="had 6 examples and the second 2"):
        measured(model, Shrinking(uneven(inputs)), structure="ekfac")


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_sampled_targets_are_those_of_the_draws(structure):
    model, inputs = mlp()
    sampled = measured(model, uneven(inputs), structure=structure, fisher="sampled", draws=LABELS)
    expected = measured(model, uneven(inputs, LABELS), structure=structure, fisher="empirical")
    assert_near(dense(sampled), dense(expected), DOUBLE)


def test_both_passes_of_ekfac_draw_the_same_targets():
    """The trace in a basis equals that of the first pass, if its targets are the same."""
    model, inputs = mlp()
    kron, ekfac = (
        measured(model, uneven(inputs), structure=structure, fisher="sampled", seed=5)
        for structure in ("diagonal", "ekfac")
    )
    assert ekfac.trace() == pytest.approx(kron.trace(), rel=1e-10)


def test_input_moment_of_ekfac_equals_that_of_kron():
    model, inputs = mlp()
    x = oracle.evaluate(model, inputs, "act0")[0]
    for biases in ("joint", "separate"):
        curvature = measured(model, uneven(inputs), structure="ekfac", biases=biases)
        A = curvature.input_moment("fc1.weight")
        assert_near(A, 2 / 7 * x.T @ x, DOUBLE)
