"""Kronecker blocks of exported layers, against rows that hooks of torch caught."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kfac_engine as ke
from tests.exporters import truth
from tests.exporters.case import EXPORTERS, Case, chain, floats
from tests.exporters.corpus_sequences import RECURRENT
from tests.exporters.exporting import BATCH, distinct_parameters, export

RELATIVE = 1e-4  # second moments of float32 values

# Each has its layer under test first. The others make its output matter.
CASES = (
    Case("dense", lambda: chain(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), floats(4)),
    Case("dense-tokens", lambda: chain(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), floats(5, 4)),
    Case(
        "convolution",
        lambda: chain(nn.Conv2d(2, 3, 3, 2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)),
        floats(2, 5, 6),
    ),
)


def _rows(layer, x):
    """The layer's input as rows with a one at the end, ``(n, t, d_in + 1)``."""
    if isinstance(layer, nn.Conv2d):
        patches = F.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride)
        window = layer.kernel_size[0] * layer.kernel_size[1]
        # Channels first, then the window; the packed form has the window first.
        rows = patches.unflatten(1, (-1, window)).transpose(1, 2).flatten(1, 2).transpose(1, 2)
    else:
        rows = x.reshape(len(x), -1, x.shape[-1])
    return torch.cat([rows, torch.ones(*rows.shape[:2], 1, dtype=rows.dtype)], -1)


def _expected(module, x, targets):
    """``t · A ⊗ G`` of the first layer, from the gradients at the targets given."""
    caught = []
    module = module.double()
    module[0].register_forward_hook(lambda _, __, out: caught.append(out))
    output = module(x.double())
    nll = ((output - targets.double()) ** 2).sum()  # of every example, variance ½
    (ds,) = torch.autograd.grad(nll, caught)
    channels = 1 if ds.ndim == 4 else -1
    ds = ds.movedim(channels, -1).reshape(len(x), -1, ds.shape[channels])
    a = _rows(module[0], x.double())
    t = a.shape[1]
    A = torch.einsum("nti,ntj->ij", a, a) / (len(x) * t)
    G = torch.einsum("nti,ntj->ij", ds, ds) / (len(x) * t)
    return t * np.kron(A.detach().numpy(), G.numpy())


@pytest.mark.quick
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_block_equals_factors_of_torch_hooks(case, exporter, tmp_path):
    torch.manual_seed(0)
    module = case.module()
    distinct_parameters(module)
    path = export(case, module, exporter, tmp_path)
    inputs = case.inputs(BATCH)
    targets = truth.made_up_targets(case, module, inputs)
    engine = ke.Engine.from_onnx(
        path, loss="normal", estimation_mode="empirical", reduction="batch_mean", damping=0.1
    )
    engine.observe({"x0": inputs[0].numpy()}, targets.numpy())
    block = next(iter(engine.collection.fisher_blocks.values()))
    expected = _expected(module, inputs[0], targets)
    np.testing.assert_allclose(
        block.full_fisher_block(), expected, atol=RELATIVE * np.abs(expected).max()
    )


@pytest.mark.quick
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("case", RECURRENT, ids=lambda case: case.name)
def test_recurrent_weights_form_layers(case, exporter, tmp_path):
    """The gates of a file have another order, and are parts of a weight for any batch size."""
    torch.manual_seed(0)
    module = case.module()
    distinct_parameters(module)
    engine = ke.Engine.from_onnx(export(case, module, exporter, tmp_path), loss="normal")
    generic = [
        name for layer in engine.layers if layer.kind == "generic" for name in layer.parameters
    ]
    assert not generic
