"""``nn.EmbeddingBag`` from both exporters, without sample inputs, against torch's autograd."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kfac_engine as ke

DYNAMIC = torch.export.Dim.DYNAMIC
RNG = np.random.default_rng(0)
FLAT = torch.tensor(RNG.permutation(10)[:9])
OFFSETS = torch.tensor([0, 3, 3, 5, 9])  # the second and the last bag are empty
IDS = torch.tensor(RNG.permuted(np.tile(np.arange(10), (6, 1)), axis=1)[:, :5].copy())
WEIGHTS = torch.rand(9, generator=torch.Generator().manual_seed(0))


class Bags(nn.Module):
    def __init__(self, mode, padding=None):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(10, 4, mode=mode, padding_idx=padding)
        self.head = nn.Linear(4, 3)

    def forward(self, ids, *rest):
        return self.head(self.bag(ids, *rest))


def written(module, inputs, exporter, path):
    names = ["ids", "offsets", "weights"][: len(inputs)]
    if exporter == "torchscript":
        sizes = ["k", "n", "k"] if len(inputs) > 1 else ["n"]
        axes = {name: {0: size} for name, size in zip(names, sizes, strict=False)}
        torch.onnx.export(
            module, inputs, path, dynamo=False, input_names=names, dynamic_axes=axes,
            opset_version=17,
        )  # fmt: skip
        return
    free = [{0: DYNAMIC} for _ in inputs]
    shapes = (free[0], tuple(free[1:])) if len(inputs) > 1 else (free[0],)
    torch.onnx.export(
        module, inputs, path, dynamo=True, input_names=names, dynamic_shapes=shapes,
        optimize=exporter == "optimized", external_data=False, verbose=False,
    )  # fmt: skip


CASES = {
    "offsets": (FLAT, OFFSETS), "weights": (FLAT, OFFSETS, WEIGHTS), "matrix": (IDS,)
}  # fmt: skip
ROWS = [
    (form, mode)
    for form in CASES
    for mode in ("sum", "mean", "max")
    if form != "weights" or mode == "sum"  # torch weights sums only
]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("padding", "exporter"),
    # torch refuses padding for TorchScript; without its optimizations the loop is another one
    [(None, "torchscript"), (None, "optimized"), (None, "plain"), (3, "optimized")],
)
@pytest.mark.parametrize(("form", "mode"), ROWS)
def test_bags_have_the_gradients_of_autograd(form, mode, padding, exporter, tmp_path):
    module, inputs = Bags(mode, padding), CASES[form]
    written(module, inputs, exporter, tmp_path / "m.onnx")
    outputs = module(*inputs)
    targets = np.arange(len(outputs)) % 3
    F.cross_entropy(outputs, torch.tensor(targets)).backward()
    engine = ke.Engine.from_onnx(tmp_path / "m.onnx", loss="categorical")
    named = dict(zip(["ids", "offsets", "weights"], inputs, strict=False))
    result = engine.gradients(named, targets)
    found = ke.match_parameters(engine, module.state_dict()).to_module(result.gradients)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(found[name], parameter.grad, atol=1e-6, err_msg=name)
    axes = {list(named)[form != "matrix"]: 0}  # the exporter names no axis
    trained = ke.Engine.from_onnx(tmp_path / "m.onnx", loss="categorical", batch_axes=axes)
    history = ke.fit(trained, [(named, targets)] * 3, epochs=10)
    assert history.records[-1]["loss"] < 0.6 * history.records[0]["loss"]
