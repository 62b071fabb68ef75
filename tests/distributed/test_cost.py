"""Bytes, memory and work of a rank are those of a hand, and the figures of known models."""

from dataclasses import replace

import pytest

from kfac_engine.distributed.cost import DISTRIBUTIONS, Message, rank_cost
from kfac_engine.distributed.owners import layer_owners
from kfac_engine.distributed.sizes import BlockSize, FactorSize, ModelSize, Periods
from kfac_engine.errors import InputError
from tests.distributed.known_models import MODELS, model_size, square


def owners_of(parts):
    """The owners of each block."""
    return {key: [part.owner for part in of_block] for key, of_block in parts.items()}


def two_layers():
    """3 × 2 and 2 × 4 parameters: A, G of 3, 2 and of 2, 4."""
    return ModelSize(
        {
            "one": BlockSize(6, ("A", "B"), products=60),
            "two": BlockSize(8, ("C", "D"), products=96),
        },
        {"A": square(3), "B": square(2), "C": square(2), "D": square(4)},
    )


def test_bytes_of_two_layers_are_those_of_the_formulas():
    # P = 4 · 14 bytes; S = 4 · (6 + 3 + 3 + 10) bytes
    model, periods = two_layers(), Periods(refresh_every=5)
    handed = {name: rank_cost(model, name, 2, periods).handed_over for name in DISTRIBUTIONS}
    expected = {"sgd": 56, "replicate": 56 + 2 * 88 / 5, "shard": 2 * 56 + 88 / 5}
    assert handed == pytest.approx(expected, rel=1e-12)
    for ranks in (2, 3, 100):
        traffic = {name: rank_cost(model, name, ranks, periods).traffic for name in DISTRIBUTIONS}
        sent = (ranks - 1) / ranks
        assert traffic == pytest.approx(
            {
                "sgd": 2 * 56 * sent,
                "replicate": (2 * 56 + 2 * 88 / 5) * sent,
                "shard": (2 * 56 + 88 / 5) * sent,
            },
            rel=1e-12,
        )


def test_messages_of_two_layers_name_collectives_and_largest_parts():
    # 64 alone exceeds 27 + 8 + 8: D has a rank of its own under replicate.
    assert rank_cost(two_layers(), "replicate", 2).messages == (
        Message("allreduce", 56, 1, 28),
        Message("reduce_scatter", 88, 10, 48),
        Message("allgather", 88, 10, 48),
    )
    # Layer two (8 parameters, triangles 3 + 10) costs more than layer one.
    assert rank_cost(two_layers(), "shard", 2).messages == (
        Message("reduce_scatter", 56, 1, 32),
        Message("allgather", 56, 1, 32),
        Message("reduce_scatter", 88, 10, 52),
    )


def test_memory_and_work_of_two_layers_are_those_of_the_largest_rank():
    replicate, shard = (rank_cost(two_layers(), name, 2) for name in ("replicate", "shard"))
    entries = 9 + 4 + 4 + 16
    assert replicate.memory == 4 * 2 * entries  # averages and inverses
    assert shard.memory == 4 * (entries + 4 + 16)  # averages, and the inverses of layer two
    assert replicate.refresh == 4**3
    assert shard.refresh == 2**3 + 4**3
    assert replicate.products == 60 + 96
    assert shard.products == 96
    assert owners_of(shard.block_owners) == {"two": [0], "one": [1]}
    assert shard.factor_owners == {"A": (1,), "B": (1,), "C": (0,), "D": (0,)}


def test_sgd_has_gradients_only():
    cost = rank_cost(two_layers(), "sgd", 4)
    assert (cost.memory, cost.refresh, cost.products) == (0, 0, 0)
    assert cost.messages == (Message("allreduce", 56, 1, 14),)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_one_rank_sends_nothing(distribution):
    cost = rank_cost(two_layers(), distribution, 1)
    assert cost.messages == ()
    assert cost.handed_over == cost.traffic == 0


def test_one_rank_of_either_distribution_stores_and_computes_everything():
    replicate, shard = (rank_cost(two_layers(), name, 1) for name in ("replicate", "shard"))
    assert replicate.memory == shard.memory
    assert replicate.refresh == shard.refresh == 27 + 8 + 8 + 64
    assert replicate.products == shard.products == 60 + 96


def test_a_shared_factor_counts_once_and_its_layers_have_one_owner():
    model = two_layers()
    shared = ModelSize(
        {**model.blocks, "three": BlockSize(12, ("A", "E"))}, {**model.factors, "E": square(4)}
    )
    triangles = 4 * (6 + 3 + 3 + 10 + 10)
    cost = rank_cost(shared, "replicate", 2, Periods(refresh_every=1))
    assert cost.handed_over == 4 * (6 + 8 + 12) + 2 * triangles
    assigned = owners_of(layer_owners(shared, 3))
    assert assigned["one"] == assigned["three"] != assigned["two"]


def test_slices_of_a_parameter_have_one_owner():
    model = two_layers()
    blocks = {key: replace(block, parameters=("stack",)) for key, block in model.blocks.items()}
    assert owners_of(layer_owners(replace(model, blocks=blocks), 2)) == {"one": [0], "two": [0]}
    assert owners_of(layer_owners(model, 2)) == {"one": [1], "two": [0]}


def test_results_that_measurements_need_are_on_all_ranks():
    # Eigenvalues 2 × 3 with eigenvectors of 2² + 3² entries
    for needed in (False, True):
        bases = FactorSize((2, 3), stored=13, refresh=35, needed=needed)
        model = ModelSize({"one": BlockSize(6, ("s",)), "two": BlockSize(4, ())}, {"s": bases})
        cost = rank_cost(model, "shard", 2, Periods(refresh_every=4))
        assert cost.handed_over == 4 * (2 * 10 + 6 + needed * 13 / 4)
        assert cost.memory == 4 * (6 + 13)
        replicate = rank_cost(model, "replicate", 2, Periods(refresh_every=4))
        assert replicate.handed_over == 4 * (10 + 6 + 13 / 4)


