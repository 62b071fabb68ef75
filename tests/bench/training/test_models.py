"""The models of the suite ``train``: parameters, initial weights and outputs."""

from itertools import pairwise

import numpy as np
import pytest
from scipy.special import erf, expit

import kfac_engine as ke
from kfac_engine.bench.training import models
from kfac_engine.bench.training.table_data import TABLES
from kfac_engine.bench.training.tasks import OF_TEXT, TASKS

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
    "llama": 96 * 96 + 3 * (2 * 96 * 96 + 2 * 96 * 48 + 3 * 96 * 256 + 2 * 96) + 96,
    "gpt": (
        96 * 96 + 3 * (2 * dense(96, 96) + 2 * dense(96, 48) + dense(96, 256, 96) + 4 * 96) + 192
    ),
    "vit": (
        dense(49, 64) + 16 * 64 + 3 * (4 * dense(64, 64) + dense(64, 128, 64) + 4 * 64) + 2 * 64
    )
    + dense(64, 10),
    "mobilenet": 9 * 16 + 32 + dense(64, 10) + sum(
        a * 4 * a + 9 * 4 * a + 4 * a * b + 2 * (8 * a + b)
        for a, b in ((16, 16), (16, 32), (32, 32), (32, 64))
    ),
    "gru": 96 * 64 + 3 * 128 * (64 + 128 + 2) + dense(128, 96),
    "unet": (
        dense(9, 16) + dense(9 * 16, 32) + dense(9 * 32, 32) + dense(9 * 32, 16) + dense(9 * 16, 1)
    )
    + 4 * 32 * 16 + 16 + 2 * (16 + 32 + 32 + 16),
    **{
        f"{name}{suffix}": dense(table.columns, 64, 32, table.outputs)
        for name, table in TABLES.items()
        for suffix in ("", "-raw")
    },
}  # fmt: skip


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


def states_of_gru(w, x):
    """The equations of torch.nn.GRU; gates in the order of ONNX: update, reset, new."""
    W, R = (np.split(w[f"gru.{name}"][0], 3) for name in ("input", "state"))
    b, c = (np.split(part, 3) for part in np.split(w["gru.bias"][0], 2))
    h = np.zeros((len(x), w["gru.state"].shape[-1]))
    for row in x.transpose(1, 0, 2):
        z, r = (expit(row @ W[i].T + b[i] + h @ R[i].T + c[i]) for i in (0, 1))
        n = np.tanh(row @ W[2].T + b[2] + r * (h @ R[2].T + c[2]))
        h = (1 - z) * n + z * h
        yield h


def run_recurrent(w, x):
    *_, last = states_of_gru(w, x)
    return linear(w, "head", last)


def run_character_gru(w, x):
    return product(w, "head", np.stack(list(states_of_gru(w, w["symbols"][x])), axis=1))


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


def swish(x):
    return x * expit(x)


def gelu(x):
    return x * (1 + erf(x / np.sqrt(2))) / 2


def softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def rotated(x):
    """Rotate feature j and feature j + d/2 of position t by the angle t / 10000^(2j/d)."""
    length, d = x.shape[-2:]
    pairs = x[..., : d // 2] + 1j * x[..., d // 2 :]
    pairs = pairs * np.exp(1j * np.outer(np.arange(length), 1e4 ** (-2 * np.arange(d // 2) / d)))
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def run_llama(w, x, classic):
    def layer(name, x):
        y = x @ w[f"{name}.weight"]
        return y + w[f"{name}.bias"] if classic else y

    def norm(x):
        return layer_norm(x) if classic else x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    x = w["symbols"][x]
    length = x.shape[1]
    future = np.triu(np.full((length, length), -np.inf), 1)
    for i in range(3):
        y, heads = norm(x), []
        q, k, v = (layer(f"{i}.attention.{part}", y) for part in "qkv")
        for head in range(4):
            own, shared = (
                slice(24 * head, 24 * head + 24),
                slice(24 * (head // 2), 24 * (head // 2) + 24),
            )
            scores = rotated(q[..., own]) @ rotated(k[..., shared]).transpose(0, 2, 1)
            heads.append(softmax(scores / np.sqrt(24) + future) @ v[..., shared])
        x = x + layer(f"{i}.attention.out", np.concatenate(heads, axis=-1))
        y = norm(x)
        y = (
            gelu(layer(f"{i}.up", y))
            if classic
            else swish(layer(f"{i}.gate", y)) * layer(f"{i}.up", y)
        )
        x = x + layer(f"{i}.down", y)
    return norm(x) @ w["symbols"].T


def run_vit(w, x):
    patch = w["patches.weight"].shape[-1]
    n = len(x)
    cut = x[:, 0].reshape(n, 4, patch, 4, patch).transpose(0, 1, 3, 2, 4).reshape(n, 16, -1)
    x = cut @ w["patches.weight"].reshape(64, -1).T + w["patches.bias"] + w["positions"]
    for i in range(3):
        y = layer_norm(x)
        q, k, v = (product(w, f"{i}.{part}", y) for part in "qkv")
        heads = [slice(16 * h, 16 * h + 16) for h in range(4)]
        mixed = [softmax(q[..., h] @ k[..., h].transpose(0, 2, 1) / 4) @ v[..., h] for h in heads]
        x = x + product(w, f"{i}.out", np.concatenate(mixed, axis=-1))
        x = x + product(w, f"{i}.down", gelu(product(w, f"{i}.up", layer_norm(x))))
    return linear(w, "head", layer_norm(x).mean(1))


def depthwise(w, name, x, stride):
    n, c = x.shape[:2]
    cut = patches(x, 3, stride)
    cut = cut.reshape(n, c, 9, *cut.shape[2:])
    return np.einsum("ck,nckhw->nchw", w[f"{name}.weight"].reshape(c, 9), cut)


def run_mobilenet(w, x):
    x = relu(batch_norm(conv(w, "stem", x, 2)))
    for i, (stride, adds) in enumerate(((1, True), (2, False), (1, True), (2, False))):
        y = relu(batch_norm(conv(w, f"{i}.expand", x)))
        y = relu(batch_norm(depthwise(w, f"{i}.depth", y, stride)))
        y = batch_norm(conv(w, f"{i}.project", y))
        x = x + y if adds else y
    return linear(w, "head", x.mean((2, 3)))


def group_norm(x):
    n, c, h, width = x.shape
    x = x.reshape(n, 4, -1)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x.reshape(n, c, h, width)


def run_unet(w, x):
    def block(name, x, stride=1):
        return swish(group_norm(conv(w, name, x, stride)))

    fine = block("fine", x)
    x = block("middle", block("coarse", fine, 2))
    up = np.einsum("nchw,coab->nohawb", x, w["up.weight"])
    up = up.reshape(fine.shape) + w["up.bias"][:, None, None]
    y = conv(w, "last", block("merged", np.concatenate([fine, up], axis=1)))
    return y.reshape(len(y), -1)


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
    "llama": (lambda w, x: run_llama(w, x, classic=False), (64,)),
    "gpt": (lambda w, x: run_llama(w, x, classic=True), (64,)),
    "vit": (run_vit, (1, 12, 12)),
    "mobilenet": (run_mobilenet, (1, 12, 12)),
    "gru": (run_character_gru, (64,)),
    "unet": (run_unet, (1, 12, 12)),
    **{
        f"{name}{suffix}": (lambda w, x: run_perceptron(w, x, relu), (table.columns,))
        for name, table in TABLES.items()
        for suffix in ("", "-raw")
    },
}


@pytest.mark.parametrize("name", TASKS)
def test_a_model_computes_the_function_of_its_name(name):
    task, (forward, shape) = TASKS[name], RUNS[name]
    model = task.model(12, 3)
    rng = np.random.default_rng(5)
    x = rng.random((3, *shape), np.float32)
    if name in OF_TEXT:
        x = rng.integers(0, 96, (3, *shape))
    engine = ke.Engine.from_onnx(model.data, loss=task.loss, threads=1)
    output = engine.objective.inputs[0]
    weights = {key: value.astype(float) for key, value in model.weights.items()}
    wide = x if name in OF_TEXT else x.astype(float)
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
