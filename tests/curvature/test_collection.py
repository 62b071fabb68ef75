"""The collection as a whole: keys, orders, and what it has to be told."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature import collection as core
from kfac_engine.layers.layer_forms import dense_form
from tests.lifecycle import observe, second_moment

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


@pytest.mark.parametrize("uses", [1, 3])
def test_a_layer_is_registered_by_its_form(uses):
    rng = np.random.default_rng(0)
    x, ds = rng.normal(size=(uses, 8, 3)), rng.normal(size=(uses, 8, 2))
    lc = core.LayerCollection()
    kind = "fully_connected" if uses == 1 else "fully_connected_multi"
    form = dense_form("IO", True, num_uses=uses)
    names = [f"x{i}" for i in range(uses)], [f"s{i}" for i in range(uses)]
    lc.register(kind, ("w", "b"), form, *names)
    gradients = tuple(f"d{i}" for i in range(uses))
    values = {f"x{i}": x[i] for i in range(uses)} | {f"d{i}": ds[i] for i in range(uses)}
    block = observe(lc, [[gradients]], [values])
    rows = np.concatenate([x.reshape(-1, 3), np.ones((8 * uses, 1))], axis=1)
    expected = uses * np.kron(second_moment(rows), second_moment(ds.reshape(-1, 2)))
    np.testing.assert_allclose(block.full_fisher_block(), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "params", "approx", "error", "message"),
    [
        ("dens", "w", None, ke.UnknownNameError, "unknown kind of layer 'dens'"),
        ("fully_connected", ("w", "b"), None, ke.RegistrationError, r"has 1 parameter\(s\)"),
        ("fully_connected", "w", "kron_indep", ke.InputError, "Bad value 'kron_indep'"),
    ],
)
def test_a_form_that_does_not_fit_changes_nothing(kind, params, approx, error, message):
    lc = core.LayerCollection()
    with pytest.raises(error, match=message):
        lc.register(kind, params, dense_form("IO", False), "x", "s", approx)
    assert lc.get_blocks() == ()


def test_general_collection_has_no_names_of_tensorflow():
    assert not hasattr(core.LayerCollection, "register_conv2d")
    assert issubclass(ke.LayerCollection, core.LayerCollection)
