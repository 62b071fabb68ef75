"""Parameters after steps of PyTorch's optimizers, which tests compare with those of ours.

``python tests/exporters/torch_optimizers.py tests/data/torch_optimizers.json`` writes the file
of stored numbers; it needs NumPy and torch 2.13 only.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

STEPS, EXAMPLES = 6, 12
SHAPES = {"w1": (4, 5), "b1": (4,), "w2": (3, 4), "b2": (3,)}  # dense weights (out, in)

Parameters = list[torch.Tensor]
optim: Any = torch.optim
MAKERS: Mapping[str, Callable[[Parameters], Any]] = {
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "sgd nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.8, nesterov=True),
    "sgd decay": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.3),
    "adam": lambda p: optim.Adam(p, 0.1),
    "adam options": lambda p: optim.Adam(p, 0.1, (0.5, 0.7), 0.01, weight_decay=0.3),
    "adamw": lambda p: optim.AdamW(p, 0.1, weight_decay=0.3),
    # Matrices only.
    "muon": lambda p: optim.Muon(p, 0.1, weight_decay=0.3, momentum=0.95),
    "muon heavy ball": lambda p: optim.Muon(p, 0.1, weight_decay=0.0, momentum=0.9, nesterov=False),
}


def problem() -> dict[str, Any]:
    """Return weights, inputs and targets of each step, as lists."""
    rng = np.random.default_rng(0)
    return {
        "weights": {n: (0.7 * rng.standard_normal(s)).tolist() for n, s in SHAPES.items()},
        "inputs": rng.standard_normal((STEPS, EXAMPLES, 5)).tolist(),
        "targets": rng.integers(0, 3, (STEPS, EXAMPLES)).tolist(),
    }


def trained(name: str, given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the parameters after the last step, in float64.

    PyTorch rounds the iterations of Muon to bfloat16. The cast is left out here, so that the
    formulas can be compared.
    """
    theta = {
        n: torch.tensor(value, dtype=torch.float64, requires_grad=True)
        for n, value in given["weights"].items()
    }
    moved = [value for value in theta.values() if value.ndim > 1 or not name.startswith("muon")]
    optimizer = MAKERS[name](moved)
    for x, y in zip(given["inputs"], given["targets"], strict=True):
        optimizer.zero_grad()
        hidden = torch.tanh(torch.tensor(x, dtype=torch.float64) @ theta["w1"].T + theta["b1"])
        logits = hidden @ theta["w2"].T + theta["b2"]
        torch.nn.functional.cross_entropy(logits, torch.tensor(y)).backward()
        with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            optimizer.step()
    return {n: value.detach().numpy().tolist() for n, value in theta.items()}


def record() -> dict[str, Any]:
    """Return the problem, the version of torch and the parameters by optimizer."""
    given = problem()
    runs = {name: trained(name, given) for name in MAKERS}
    return {"torch": torch.__version__, **given, "runs": runs}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(record()) + "\n", encoding="utf-8")
