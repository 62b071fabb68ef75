"""A two-layer softmax classifier in NumPy with its derivatives, and the same model in ONNX."""

import numpy as np

import kfac_engine as ke
from tests.models import parsed

D, H, K, N = 5, 4, 3, 12  # inputs, hidden units, classes, examples


def weights(dtype="float64", seed=0):
    """Parameters by name: dense weights ``(out, in)``, as ``Gemm`` with ``transB`` takes them."""
    rng = np.random.default_rng(seed)
    shapes = {"w1": (H, D), "b1": (H,), "w2": (K, H), "b2": (K,)}
    return {name: (0.7 * rng.standard_normal(s)).astype(dtype) for name, s in shapes.items()}


def batch(seed=0, dtype="float64", n=N):
    rng = np.random.default_rng(100 + seed)
    return rng.standard_normal((n, D)).astype(dtype), rng.integers(0, K, n)


def model(dtype="float64", seed=0, examples="batch"):
    element = {"float64": "double", "float32": "float"}[dtype]
    return parsed(
        f"""net ({element}[{examples},{D}] x) => ({element}[{examples},{K}] z) {{
          s1 = Gemm <transB = 1> (x, w1, b1)  h = Tanh (s1)  z = Gemm <transB = 1> (h, w2, b2)
        }}""",
        weights(dtype, seed),
    )


def engine(dtype="float64", **options):
    return ke.Engine.from_onnx(model(dtype), loss="categorical", backend="numpy", **options)


def forward(theta, x):
    """Hidden values and logits."""
    h = np.tanh(x @ theta["w1"].T + theta["b1"])
    return h, h @ theta["w2"].T + theta["b2"]


def loss(theta, x, y):
    """Mean cross-entropy."""
    z = forward(theta, x)[1]
    z = z - z.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]))


def probabilities(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def gradients(theta, x, y):
    """Gradient of ``loss`` by name."""
    h, z = forward(theta, x)
    dz = (probabilities(z) - np.eye(K)[y]) / len(y)
    ds = (dz @ theta["w2"]) * (1 - h**2)
    return {"w1": ds.T @ x, "b1": ds.sum(0), "w2": dz.T @ h, "b2": dz.sum(0)}
