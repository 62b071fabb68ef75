"""The tasks whose data come again: equations against differences, and what the suite trains."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.bench.training.repeated import EQUATIONS
from kfac_engine.bench.training.tasks import REPEATED, TASKS


class Solution:
    """What a residual reads of the solution of an equation, by differences."""

    def __init__(self, equation, points, step=1e-3):
        self.function, self.x, self.step = equation.solution, points, step
        self.value = equation.solution(points)

    def d(self, i, j=None):
        shift = self.step * np.eye(self.x.shape[1])[i]
        ahead, behind = self.function(self.x + shift), self.function(self.x - shift)
        if j is None:
            return (ahead - behind) / (2 * self.step)
        assert i == j
        return (ahead - 2 * self.value + behind) / self.step**2

    def laplacian(self):
        return sum(self.d(i, i) for i in range(self.x.shape[1]))


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_solution_of_an_equation_has_no_residual(name):
    equation, rng = EQUATIONS[name], np.random.default_rng(0)
    points = rng.uniform(0.2, 0.8, (20, len(equation.low)))
    found = Solution(equation, points)
    # Differences of this step are right to 1e-6 of the fourth derivative, which is 1e4 at most
    # away from the shock at zero. Terms of the equations have sizes of one to a hundred.
    np.testing.assert_allclose(equation.residual(found), 0, atol=1e-2)
    assert np.abs(found.d(0)).max() > 0.1  # not constant
    data = equation.data()
    for axis, (low, high) in enumerate(zip(equation.low, equation.high, strict=True)):
        for array in (data.x, data.held_x, data.edge_x):
            assert low <= array[:, axis].min() < array[:, axis].max() <= high
    sides = equation.sides or [(i, v) for i in range(len(equation.low)) for v in (0, 1)]
    assert all(any(point[axis] == place for axis, place in sides) for point in data.edge_x)


@pytest.mark.parametrize("name", EQUATIONS)
def test_an_equation_is_validated_by_the_values_of_its_network(name):
    equation = EQUATIONS[name]
    model, data = equation.model((8, 7), seed=3), equation.data()
    task = TASKS[name]
    engine = ke.Engine.from_onnx(
        model.data, loss=task.loss, trainable=tuple(model.weights), threads=1
    )
    kinds = {layer.parameters[0]: layer.kind for layer in engine.layers}
    assert {kinds[f"{i}.weight"] for i in range(3)} == {"fully_connected_multi"}
    inputs, y = next(data.held_batches(2_000))
    h = data.held_x
    for layer in range(3):
        h = h @ model.weights[f"{layer}.weight"].T + model.weights[f"{layer}.bias"]
        h = np.tanh(h) if layer < 2 else h
    np.testing.assert_allclose(engine.predict(inputs)[task.validated], h, atol=1e-5)
    assert y.shape == h.shape


@pytest.mark.parametrize("name", REPEATED)
def test_a_step_of_each_task_has_all_its_examples(name):
    task = TASKS[name]
    data = task.data(None)
    inputs, targets = next(data.batches(task.batch, 0))
    examples = sum(map(len, inputs.values()))
    edge = len(data.edge_x) if name in EQUATIONS else 0
    assert examples == len(data.x) + edge
    engine = ke.Engine.from_onnx(task.model(8, 0).data, loss=task.loss, threads=1)
    assert np.isfinite(engine.loss(inputs, targets))
