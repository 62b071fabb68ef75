"""``engine.factors``: its keys, the roles of factors, and errors for names and roles."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.engine.factors import ROLES
from tests import models
from tests.models import Net


def engine_of(model, **options):
    return ke.Engine.from_onnx(model, loss="categorical", backend="numpy", **options)


@pytest.fixture(scope="module")
def engine():
    return engine_of(models.mlp())


def test_keys_are_the_names_of_the_parameters(engine):
    assert list(engine.factors) == list(engine.parameters)
    assert len(engine.factors) == 6
    assert "fc1.weight" in engine.factors
    assert "fc9.weight" not in engine.factors
    assert ["fc1.weight"] not in engine.factors
    assert engine.factors.get("fc9.weight") is None


def test_factors_are_read_only(engine):
    with pytest.raises(ke.UnknownAttributeError, match="has 'factors', but only"):
        engine.factors = {}
    with pytest.raises(TypeError, match="item assignment"):
        engine.factors["fc1.weight"] = engine.factors["fc0.weight"]
    with pytest.raises(AttributeError, match="cannot assign"):
        engine.factors["fc1.weight"].input.shape = (1,)


def test_parameters_of_a_layer_have_equal_factors_with_roles(engine):
    factors = engine.factors["fc1.weight"]
    assert list(factors) == list(engine.factors["fc1.bias"])
    assert [view.name for view in factors] == ["fc1.weight: A", "fc1.weight: G"]
    assert [view.role for view in factors] == ["input", "output"]
    assert (factors.input, factors.output) == (factors[0], factors[-1])
    assert factors[0] != engine.factors["fc0.weight"][0]


def test_views_have_each_factor_once_in_the_order_of_layers():
    engine = engine_of(models.mlp(), approximations={"fully_connected": "ekfac"})
    names = [view.name for view in engine.factors.views()]
    assert names == [f"fc{layer}.weight: {symbol}" for layer in range(3) for symbol in "AGs"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fc1.wieght", "did you mean 'fc1.weight'"),
        ("completely different", "engine.parameters has all names"),
        (3, "engine.parameters has all names"),
        (["fc1.weight"], "engine.parameters has all names"),
    ],
)
def test_unknown_parameter_is_an_error_with_the_nearest_name(engine, name, hint):
    with pytest.raises(ke.UnknownNameError, match=hint) as caught:
        engine.factors[name]
    assert repr(name) in str(caught.value)


def test_a_block_without_an_input_factor_says_what_it_has():
    factors = engine_of(models.layer_norm()).factors["norm.weight"]
    assert [view.role for view in factors] == ["block"]
    with pytest.raises(ke.UnknownAttributeError, match=r"no input factor.*\[0\] 'norm.weight: F'"):
        factors.input  # noqa: B018 (reading it is the test)
    assert not hasattr(factors, "output")


def sliced():
    """Two dense layers whose weights are slices of one parameter."""
    net = Net()
    sizes = net.constant("sizes", np.array([4, 3], np.int64))
    weight = net.weight("both", 4, 7)
    net.op("Split", weight, sizes, to="w0", further=["w1"], axis=1)
    x = net.op("Tanh", net.op("MatMul", "input", "w0", to="first"), to="act")
    net.op("MatMul", x, "w1", to="output")
    return net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})


def test_a_parameter_of_several_layers_has_the_factors_of_all():
    engine = engine_of(sliced())
    factors = engine.factors["both"]
    parts = ["both[:, 0:4]", "both[:, 4:7]"]
    assert [view.name for view in factors] == [f"{part}: {s}" for part in parts for s in "AG"]
    assert [view.shape for view in factors] == [(4, 4), (4, 4), (4, 4), (3, 3)]
    with pytest.raises(ke.UnknownAttributeError, match=r"belongs to 2 layers.*\[2\] 'both\[:, 4:7"):
        factors.input  # noqa: B018 (reading it is the test)


def test_every_symbol_of_a_block_has_a_role():
    blocks = [FisherBlock]
    for block in blocks:
        blocks += block.__subclasses__()
    assert len(blocks) > 10
    assert {symbol for block in blocks for symbol in block.symbols} == set(ROLES)


@pytest.mark.parametrize("read", ["value", "damping", "trace", "condition"])
def test_numbers_before_the_first_batch_are_an_error(engine, read):
    view = engine.factors["fc1.weight"].input
    assert view.shape == (6, 6)
    for call in (lambda: getattr(view, read), view.eigenvalues, view.spectrum, view.plot):
        with pytest.raises(ke.NotReadyError, match=r"'fc1.weight: A' has no statistics yet"):
            call()
