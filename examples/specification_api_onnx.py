"""K-FAC through ONNX, layer by layer.

The model is that of `specification_api.py`, as an ONNX graph; its derivatives come from the
engine. Layers are registered by the names of values in the graph. The numbers are the same.
"""

import numpy as np
from onnx import helper, numpy_helper

import kfac_engine as ke

N, D, H, K = 64, 6, 5, 3  # examples, inputs, hidden units, classes
DAMPING = 1e-2

# %% The data and the weights.
rng = np.random.default_rng(0)
inputs = rng.standard_normal((3, N, D))  # three batches
targets = rng.integers(0, K, (3, N))
parameters = {
    "w1": 0.5 * rng.standard_normal((D, H)),
    "b1": np.zeros(H),
    "w2": 0.5 * rng.standard_normal((H, K)),
    "b2": np.zeros(K),
}

# %% The model, as an exporter would write it.
double = helper.np_dtype_to_tensor_dtype(np.dtype(np.float64))
graph = helper.make_graph(
    [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["s"]),
        helper.make_node("Tanh", ["s"], ["a"]),
        helper.make_node("Gemm", ["a", "w2", "b2"], ["logits"]),
    ],
    "two_layers",
    [helper.make_tensor_value_info("x", double, ["batch", D])],
    [helper.make_tensor_value_info("logits", double, ["batch", K])],
    [numpy_helper.from_array(array, name) for name, array in parameters.items()],
)
opset = [helper.make_opsetid("", 18)]
model = ke.load_model(helper.make_model(graph, opset_imports=opset, ir_version=10))


def run(x, y):
    """Evaluate the model on a batch."""
    return model.run({"x": x}, {"targets": y})


# %% Layers and loss, by the names of the graph; shapes and uses are those of the graph.
collection = ke.LayerCollection(model)
collection.register_fully_connected(("w1", "b1"), inputs="x", outputs="s")
collection.register_fully_connected(("w2", "b2"), inputs="a", outputs="logits")
collection.register_categorical_predictive_distribution("logits", targets="targets")

# %% The estimator: statistics of three batches with sampled targets, then the inverses.
estimator = ke.FisherEstimator(
    list(parameters),
    cov_ema_decay=0.95,
    damping=DAMPING,
    layer_collection=collection,
    exps=(-1, -0.5),
    estimation_mode="gradients",
    compute_cholesky_inverse=True,
)
for x, y in zip(inputs, targets, strict=True):
    estimator.update_covariances(run(x, y))
estimator.update_inverses()

# %% The gradient of the mean loss on the last batch, and what K-FAC makes of it.
trace = run(inputs[-1], targets[-1])
loss = collection.total_loss()(trace) / N
(registered,) = collection.losses
cotangent = registered.gradient(trace)["logits"] / N
gradients = trace.vjp({"logits": cotangent}, list(parameters))

pairs = [(gradients[name], name) for name in parameters]
natural = {name: vector for vector, name in estimator.multiply_inverse(pairs)}
rooted = {name: vector for vector, name in estimator.multiply_matpower(-0.5, pairs)}

# %% A sample from N(0, F⁻¹): white noise times the transposed root of the inverse.
noise = np.random.default_rng(1)
white = [(noise.standard_normal(array.shape), name) for name, array in parameters.items()]
sample = {v: a for a, v in estimator.multiply_cholesky_inverse(white, transpose=True)}

# %% The whole network at once, without a matrix: the exact Fisher along the natural gradient.
computer = ke.CurvatureMatrixVectorProductComputer(collection, list(parameters), trace)
direction = [natural[name] for name in parameters]
curvature = sum(
    float((v * Fv).sum())
    for v, Fv in zip(direction, computer.multiply_fisher(direction), strict=True)
)
print(f"curvature along the natural gradient {curvature / N:.6f}")

# %% What the script shows; its sibling prints the same.
print(f"loss {loss:.6f}")
for name in parameters:
    print(f"{name}  |gradient| {np.linalg.norm(gradients[name]):.6f}"
          f"  |natural gradient| {np.linalg.norm(natural[name]):.6f}"
          f"  |sample| {np.linalg.norm(sample[name]):.6f}")  # fmt: skip
