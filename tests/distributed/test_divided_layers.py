"""Layers whose rows or columns several ranks precondition give the results of one process."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.distributed.owners import Part, layer_owners
from kfac_engine.distributed.sizes import BlockSize, FactorSize, ModelSize
from kfac_engine.training.kfac_updates import natural_gradients
from tests.distributed.known_models import square
from tests.distributed.test_distributions import (
    CUTS,
    TOLERANCES,
    assert_close,
    assert_equal_to_one_process,
    batches,
)
from tests.distributed.threads import rows_of, run
from tests.models import Net

SIZE = 3


def table(rows=300):
    """A table of 300 × 5, whose product is most of the work, and a dense layer."""
    net = Net("float64")
    x = net.op("Gather", net.weight("table", rows, 5), "input", to="rows")
    axes = net.constant("axes", np.asarray([1], np.int64))
    x = net.op("Tanh", net.op("ReduceMean", x, axes, to="mean", keepdims=0), to="features")
    net.dense("output", x, 5, 3)
    return net.model({"input": ["batch", 4]}, {"output": ["batch", 3]}, "int64")


def dense(transposed=True, bias=True):
    """A dense layer of 30 × 40, whose product is most of the work, and one of 40 × 3."""
    net = Net("float64")
    if transposed:
        x = net.dense("first", "input", 30, 40)
    else:
        x = net.op("MatMul", "input", net.weight("first.weight", 30, 40), to="product")
        x = net.op("Add", x, net.weight("first.bias", 40), to="first") if bias else x
    net.dense("output", net.op("Tanh", x, to="hidden"), 40, 3)
    return net.model({"input": ["batch", 30]}, {"output": ["batch", 3]})


def filters():
    """A convolution of 28 × 24 and a dense layer; ONNX Runtime has none in float64."""
    net = Net("float32")
    weight, bias = net.weight("conv.weight", 24, 3, 3, 3), net.weight("conv.bias", 24)
    x = net.op("Tanh", net.op("Conv", "input", weight, bias, to="conv"), to="act")
    x = net.op("Flatten", net.op("GlobalAveragePool", x, to="pool"), to="features")
    net.dense("output", x, 24, 3)
    return net.model({"input": ["batch", 3, 6, 6]}, {"output": ["batch", 3]})


# A model, and its parameters that several ranks own.
CASES = {
    "table": (table, ["table"]),
    "weight of outputs by inputs": (dense, ["first.weight", "first.bias"]),
    "weight of inputs by outputs": (
        lambda: dense(transposed=False),
        ["first.weight", "first.bias"],
    ),
    "weight without bias": (lambda: dense(transposed=False, bias=False), ["first.weight"]),
    "filters": (filters, ["conv.weight", "conv.bias"]),
}
DIVIDED = {"distribution": "shard", "layer_owners": SIZE}


def owners_of(engine):
    """The ranks that own each parameter, of which there are several."""
    parts = engine.fisher.distribution._parts.items()
    return {name: [p.owner for p in of_name] for name, of_name in parts if len(of_name) > 1}


def engines(model, size=SIZE, **options):
    """The result of a function of an engine and of its rank, on each rank."""

    def on_ranks(work):
        def on_one(communicator):
            engine = ke.Engine.from_onnx(
                model, loss="categorical", damping=0.1, communicator=communicator,
                **{**DIVIDED, "schedule": ke.Schedule(refresh_every=2), **options},
            )  # fmt: skip
            return work(engine, rows_of(communicator, CUTS))

        return run(size, on_one)

    return on_ranks


def shard(batch, rows):
    """The examples of a rank."""
    inputs, targets = batch
    return {key: array[rows] for key, array in inputs.items()}, targets[rows]


@pytest.mark.parametrize("case", CASES)
def test_large_layers_have_several_owners(case):
    model, divided = CASES[case]
    for owned in engines(model())(lambda engine, _: owners_of(engine)):
        assert owned == {name: [0, 1, 2] for name in divided}


@pytest.mark.parametrize("exps", [(-1,), (-0.5, -1)])
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_one_process(case, exps):
    model, divided = CASES[case]
    assert_equal_to_one_process(model(), SIZE, divided, exps=exps, **DIVIDED)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("case", ["table", "weight of outputs by inputs"])
def test_steps_equal_those_of_one_process_for_any_number_of_ranks(case, size):
    model, divided = CASES[case]
    assert_equal_to_one_process(model(), size, divided, **{**DIVIDED, "layer_owners": size})


@pytest.mark.parametrize(
    "schedule",
    [
        ke.Schedule(refresh_every=2, policy="round_robin"),
        ke.Schedule(refresh_every=2, overlap=True),
        ke.Schedule(refresh_every=1, covariance_every=2),
        ke.Schedule(refresh_every=3, covariance_every=2),
    ],
)
@pytest.mark.parametrize("case", ["table", "weight of outputs by inputs"])
def test_steps_equal_those_of_one_process_for_every_schedule(case, schedule):
    model, divided = CASES[case]
    assert_equal_to_one_process(model(), SIZE, divided, schedule=schedule, **DIVIDED)


@pytest.mark.parametrize("case", ["table", "weight of outputs by inputs", "filters"])
def test_products_files_and_later_steps_equal_those_of_one_process(case, tmp_path):
    model, data = CASES[case][0](), list(batches(CASES[case][0](), 4))
    path, options = tmp_path / "state", {"compute_cholesky": True, "compute_cholesky_inverse": True}

    def work(engine, rows):
        engine.step(*shard(data[0], rows))
        last = engine.step(*shard(data[1], rows), gradients="all")
        vectors = {name: np.cos(array) for name, array in engine.parameters.items()}
        weights = {name: array for name, array in vectors.items() if array.ndim > 1}
        products = [
            natural_gradients(engine, weights),
            engine.precondition(vectors),
            engine.precondition(vectors, exp=1),
            engine.multiply_cholesky(vectors),
            engine.multiply_cholesky_inverse(vectors, transpose=True),
        ]
        engine.save(path)
        later = engine.step(*shard(data[2], rows))
        engine.load(path)
        again = engine.step(*shard(data[2], rows))
        engine.step(*shard(data[3], rows))
        assert_close(again.natural_gradients, later.natural_gradients, 0)
        return [last.gradients, last.natural_gradients, *products, later.natural_gradients]

    results = engines(model, **options)(work)
    (expected,) = engines(model, 1, **options)(work)
    close = 10 * TOLERANCES[str(next(iter(expected[0].values())).dtype)]
    for arrays in results:
        for mine, wanted, first in zip(arrays, expected, results[0], strict=True):
            assert_close(mine, wanted, close)
            for name, array in first.items():
                np.testing.assert_array_equal(mine[name], array)


def test_gradients_of_owned_layers_have_no_table_that_is_divided():
    model, data = table(), next(batches(table(), 1))
    gradients = engines(model)(lambda engine, rows: engine.step(*shard(data, rows)).gradients)
    assert not any("table" in of_rank for of_rank in gradients)
    assert set().union(*gradients) == {"output.weight", "output.bias"}


# -- owners ---------------------------------------------------------------------------------------


def model_of(rows, width, others, *, divisible="rows", most_owners=1):
    """A table of ``rows × width`` or a dense layer, and small layers of the cost ``8``."""
    blocks = {
        "large": BlockSize(
            rows * width, ("ids", "G"), products=2 * rows * width**2, divisible=divisible,
            extent=rows, most_owners=most_owners,
        )
    }  # fmt: skip
    blocks |= {f"small {i}": BlockSize(4, (), products=16) for i in range(others)}
    return ModelSize(blocks, {"ids": FactorSize((rows,)), "G": square(width)})


def test_rows_of_a_table_are_divided_into_parts_of_the_share_of_a_rank():
    # 800 of the table, with 8 / 10 of its refresh, and 400 of the others: 300 for each of four
    parts = layer_owners(model_of(200, 2, 50), 4)
    # three parts of 267
    assert [p.stop - p.start for p in parts["large"]] == [66, 67, 67]
    assert [p.start for p in parts["large"]] == [0, *(p.stop for p in parts["large"][:-1])]
    assert len({p.owner for p in parts["large"]}) == 3
    assert all(parts[f"small {i}"][0].start == 0 for i in range(50))
    sums = np.zeros(4)
    for name, of_block in parts.items():
        for p in of_block:
            sums[p.owner] += 8 if name != "large" else 0.8 + 4 * (p.stop - p.start)
    assert sums.max() <= 1.1 * sums.mean()


def test_a_table_is_whole_if_it_has_at_most_the_share_of_a_rank():
    assert layer_owners(model_of(20, 2, 50), 4)["large"] == (Part(0, 0, 20),)


@pytest.mark.parametrize(
    ("numbers", "products", "parts"),
    [
        (400, 1600, 2),  # as many bytes as the table, whose work 800.8 has parts of at most 800
        (100, 4000, 4),  # more work than the table, a quarter of its bytes
        (400, 4000, 1),
    ],
)
def test_a_table_is_not_divided_below_the_largest_layer_that_is_whole(numbers, products, parts):
    model = model_of(200, 2, 0)
    assert len(layer_owners(model, 7)["large"]) == 7
    other = BlockSize(numbers, (), products=products)
    both = ModelSize({**model.blocks, "whole": other}, model.factors)
    assert len(layer_owners(both, 100)["large"]) == parts


def test_copies_of_a_factor_bound_the_owners_of_a_table():
    # G has 4 · 820 bytes, a tenth of them in a step; 2 % of the table have 4 · 4000.
    assert len(layer_owners(model_of(5000, 40, 0), 1000)["large"]) == 1 + int(4000 / 82)
    # a table of fewer words than columns
    assert len(layer_owners(model_of(20, 40, 0), 4)["large"]) == 1


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_columns_are_divided_among_at_most_the_chosen_number_of_ranks(most):
    model = model_of(60, 2, 4, divisible="columns", most_owners=most)
    assert len(layer_owners(model, 4)["large"]) == min(most, 4)


def test_layers_that_share_a_factor_are_whole():
    model = model_of(60, 2, 0, divisible="columns", most_owners=4)
    other = BlockSize(4, ("G",), products=16)
    shared = ModelSize({**model.blocks, "other": other}, model.factors)
    parts = layer_owners(shared, 4)
    assert [len(of_block) for of_block in parts.values()] == [1, 1]
    assert parts["large"][0].owner == parts["other"][0].owner


@pytest.mark.parametrize("value", [0, 1.5, "2"])
def test_a_number_of_owners_below_one_is_refused(value):
    with pytest.raises(ke.InputError, match="layer_owners must be a whole number of at least 1"):
        ke.Engine.from_onnx(dense(), loss="categorical", layer_owners=value)
