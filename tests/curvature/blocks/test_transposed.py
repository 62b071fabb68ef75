"""Transposed convolutions: blocks against loops over input locations."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.layers.layer_forms import transposed_form
from tests import models

EXACT = 1e-10  # float64 sums of a few hundred terms
SINGLE = 5e-5  # float32, relative to the largest entry
BATCH, INS, OUTS, DAMPING = 4, 2, 3, 0.1

# Name to input sides, kernel, strides, dilations, pads (begins then ends), output padding.
CASES = {
    "dense": ((3, 2), (2, 3), (1, 1), (1, 1), (0, 0, 0, 0), (0, 0)),
    "strided": ((3, 3), (3, 2), (2, 2), (1, 1), (1, 0, 0, 1), (0, 0)),
    "output_padding": ((2, 3), (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), (1, 1)),
    "dilated": ((3, 3), (2, 2), (1, 2), (2, 1), (0, 1, 1, 0), (0, 0)),
    "line": ((5,), (3,), (2,), (1,), (1, 1), (0,)),
    "volume": ((2, 2, 3), (2, 1, 2), (2, 1, 1), (1, 1, 1), (0, 0, 0, 0, 0, 1), (0, 0, 0)),
}


def output_shape(sides, kernel, strides, dilations, pads, added):
    axes = range(len(sides))
    return tuple(
        (sides[i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1
        - pads[i] - pads[i + len(sides)] + added[i]
        for i in axes
    )  # fmt: skip


def rows(x, ds, sides, kernel, strides, dilations, pads):
    """A row ``x[pixel]`` and the output gradients it is spread over, by loops; channels last."""
    inputs, patches = [], []
    for n in range(len(x)):
        for pixel in np.ndindex(*sides):
            patch = np.zeros((*kernel, ds.shape[-1]))
            for tap in np.ndindex(*kernel):
                at = tuple(
                    p * s + t * d - begin
                    for p, s, t, d, begin in zip(pixel, strides, tap, dilations, pads, strict=False)
                )
                if all(0 <= i < side for i, side in zip(at, ds.shape[1:-1], strict=True)):
                    patch[tap] = ds[(n, *at)]
            inputs.append(x[(n, *pixel)])
            patches.append(patch.ravel())
    return np.array(inputs), np.array(patches)


def image(array, first):
    return np.moveaxis(array, -1, 1) if first else array


def stored(weight, first):
    """A filter ``(in, *kernel, out)`` as it is registered."""
    return np.moveaxis(weight, -1, 1) if first else np.moveaxis(weight, 0, -1)


def observed(case, first, values, weight, damping):
    """The block of a transposed convolution that saw one batch."""
    _, _, strides, dilations, pads, _ = case
    axes = len(strides)
    spatial = {1: "W", 2: "HW", 3: "DHW"}[axes]
    lc = ke.LayerCollection(graph={"w": stored(weight, first).shape})
    form = transposed_form(
        lc.require_shape("w"),
        padding=tuple(zip(pads[:axes], pads[axes:], strict=True)),
        strides=strides,
        dilations=dilations,
        data_format=f"NC{spatial}" if first else f"N{spatial}C",
        weight_format=f"IO{spatial}" if first else f"{spatial}OI",
    )
    lc.register("conv_transpose", "w", form, "x", "s")
    block = lc.fisher_blocks["w"]
    block.instantiate_factors([["ds"]], damping)
    block.register_inverse()
    for factor in lc.get_factors():
        factor.instantiate_cov_variables()
        factor.make_covariance_update_op(0.9)(values)
    for factor in lc.get_factors():
        factor.instantiate_inv_variables()
        for refresh in factor.make_inverse_update_ops():
            refresh()
    return block


@pytest.mark.parametrize("first", [True, False], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("name", CASES)
def test_block_is_locations_times_moments_of_inputs_and_of_what_they_are_spread_over(name, first):
    sides, kernel, strides, dilations, pads, _ = CASES[name]
    rng = np.random.default_rng(2)
    x = rng.standard_normal((BATCH, *sides, INS))
    ds = rng.standard_normal((BATCH, *output_shape(*CASES[name]), OUTS))
    w = rng.standard_normal((INS, *kernel, OUTS))
    values = {"x": image(x, first), "ds": image(ds, first)}
    block = observed(CASES[name], first, values, w, DAMPING)
    a, g = rows(x, ds, sides, kernel, strides, dilations, pads)
    locations = len(a) // BATCH
    A, G = a.T @ a / len(a), g.T @ g / len(g)
    F = locations * np.kron(A, G)
    np.testing.assert_allclose(block.full_fisher_block(), F, atol=EXACT * np.abs(F).max())
    pi = np.sqrt(np.trace(A) / len(A) / (np.trace(G) / len(G)))
    root = np.sqrt(DAMPING / locations)
    damped = locations * np.kron(A + root * pi * np.eye(len(A)), G + root / pi * np.eye(len(G)))
    for product, matrix in (
        (block.multiply, damped),
        (block.multiply_inverse, np.linalg.inv(damped)),
    ):
        expected = stored((matrix @ w.ravel()).reshape(w.shape), first)
        np.testing.assert_allclose(product(stored(w, first)), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_transposed_convolution_of_a_model_is_found_with_its_geometry(name):
    sides, kernel, strides, dilations, pads, added = CASES[name]
    net = models.Net()
    w, b = net.weight("w", INS, OUTS, *kernel), net.weight("b", OUTS)
    net.op("ConvTranspose", "input", w, b, to="output", strides=strides, dilations=dilations,
           pads=pads, output_padding=added)  # fmt: skip
    out = output_shape(*CASES[name])
    proto = net.model({"input": ["batch", INS, *sides]}, {"output": ["batch", OUTS, *out]})
    engine = ke.Engine.from_onnx(
        proto, loss="normal", class_axis=1, estimation_mode="empirical", reduction="batch_mean"
    )
    kinds = {layer.parameters: layer.kind for layer in engine.layers}
    assert kinds == {("w",): "conv_transpose", ("b",): "shift"}
    feeds = models.random_inputs(proto, BATCH)
    trace = ke.load_model(proto).run(feeds)
    engine.observe(feeds, np.zeros_like(trace["output"]))
    x, ds = (np.moveaxis(v, 1, -1) for v in (feeds["input"], 2 * trace["output"]))
    a, g = rows(x, ds, sides, kernel, strides, dilations, pads)
    expected = len(a) / BATCH * np.kron(a.T @ a / len(a), g.T @ g / len(g))
    found = engine.collection.fisher_blocks["w"].full_fisher_block()
    np.testing.assert_allclose(found, expected, atol=SINGLE * np.abs(expected).max())


def test_groups_and_wrong_formats_are_refused_by_name():
    net = models.Net()
    net.op("ConvTranspose", "input", net.weight("w", 4, 1, 2), to="output", group=2)
    proto = net.model({"input": ["batch", 4, 3]}, {"output": ["batch", 2, 4]})
    (layer,) = ke.Engine.from_onnx(proto, loss="normal", class_axis=1).layers
    assert layer.reason == "transposed convolution over 1 axes in 2 group(s)"
    with pytest.raises(ke.InputError, match="weight_format must be one of HWOI, IOHW; got 'OIHW'"):
        transposed_form((2, 3, 4, 5), padding="VALID", weight_format="OIHW")
