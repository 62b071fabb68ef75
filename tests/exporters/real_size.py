"""Networks of real size with random weights, for the suite ``models`` of ``bench``.

Run from the repository root in the environment of the exporters::

    python -m tests.exporters.real_size FOLDER [NAME …] [--size small]
    python -m kfac_engine bench --suite models --models FOLDER --compare torch

The folder receives for each network the model as ``NAME.onnx``, a batch with its targets as
``NAME.npz``, and the module for PyTorch as ``NAME.pt2``.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional

# Arrays of a batch: inputs by name, and targets.
Batch = tuple[dict[str, np.ndarray], np.ndarray]
CLASSES = 1000
# Another number of examples than any batch, so that the axis is dynamic.
EXPORTED = 3


@dataclass(frozen=True)
class Network:
    """A network, its sizes, and its batches."""

    build: Callable[..., nn.Module]  # returns the module, from the sizes of one column
    batch: Callable[..., Batch]  # returns a batch of some examples, from the same sizes
    sizes: Mapping[str, Mapping[str, Any]]  # size to keyword arguments of both
    examples: int  # number of examples of a batch


def logits_of(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of modules whose result is the logits alone.

    A module that returns a class of transformers could not be loaded without it.
    """

    class Logits(kind):
        def forward(
            self,
            input_ids: torch.Tensor | None = None,
            attention_mask: torch.Tensor | None = None,
            pixel_values: torch.Tensor | None = None,
        ) -> torch.Tensor:
            given = {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "pixel_values": pixel_values,
            }
            read = {name: tensor for name, tensor in given.items() if tensor is not None}
            return super().forward(**read).logits

    return Logits


def hub(
    name: str, rename: Mapping[str, str] | None = None, **fixed: Any
) -> Callable[..., nn.Module]:
    """Return a function that builds a class of transformers from fields of its configuration."""

    def build(**sizes: Any) -> nn.Module:
        kind = getattr(transformers, name)
        fields = {(rename or {}).get(key, key): value for key, value in sizes.items()}
        return logits_of(kind)(kind.config_class(**fixed, **fields))

    return build


