"""Derivatives with respect to inputs, from both exporters, against torch.func in float64."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.func import hessian, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import kfac_engine as ke

D, WIDTH = 6, 16


class Sequence(nn.Module):
    """The features of an example are a sequence."""

    def __init__(self, body):
        super().__init__()
        self.first, self.body, self.last = nn.Linear(1, WIDTH), body, nn.Linear(WIDTH, 2)

    def forward(self, x):
        out = self.body(self.first(x.unsqueeze(-1)))
        return self.last(torch.tanh(out[0] if isinstance(out, tuple) else out).mean(1))


class Channels(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x.transpose(1, 2)).transpose(1, 2)


NETWORKS = {
    "dense": lambda: nn.Sequential(
        nn.Linear(D, WIDTH), nn.LayerNorm(WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH), nn.Mish(),
        nn.Linear(WIDTH, 2),
    ),
    "convolution": lambda: Sequence(
        Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(4, WIDTH), nn.SiLU())
    ),
    "transformer": lambda: Sequence(
        nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, activation="gelu", batch_first=True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("name", NETWORKS)
def test_derivatives_equal_those_of_torch(name, exporter, tmp_path):
    torch.manual_seed(0)
    net, x = NETWORKS[name]().eval(), torch.randn(3, D)
    path = str(tmp_path / "net.onnx")
    sides = {"input_names": ["x"], "output_names": ["u"], "verbose": False}
    if exporter == "dynamo":
        shapes = ({0: torch.export.Dim.DYNAMIC},)
        torch.onnx.export(net, (x,), path, dynamo=True, dynamic_shapes=shapes, **sides)
    else:
        axes = {"x": {0: "n"}, "u": {0: "n"}}
        torch.onnx.export(net, (x,), path, dynamo=False, dynamic_axes=axes, **sides)
    result = ke.derivatives(path, "x", jacobian=True, laplacian=True, hessian=True)
    session = onnxruntime.InferenceSession(result.SerializeToString())
    _, first, trace, second = session.run(None, {"x": x.numpy()})

    def one(v):
        return wide(v[None])[0]

    wide = net.double()
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = vmap(jacrev(one))(x.double()).detach().numpy()
        bend = vmap(hessian(one))(x.double()).detach().numpy()
    for value, expected in (
        (first, jacobian), (second, bend), (trace, np.trace(bend, axis1=2, axis2=3))
    ):  # fmt: skip
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5 * abs(expected).max())
