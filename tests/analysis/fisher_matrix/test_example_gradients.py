"""Gradients and Jacobians of single examples, and matrices from them, against the oracle.

The models have a layer of every way in which a gradient is read: rows, patches, groups, tokens,
scales, shared weights, token ids, parts of a parameter, and parameters without a layer.
"""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.analysis.fisher_matrix.example_gradients import (
    block_tiles,
    gradient_sources,
    jacobian_sources,
)
from tests import models, oracle
from tests.analysis.fisher_matrix.dense import (
    DOUBLE,
    SINGLE,
    dense,
    exact_fisher,
    example,
    measured,
    uneven,
)
from tests.comparing import assert_near

EXAMPLES = 5


def grouped():
    """A convolution of two groups with a bias."""
    net = models.Net()
    operands = ["input", net.weight("conv.weight", 4, 1, 2, 2), net.weight("conv.bias", 4)]
    net.op("Conv", *operands, to="conv", group=2)
    net.op("GlobalAveragePool", "conv", to="pool")
    net.op("Flatten", "pool", to="output")
    return net.model({"input": ["batch", 2, 3, 3]}, {"output": ["batch", 4]})


def stacked():
    """Two dense layers with weights and biases of their own, for two slots of an example."""
    net = models.Net("float64")
    net.op("Einsum", "input", net.weight("w", 2, 3, 2), to="product", equation="nsi,sio->nso")
    net.op("Add", "product", net.weight("b", 2, 2), to="slots")
    net.op("Flatten", net.op("Tanh", "slots", to="act"), to="output")
    return net.model({"input": ["batch", 2, 3]}, {"output": ["batch", 4]})


def without_layer():
    """``output = x · W · exp(s)``, where ``s`` belongs to no layer, and a constant without use."""
    net = models.Net("float64")
    net.op("MatMul", "input", net.weight("w", 4, 3), to="product")
    net.op("Exp", net.weight("s", 3), to="factor")
    net.op("Mul", "product", "factor", to="output")
    return net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})


def parts():
    """Two dense layers whose weights are columns of a parameter; its last column has no use."""
    net = models.Net("float64")
    w = net.weight("w", 3, 7)
    for name, start, stop in (("first", 0, 3), ("second", 3, 6)):
        bounds = [
            net.constant(f"{name}.{what}", np.array([value]))
            for what, value in (("start", start), ("stop", stop), ("axis", 1))
        ]
        net.op("Slice", w, *bounds, to=f"{name}.weight")
    x = net.op("Tanh", net.op("MatMul", "input", "first.weight", to="hidden"), to="act")
    net.op("MatMul", x, "second.weight", to="output")
    return net.model({"input": ["batch", 3]}, {"output": ["batch", 3]})


