"""K-FAC from named arrays, without any ONNX file.

The model is a few lines of NumPy: two dense layers with a tanh between them, and a softmax. All
that the estimator asks of it is values by name and products with its transposed Jacobian.
`specification_api_onnx.py` does the same with a model from ONNX and gives the same numbers.
"""

import numpy as np

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


# %% One evaluation of the model: what a framework would record, and its backward pass.
class Trace(dict):
    """Values of a batch by name, with derivatives written by hand."""

    def vjp(self, cotangents, wrt):
        """Gradients of ``Σ ⟨cotangent, value⟩`` with respect to the values of ``wrt``."""
        dz = cotangents["logits"]
        ds = (dz @ self["w2"].T) * (1 - self["a"] ** 2)
        known = {
            "logits": dz, "w2": self["a"].T @ dz, "b2": dz.sum(0),
            "s": ds, "w1": self["x"].T @ ds, "b1": ds.sum(0),
        }  # fmt: skip
        return {name: known[name] for name in wrt}


def run(x, y):
    """Evaluate the model on a batch."""
    s = x @ parameters["w1"] + parameters["b1"]
    a = np.tanh(s)
    logits = a @ parameters["w2"] + parameters["b2"]
    return Trace(parameters, x=x, s=s, a=a, logits=logits, targets=y)


# %% Layers and loss, by the names that the trace answers to.
collection = ke.LayerCollection(graph={name: array.shape for name, array in parameters.items()})
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
p = np.exp(trace["logits"] - trace["logits"].max(1, keepdims=True))
p /= p.sum(1, keepdims=True)
gradients = trace.vjp({"logits": (p - np.eye(K)[targets[-1]]) / N}, list(parameters))

pairs = [(gradients[name], name) for name in parameters]
natural = {name: vector for vector, name in estimator.multiply_inverse(pairs)}
rooted = {name: vector for vector, name in estimator.multiply_matpower(-0.5, pairs)}

# %% A sample from N(0, F⁻¹): white noise times the transposed root of the inverse.
noise = np.random.default_rng(1)
white = [(noise.standard_normal(array.shape), name) for name, array in parameters.items()]
sample = {v: a for a, v in estimator.multiply_cholesky_inverse(white, transpose=True)}

# %% One block by itself: its matrix is Kronecker-factored, and it undoes its inverse.
block = collection.fisher_blocks["w1", "b1"]
A, G = block.input_factor.cov, block.output_factor.cov
assert np.allclose(block.full_fisher_block(), np.kron(A, G))
back = block.multiply(block.multiply_inverse((gradients["w1"], gradients["b1"])))
assert np.allclose(back[0], gradients["w1"])

# %% What the script shows, and what its sibling must repeat.
print(f"loss {loss:.6f}")
for name in parameters:
    print(f"{name}  |gradient| {np.linalg.norm(gradients[name]):.6f}"
          f"  |natural gradient| {np.linalg.norm(natural[name]):.6f}"
          f"  |sample| {np.linalg.norm(sample[name]):.6f}")  # fmt: skip
