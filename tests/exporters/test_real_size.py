"""The networks of the suite of models train from their files as in PyTorch."""

import json

import numpy as np
import pytest
import torch

from kfac_engine.bench import models
from kfac_engine.bench.peers import torch_models
from tests.exporters import real_size

# One of the tests is enough for a first look.
pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", real_size.NETWORKS)
def test_losses_of_steps_are_those_of_torch(name, tmp_path, monkeypatch):
    for module in (models, torch_models):
        monkeypatch.setattr(module, "STEPS", 3)
    real_size.write(tmp_path, name, "small")
    path = tmp_path / f"{name}.onnx"
    ours, theirs = models.measure(path, "AdamW"), torch_models.measure(path)
    assert ours.parameters == theirs.parameters
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-3)
    assert models.measure(path, "K-FAC").losses[-1] < ours.losses[0]
    json.dumps([ours, theirs])


def test_sizes_change_the_networks():
    for network in real_size.NETWORKS.values():
        counts = {}
        for size, sizes in network.sizes.items():
            with torch.device("meta"):
                module = network.build(**sizes)
            counts[size] = sum(parameter.numel() for parameter in module.parameters())
        assert counts["small"] < counts["real"] / 2
