"""SGD, Adam, AdamW and Muon against the stored numbers of PyTorch's optimizers."""

import json
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from tests.training import softmax_net as net

FILE = Path(__file__).resolve().parent.parent / "data" / "torch_optimizers.json"
STORED = json.loads(FILE.read_text(encoding="utf-8"))

# Float64, six steps: sums of a few dozen products in another order. Adam divides by gradients.
EXACT = 1e-10
# PyTorch divides by the norm, we by the norm plus 1e-7; norms are near 0.3. Five iterations
# multiply small singular values by up to 3.4445 each, in six steps of length 0.1.
MUON = 6 * 0.1 * 1e-7 / 0.3 * 3.4445**5
MAKERS = {
    "sgd": lambda e: ke.SGD(e, 0.1),
    "sgd nesterov": lambda e: ke.SGD(e, 0.1, 0.8, True),
    "sgd decay": lambda e: ke.SGD(e, 0.1, weight_decay=0.3),
    "adam": lambda e: ke.Adam(e, 0.1),
    "adam options": lambda e: ke.Adam(e, 0.1, (0.5, 0.7), 0.01, 0.3),
    "adamw": lambda e: ke.AdamW(e, 0.1, weight_decay=0.3),
    "muon": lambda e: ke.Muon(e, 0.1, weight_decay=0.3, adam_rate=0.0),
    "muon heavy ball": lambda e: ke.Muon(e, 0.1, 0.9, False, adam_rate=0.0),
}


def trained(name, given):
    engine = net.engine()
    weights = {n: np.array(value) for n, value in given["weights"].items()}
    engine.set_parameters(weights)
    optimizer = MAKERS[name](engine)
    for x, y in zip(given["inputs"], given["targets"], strict=True):
        optimizer.step({"x": np.array(x)}, np.array(y))
    if name.startswith("muon"):  # PyTorch's Muon moves matrices only, and decays no vectors
        engine.set_parameters({n: value for n, value in weights.items() if value.ndim == 1})
    return engine.parameters


def tolerance(name):
    return MUON if name.startswith("muon") else EXACT


def difference(parameters, stored):
    return max(np.abs(value - np.array(stored[n])).max() for n, value in parameters.items())


def test_every_stored_run_has_a_case():
    assert MAKERS.keys() == STORED["runs"].keys()


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_has_the_numbers_of_pytorch(name):
    assert difference(trained(name, STORED), STORED["runs"][name]) < tolerance(name)