def test_a_diagonal_is_sent_with_each_update_and_has_no_inverse():
    # A table of 10 × 2: its diagonal A has 10 entries and no inverse.
    table = {"ids": FactorSize((10,)), "G": square(2)}
    model = ModelSize({"table": BlockSize(20, ("ids", "G"))}, table)
    periods = Periods(refresh_every=8, covariance_every=2)
    replicate = rank_cost(model, "replicate", 2, periods)
    assert replicate.handed_over == pytest.approx(80 + 2 * 12 / 8 + 40 / 2, rel=1e-12)
    # an all-reduce passes the network twice
    assert replicate.traffic == pytest.approx((2 * 80 + 2 * 12 / 8 + 2 * 40 / 2) / 2, rel=1e-12)
    shard = rank_cost(model, "shard", 2, periods)
    assert shard.handed_over == pytest.approx(2 * 80 + 12 / 8 + 40 / 2, rel=1e-12)
    assert shard.traffic == pytest.approx((2 * 80 + 12 / 8 + 2 * 40 / 2) / 2, rel=1e-12)
    assert replicate.memory == shard.memory == 4 * (10 + 4 + 4)


def test_triangles_of_a_stack_and_of_several_powers_are_packed_matrix_by_matrix():
    stack = FactorSize((5, 3, 3), 2 * 45, 5 * 27, symmetric=True, divided=True)
    assert stack.packed == 5 * 6
    assert stack.results == 2 * 5 * 6
    bases = FactorSize((3, 4), 9 + 16)  # eigenvalues; eigenvectors are not symmetric
    assert (bases.packed, bases.results) == (12, 25)


def test_float64_doubles_bytes_and_memory():
    single, double = two_layers(), replace(two_layers(), itemsize=8)
    for name in DISTRIBUTIONS:
        one, two = rank_cost(single, name, 3), rank_cost(double, name, 3)
        assert (two.handed_over, two.memory) == (2 * one.handed_over, 2 * one.memory)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"distribution": "shards"}, "did you mean 'shard'|distribution must be one of"),
        ({"ranks": 0}, "ranks must be a whole number of at least 1, got 0"),
        ({"ranks": 2.0}, "ranks must be a whole number"),
    ],
)
def test_wrong_arguments_are_named(change, named):
    with pytest.raises(InputError, match=named):
        rank_cost(two_layers(), **{"distribution": "shard", "ranks": 2, **change})


@pytest.mark.parametrize("name", ["refresh_every", "covariance_every"])
def test_periods_are_positive(name):
    with pytest.raises(InputError, match=f"{name} must be"):
        Periods(**{name: 0})


# The independent figures below have one owner for a table.
MODELS_BY_SIZE = {name: model_size(name, divisible=False) for name in MODELS}
# Megabytes that a rank sends in a step, with many ranks, of an independent model of the same cost.
TRAFFIC = {
    ("ResNet-50", 10): (204, 266, 235),
    ("ResNet-50", 100): (204, 210, 207),
    ("GPT-2 small", 10): (989, 1119, 1054),
    ("GPT-2 small", 100): (989, 1002, 995),
    ("ViT-B/16", 10): (691, 822, 757),
    ("ViT-B/16", 100): (691, 704, 698),
}


@pytest.mark.parametrize(("model", "every"), TRAFFIC)
def test_traffic_of_known_models_has_the_known_figures(model, every):
    periods = Periods(every, every // 10)
    costs = [rank_cost(MODELS_BY_SIZE[model], name, 10**9, periods) for name in DISTRIBUTIONS]
    # Half a megabyte of rounding; 0.4 MB of the diagonal of GPT-2's table are not in the figures.
    assert [c.traffic / 1e6 for c in costs] == pytest.approx(TRAFFIC[model, every], abs=0.91)


@pytest.mark.parametrize(
    ("model", "replicate", "shard"),
    [("ResNet-50", 1.23, 0.63), ("GPT-2 small", 2.61, 1.33), ("ViT-B/16", 2.63, 1.34)],
)
def test_curvature_of_known_models_in_gigabytes(model, replicate, shard):
    size = MODELS_BY_SIZE[model]
    assert rank_cost(size, "replicate", 64).memory / 1e9 == pytest.approx(replicate, abs=0.0051)
    cost = rank_cost(size, "shard", 64)
    # The figure is the mean over owners; the largest owner has more.
    inverses = 4 * sum(factor.stored for factor in size.factors.values())
    averages = 4 * sum(factor.numbers for factor in size.factors.values())
    mean = averages + inverses / len(size.blocks)
    assert mean / 1e9 == pytest.approx(shard, abs=0.0051)
    assert mean < cost.memory < 1.2 * mean


def test_rows_of_the_table_of_gpt2_are_divided_evenly_for_few_more_bytes():
    ranks = 64
    whole, divided = (
        rank_cost(model_size("GPT-2 small", divisible=divisible), "shard", ranks)
        for divisible in (False, True)
    )
    assert whole.traffic < divided.traffic < 1.01 * whole.traffic
    for message in divided.messages[:2]:
        # The share of a rank is 1 / 64; the largest other layers have 1 / 53 each.
        assert message.largest < message.bytes / 50
    assert whole.messages[0].largest > whole.messages[0].bytes / 4
    assert 3 * divided.products < whole.products