class Recurrent(nn.Module):
    """A language model of two recurrent layers."""

    def __init__(self, kind: str, words: int, width: int, length: int) -> None:
        super().__init__()
        del length
        self.embedding = nn.Embedding(words, width)
        self.rnn = getattr(nn, kind)(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(input_ids))[0])


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions with normalizations."""
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        layers += [nn.Conv2d(before, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Segmentation of images, with transposed convolutions and skips."""

    def __init__(self, widths: tuple[int, ...], side: int, classes: int = 4) -> None:
        super().__init__()
        del side
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(convolutions(a, b) for a, b in [(3, widths[0]), *pairs])
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs)
        self.mix = nn.ModuleList(convolutions(2 * a, a) for a, _ in pairs)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        skips = [self.down[0](image)]
        for down in self.down[1:]:
            skips.append(down(functional.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, mix in zip(reversed(self.up), reversed(self.mix), strict=True):
            x = mix(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def sentences(
    examples: int, seed: int, *, words: int, length: int, labels: int = 4, **_: Any
) -> Batch:
    """Return sentences with padding, and a label for each."""
    random = np.random.default_rng(seed)
    mask = np.arange(length) < random.integers(length // 4, length + 1, (examples, 1))
    tokens = _tokens(random, examples, length, words) * mask
    return {"input_ids": tokens, "attention_mask": mask.astype(np.int64)}, tokens[:, 0] % labels


def text(examples: int, seed: int, *, words: int, length: int, **_: Any) -> Batch:
    """Return tokens, and the next token of each."""
    tokens = _tokens(np.random.default_rng(seed), examples, length + 1, words)
    return {"input_ids": tokens[:, :-1].copy()}, tokens[:, 1:].copy()


def images(name: str) -> Callable[..., Batch]:
    """Return a function for images with a class each."""

    def batch(examples: int, seed: int, *, side: int, **_: Any) -> Batch:
        random = np.random.default_rng(seed)
        labels = random.integers(0, CLASSES, examples)
        noise = random.normal(0, 1, (examples, 3, side, side))
        return {name: (noise + labels[:, None, None, None] % 7 / 7).astype(np.float32)}, labels

    return batch


def segments(examples: int, seed: int, *, side: int, **_: Any) -> Batch:
    """Return images with a class for each pixel."""
    image = np.random.default_rng(seed).normal(0, 1, (examples, 3, side, side)).astype(np.float32)
    return {"image": image}, ((image[:, 0] > 0) + 2 * (image[:, 1] > 0.5)).astype(np.int64)


def _tokens(random: np.random.Generator, examples: int, length: int, words: int) -> np.ndarray:
    """Return tokens with the frequencies of words; 0 to 3 are left to padding and marks."""
    frequencies = 1 / np.arange(1, words - 3) ** 1.1
    drawn = random.choice(words - 4, (examples, length), p=frequencies / frequencies.sum())
    return (drawn + 4).astype(np.int64)


def _encoder(**sizes: Any) -> nn.Module:
    names = {"words": "vocab_size", "length": "max_position_embeddings"}
    return hub("DistilBertForSequenceClassification", names, num_labels=4)(**sizes)


def _llama(*, length: int, **sizes: Any) -> nn.Module:
    fixed = {"tie_word_embeddings": True, "use_cache": False, "max_position_embeddings": length}
    return hub("LlamaForCausalLM", {"words": "vocab_size"}, **fixed)(**sizes)


def _efficientnet(*, side: int, **sizes: Any) -> nn.Module:
    module = hub("EfficientNetForImageClassification", num_labels=CLASSES)(image_size=side, **sizes)
    # Transformers averages over a window of 1,280 pixels, wider than the image.
    module.efficientnet.pooler = nn.AdaptiveAvgPool2d(1)
    return module


NETWORKS: Mapping[str, Network] = {
    "distilbert": Network(
        _encoder,
        sentences,
        {
            "real": {"words": 30522, "length": 128, "dim": 768, "hidden_dim": 3072, "n_layers": 6,
                     "n_heads": 12},
            "small": {"words": 300, "length": 16, "dim": 32, "hidden_dim": 64, "n_layers": 2,
                      "n_heads": 2},
        },
        8,
    ),
    "llama": Network(
        _llama,
        text,
        {
            "real": {"words": 49152, "length": 128, "hidden_size": 576, "intermediate_size": 1536,
                     "num_hidden_layers": 6, "num_attention_heads": 9, "num_key_value_heads": 3},
            "small": {"words": 300, "length": 16, "hidden_size": 32, "intermediate_size": 64,
                      "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        },
        4,
    ),
    "lstm": Network(
        lambda **sizes: Recurrent("LSTM", **sizes),
        text,
        {
            "real": {"words": 10000, "length": 35, "width": 650},
            "small": {"words": 100, "length": 6, "width": 16},
        },
        16,
    ),
    "gru": Network(
        lambda **sizes: Recurrent("GRU", **sizes),
        text,
        {
            "real": {"words": 10000, "length": 35, "width": 650},
            "small": {"words": 100, "length": 6, "width": 16},
        },
        16,
    ),
    "resnet50": Network(
        lambda side, **sizes: hub("ResNetForImageClassification", num_labels=CLASSES)(**sizes),
        images("pixel_values"),
        {
            "real": {"side": 224},
            "small": {"side": 32, "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]},
        },
        8,
    ),
    "vit": Network(
        lambda side, **sizes: hub(
            "ViTForImageClassification", num_labels=CLASSES, image_size=side
        )(**sizes),
        images("pixel_values"),
        {
            "real": {"side": 224, "hidden_size": 192, "intermediate_size": 768,
                     "num_attention_heads": 3},
            "small": {"side": 32, "hidden_size": 24, "intermediate_size": 48, "patch_size": 8,
                      "num_attention_heads": 2, "num_hidden_layers": 2},
        },
        8,
    ),
    "mobilenet": Network(
        lambda side, **sizes: hub("MobileNetV2ForImageClassification", num_labels=CLASSES)(**sizes),
        images("pixel_values"),
        {"real": {"side": 224}, "small": {"side": 32, "depth_multiplier": 0.25}}, 8),
    "efficientnet": Network(
        _efficientnet,
        images("pixel_values"),
        {
            "real": {"side": 224, "width_coefficient": 1.0, "depth_coefficient": 1.0,
                     "hidden_dim": 1280},
            "small": {"side": 32, "width_coefficient": 0.25, "depth_coefficient": 0.5,
                      "hidden_dim": 320},
        },
        8,
    ),
    "unet": Network(
        UNet,
        segments,
        {
            "real": {"widths": (32, 64, 128, 256, 512), "side": 128},
            "small": {"widths": (4, 8), "side": 16},
        },
        4,
    ),
}  # fmt: skip


def write(folder: Path, name: str, size: str) -> None:
    """Write the files of a network."""
    folder.mkdir(parents=True, exist_ok=True)
    network = NETWORKS[name]
    sizes = network.sizes[size]
    torch.manual_seed(0)
    module = network.build(**sizes).eval()
    inputs, _ = network.batch(EXPORTED, 0, **sizes)
    tensors = {key: torch.from_numpy(array) for key, array in inputs.items()}
    axes = {key: {0: torch.export.Dim.DYNAMIC} for key in tensors}
    program = torch.export.export(module, (), tensors, dynamic_shapes=axes)
    torch.export.save(program, folder / f"{name}.pt2")
    torch.onnx.export(
        program,
        f=folder / f"{name}.onnx",
        dynamo=True,
        optimize=False,
        external_data=False,
        verbose=False,
        input_names=list(tensors),
        output_names=["logits"],
    )
    inputs, targets = network.batch(network.examples, 0, **sizes)
    np.savez(folder / f"{name}.npz", targets=targets, **inputs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NETWORKS))
    parser.add_argument("--size", choices=("small", "real"), default="real")
    arguments = parser.parse_args()
    for chosen in arguments.names or NETWORKS:
        write(arguments.folder, chosen, arguments.size)
