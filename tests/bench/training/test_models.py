"""The models of the suite ``train``: parameters, initial weights and outputs."""

from itertools import pairwise

import numpy as np
import pytest
from scipy.special import erf, expit

import kfac_engine as ke
from kfac_engine.bench.training import models
from kfac_engine.bench.training.tasks import TASKS

# Float32 sums of up to 800 terms; outputs are of order 1.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def dense(*widths):
    return sum((a + 1) * b for a, b in pairwise(widths))


# Parameters for images of 28 × 28, counted by layers: filters, biases, scales and shifts.
COUNTS = {
    "autoencoder": dense(784, 400, 200, 100, 30, 100, 200, 400, 784),
    "resnet": (
        (9 * 16 + 2 * 16)
        + (2 * 9 * 16 * 16 + 4 * 16)
        + (9 * 16 * 32 + 9 * 32 * 32 + 16 * 32 + 4 * 32)
        + (9 * 32 * 64 + 9 * 64 * 64 + 32 * 64 + 4 * 64)
        + dense(64, 10)
    ),
    "transformer": (
        96 * 96 + 64 * 96 + 2 * (4 * dense(96, 96) + dense(96, 384, 96) + 4 * 96) + 2 * 96
    )
    + dense(96, 96),
    "mlp": dense(784, 512, 256, 10),
    "lenet": dense(25, 8) + dense(25 * 8, 16) + dense(784, 64, 10),
    "autoencoder-relu": dense(784, 400, 200, 100, 30, 100, 200, 400, 784),
    "digits": dense(64, 100, 50, 10),
    "cnn": dense(9, 16) + dense(9 * 16, 32) + dense(9 * 32, 32) + dense(32 * 49, 64, 10),
    "restorer": dense(25, 12) + dense(9 * 12, 12) + dense(25 * 12, 1),
    "function": dense(8, 64, 64, 4),
    "recurrent": 3 * 64 * (28 + 64 + 2) + dense(64, 10),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_engine_trains_every_parameter_of_a_model(name):
    task = TASKS[name]
    model = task.model(28, 0)
    engine = ke.Engine.from_onnx(model.data, loss=task.loss, threads=1)
    assert sum(value.size for value in engine.parameters.values()) == COUNTS[name]
    assert set(engine.parameters) == set(model.weights)


def patches(x, kernel, stride):
    """``(n, c, h, w)`` to ``(n, c k k, h', w')`` with ``k // 2`` zeros of padding."""
    pad = kernel // 2
    wide = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(wide, (kernel, kernel), (2, 3))
    windows = windows[:, :, ::stride, ::stride]
    n, c, h, w = windows.shape[:4]
    return windows.transpose(0, 1, 4, 5, 2, 3).reshape(n, c * kernel**2, h, w)


def conv(w, name, x, stride=1):
    weight = w[f"{name}.weight"]
    flat = weight.reshape(len(weight), -1)
    y = np.einsum("oc,nchw->nohw", flat, patches(x, weight.shape[-1], stride))
    bias = w.get(f"{name}.bias")
    return y if bias is None else y + bias[:, None, None]


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def product(w, name, x):
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def batch_norm(x):
    """With the initial scale 1 and shift 0."""
    mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5)


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def relu(x):
    return np.maximum(x, 0)


def run_autoencoder(w, x, activation):
    for i in range(8):
        x = linear(w, f"{i}", x)
        x = x if i in {3, 7} else activation(x)
    return x


def run_resnet(w, x):
    x = relu(batch_norm(conv(w, "stem", x, 2)))
    for i, stride in enumerate((1, 2, 2)):
        y = relu(batch_norm(conv(w, f"{i}.0", x, stride)))
        y = batch_norm(conv(w, f"{i}.1", y))
        x = relu(y + (conv(w, f"{i}.short", x, stride) if i else x))
    return linear(w, "head", x.mean((2, 3)))


def run_lenet(w, x):
    x = np.tanh(conv(w, "conv1", np.tanh(conv(w, "conv0", x, 2)), 2))
    return linear(w, "head", np.tanh(linear(w, "dense", x.reshape(len(x), -1))))


def run_cnn(w, x):
    for i, stride in enumerate((2, 2, 1)):
        x = relu(conv(w, f"conv{i}", x, stride))
    return linear(w, "head", relu(linear(w, "dense", x.reshape(len(x), -1))))


def run_restorer(w, x):
    y = conv(w, "conv2", relu(conv(w, "conv1", relu(conv(w, "conv0", x)))))
    return y.reshape(len(y), -1)


def run_recurrent(w, x):
    """The equations of torch.nn.GRU; gates in the order of ONNX: update, reset, new."""
    W, R = (np.split(w[f"gru.{name}"][0], 3) for name in ("input", "state"))
    b, c = (np.split(part, 3) for part in np.split(w["gru.bias"][0], 2))
    h = np.zeros((len(x), models.RECURRENT_WIDTH))
    for row in x.transpose(1, 0, 2):
        z, r = (expit(row @ W[i].T + b[i] + h @ R[i].T + c[i]) for i in (0, 1))
        n = np.tanh(row @ W[2].T + b[2] + r * (h @ R[2].T + c[2]))
        h = (1 - z) * n + z * h
    return linear(w, "head", h)


