"""Blocks, factors and collections are shown by name and shape."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models


def collection():
    shapes = {"w": (4, 3), "b": (3,), "x": (8, 4), "s": (8, 3)}
    layers = ke.LayerCollection(shapes, backend="numpy")
    layers.register_fully_connected(("w", "b"), "x", "s")
    return layers


def test_block_is_shown_with_parameters_and_shapes():
    layers = collection()
    block = layers.fisher_blocks["w", "b"]
    assert repr(block) == "<KroneckerProductFB of w, b: without factors>"
    block.instantiate_factors([["ds"]], 0.1)
    assert repr(block) == "<KroneckerProductFB of w, b: without statistics>"
    A, G = block.factors
    assert repr(A) == "<DenseSquareMatrixFactor without statistics: KroneckerMoment(x)>"
    rng = np.random.default_rng(0)
    for factor in (A, G):
        factor.update({"x": rng.standard_normal((8, 4)), "ds": rng.standard_normal((8, 3))}, 0.9)
    assert repr(A) == "<DenseSquareMatrixFactor 5×5: KroneckerMoment(x)>"
    assert repr(G) == "<DenseSquareMatrixFactor 3×3: KroneckerMoment(ds)>"
    assert repr(block) == "<KroneckerProductFB of w, b: A 5×5, G 3×3>"
    assert repr(layers) == "<LayerCollection 'LayerCollection': 1 block, 2 factors>"


@pytest.mark.parametrize("name", sorted(models.MODELS.keys() - {"odd_ops", "two_outputs"}))
def test_every_block_and_factor_is_shown_without_an_address(name):
    model = models.MODELS[name]()
    engine = ke.Engine.from_onnx(model, loss="normal", backend="numpy")
    engine.observe(models.random_inputs(model, 4))
    for layer in engine.layers:
        block = engine.collection.fisher_blocks[layer.key]
        for factor, shape in zip(block.factors, layer.factor_shapes, strict=True):
            size = "×".join(map(str, shape))
            assert f"{type(factor).__name__} {size}: " in repr(factor)
            assert f" {size}" in repr(block)
        assert " at 0x" not in repr(block) + "".join(map(repr, block.factors))


def test_names_are_shortened_and_printable():
    name = "\x1b[31m" + "n" * 1000
    layers = ke.LayerCollection({name: (4, 3)}, name=name, backend="numpy")
    layers.register_fully_connected(name, "x" * 1000, "s")
    block = layers.fisher_blocks[name]
    block.instantiate_factors([["ds"]], 0.1)
    for shown in (layers, block, block.factors[0]):
        assert repr(shown).isprintable()
        assert len(repr(shown)) < 200


def test_scalar_parameters_are_shown_as_scalars():
    layers = ke.LayerCollection({"w": ()}, backend="numpy")
    layers.register_generic("w", 8, approx="diagonal")
    (block,) = layers.get_blocks()
    block.instantiate_factors([["g"]], 0.1)
    block.factors[0].update({"g": np.array(2.0)}, 0.9)
    assert repr(block) == "<NaiveDiagonalFB of w: F scalar>"


def test_losses_models_and_traces_are_shown_by_name():
    model = ke.load_model(models.mlp())
    assert repr(model) == "<OnnxModel 'test_model': 6 parameters>"
    trace = model.run(models.random_inputs(models.mlp(), 2))
    assert repr(trace) == f"<Trace of 'test_model': {len(trace)} values>"
    loss = ke.NormalMeanVarianceNegativeLogProbLoss("mean", "variance", targets="y\x1b")
    shown = "NormalMeanVarianceNegativeLogProbLoss('mean', 'variance', targets='y\\x1b')"
    assert repr(loss) == shown
    assert len(repr(ke.MultiBernoulliNegativeLogProbLoss("n" * 1000))) < 130
