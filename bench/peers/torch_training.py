"""Adam in PyTorch on the tasks of the suite ``train``, with the weights of the ONNX files."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch.nn import functional as F

from kfac_engine._types import Array
from kfac_engine.bench.training import models as sizes
from kfac_engine.bench.training.layers import INPUT, Model
from kfac_engine.errors import BackendError

Weights: TypeAlias = Mapping[str, torch.Tensor]
Forward: TypeAlias = Callable[[Weights, torch.Tensor], torch.Tensor]
Batch: TypeAlias = tuple[Mapping[str, Array], Array]


def _linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def _product(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def _conv(w: Weights, name: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
    weight = w[f"{name}.weight"]
    return F.conv2d(x, weight, w.get(f"{name}.bias"), stride, weight.shape[-1] // 2)


def _batch_norm(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, w[f"{name}.weight"], w[f"{name}.bias"], training=True)


def _layer_norm(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def _autoencoder(w: Weights, x: torch.Tensor) -> torch.Tensor:
    count = 2 * len(sizes.CODES)
    for i in range(count):
        x = _linear(w, f"{i}", x)
        # The code and the output have no activation.
        x = x if (i + 1) % len(sizes.CODES) == 0 else torch.tanh(x)
    return x


def _perceptron(w: Weights, x: torch.Tensor) -> torch.Tensor:
    return _linear(w, "2", F.relu(_linear(w, "1", F.relu(_linear(w, "0", x)))))


def _resnet(w: Weights, x: torch.Tensor) -> torch.Tensor:
    x = F.relu(_batch_norm(w, "stem.norm", _conv(w, "stem", x, 2)))
    for i, (_, stride) in enumerate(sizes.RESNET_BLOCKS):
        y = F.relu(_batch_norm(w, f"{i}.0.norm", _conv(w, f"{i}.0", x, stride)))
        y = _batch_norm(w, f"{i}.1.norm", _conv(w, f"{i}.1", y))
        x = F.relu(y + (_conv(w, f"{i}.short", x, stride) if f"{i}.short.weight" in w else x))
    return _linear(w, "head", x.mean((2, 3)))


def _lenet(w: Weights, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(_conv(w, "conv1", torch.tanh(_conv(w, "conv0", x, 2)), 2))
    return _linear(w, "head", torch.tanh(_linear(w, "dense", x.flatten(1))))


def _transformer(w: Weights, x: torch.Tensor) -> torch.Tensor:
    x = w["symbols"][x] + w["positions"]
    for i in range(sizes.LAYERS):
        x = x + _attention(w, f"{i}.attention", _layer_norm(w, f"{i}.norm0", x))
        y = F.gelu(_product(w, f"{i}.up", _layer_norm(w, f"{i}.norm1", x)))
        x = x + _product(w, f"{i}.down", y)
    return _product(w, "head", _layer_norm(w, "norm", x))


def _attention(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        _product(w, f"{name}.{part}", x).unflatten(2, (sizes.HEADS, -1)).transpose(1, 2)
        for part in "qkv"
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return _product(w, f"{name}.out", y.transpose(1, 2).flatten(2))


FORWARD: Mapping[str, Forward] = {
    "autoencoder": _autoencoder,
    "mlp": _perceptron,
    "resnet": _resnet,
    "lenet": _lenet,
    "transformer": _transformer,
}


class TorchTrainer:
    """A model in training by Adam."""

    def __init__(self, forward: Forward, weights: Mapping[str, Array], rate: float) -> None:
        torch.set_num_threads(1)
        self._forward, self._rate = forward, rate
        self._weights = {n: torch.tensor(w, requires_grad=True) for n, w in weights.items()}
        self._adam = torch.optim.Adam(list(self._weights.values()), lr=rate)

    def step(self, inputs: Mapping[str, Array], targets: Array, scale: float) -> float:
        """Change the parameters by one batch; return the loss before the change."""
        for group in self._adam.param_groups:
            group["lr"] = self._rate * scale
        loss = self.gradients(inputs, targets)
        self._adam.step()
        return loss

    def warm_up(self, inputs: Mapping[str, Array], targets: Array) -> None:
        """Compute the gradients of a batch without a change."""
        self.gradients(inputs, targets)

    def gradients(self, inputs: Mapping[str, Array], targets: Array) -> float:
        """Compute the gradients of a batch; return the loss."""
        self._adam.zero_grad(set_to_none=True)
        loss, _ = self._loss(inputs, targets)
        loss.backward()
        return float(loss.detach())

    def gradient(self, name: str) -> Array:
        """Return the gradient of a parameter, as the last call computed it."""
        return np.asarray(self._weights[name].grad)

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, float | None]:
        """Return the loss and the accuracy of batches, with their own normalizations."""
        losses, hits, count, discrete = 0.0, 0.0, 0, False
        for inputs, targets in batches:
            with torch.no_grad():
                loss, logits = self._loss(inputs, targets)
            losses += float(loss) * len(targets)
            discrete = targets.dtype.kind == "i"
            if discrete:
                hits += float(np.mean(logits.argmax(-1).numpy() == targets)) * len(targets)
            count += len(targets)
        return losses / count, hits / count if discrete else None

    def _loss(
        self, inputs: Mapping[str, Array], targets: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._forward(self._weights, torch.from_numpy(inputs[INPUT]))
        y = torch.from_numpy(targets)
        if targets.dtype.kind == "i":
            return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1)), logits
        entropy = F.binary_cross_entropy_with_logits(logits, y, reduction="sum")
        return entropy / len(targets), logits


def trainer(task: str, model: Model, rate: float) -> TorchTrainer:
    """Return a model in training; ``BackendError`` if PyTorch has no implementation of the task."""
    if task not in FORWARD:
        raise BackendError(
            f"task '{task}' is not implemented in PyTorch; the tasks are {', '.join(FORWARD)}."
        )
    return TorchTrainer(FORWARD[task], model.weights, rate)
