"""Ranks hand over the bytes of the cost model, counted at their communicators."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.engine.options import DISTRIBUTIONS
from tests.models import VOCABULARY, Net, embedding
from tests.ranks.threads import run

PERIOD, RANKS = 5, 3


def dense():
    """Two dense layers with biases: factors of 161, 120, 121 and 10 rows."""
    net = Net()
    x = net.op("Tanh", net.dense("first", "input", 160, 120), to="hidden")
    net.dense("second", x, 120, 10)
    return net.model({"input": ["batch", 160]}, {"second": ["batch", 10]})


def shared():
    """Three layers of one input, which share A. Their outputs have different gradients."""
    net = Net()
    for name in "qkv":
        net.op("MatMul", "input", net.weight(f"{name}.weight", 90, 90), to=name)
    net.op("Add", net.op("Mul", "q", net.op("Tanh", "k", to="gate"), to="gated"), "v", to="output")
    return net.model({"input": ["batch", 90]}, {"output": ["batch", 90]})


def table():
    """An embedding of 400 columns, whose A is diagonal, and a dense layer."""
    return embedding(d=400, classes=5)


CASES = {
    "dense": (dense, {}),
    "shared A": (shared, {}),
    "table": (table, {}),
    "diagonals": (dense, {"approximations": {"fully_connected": "diagonal"}}),
    "EKFAC": (dense, {"approximations": {"fully_connected": "ekfac"}}),
    "updates every second step": (dense, {"covariance_every": 2}),
}


def batch(model, rng):
    """The shard of one rank: four examples."""
    info = model.graph.input[0]
    shape = [4, *(side.dim_value for side in info.type.tensor_type.shape.dim[1:])]
    if model.graph.node[0].op_type == "Gather":
        return {info.name: rng.integers(0, VOCABULARY, shape)}
    return {info.name: rng.standard_normal(shape, np.float32)}


def counted(model, distribution, options):
    """Mean bytes that a rank hands over in a step, and the cost of the model."""
    every = options.pop("covariance_every", 1)
    schedule = ke.Schedule(refresh_every=PERIOD, covariance_every=every)

    def work(communicator):
        engine = ke.Engine.from_onnx(
            model, loss="categorical", schedule=schedule, communicator=communicator,
            distribution=distribution, **options,
        )  # fmt: skip
        rng = np.random.default_rng(communicator.rank)
        marks = []
        # The first step refreshes everything; then follow two periods.
        for _ in range(1 + 2 * PERIOD):
            engine.step(batch(model, rng), np.zeros(4, int))
            marks.append(len(communicator.log))
        return sum(count for _, count in communicator.log[marks[0] : marks[-1]])

    report = ke.Engine.from_onnx(model, loss="categorical", schedule=schedule, **options)
    return run(RANKS, work)[0] / (2 * PERIOD), report.ranks_report(RANKS).costs[distribution]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_bytes_handed_over_are_those_of_the_cost_model(case, distribution):
    model, options = CASES[case]
    count, cost = counted(model(), distribution, dict(options))
    # Votes and traces are a few bytes more.
    assert cost.handed_over <= count <= 1.02 * cost.handed_over
