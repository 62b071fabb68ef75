"""Edited files of PyTorch's exporters compute what the edited modules compute."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import kfac_engine as ke

# float32 sums of some dozens of terms, in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
EXPORTERS = ("legacy", "dynamo", "dynamo folded")


class Adapted(nn.Module):
    """A dense layer with a low-rank update."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + 0.5 * self.lora_B(self.lora_A(x))


class Tokens(nn.Module):
    """Dense layers of tokens, and a head of their mean."""

    def __init__(self):
        super().__init__()
        self.embed, self.first = nn.Embedding(11, 6), nn.Linear(6, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(nn.functional.gelu(self.first(self.embed(x))).mean(1)).softmax(-1)


class Images(nn.Module):
    """Filters with a normalization, and filters as a head."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.first(x)))).mean((2, 3))


MODULES = {
    "tokens": (Tokens, lambda: torch.randint(0, 11, (4, 7))),
    "images": (Images, lambda: torch.randn(4, 3, 6, 6)),
}


def export(module, x, exporter, path):
    names = {"input_names": ["x"], "output_names": ["y"]}
    if exporter == "legacy":
        torch.onnx.export(
            module, (x,), str(path), dynamo=False, dynamic_axes={"x": {0: "n"}}, **names
        )
    else:
        torch.onnx.export(
            module, (x,), str(path), dynamo=True, verbose=False, external_data=False,
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), optimize="folded" in exporter, **names,
        )  # fmt: skip
    return onnx.load(path)


def run(model, x):
    return ort.InferenceSession(model.SerializeToString()).run(None, {"x": x.numpy()})[0]


def weights(model):
    return {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer}


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", MODULES)
def test_a_file_with_a_new_head_is_the_module_with_this_head(name, exporter, tmp_path):
    torch.manual_seed(0)
    make, inputs = MODULES[name]
    module, x = make().eval(), inputs()
    edited = ke.replace_head(export(module, x, exporter, tmp_path / "m.onnx"), 3)
    stored = weights(edited)
    old = module.head
    module.head = nn.Linear(8, 3) if name == "tokens" else nn.Conv2d(8, 3, 1)
    weight = stored["head.weight"]
    if weight.shape != tuple(module.head.weight.shape):
        weight = weight.T
    with torch.no_grad():
        module.head.weight.copy_(torch.from_numpy(weight.copy()))
        module.head.bias.zero_()
        truth = module(x).numpy()
    assert old.out_features if name == "tokens" else old.out_channels == 5
    np.testing.assert_allclose(run(edited, x), truth, **CLOSE)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", MODULES)
def test_new_adapters_change_nothing(name, exporter, tmp_path):
    torch.manual_seed(0)
    make, inputs = MODULES[name]
    module, x = make().eval(), inputs()
    with torch.no_grad():
        truth = module(x).numpy()
    adapted = ke.add_adapters(export(module, x, exporter, tmp_path / "m.onnx"), 2)
    np.testing.assert_allclose(run(adapted, x), truth, **CLOSE)
    layers = {key.rpartition(".lora_")[0] for key in weights(adapted) if ".lora_" in key}
    assert layers == ({"first", "head"} if name == "tokens" else {"head"})


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_adapters_of_a_module_are_folded_in(exporter, tmp_path):
    torch.manual_seed(0)
    module, x = Tokens().eval(), MODULES["tokens"][1]()
    module.first, module.head = Adapted(module.first), Adapted(module.head)
    with torch.no_grad():
        truth = module(x).numpy()
    merged = ke.merge_adapters(export(module, x, exporter, tmp_path / "m.onnx"))
    np.testing.assert_allclose(run(merged, x), truth, **CLOSE)
    assert not [key for key in weights(merged) if "lora" in key]
