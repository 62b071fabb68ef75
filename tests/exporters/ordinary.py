"""Ordinary modules of PyTorch, each exported in three ways.

``python -m tests.exporters.ordinary`` writes small exports with the parameters and gradients of
torch into ``tests/exports``, for the tests that run without torch.
"""

import copy
import logging
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

FOLDER = Path(__file__).resolve().parents[1] / "exports"
CLASSES = 3


class TiedEmbedding(nn.Module):
    """An embedding whose table is the output matrix as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.fc = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.fc(self.embed(x))).mean(1))


class Recurrent(nn.Module):
    """An LSTM and a dense layer on its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Encoder(nn.Module):
    """Two equal layers of a transformer: ``nn.TransformerEncoder`` copies its layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


class Shared(nn.Module):
    """A list of modules that has the first one twice."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([first, nn.Linear(6, 6), first])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def _cnn() -> nn.Module:
    first = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    second = nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(96, CLASSES))


def _depthwise() -> nn.Module:
    body = nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.ReLU()
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES))


# Name to the constructor and to a batch of some size.
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)),
        lambda n: torch.randn(n, 6),
    ),
    "cnn": (_cnn, lambda n: torch.randn(n, 1, 8, 8)),
    "encoder": (Encoder, lambda n: torch.randn(n, 5, 8)),
    "lstm": (Recurrent, lambda n: torch.randn(n, 4, 5)),
    "tied": (TiedEmbedding, lambda n: torch.randint(0, 11, (n, 4))),
    "depthwise": (_depthwise, lambda n: torch.randn(n, 4, 6, 6)),
    "shared": (Shared, lambda n: torch.randn(n, 6)),
}
EXPORTS = ("legacy", "dynamo", "plain")


def create(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a module in evaluation form with inputs and targets of a batch."""
    torch.manual_seed(0)
    constructor, inputs = MODULES[name]
    module, batch = constructor().eval(), inputs(7)
    return module, batch, torch.randint(0, CLASSES, (7,))


def perturb(module: nn.Module) -> nn.Module:
    """Return a copy whose parameters and running statistics differ, as after training."""
    moved = copy.deepcopy(module)
    with torch.no_grad():
        for tensor in (*moved.parameters(), *moved.buffers()):
            if tensor.is_floating_point():
                tensor += 0.1 * torch.rand_like(tensor)
    return moved


def write(module: nn.Module, batch: torch.Tensor, how: str, path: Path) -> Path:
    """Export a module with a dynamic batch axis, by one of ``EXPORTS``."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    if how == "legacy":
        form = {"dynamo": False, "dynamic_axes": {"x": {0: "batch"}}}
    else:
        axes = ({0: torch.export.Dim.DYNAMIC},)
        form = {"dynamo": True, "dynamic_shapes": axes, "verbose": False, "external_data": False}
        form |= {"optimize": how == "dynamo"}
    torch.onnx.export(module, (batch[:3],), str(path), input_names=["x"], **form)
    return path


def gradients(
    module: nn.Module, batch: torch.Tensor, targets: torch.Tensor
) -> dict[str, np.ndarray]:
    """Return the gradients of the mean cross entropy by autograd, in float64."""
    wide = copy.deepcopy(module).double()
    inputs = batch.double() if batch.is_floating_point() else batch
    nn.functional.cross_entropy(wide(inputs), targets).backward()
    return {name: p.grad.numpy() for name, p in wide.named_parameters()}


def _store(name: str) -> None:
    module, batch, targets = create(name)
    for how in EXPORTS:
        path = write(module, batch, how, FOLDER / f"{name}-{how}.onnx")
        model = onnx.load(path)
        del model.graph.value_info[:], model.graph.metadata_props[:]
        for node in model.graph.node:
            scopes = [p for p in node.metadata_props if re.search("name_scopes$", p.key)]
            del node.metadata_props[:]
            node.metadata_props.extend(scopes)
            node.doc_string = ""
        onnx.save(model, path)
    arrays = {f"state/{n}": p.detach().numpy() for n, p in module.state_dict().items()}
    arrays |= {f"gradient/{n}": g for n, g in gradients(module, batch, targets).items()}
    np.savez_compressed(FOLDER / f"{name}.npz", x=batch.numpy(), targets=targets.numpy(), **arrays)


if __name__ == "__main__":
    for title in MODULES:
        _store(title)
