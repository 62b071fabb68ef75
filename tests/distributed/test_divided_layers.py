"""Tables whose rows several ranks precondition give the results of one process."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.distributed.owners import FactorSize, LayerSize, OwnedPart, layer_owners
from kfac_engine.training.kfac_updates import natural_gradients
from tests.comparing import assert_arrays_equal, assert_arrays_near
from tests.distributed.known_models import square
from tests.distributed.test_distributions import (
    CUTS,
    TOLERANCES,
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


DIVIDED = {"distribution": "shard"}


def owners_of(engine):
    """The ranks that own each parameter, of which there are several."""
    parts = engine.fisher.division._parts.items()
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


def test_a_large_table_has_several_owners():
    for owned in engines(table())(lambda engine, _: owners_of(engine)):
        assert owned == {"table": [0, 1, 2]}


CASES = [
    (2, {}),
    (4, {}),
    (8, {}),
    (SIZE, {"exps": (-1,)}),
    (SIZE, {"exps": (-0.5, -1)}),
    (SIZE, {"schedule": ke.Schedule(refresh_every=2, policy="round_robin")}),
    (SIZE, {"schedule": ke.Schedule(refresh_every=2, overlap=True)}),
    (SIZE, {"schedule": ke.Schedule(refresh_every=1, covariance_every=2)}),
    (SIZE, {"schedule": ke.Schedule(refresh_every=3, covariance_every=2)}),
]


@pytest.mark.parametrize(("size", "options"), CASES)
def test_steps_equal_those_of_one_process(size, options):
    assert_equal_to_one_process(table(), size, ["table"], **DIVIDED, **options)


def test_products_files_and_later_steps_equal_those_of_one_process(tmp_path):
    model, data = table(), list(batches(table(), 4))
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
        assert_arrays_near(again.natural_gradients, later.natural_gradients, 0)
        return [last.gradients, last.natural_gradients, *products, later.natural_gradients]

    results = engines(model, **options)(work)
    (expected,) = engines(model, 1, **options)(work)
    close = 10 * TOLERANCES[str(next(iter(expected[0].values())).dtype)]
    for arrays in results:
        for mine, wanted, first in zip(arrays, expected, results[0], strict=True):
            assert_arrays_near(mine, wanted, close)
            assert_arrays_equal(mine, first)


def test_gradients_of_owned_layers_have_no_table_that_is_divided():
    model, data = table(), next(batches(table(), 1))
    gradients = engines(model)(lambda engine, rows: engine.step(*shard(data, rows)).gradients)
    assert not any("table" in of_rank for of_rank in gradients)
    assert set().union(*gradients) == {"output.weight", "output.bias"}


# -- owners ---------------------------------------------------------------------------------------


def model_of(rows, width, others):
    """A table of ``rows × width``, and small layers of the cost ``8``."""
    layers = {
        "large": LayerSize(4 * rows * width, rows * width**2, ("ids", "G"), rows=rows),
        **{f"small {i}": LayerSize(16, 8, ()) for i in range(others)},
    }
    return layers, {"ids": FactorSize(), "G": square(width)}


def test_rows_of_a_table_are_divided_into_parts_of_the_share_of_a_rank():
    # 800 of the table, with 8 / 10 of its refresh, and 400 of the others: 300 for each of four
    parts = layer_owners(*model_of(200, 2, 50), 4)
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
    assert layer_owners(*model_of(20, 2, 50), 4)["large"] == (OwnedPart(0, 0, 20),)


@pytest.mark.parametrize(
    ("numbers", "operations", "parts"),
    [
        (400, 1600, 2),  # as many bytes as the table, whose work 800.8 has parts of at most 800
        (100, 4000, 4),  # more work than the table, a quarter of its bytes
        (400, 4000, 1),
    ],
)
def test_a_table_is_not_divided_below_the_largest_layer_that_is_whole(numbers, operations, parts):
    layers, factors = model_of(200, 2, 0)
    assert len(layer_owners(layers, factors, 7)["large"]) == 7
    both = {**layers, "whole": LayerSize(4 * numbers, operations / 2, ())}
    assert len(layer_owners(both, factors, 100)["large"]) == parts


def test_copies_of_a_factor_bound_the_owners_of_a_table():
    # G has 4 · 820 bytes, a tenth of them in a step; 2 % of the table have 4 · 4000.
    assert len(layer_owners(*model_of(5000, 40, 0), 1000)["large"]) == 1 + int(4000 / 82)
    # a table of fewer words than columns
    assert len(layer_owners(*model_of(20, 40, 0), 4)["large"]) == 1


def test_a_table_that_shares_a_factor_is_whole():
    layers, factors = model_of(60, 2, 0)
    assert len(layer_owners(layers, factors, 4)["large"]) > 1
    parts = layer_owners({**layers, "other": LayerSize(16, 8, ("G",))}, factors, 4)
    assert [len(of_layer) for of_layer in parts.values()] == [1, 1]
    assert parts["large"][0].owner == parts["other"][0].owner
