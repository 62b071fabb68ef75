"""The weight of unusually long gradients, beside a formula and beside runs without rare rows."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.bench.training import models
from kfac_engine.training.gradient_weight import GradientWeight

SHAPES = {"a": np.empty(()), "b": np.empty(3)}


def weights_of(rows, back=()):
    """The weights of steps, whose squares of four matrices are ``rows``, and the last state."""
    rule, found = GradientWeight(), []
    old = rule.new_slots(SHAPES)
    for step, row in enumerate(rows):
        new = rule.new_slots(SHAPES)
        squares = {("a",): np.asarray(row[0]), ("b",): np.asarray(row[1:])}
        found.append(rule.of_step(old, new, squares, step, step in back))
        old = new
    return np.array(found), old["usual_square"]["matrices"]


def expected(rows):
    """The weights that the definition gives, computed from lengths of gradients, not squares."""
    usual, found = None, []
    for step, row in enumerate(np.sqrt(rows)):
        usual = row**2 if usual is None else usual
        ratio = np.prod(row / np.sqrt(usual)) ** (1 / len(row))
        found.append(min(1.0, 2 / ratio))
        decay = min(0.9, step / (step + 1))
        usual = decay * usual + (1 - decay) * (found[-1] * row) ** 2
    return np.array(found)


STEADY = np.exp(np.random.default_rng(0).normal(0, 0.3, (40, 4))) * [1e-6, 1.0, 3.0, 1e6]


def with_long(steps, factor):
    rows = STEADY.copy()
    rows[steps] *= factor
    return rows


@pytest.mark.parametrize(
    "rows", [STEADY, with_long([17, 18, 30], 2500), with_long(slice(20, None), 100)]
)
def test_weights_follow_the_definition(rows):
    np.testing.assert_allclose(weights_of(rows)[0], expected(rows), rtol=1e-12)


def test_only_unusual_gradients_have_less_weight():
    assert (weights_of(STEADY)[0] == 1).all()
    found = weights_of(with_long([17], 2500))[0]  # fifty times as long
    assert found[17] == pytest.approx(2 / 50, rel=0.4)
    assert (np.delete(found, 17) == 1).all()


def test_longer_gradients_are_usual_soon():
    found = weights_of(with_long(slice(20, None), 100))[0]  # ten times as long, from step 20 on
    assert found[20] < 0.3
    assert (found[36:] == 1).all()


@pytest.mark.parametrize("of_one", [0.0, np.inf])
def test_a_matrix_without_a_square_does_not_count(of_one):
    rows = np.ones((30, 4))
    rows[:, 2] = of_one
    rows[20] *= 400
    found = weights_of(rows)[0]
    assert found[20] == pytest.approx(2 / 20)
    assert (np.delete(found, 20) == 1).all()


def test_a_matrix_that_few_steps_reach_changes_little():
    """An expert that is chosen after a hundred steps without it has some millions of its usual."""
    rows = np.ones((120, 4))
    rows[1:110, 3] = 0
    assert (np.array(weights_of(rows)[0][:110]) == 1).all()
    shapes = {"experts": np.empty(64)}
    rule, old = GradientWeight(), GradientWeight().new_slots(shapes)
    for step in range(120):
        squares = np.ones(64)
        squares[0] = step in (0, 110)
        new = rule.new_slots(shapes)
        assert rule.of_step(old, new, {("experts",): squares}, step, False) == 1
        old = new


def test_a_step_back_has_no_weight_and_leaves_the_usual_squares():
    rows = with_long([17], 1e12)
    found, usual = weights_of(rows, back=[17])
    assert found[17] == 0
    np.testing.assert_allclose(usual, weights_of(np.delete(rows, 17, 0))[1], rtol=1e-12)


def errors(column, seed):
    """Mean squared errors after 150 steps, relative to the variance: of all rows but the rare."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3000, 12)).astype(np.float32)
    y = np.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    rare = np.zeros(3000, bool)
    rare[rng.choice(3000, 3, replace=False)] = True
    if column:
        flag = (rare - rare.mean()) / rare.std()
        x = np.hstack([x, flag[:, None]]).astype(np.float32)
    model = models.perceptron((x.shape[1], 64, 32, 1), "Relu", seed).data
    run = ke.fit(model, (x, y), loss="normal", steps=150, batch_size=64, seed=seed)
    return float(((run.engine.predict(x) - y)[~rare] ** 2).mean() / y.var())


def test_rows_with_a_rare_feature_do_not_stop_the_others():
    """Three rows of 3,000 have a flag, of thirty standard deviations.

    Without weights, the errors are 1.4 to 1.6 times those without the column.
    """
    ratios = [errors(True, seed) / errors(False, seed) for seed in range(3)]
    assert np.median(ratios) < 1.25
