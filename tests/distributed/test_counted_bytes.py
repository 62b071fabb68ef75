"""Ranks hand over the bytes of the formulas of the page, counted at their communicators."""

from itertools import pairwise

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.engine.options import DISTRIBUTIONS
from tests.distributed.threads import run
from tests.models import VOCABULARY, Net, embedding

PERIOD, RANKS = 5, 3
# Approximation to the largest number of messages of a step, those of votes included.
MOST_MESSAGES = {"kron": 9, "diagonal": 7, "ekfac": 9}


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


def words():
    """An embedding of 600 rows, which all ranks own, and a dense layer."""
    net = Net()
    x = net.op("Gather", net.weight("table", 600, 40), "input", to="rows")
    axes = net.constant("axes", np.asarray([1], np.int64))
    x = net.op("ReduceMean", x, axes, to="mean", keepdims=0)
    net.dense("output", x, 40, 5)
    return net.model({"input": ["batch", 3]}, {"output": ["batch", 5]}, "int64")


DENSE = 161 * 120 + 121 * 10
# Model, numbers of parameters, sides of the factors with inverses, sides of those that several
# owners receive, bytes of averages that are sent with each update, and options.
CASES = {
    "dense": (dense, DENSE, (161, 120, 121, 10), (), 0, {}),
    "updates every second step": (
        dense, DENSE, (161, 120, 121, 10), (), 0, {"covariance_every": 2}),
    "shared A": (shared, 3 * 90 * 90, (90, 90, 90, 90), (), 0, {}),
    # A of a table is a diagonal of float64.
    "table": (table, 400 * VOCABULARY + 401 * 5, (400, 401, 5), (), 8 * VOCABULARY, {}),
    "rows of three owners": (words, 600 * 40 + 41 * 5, (40, 41, 5), (40,), 8 * 600, {}),
    "diagonals": (
        dense, DENSE, (), (), 4 * DENSE, {"approximations": {"fully_connected": "diagonal"}}),
}  # fmt: skip


def batch(model, rng):
    """The shard of one rank: four examples."""
    info = model.graph.input[0]
    shape = [4, *(side.dim_value for side in info.type.tensor_type.shape.dim[1:])]
    if model.graph.node[0].op_type == "Gather":
        return {info.name: rng.integers(0, VOCABULARY, shape)}
    return {info.name: rng.standard_normal(shape, np.float32)}


def layers(count):
    """Dense layers with biases: of 20 numbers each, the last of 10."""
    net, x = Net(), "input"
    for index in range(count - 1):
        x = net.op("Tanh", net.dense(f"layer{index}", x, 20, 20), to=f"hidden{index}")
    net.dense("last", x, 20, 10)
    return net.model({"input": ["batch", 20]}, {"last": ["batch", 10]})


def logs(model, distribution, steps, **options):
    """For each step, the names and bytes of the messages that a rank hands over."""

    def work(communicator):
        engine = ke.Engine.from_onnx(
            model, loss="categorical", communicator=communicator, distribution=distribution,
            **options,
        )  # fmt: skip
        communicator.log.clear()
        rng, marks = np.random.default_rng(communicator.rank), [0]
        for _ in range(steps):
            engine.step(batch(model, rng), np.zeros(4, int))
            marks.append(len(communicator.log))
        return [communicator.log[start:stop] for start, stop in pairwise(marks)]

    first, *others = run(RANKS, work)
    assert all(other == first for other in others)
    return first


# Sides of the results of a refresh that are not those of the averages: A has an inverse for the
# damping of each layer.
RESULTS = {"shared A": 6 * (90,)}


def triangles(sides):
    """The bytes of lower triangles of float32."""
    return sum(4 * d * (d + 1) // 2 for d in sides)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_bytes_handed_over_are_those_of_the_formula(case, distribution):
    model, numbers, sides, copied, whole, options = CASES[case]
    every = options.get("covariance_every", 1)
    schedule = ke.Schedule(refresh_every=PERIOD, covariance_every=every)
    rest = {name: value for name, value in options.items() if name != "covariance_every"}
    # The first step refreshes everything; then follow two periods.
    steps = logs(model(), distribution, 1 + 2 * PERIOD, schedule=schedule, **rest)[1:]
    count = sum(size for step in steps for _, size in step) / (2 * PERIOD)
    inverses, results = (triangles(s) / PERIOD for s in (sides, RESULTS.get(case, sides)))
    formula = (
        whole / every
        + {
            "replicate": 4 * numbers + inverses + results,
            "shard": 8 * numbers + inverses + (RANKS - 1) * triangles(copied) / PERIOD,
        }[distribution]
    )
    # Votes and traces are a few bytes more.
    assert formula <= count <= 1.02 * formula


@pytest.mark.parametrize(("approximation", "most"), MOST_MESSAGES.items())
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_number_of_messages_does_not_depend_on_the_number_of_layers(
    distribution, approximation, most
):
    options = {
        "schedule": ke.Schedule(refresh_every=3, covariance_every=2),
        "approximations": {"fully_connected": approximation},
    }
    few, many = (logs(layers(count), distribution, 7, **options) for count in (3, 12))
    calls, others = ([[name for name, _ in step] for step in steps] for steps in (few, many))
    assert calls[1:] == others[1:]
    assert max(map(len, calls[1:])) <= most
    # EKFAC has two more messages in the first step, for the first bases of all layers.
    bases = 2 if approximation == "ekfac" else 0
    assert len(calls[0]) - bases == len(others[0]) - bases <= most
    assert sum(size for _, size in few[-1]) < sum(size for _, size in many[-1])
