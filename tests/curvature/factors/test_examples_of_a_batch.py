"""Factors of one collection that are updated by hand take the values of one batch only."""

import numpy as np
import pytest

import kfac_engine as ke

SHAPES = {"w": (4, 3), "v": (3, 2), "k": (3, 3, 2, 5), "table": (7, 3)}


def updates_of(collection, gradients):
    """An update for each factor, by the values that it reads."""
    for block, names in zip(collection.get_blocks(), gradients, strict=True):
        block.instantiate_factors(names, damping=0.1)
    updates = {}
    for factor in collection.get_factors():
        factor.instantiate_cov_variables()
        updates[factor.names()] = factor.make_covariance_update_op(0.95)
    return updates


def dense(collection):
    collection.register_fully_connected("w", inputs="x", outputs="s", approx="kron")
    return [[["ds"]]], {"x": (8, 4), "ds": (8, 3)}


def two_dense(collection):
    gradients, shapes = dense(collection)
    collection.register_fully_connected("v", inputs="y", outputs="z", approx="kron")
    return [*gradients, [["dz"]]], shapes | {"y": (8, 3), "dz": (8, 2)}


def convolution(collection):
    collection.register_conv2d("k", [1] * 4, "SAME", inputs="x", outputs="s", approx="kron")
    return [[["ds"]]], {"x": (8, 5, 5, 2), "ds": (8, 5, 5, 5)}


def embedding(collection):
    collection.register_embedding("table", inputs="ids", outputs="s")
    return [[["ds"]]], {"ids": (8,), "ds": (8, 3)}


def two_towers(collection):
    collection.register_fully_connected("w", inputs="x", outputs="s", approx="kron")
    collection.register_fully_connected("w", inputs="y", outputs="z", reuse=True)
    return [[["ds", "dz"]]], {"x": (8, 4), "y": (8, 4), "ds": (8, 3), "dz": (8, 3)}


LAYERS = [dense, two_dense, convolution, embedding, two_towers]


def drawn(shapes):
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return values | ({"ids": np.arange(8) % 7} if "ids" in shapes else {})


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("as_lists", [False, True])
def test_values_of_one_batch_are_taken(layers, as_lists):
    collection = ke.LayerCollection(graph=SHAPES)
    gradients, shapes = layers(collection)
    updates = updates_of(collection, gradients)
    values = drawn(shapes)
    for update in updates.values():
        update({n: a.tolist() for n, a in values.items()} if as_lists else values)
    assert all(factor.average.weight == 1 for factor in collection.get_factors())


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("size", [3, 7, 9])
def test_each_value_with_another_number_of_examples_is_refused(layers, size):
    collection = ke.LayerCollection(graph=SHAPES)
    gradients, shapes = layers(collection)
    updates = updates_of(collection, gradients)
    for name, shape in shapes.items():
        values = drawn(shapes)
        values[name] = np.ones((size, *shape[1:]), values[name].dtype)
        reader = next(update for names, update in updates.items() if name in names)
        if len(shapes) <= 2:
            message = f"reads ({size} examples, but .* reads 8|8 examples, but .* reads {size});"
        else:
            message = "examples"  # towers that differ are told by their own statistic
        with pytest.raises((ke.InputError, ke.ShapeError), match=message):
            reader(values)
    assert all(factor.average.value is None for factor in collection.get_factors())


def test_a_value_of_another_layer_with_another_number_of_examples_is_refused():
    collection = ke.LayerCollection(graph=SHAPES)
    gradients, shapes = two_dense(collection)
    updates = updates_of(collection, gradients)
    values = drawn(shapes) | {"dz": np.ones((3, 2))}
    with pytest.raises(ke.InputError, match=r"\(dz\) reads 3 examples, but .*\(x\) reads 8"):
        updates["dz",](values)


def test_the_batch_of_a_parameter_without_a_layer_is_compared_as_well():
    collection = ke.LayerCollection(graph=SHAPES)
    collection.register_fully_connected("w", inputs="x", outputs="s", approx="kron")
    collection.register_generic("v", "x", approx="diagonal")
    updates = updates_of(collection, [[["ds"]], ["dv"]])
    values = drawn({"x": (8, 4), "ds": (3, 3), "dv": (3, 2)})
    with pytest.raises(ke.InputError, match=r"\(ds\) reads 3 examples, but .*\(x\) reads 8"):
        updates["ds",](values)
    updates["dv",](values)  # 8 examples; its own array has none


def test_batches_of_separate_calls_may_differ():
    collection = ke.LayerCollection(graph=SHAPES)
    gradients, _ = dense(collection)
    updates = updates_of(collection, gradients)
    updates["x",]({"x": np.ones((8, 4))})
    updates["ds",]({"ds": np.ones((3, 3))})
    A, G = collection.get_factors()
    np.testing.assert_allclose(A.cov, np.ones((4, 4)))
    np.testing.assert_allclose(G.cov, np.ones((3, 3)))
