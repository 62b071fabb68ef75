"""The networks and data of the suite ``uses`` in PyTorch."""

import torch
from torch import nn

from kfac_engine.bench.peers.torch_networks import transposed
from kfac_engine.bench.uses import Study


def network(data: Study) -> nn.Module:
    """Return the network of a job with the same weights."""
    layers: list[tuple[str, nn.Module]] = []
    for node in data.network.nodes:
        weight = next((name for name in node.inputs if name.endswith(".weight")), "")
        if node.op == "Relu":
            layers.append((node.outputs[0], nn.ReLU()))
        elif node.op == "Flatten":
            layers.append((node.outputs[0], nn.Flatten()))
        elif node.op == "Conv":
            c_out, c_in, kernel, _ = data.network.weights[weight].shape
            stride, pad = node.attributes["strides"][0], node.attributes["pads"][0]
            layers.append((weight[:-7], nn.Conv2d(c_in, c_out, kernel, stride, pad)))
        elif weight:
            d_in, d_out = data.network.weights[weight].shape
            layers.append((weight[:-7], nn.Linear(d_in, d_out)))
    module = nn.Sequential()
    for name, layer in layers:
        module.add_module(name, layer)
    weights = {n: transposed(n, torch.tensor(w)) for n, w in data.network.weights.items()}
    module.load_state_dict(weights)
    return module


def tensors(pair: tuple[object, object]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and classes as tensors."""
    x, targets = (torch.as_tensor(array) for array in pair)
    return x, targets