def attention(w, name, x, read):
    n, length, width = x.shape
    q, k, v = (
        product(w, f"{name}.{part}", x).reshape(n, length, 4, width // 4).transpose(0, 2, 1, 3)
        for part in "qkv"
    )
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(width // 4)
    seen = np.tril(np.ones((length, length), bool)) & read[:, None, None]
    scores = np.where(seen, scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return product(w, f"{name}.out", (shares @ v).transpose(0, 2, 1, 3).reshape(x.shape))


def run_transformer(w, x, read=None):
    read = np.ones(x.shape, bool) if read is None else read
    x = w["symbols"][x] + w["positions"][: x.shape[1]]
    for i in range(2):
        x = x + attention(w, f"{i}.attention", layer_norm(x), read)
        y = product(w, f"{i}.up", layer_norm(x))
        x = x + product(w, f"{i}.down", y * (1 + erf(y / np.sqrt(2))) / 2)
    return product(w, "head", layer_norm(x))


def run_perceptron(w, x, activation):
    count = sum(name.endswith("weight") for name in w)
    for i in range(count - 1):
        x = activation(linear(w, f"{i}", x))
    return linear(w, f"{count - 1}", x)


# The forward pass of each task in NumPy, and the shape of an example for images of 12 × 12.
RUNS = {
    "autoencoder": (lambda w, x: run_autoencoder(w, x, np.tanh), (144,)),
    "resnet": (run_resnet, (1, 12, 12)),
    "transformer": (run_transformer, (64,)),
    "mlp": (lambda w, x: run_perceptron(w, x, relu), (144,)),
    "lenet": (run_lenet, (1, 12, 12)),
    "autoencoder-relu": (lambda w, x: run_autoencoder(w, x, relu), (144,)),
    "digits": (lambda w, x: run_perceptron(w, x, np.tanh), (64,)),
    "cnn": (run_cnn, (1, 12, 12)),
    "restorer": (run_restorer, (1, 12, 12)),
    "function": (lambda w, x: run_perceptron(w, x, np.tanh), (8,)),
    "recurrent": (run_recurrent, (12, 12)),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_model_computes_the_function_of_its_name(name):
    task, (forward, shape) = TASKS[name], RUNS[name]
    model = task.model(12, 3)
    rng = np.random.default_rng(5)
    x = rng.random((3, *shape), np.float32)
    if name == "transformer":
        x = rng.integers(0, 96, (3, *shape))
    engine = ke.Engine.from_onnx(model.data, loss=task.loss, threads=1)
    output = engine.objective.inputs[0]
    weights = {key: value.astype(float) for key, value in model.weights.items()}
    wide = x if name == "transformer" else x.astype(float)
    np.testing.assert_allclose(engine.trace({"x": x})[output], forward(weights, wide), **TOLERANCE)


@pytest.mark.parametrize("length", [5, 64])
def test_a_transformer_of_texts_with_padding_reads_no_padding(length):
    model, rng = models.transformer(3, padded=True), np.random.default_rng(5)
    x, read = rng.integers(0, 96, (3, length)), rng.random((3, length)) < 0.7
    read[:, 0], read[:, -1] = True, False  # each position reads the first one
    engine = ke.Engine.from_onnx(model.data, loss="categorical", threads=1)
    weights = {key: value.astype(float) for key, value in model.weights.items()}
    assert all(
        (value == models.transformer(3).weights[key]).all() for key, value in weights.items()
    )

    def outputs(x):
        return engine.trace({"x": x, "read": read})[engine.objective.inputs[0]]

    np.testing.assert_allclose(outputs(x), run_transformer(weights, x, read), **TOLERANCE)
    others = np.where(read, x, rng.integers(0, 96, x.shape))
    np.testing.assert_array_equal(outputs(others)[read], outputs(x)[read])


@pytest.mark.parametrize("name", TASKS)
def test_initial_weights_depend_on_the_seed_alone(name):
    first, again, other = (TASKS[name].model(8, seed).data for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_initial_weights_have_the_deviations_of_their_rules():
    """Bounds of five standard errors of a deviation of that many numbers."""
    tanh, ramp = (models.autoencoder(28, kind, 0).weights for kind in ("Tanh", "Relu"))
    relative = 5 / np.sqrt(2 * 400 * 784)
    assert tanh["0.weight"].std() == pytest.approx(np.sqrt(2 / (400 + 784)), rel=relative)
    assert ramp["0.weight"].std() == pytest.approx(np.sqrt(2 / 784), rel=relative)
    filters = models.cnn(28, 0).weights["conv1.weight"]
    assert abs(filters).max() <= 144**-0.5
    assert filters.std() == pytest.approx((3 * 144) ** -0.5, rel=5 / np.sqrt(2 * filters.size))
