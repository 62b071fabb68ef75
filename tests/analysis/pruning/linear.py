"""A linear classifier whose curvature has a closed form: ``A ⊗ G`` with moments in NumPy."""

import numpy as np
import onnx

import kfac_engine as ke

EXAMPLES, INPUTS, CLASSES = 40, 4, 3
_TEXT = """<ir_version: 10, opset_import: ["" : 20]>
linear (double[N, 4] x) => (double[N, 3] logits)
<double[4, 3] W = {0,0,0,0,0,0,0,0,0,0,0,0}, double[3] b = {0,0,0}> {
    logits = Gemm (x, W, b)
}"""


def linear_model(seed=0):
    """The model with random weights, and its weights."""
    generator = np.random.default_rng(seed)
    model = onnx.parser.parse_model(_TEXT)
    weights = {"W": generator.normal(size=(4, 3)), "b": generator.normal(size=3)}
    del model.graph.initializer[:]
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model, weights


def linear_curvature(seed=0, **options):
    """The curvature, the weights as a vector (W row by row, then b), and its matrix ``A ⊗ G``."""
    model, weights = linear_model(seed)
    x = np.random.default_rng(10 + seed).normal(size=(EXAMPLES, INPUTS))
    curvature = ke.curvature(model, ({"x": x}, None), loss="categorical", **options)
    a = np.hstack([x, np.ones((EXAMPLES, 1))])
    exponentials = np.exp(x @ weights["W"] + weights["b"])
    p = exponentials / exponentials.sum(axis=1, keepdims=True)
    output = np.diag(p.mean(axis=0)) - p.T @ p / EXAMPLES
    theta = np.concatenate([weights["W"].ravel(), weights["b"]])
    return curvature, theta, np.kron(a.T @ a / EXAMPLES, output)


def vector(parameters):
    """Parameters by name as one vector."""
    return np.concatenate([parameters["W"].ravel(), parameters["b"]])
