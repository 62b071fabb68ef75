"""Lengths of the first updates by batches of few examples, beside singular values from LAPACK."""

from typing import NamedTuple

import numpy as np
import pytest

import kfac_engine as ke
from tests.models import parsed

CLASSES, LENGTH = 40, 0.03
TOKENS = (
    "net (double[n,3,40] x) => (double[n,3,40] y) { h = MatMul (x, inner) r = Tanh (h) "
    "y = MatMul (r, outer) }"
)
ROWS = TOKENS.replace("n,3,40", "n,40")


class FirstStep(NamedTuple):
    """The first step of the default rule, without weight decay."""

    updates: dict[str, np.ndarray]  # the updates of the matrices
    share: float  # the fall that the slopes predict, divided by a tenth of the loss per row


def first_step(text, examples, width=40, seed=0):
    rng = np.random.default_rng(seed)
    weights = {
        "inner": rng.standard_normal((40, width)) / 7,
        "outer": rng.standard_normal((width, CLASSES)) / 7,
    }
    engine = ke.Engine.from_onnx(parsed(text, weights), loss="categorical", backend="numpy")
    shape = (examples, 3) if text is TOKENS else (examples,)
    x, y = rng.standard_normal((*shape, 40)), rng.integers(0, CLASSES, shape)
    # One column dominates, so that few singular values are large.
    x[..., 0] += 6
    loss, gradients = engine.loss({"x": x}, y), engine.gradients({"x": x}, y).gradients
    ke.KfacOptimizer(engine, weight_decay=0).step({"x": x}, y)
    updates = {name: engine.parameters[name] - value for name, value in weights.items()}
    fall = -sum(np.vdot(gradients[name], update) for name, update in updates.items())
    return FirstStep(updates, fall / (np.prod(shape) * loss / 10))


@pytest.mark.parametrize("text", [ROWS, TOKENS], ids=["rows", "tokens"])
@pytest.mark.parametrize("examples", [1, 4, 16])
@pytest.mark.parametrize("width", [24, 60])
def test_an_example_moves_a_matrix_by_two_singular_values(text, examples, width):
    bounded, step = [], first_step(text, examples, width)
    for name, update in step.updates.items():
        norm, largest = np.linalg.norm(update), np.linalg.norm(update, 2)
        share = np.sqrt(2 * examples / min(update.shape)) * norm / largest
        bounded.append(share < 0.99)
        length = LENGTH * np.sqrt(update.shape[1]) * min(1, share)
        # Two power iterations never find more than the largest singular value, and little less
        # where it is far larger than the others.
        assert length * (1 - 1e-9) <= norm or step.share > 1 - 1e-9, name
        assert share > 0.5 or norm <= length * 4 / 3, name
    assert any(bounded) or examples > 4


@pytest.mark.parametrize("width", [12, 15])
def test_a_row_adds_a_tenth_of_the_loss_to_the_predicted_fall(width):
    of_one, *shares = [first_step(ROWS, examples, width).share for examples in (1, 4, 16)]
    assert of_one == pytest.approx(1, rel=1e-9)
    assert max(shares) < 0.9


@pytest.mark.parametrize(("examples", "width"), [(1, 15), (2, 12), (20, 40), (30, 60)])
def test_small_matrices_and_enough_examples_have_the_whole_length(examples, width):
    step = first_step(ROWS, examples, width)
    for name, update in step.updates.items():
        length = LENGTH * np.sqrt(update.shape[1])
        share = np.linalg.norm(update) / length
        assert share == pytest.approx(1, rel=1e-6) or (share < step.share == pytest.approx(1)), name


def test_a_state_that_is_restored_in_place_has_its_own_directions(tmp_path):
    rng = np.random.default_rng(0)
    weights = {"inner": rng.standard_normal((40, 600)), "outer": rng.standard_normal((600, 40))}
    batches = [({"x": rng.standard_normal((4, 40))}, rng.integers(0, 40, 4)) for _ in range(4)]
    engine = ke.Engine.from_onnx(parsed(ROWS, weights), loss="categorical", backend="numpy")
    optimizer, found = ke.KfacOptimizer(engine), []
    optimizer.step(*batches[0])
    optimizer.save(tmp_path / "state")
    for _ in range(2):  # the second and the fourth step take the directions of the step before
        found.append([optimizer.step(*batch).loss for batch in batches[1:]])
        found[-1].append({name: value.copy() for name, value in engine.parameters.items()})
        optimizer.load(tmp_path / "state")
    assert found[0][:-1] == found[1][:-1]
    for name in weights:
        np.testing.assert_array_equal(found[0][-1][name], found[1][-1][name])
