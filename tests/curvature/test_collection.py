"""The collection as a whole: keys, orders, and what it has to be told."""

import numpy as np
import pytest

import kfac_engine as ke

LAYERS = {
    "dense": lambda lc, key: lc.register_fully_connected(key, "x", "s"),
    "convolution": lambda lc, key: lc.register_conv2d(key, [1, 1], "SAME", "x", "s"),
    "any convolution": lambda lc, key: lc.register_convolution(key, "x", "s", "SAME"),
    "uses": lambda lc, key: lc.register_fully_connected_multi(key, ["x"], ["s"]),
    "scale": lambda lc, key: lc.register_scale_and_shift(key, "x", "s"),
    "generic": lambda lc, key: lc.register_generic(key, 4, approx="full"),
}
every_layer = pytest.mark.parametrize("register", LAYERS.values(), ids=LAYERS)


def collection(**options):
    shapes = {"w": (3, 3, 2, 4), "b": (4,), "x": (8, 5, 5, 2), "s": (8, 5, 5, 4)}
    return ke.LayerCollection(graph=shapes, **options)


@every_layer
@pytest.mark.parametrize(
    "key",
    [(), ("w", "w"), ("w", 3), (np.ones(3), np.ones(3))],
    ids=["none", "twice", "int", "arrays"],
)
def test_keys_are_distinct_names(register, key):
    lc = collection()
    with pytest.raises(ValueError, match="distinct names of parameters"):
        register(lc, key)
    assert lc.registered_variables == ()


@pytest.mark.parametrize("key", [("w",), ("w", "b", "c")], ids=["tuple of one", "three"])
@pytest.mark.parametrize("layer", ["dense", "convolution", "any convolution", "uses"])
def test_a_layer_has_a_parameter_or_a_pair(layer, key):
    lc = collection()
    with pytest.raises(ValueError, match="a pair of them"):
        LAYERS[layer](lc, key)
    assert lc.registered_variables == ()


@pytest.mark.parametrize("register", [LAYERS["convolution"], LAYERS["any convolution"]])
def test_a_filter_must_be_declared(register):
    with pytest.raises(ValueError, match=r"shape of 'w' is needed .*LayerCollection\(graph="):
        register(ke.LayerCollection(), "w")


def test_blocks_and_variables_come_in_the_order_of_registration():
    lc = ke.LayerCollection()
    lc.register_fully_connected(("w2", "b2"), "y", "z")
    lc.register_generic("g", 4)
    lc.register_fully_connected("w1", "x", "s")
    assert lc.registered_variables == ("w2", "b2", "g", "w1")
    assert list(lc.fisher_blocks) == [("w2", "b2"), "g", "w1"]
    assert lc.get_blocks() == tuple(lc.fisher_blocks.values())
    assert [block.params for block in lc.get_blocks()] == [("w2", "b2"), "g", "w1"]


def test_factors_come_in_the_order_of_creation_the_input_first():
    lc = ke.LayerCollection()
    lc.register_fully_connected("w1", "x", "s")
    lc.register_fully_connected("w2", "y", "z")
    lc.register_generic("g", 4)
    first, second, generic = lc.get_blocks()
    generic.instantiate_factors(["dg"], 0.1)
    second.instantiate_factors([["dz"]], 0.1)
    first.instantiate_factors([["ds"]], 0.1)
    assert lc.get_factors() == (*generic.factors, *second.factors, *first.factors)
    assert [factor.statistic.names() for factor in lc.get_factors()] == [
        ("dg",), ("y",), ("dz",), ("x",), ("ds",)
    ]  # fmt: skip


def test_collections_share_nothing():
    one, other = ke.LayerCollection(), ke.LayerCollection()
    one.set_default_approximation("fully_connected", "diagonal")
    one.register_fully_connected("w", "x", "s")
    one.register_normal_predictive_distribution("z")
    assert other.fisher_blocks == {}
    assert other.losses == ()
    other.register_fully_connected("w", "x", "s")
    assert other.approximation_of("w") == "kron"
    assert one.approximation_of("w") == "diagonal"
