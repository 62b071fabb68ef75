"""Pruned weights are zero, the choice is that of the saliencies, and other weights make up."""

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from tests.analysis.pruning.linear import linear_curvature, vector
from tests.comparing import assert_arrays_equal

DAMPING = 0.05


def zeros(parameters):
    return np.flatnonzero(vector(parameters) == 0)


@pytest.mark.parametrize("method", ["obd", "magnitude", "obs"])
def test_weights_with_the_smallest_saliencies_become_zero(method):
    curvature, _, _ = linear_curvature()
    scores = vector(ke.saliency(curvature, method, DAMPING))[:12]  # b has one axis
    pruned = ke.prune(curvature, count=5, method=method, damping=DAMPING)
    assert set(zeros(pruned)) == set(np.argsort(scores)[:5])


@pytest.mark.parametrize("count", [1, 5, 11])
def test_brain_surgeon_moves_the_other_weights_to_the_minimum(count):
    curvature, theta, F = linear_curvature()
    damped = F + DAMPING * np.eye(len(F))
    pruned = vector(ke.prune(curvature, count=count, method="obs", damping=DAMPING))
    zero = pruned == 0
    assert zero.sum() == count
    # The equations of the minimum: the gradient of the quadratic model vanishes elsewhere.
    free = ~zero
    step = np.where(zero, -theta, 0.0)
    step[free] = np.linalg.solve(
        damped[np.ix_(free, free)], damped[np.ix_(free, zero)] @ theta[zero]
    )
    # The relative residual of conjugate gradients is 1e-8, times the condition of about 50.
    np.testing.assert_allclose(pruned, theta + step, atol=1e-6)


def test_pattern_of_a_convolution_has_channels_of_one_pixel():
    images, labels = digits()
    curvature = ke.curvature(
        demo_model("cnn"), ({"image": images[:20]}, labels[:20]), loss="categorical",
        fisher="sampled",
    )  # fmt: skip
    pruned = ke.prune(curvature, pattern="2:4", parameters=["conv2.weight"])
    filters = pruned["conv2.weight"]  # (32, 16, 3, 3)
    of_pixels = filters.transpose(0, 2, 3, 1).reshape(-1, 4)
    assert np.all(np.count_nonzero(of_pixels, axis=1) == 2)
    assert np.all(pruned["conv3.weight"])


def test_parameters_are_pruned_by_pattern_of_names():
    curvature, theta, _ = linear_curvature()
    pruned = ke.prune(curvature, count=2, parameters=["b"])
    np.testing.assert_array_equal(pruned["W"].ravel(), theta[:12])
    assert np.count_nonzero(pruned["b"] == 0) == 2


# Spellings of one layer: nodes, and its parameters from W (inputs, outputs) and b.
LAYOUTS = {
    "inputs first": ("logits = Gemm (x, W, b)", lambda W, b: {"W": W, "b": b}),
    "outputs first": ("logits = Gemm <transB = 1> (x, W, b)", lambda W, b: {"W": W.T, "b": b}),
    "a bias with two axes": (
        "h = MatMul (x, W) logits = Add (h, b)",
        lambda W, b: {"W": W, "b": b[None]},
    ),
    "one vector": (
        """
        first = Constant <value_ints = [0]> () middle = Constant <value_ints = [12]> ()
        last = Constant <value_ints = [15]> () shape = Constant <value_ints = [4, 3]> ()
        flat = Slice (V, first, middle) W = Reshape (flat, shape) b = Slice (V, middle, last)
        logits = Gemm (x, W, b)
        """,
        lambda W, b: {"V": np.concatenate([W.ravel(), b])},
    ),
}


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diagonal", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_zeros_are_inputs_of_each_output_in_every_layout_and_structure(layout, structure):
    nodes, parameters = LAYOUTS[layout]
    generator = np.random.default_rng(0)
    # The bias is smaller than all weights.
    W, b = generator.normal(size=(4, 3)), 1e-3 * generator.normal(size=3)
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        linear (double[N, 4] x) => (double[N, 3] logits) {{ {nodes} }}"""
    )
    for name, array in parameters(W, b).items():
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.ascontiguousarray(array), name)
        )
    data = ({"x": generator.normal(size=(9, 4))}, None)
    curvature = ke.curvature(model, data, loss="categorical", structure=structure)
    by_pattern, by_count = W.copy(), W.copy()
    np.put_along_axis(by_pattern, np.argsort(abs(W), axis=0)[:2], 0.0, axis=0)
    by_count.flat[np.argsort(abs(W), axis=None)[:5]] = 0.0
    for options, expected in (({"pattern": "2:4"}, by_pattern), ({"count": 5}, by_count)):
        pruned = ke.prune(curvature, method="magnitude", **options)
        assert_arrays_equal(pruned, parameters(expected, b))


def test_all_weights_of_a_block_can_be_pruned():
    curvature, _, _ = linear_curvature()
    pruned = ke.prune(curvature, count=15, method="obs", damping=DAMPING, parameters=["W", "b"])
    assert not vector(pruned).any()


@pytest.mark.parametrize("method", ["obd", "obs"])
def test_pruning_by_curvature_keeps_the_accuracy_that_magnitude_loses(method, tmp_path):
    images, labels = digits()
    train, held_out = slice(0, 1400), ({"image": images[1400:]}, labels[1400:])
    history = ke.fit(demo_model("cnn"), (images[train], labels[train]), steps=60)
    engine = history.engine
    engine.export(tmp_path / "trained.onnx")
    batches = [({"image": images[i : i + 200]}, None) for i in range(0, 1400, 200)]
    curvature = ke.curvature(tmp_path / "trained.onnx", batches, loss="categorical")

    def accuracy(pruned):
        engine.set_parameters(pruned)
        return engine.evaluate(held_out)["accuracy"]

    by_curvature = accuracy(ke.prune(curvature, sparsity=0.75, method=method, damping=1e-3))
    by_magnitude = accuracy(ke.prune(curvature, sparsity=0.75, method="magnitude"))
    # Of 397 digits: 0.79 to 0.9 by the order in which a processor adds.
    assert by_curvature > 0.7
    assert by_magnitude < by_curvature - 0.1
