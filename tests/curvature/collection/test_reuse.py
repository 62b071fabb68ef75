"""Registering a key again adds a tower, or is refused: what may share a key and what may not."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.errors import RegistrationError, UnknownNameError
from tests.lifecycle import observe

SHAPES = {"w": (4, 3), "b": (3,), "v": (4, 3), "f": (2, 2, 3, 4)}


def collection():
    return ke.LayerCollection(graph=SHAPES)


def dense(lc, params="w", **options):
    lc.register_fully_connected(params, "x", "s", **options)


def conv(lc, strides=(1, 1, 1, 1), **options):
    lc.register_conv2d("f", strides, "SAME", "image", "maps", **options)


def generic(lc, params="w", **options):
    lc.register_generic(params, batch_size=4, **options)


# -- reuse=True and reuse=False --------------------------------------------------------------------


@pytest.mark.parametrize("register", [dense, conv, generic])
def test_reuse_needs_a_registered_key(register):
    lc = collection()
    with pytest.raises(UnknownNameError, match="no layer is registered for"):
        register(lc, reuse=True)
    assert lc.fisher_blocks == {}


@pytest.mark.parametrize("register", [dense, conv, generic])
@pytest.mark.parametrize("reuse", [True, "VARIABLE_SCOPE"])
def test_reuse_adds_a_tower_to_the_registered_block(register, reuse):
    lc = collection()
    register(lc)
    (block,) = lc.get_blocks()
    register(lc, reuse=reuse)
    assert lc.get_blocks() == (block,)
    assert block.num_registered_towers == 2


@pytest.mark.parametrize("register", [dense, conv, generic])
def test_a_key_is_registered_once_without_reuse(register):
    lc = collection()
    register(lc, reuse=False)
    with pytest.raises(RegistrationError, match="is already in LayerCollection"):
        register(lc, reuse=False)
    (block,) = lc.get_blocks()
    assert block.num_registered_towers == 1


OTHER_LAYERS = {
    "another approximation": lambda lc: dense(lc, approx="diagonal", reuse=True),
    "another form of the same class": lambda lc: dense(lc, approx="kron_in_diag", reuse=True),
    "another layout": lambda lc: dense(lc, weight_format="OI", reuse=True),
    "another kind": lambda lc: generic(lc, reuse=True),
    "several uses": lambda lc: lc.register_fully_connected_multi("w", ["x"], ["s"], reuse=True),
    "a block of another type": lambda lc: lc.register_block(
        "w", ke.NaiveDiagonalFB(lc, "w"), reuse=True
    ),
}


@pytest.mark.parametrize("name", OTHER_LAYERS)
def test_a_tower_must_be_the_same_layer(name):
    lc = collection()
    dense(lc)
    with pytest.raises(RegistrationError, match="w is registered as fully_connected kron"):
        OTHER_LAYERS[name](lc)
    assert lc.fisher_blocks["w"].num_registered_towers == 1


def test_a_convolution_tower_must_have_the_same_geometry():
    lc = collection()
    conv(lc)
    with pytest.raises(RegistrationError, match="must be the same layer"):
        conv(lc, strides=(1, 2, 2, 1), reuse=True)


@pytest.mark.parametrize(
    "params", [("w", "b"), ("b", "w"), "b"], ids=["superset", "other order", "part"]
)
def test_a_parameter_belongs_to_one_key(params):
    lc = collection()
    first = "w" if params == ("w", "b") else ("w", "b")
    dense(lc, first)
    with pytest.raises(RegistrationError, match=r"belong\(s\) to another registered layer"):
        dense(lc, params)
    assert list(lc.fisher_blocks) == [first]


def test_a_list_of_parameters_is_the_same_key_as_a_tuple():
    lc = collection()
    dense(lc, ["w", "b"])
    dense(lc, ("w", "b"), reuse=True)
    assert list(lc.fisher_blocks) == [("w", "b")]


def test_what_a_registration_refuses_leaves_no_trace():
    lc = collection()
    with pytest.raises(RegistrationError, match="counted differently"):
        lc.register_fully_connected_multi("w", ["x1", "x2"], ["s1", "s2", "s3"])
    assert lc.fisher_blocks == {}
    assert lc.registered_variables == ()


# -- blocks of the caller's own --------------------------------------------------------------------


def test_register_block_returns_the_registered_block():
    lc = collection()
    first, second = ke.FullyConnectedKFACBasicFB(lc), ke.FullyConnectedKFACBasicFB(lc)
    assert lc.register_block("w", first) is first
    assert lc.register_block("w", second, reuse=True) is first
    assert lc.register_block("w", second) is first
    assert lc.registered_variables == ("w",)


def test_register_block_has_the_errors_of_layers():
    lc = collection()
    with pytest.raises(UnknownNameError, match="no layer is registered"):
        lc.register_block("w", ke.FullyConnectedKFACBasicFB(lc), reuse=True)
    lc.register_block(("w", "b"), ke.FullyConnectedKFACBasicFB(lc, has_bias=True))
    with pytest.raises(RegistrationError, match="already in LayerCollection"):
        lc.register_block(("w", "b"), ke.FullyConnectedKFACBasicFB(lc), reuse=False)
    with pytest.raises(RegistrationError, match="registered as FullyConnectedKFACBasicFB"):
        lc.register_block(("w", "b"), ke.NaiveFullFB(lc, ("w", "b")), reuse=True)
    with pytest.raises(RegistrationError, match="another registered layer"):
        lc.register_block("w", ke.FullyConnectedKFACBasicFB(lc))


def test_a_full_block_is_no_diagonal_one():
    lc = collection()
    lc.register_block("w", ke.NaiveDiagonalFB(lc, "w"))
    with pytest.raises(RegistrationError, match="registered as NaiveDiagonalFB"):
        generic(lc, approx="full", reuse=True)


def test_a_named_block_takes_towers_by_its_layers_function():
    lc = collection()
    block = ke.FullyConnectedKFACBasicFB(lc)
    block.register_additional_tower(inputs="x", outputs="s")
    lc.register_block("w", block)
    dense(lc, reuse=True)
    assert block.num_registered_towers == 2
    with pytest.raises(RegistrationError, match="registered as FullyConnectedKFACBasicFB"):
        dense(lc, approx="diagonal", reuse=True)


# -- factors ---------------------------------------------------------------------------------------


def test_layers_that_read_one_tensor_share_its_factor():
    lc = collection()
    lc.register_fully_connected("w", "x", "s")
    lc.register_fully_connected("v", "x", "t")
    for block, gradient in zip(lc.get_blocks(), ("ds", "dt"), strict=True):
        block.instantiate_factors([[gradient]], damping=0.1)
    first, second = lc.get_blocks()
    assert first.input_factor is second.input_factor
    assert first.output_factor is not second.output_factor
    assert len(lc.get_factors()) == 3
    assert set(lc.fisher_factors.values()) == set(lc.get_factors())


def test_factors_of_equal_arguments_are_one_object():
    lc = collection()
    dense(lc)
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((5, 4)), "ds": rng.standard_normal((5, 3))}
    factor = observe(lc, [["ds"]], [batch]).input_factor
    cls, statistic = type(factor), factor.statistic
    assert lc.make_or_get_factor(cls, (statistic,)) is factor
    assert next(iter(lc.fisher_factors)) == (cls, statistic)


def test_arguments_of_a_factor_must_be_hashable():
    with pytest.raises(TypeError, match="unhashable"):
        collection().make_or_get_factor(ke.DenseSquareMatrixFactor, ([1, 2],))