MODELS = {
    "mlp": (lambda: models.mlp((4, 3, 3), dtype="float64"), DOUBLE),
    "tokens": (lambda: models.token_mlp(tokens=2, widths=(2, 3, 2), dtype="float64"), DOUBLE),
    "tied": (lambda: models.tied(dtype="float64"), DOUBLE),
    "parts": (parts, DOUBLE),
    "without_layer": (without_layer, DOUBLE),
    "layer_norm": (models.layer_norm, SINGLE),
    "embedding": (models.embedding, SINGLE),
    "conv": (lambda: models.conv_linear(side=3, kernel=2, pads=0), SINGLE),
    "grouped": (grouped, SINGLE),
    "stacked": (stacked, DOUBLE),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """Model, tolerance, inputs, labels, and Jacobian ``(n, k, P)`` of the oracle."""
    model, tolerance, inputs, _, labels = example(MODELS[request.param], EXAMPLES)
    names = list(measured(model, (inputs, None)).model.parameters)
    jacobian = oracle.jacobian(model, inputs, "output", names)
    return model, tolerance, inputs, labels, jacobian


def softmax(z):
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def gradients_of(model, inputs, labels, jacobian):
    """Gradients of −log p of the labels, ``(n, P)``, from the Jacobian of the oracle."""
    p = softmax(oracle.evaluate(model, inputs, "output")[0])
    score = (p - np.eye(p.shape[-1])[labels]).reshape(*jacobian.shape[:3])
    return np.einsum("ntc,ntcp->np", score, jacobian)


def joined(curvature, tiles, *axes):
    """Return the derivatives of all tiles with respect to all parameters, ``(n, *axes, P)``."""
    vector = curvature.vector
    rows = np.zeros((EXAMPLES, *axes, vector.size))
    for tile in tiles:
        for name, array in tile.arrays.items():
            assert array.shape[1 + len(axes) :] == vector.shapes[name]
            start, size = vector.starts[name], np.prod(vector.shapes[name])
            block = array.reshape(*array.shape[: 1 + len(axes)], -1)
            rows[tile.examples, ..., start : start + size] += block
    return rows


def test_example_gradients_equal_those_of_the_oracle(case):
    model, tolerance, inputs, labels, jacobian = case
    curvature = measured(model, (inputs, None), scratch_bytes=256)
    tiles = list(curvature.example_gradients(inputs, labels))
    for tile in tiles:
        count = tile.examples.stop - tile.examples.start
        assert count == 1 or sum(array.nbytes for array in tile.arrays.values()) <= 256
    expected = gradients_of(model, inputs, labels, jacobian)
    assert_near(joined(curvature, tiles), expected, tolerance)


def test_example_jacobians_equal_those_of_the_oracle(case):
    model, tolerance, inputs, _, jacobian = case
    curvature = measured(model, (inputs, None))
    expected = jacobian.reshape(EXAMPLES, -1, jacobian.shape[-1])
    tiles = curvature.example_jacobians(inputs)
    assert_near(joined(curvature, tiles, expected.shape[1]), expected, tolerance)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full"])
@pytest.mark.parametrize("scratch_bytes", [256, 2**20])
def test_sums_over_blocks_equal_products_with_the_dense_matrix(case, structure, scratch_bytes):
    model, tolerance, inputs, labels, jacobian = case
    options = {"structure": structure, "scratch_bytes": scratch_bytes}
    curvature = measured(model, (inputs, None), **options)
    P = dense(curvature, power=-1.0, damping=0.3)
    rows = jacobian.reshape(EXAMPLES, -1, jacobian.shape[-1])
    v = np.random.default_rng(3).standard_normal((2, curvature.vector.size))
    variance, products = (
        np.zeros((EXAMPLES, rows.shape[1], rows.shape[1])),
        np.zeros((2, *rows.shape[:2])),
    )
    scores = np.zeros(EXAMPLES)
    sources = jacobian_sources(curvature.layout, inputs)
    for block, examples, gradients in block_tiles(curvature.layout, curvature.blocks, sources):
        weights = block.powers(0.3, -1.0)
        variance[examples] += gradients.gram(weights)
        rotated = block.spectrum.into(v[:, block.places])
        products[:, examples] += gradients.products(weights * rotated)
    sources = gradient_sources(curvature.layout, inputs, labels)
    for block, examples, gradients in block_tiles(curvature.layout, curvature.blocks, sources):
        scores[examples] += gradients.gram(block.powers(0.3, -1.0)).sum(axis=(1, 2))
    assert_near(variance, rows @ P @ rows.swapaxes(1, 2), tolerance)
    assert_near(products, np.einsum("qp,mkp->qmk", v @ P, rows), tolerance)
    g = gradients_of(model, inputs, labels, jacobian)
    assert_near(scores, np.einsum("np,pq,nq->n", g, P, g), tolerance)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_full_curvature_equals_the_fisher(case, fisher):
    model, tolerance, inputs, labels, jacobian = case
    batches = uneven(inputs, labels, sizes=(1, 3))
    curvature = measured(model, batches, structure="full", fisher=fisher, scratch_bytes=4096)
    if fisher == "empirical":
        g = gradients_of(model, inputs, labels, jacobian)
        expected = g.T @ g / EXAMPLES
    else:
        p = softmax(oracle.evaluate(model, inputs, "output")[0]).reshape(jacobian.shape[:3])
        H = np.einsum("ntc,cd->ntcd", p, np.eye(p.shape[-1])) - p[..., None] * p[..., None, :]
        expected = np.einsum("ntcp,ntcd,ntdq->pq", jacobian, H, jacobian) / EXAMPLES
    assert_near(dense(curvature), expected, tolerance)
    values = next(iter(curvature.eigenvalues().values()))
    assert_near(values, np.linalg.eigvalsh(expected), tolerance)


def test_diagonal_curvature_of_every_layer_is_that_of_the_fisher(case):
    model, tolerance, inputs, labels, jacobian = case
    batches = uneven(inputs, labels, sizes=(1, 3))
    curvature = measured(model, batches, structure="diagonal", fisher="empirical")
    g = gradients_of(model, inputs, labels, jacobian)
    assert_near(dense(curvature), np.diag((g**2).mean(axis=0)), tolerance)


def test_blocks_cover_each_entry_of_each_parameter_once(case):
    model, _, inputs, _, _ = case
    for structure in ("kron", "ekfac", "diagonal", "full"):
        curvature = measured(model, (inputs, None), structure=structure)
        places = np.concatenate([block.places.ravel() for block in curvature.blocks])
        np.testing.assert_array_equal(np.sort(places), np.arange(curvature.vector.size))


def test_parameter_without_a_layer_has_the_mean_of_squares_and_not_the_square_of_the_mean():
    model = without_layer()
    inputs = models.random_inputs(model, batch=EXAMPLES)
    curvature = measured(model, uneven(inputs, sizes=(1, 3)))
    F = exact_fisher(curvature, model, inputs, "categorical")
    start = curvature.vector.starts["s"]
    rows = slice(start, start + 3)
    assert_near(np.diag(dense(curvature))[rows], np.diag(F)[rows], DOUBLE)


def test_entries_without_use_have_zero_curvature():
    model = parts()
    inputs = models.random_inputs(model, batch=EXAMPLES)
    curvature = measured(model, (inputs, None))
    values = curvature.eigenvalues()["w (unused entries)"]
    np.testing.assert_array_equal(values, np.zeros(3))
    assert curvature.log_determinant(2.0) > 3 * np.log(2.0)
    with pytest.raises(ke.InputError, match="raise the damping"):
        curvature.sample(1)
    vector = {"w": np.ones((3, 7))}
    product = curvature.multiply(vector, power=-1, damping=0.5)["w"]
    np.testing.assert_allclose(product[:, 6], 2.0, rtol=1e-15)


def test_matrix_that_does_not_fit_is_refused_before_the_data_are_read(monkeypatch):
    model = models.mlp()
    monkeypatch.setattr("kfac_engine.system.memory_limits.available_memory", lambda: 200_000)

    def unread():
        pytest.fail("the data were read")
        yield

    with pytest.raises(ke.MemoryLimitError, match=r"of 74 parameters needs .* layers='last'"):
        measured(model, unread(), structure="full")


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_factors_that_do_not_fit_are_refused_before_the_data_are_read(monkeypatch, structure):
    model = models.mlp((40, 3, 2))
    batch = models.random_inputs(model), None
    # The inputs of fc0 have a factor of 41 × 41 numbers, 12 bytes each and 24 to decompose it.
    memory = "kfac_engine.system.memory_limits.available_memory"
    monkeypatch.setattr(memory, lambda: 36 * 41**2)
    with pytest.raises(ke.MemoryLimitError, match=r"largest for fc0.weight, fc0.bias, .* freeze"):
        measured(model, batch, structure=structure)
    # Other matrices fit, and the gradient of the batch is what does not.
    for options in ({"structure": "diagonal"}, {"structure": structure, "freeze": "fc0.*"}):
        with pytest.raises(ke.MemoryLimitError, match="a gradient needs"):
            measured(model, batch, **options)


def test_full_matrix_has_no_separate_bias():
    model = models.mlp()
    with pytest.raises(ke.InputError, match="no layer has an approximation"):
        measured(
            model, ({}, None), structure="full", approximations={"fully_connected": "diagonal"}
        )
    with pytest.raises(ke.InputError, match="no bias is separate"):
        measured(model, (models.random_inputs(model), None), structure="full", biases="separate")


def test_sampled_targets_of_blocks_and_of_single_examples_are_equal():
    """The diagonal block of a dense layer is measured by a factor, that of a table by examples."""
    model = models.embedding()
    inputs = models.random_inputs(model, batch=EXAMPLES)
    options = {"fisher": "sampled", "seed": 4}
    diagonal = measured(model, (inputs, None), structure="diagonal", **options)
    full = measured(model, (inputs, None), structure="full", **options)
    assert_near(np.diag(dense(diagonal)), np.diag(dense(full)), SINGLE)


def test_jacobians_of_several_losses_are_refused():
    model = models.two_outputs()
    inputs = models.random_inputs(model, batch=3)
    outputs = [entry.name for entry in model.graph.output]
    curvature = measured(model, (inputs, None), ["normal", "normal"], output=outputs)
    with pytest.raises(ke.UnsupportedError, match="one value that the loss reads"):
        next(curvature.example_jacobians(inputs))
