"""Transposed convolutions whose padding follows from sizes: the same layer, or none."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models

BATCH = 6


def model(**geometry):
    net = models.Net()
    x = net.op("Tanh", "input", to="bent")
    w = net.weight("w", 2, 3, 3, 3)
    x = net.op("ConvTranspose", x, w, to="image", strides=[2, 2], **geometry)
    net.op("Tanh", x, to="output")
    return net.model({"input": ["batch", 2, 4, 4]}, {"output": ["batch", 3, "h", "w"]})


def natural_gradient(**geometry):
    rng = np.random.default_rng(0)
    inputs = {"input": rng.normal(size=(BATCH, 2, 4, 4)).astype("float32")}
    targets = rng.normal(size=(BATCH, 3, 8, 8)).astype("float32")
    return ke.precondition(model(**geometry), inputs, targets, "normal").natural_gradients["w"]


@pytest.mark.parametrize(
    ("automatic", "pads"),
    [("SAME_UPPER", [0, 0, 1, 1]), ("SAME_LOWER", [1, 1, 0, 0])],
    ids=["upper", "lower"],
)
def test_automatic_padding_equals_explicit_padding(automatic, pads):
    found = natural_gradient(auto_pad=automatic)
    np.testing.assert_array_equal(found, natural_gradient(pads=pads))


@pytest.mark.parametrize(
    "geometry",
    [
        {"output_shape": [8, 8]},
        {"output_shape": [8, 8], "auto_pad": "SAME_UPPER"},
        {"output_padding": [1, 1], "auto_pad": "SAME_UPPER"},
    ],
    ids=["given_size", "given_size_same", "same_and_output_padding"],
)
def test_size_dependent_padding_is_not_layer(geometry):
    (entry,) = ke.Engine.from_onnx(model(**geometry), loss="normal").layers
    assert entry.kind == "generic"
    assert "size of its result" in entry.reason
