"""The sizes of a model, from which the cost of a rank follows, are those of its formula."""

import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model
from kfac_engine.engine.model_size import model_size
from kfac_engine.errors import InputError
from tests.models import VOCABULARY, Net, embedding, tied

# Rows of A and G.
CNN = [(10, 16), (145, 32), (289, 32), (129, 64), (65, 10)]


def engine_of(model, **options):
    return ke.Engine.from_onnx(model, **{"loss": "categorical", **options})


def size_of(engine):
    return model_size(engine._assembly, engine.layers)


def test_bytes_of_the_demo_network_are_those_of_its_sides():
    engine = engine_of(demo_model("cnn"), schedule=ke.Schedule(refresh_every=4))
    P = 4 * sum(a * g for a, g in CNN)
    S = 4 * sum(d * (d + 1) // 2 for a, g in CNN for d in (a, g))
    costs = engine.ranks_report(64)
    assert costs["sgd"].handed_over == P
    assert costs["replicate"].handed_over == pytest.approx(P + 2 * S / 4, rel=1e-12)
    assert costs["shard"].handed_over == pytest.approx(2 * P + S / 4, rel=1e-12)
    assert costs["replicate"].memory == sum(layer.factor_bytes for layer in engine.layers)


def test_operations_of_the_demo_network_are_those_of_its_formula():
    blocks = size_of(engine_of(demo_model("cnn"))).blocks.values()
    assert [block.numbers for block in blocks] == [a * g for a, g in CNN]
    assert [block.products for block in blocks] == [2 * a * g * (a + g) for a, g in CNN]


def test_refresh_costs_are_those_of_the_planner():
    engine = engine_of(demo_model("cnn"))
    factors = size_of(engine).factors.values()
    assert [f.refresh for f in factors] == [work.cost for work in engine.estimator.refreshes.works]


def three_from_one():
    """Queries, keys and values: three layers of one input, which share A."""
    net = Net()
    parts = [net.op("MatMul", "input", net.weight(f"{n}.weight", 4, 4), to=n) for n in "qkv"]
    net.op("Sum", *parts, to="output")
    return net.model({"input": ["batch", 4]}, {"output": ["batch", 4]})


def test_a_shared_factor_is_sent_once_and_its_layers_have_one_owner():
    report = engine_of(three_from_one(), schedule=ke.Schedule(refresh_every=1)).ranks_report(8)
    P, triangle = 4 * 3 * 16, 4 * 10
    assert report["shard"].handed_over == 2 * P + 4 * triangle
    assert len({parts[0].owner for parts in report["shard"].block_owners.values()}) == 1


def test_several_owners_of_a_layer_divide_its_products_and_copy_its_gradient():
    one, three = (
        engine_of(demo_model("mlp"), layer_owners=most).ranks_report(8)["shard"] for most in (1, 3)
    )
    assert three.products < one.products / 2
    assert three.handed_over > one.handed_over
    assert max(len(parts) for parts in three.block_owners.values()) == 3


def test_a_table_has_one_product():
    size = size_of(engine_of(embedding(length=3)))
    table = size.blocks["table"]
    ids, columns = (size.factors[name] for name in table.factors)
    assert ids.shape == (VOCABULARY,)
    assert not (ids.stored)
    assert not (ids.divided)
    assert columns.divided
    assert table.products == 2 * table.numbers * columns.shape[0]


def test_diagonal_approximations_are_sent_with_each_update():
    engine = engine_of(
        demo_model("mlp"),
        approximations={"fully_connected": "diagonal"},
        schedule=ke.Schedule(covariance_every=2),
    )
    P = 4 * sum(array.size for array in engine.parameters.values())
    costs = engine.ranks_report(4)
    assert costs["replicate"].handed_over == P + P / 2
    assert costs["shard"].handed_over == 2 * P + P / 2
    assert costs["replicate"].refresh == costs["shard"].refresh == 0
    assert costs["shard"].memory == costs["replicate"].memory == P


def test_moments_of_successive_uses_are_sent_whole():
    size = size_of(engine_of(tied(), approximations={"fully_connected_multi": "kron_series_2"}))
    pairs = [factor for factor in size.factors.values() if factor.shape == (2, 4, 4)]
    assert len(pairs) == 2
    assert all(factor.packed == factor.numbers == 32 for factor in pairs)


def test_bases_of_ekfac_are_sent_whole():
    plain, rotated = (
        size_of(engine_of(demo_model("mlp"), approximations={"fully_connected": name}))
        for name in ("kron", "ekfac")
    )
    for block in rotated.blocks.values():
        a, g = (rotated.factors[name].shape[0] for name in block.factors[:2])
        scales = rotated.factors[block.factors[2]]
        assert scales.shape == (a, g)
        assert scales.results == a * a + g * g
        assert not any(rotated.factors[name].divided for name in block.factors)
    assert all(factor.divided for factor in plain.factors.values())
    # Into the basis and back: twice the products.
    products = [[b.products for b in size.blocks.values()] for size in (plain, rotated)]
    assert products[1] == [2 * count for count in products[0]]


def test_float64_models_have_entries_of_eight_bytes():
    net = Net("float64")
    net.dense("output", "input", 4, 3)
    engine = engine_of(net.model({"input": ["batch", 4]}, {"output": ["batch", 3]}))
    assert engine.ranks_report(2)["sgd"].handed_over == 8 * 15


def test_counts_below_one_are_refused():
    with pytest.raises(InputError, match="ranks must be"):
        engine_of(demo_model("mlp")).ranks_report(0)
