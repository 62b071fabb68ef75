"""Masks that one operator makes: those of a comparison and a cast."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.autodiff.layouts import laid_out
from kfac_engine.autodiff.masks import quick_masks
from kfac_engine.autodiff.runtime import Session
from kfac_engine.graph.compact import compact_model
from kfac_engine.graph.structure import Input, Node
from tests import models

TO_FLOAT, TO_DOUBLE = 1, 11
# The smallest normal number, its neighbours and the ends of the range.
NUMBERS = np.array([-np.inf, -3.0, -1e-38, -0.0, 0.0, 1.2e-38, 1e-20, 0.5, 3e38, np.inf])


def compared(dtype, to):
    zero = {"zero": np.zeros((), dtype)}
    nodes = [
        Node("Greater", ("x", "zero"), ("positive",), {}, "greater"),
        Node("Cast", ("positive",), ("mask",), {"to": to}, "cast"),
    ]
    return nodes, zero


def test_the_mask_is_one_where_numbers_are_greater_than_zero():
    nodes, zero = compared(np.float32, TO_FLOAT)
    found = quick_masks(nodes, ["mask"], zero)
    assert [node.op for node in found] == ["HardSigmoid"]
    model = compact_model(found, [Input("x", np.dtype("float32"), (None,))], ("mask",), {}, 18)
    session = Session(model, threads=1, once=True, what="a test")
    mask = session.run(("mask",), {"x": NUMBERS.astype(np.float32)})["mask"]
    np.testing.assert_array_equal(mask, [float(x > 0) for x in NUMBERS])


def test_a_comparison_that_others_read_stays():
    nodes, zero = compared(np.float32, TO_FLOAT)
    found = quick_masks(nodes, ["mask", "positive"], zero)
    assert [node.op for node in found] == ["Greater", "HardSigmoid"]


@pytest.mark.parametrize(
    ("dtype", "to", "constants"),
    [(np.float64, TO_DOUBLE, True), (np.float32, TO_DOUBLE, True), (np.float32, TO_FLOAT, False)],
    ids=["float64", "cast to float64", "another bound"],
)
def test_other_masks_stay(dtype, to, constants):
    nodes, zero = compared(dtype, to)
    bounds = zero if constants else {"zero": np.ones((), dtype)}
    assert quick_masks(nodes, ["mask"], bounds) == tuple(nodes)


def test_the_way_back_through_relu_makes_one_mask_each():
    model = ke.load_model(models.MODELS["cnn"]())
    backward = model.backward(["output"], list(model.parameters))
    handed = {*backward.gradients.values()}
    found = laid_out(model, backward.nodes, handed, backward.constants, backward=True).nodes
    ops = [node.op for node in found]
    assert ops.count("HardSigmoid") == 2
    assert "Greater" not in ops


def test_masks_of_the_model_itself_stay():
    nodes, zero = compared(np.float32, TO_FLOAT)
    model = ke.load_model(models.MODELS["mlp"]())
    assert laid_out(model, nodes, ["mask"], zero).nodes == tuple(nodes)
    assert laid_out(model, nodes, ["mask"], zero, backward=True).nodes != tuple(nodes)
