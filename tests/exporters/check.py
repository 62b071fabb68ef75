"""What is asked of every exported model."""

import copy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from torch import nn

import kfac_engine as ke
from kfac_engine.graph.load import load_graph
from tests.exporters import truth
from tests.exporters.case import Case
from tests.exporters.exporting import BATCH

# Float32 against float64 through up to a hundred operators: 1e-6 … 1e-5 in practice.
RELATIVE = 1e-3
# Gradients that vanish by symmetry, such as that of a key's bias, are rounding noise: below this
# part of the largest gradient they are compared with that, not with themselves. With RELATIVE it
# allows 1e-6 of the largest gradient, eight roundings of float32: sums of many terms that cancel.
FLOOR = 1e-3


@dataclass
class Finding:
    """What one exported model gave."""

    worst: float = 0.0  # largest relative error of a gradient
    folded: list[str] = field(default_factory=list)  # parameters that the file does not hold
    # Trainable weights of the file that are no parameters.
    strange: list[str] = field(default_factory=list)
    # Kind of block to number of weights in the file.
    kinds: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)  # what is not as it should be, in words


def checked(case: Case, module: nn.Module, path: Path) -> Finding:
    """Compare an exported model with the module it was made from.

    Args:
        case: Where they come from.
        module: Its parameters are distinct.
        path: The file.

    Returns:
        What was found; ``wrong`` is empty if all is well.
    """
    torch.manual_seed(2)
    inputs = case.inputs(BATCH)
    targets = truth.made_up_targets(case, module, inputs)
    loss, expected = truth.gradients(case, copy.deepcopy(module), inputs, targets)
    feeds = {f"x{i}": x.numpy() for i, x in enumerate(inputs)}
    engine = engine_for(case, path, feeds)
    feeds = {name: feeds[name] for name in feeds if name in input_names(path)}
    result = engine.step(feeds, targets.numpy())
    provenance = truth.Provenance.of(module)
    found, _, strange = provenance.gather(engine.parameters, result.gradients)
    finding = Finding(strange=sorted(strange))
    if not np.isclose(result.loss, loss, rtol=1e-4):
        finding.wrong.append(f"loss {result.loss} for {loss}")
    _compare(case, expected, found, finding)
    _check_blocks(engine, result, finding)
    return finding


def engine_for(case: Case, path: Path, feeds: dict[str, np.ndarray]) -> ke.Engine:
    """An engine on the first output."""
    known = input_names(path)
    return ke.Engine.from_onnx(
        path,
        loss=case.loss,
        output=output_names(path)[0],
        damping=0.1,
        sample_inputs={name: array for name, array in feeds.items() if name in known},
    )


def input_names(path: Path) -> list[str]:
    """Inputs of a file that are not weights."""
    return [entry.name for entry in load_graph(path).inputs]


def output_names(path: Path) -> list[str]:
    """Outputs of a file."""
    return list(load_graph(path).outputs)


def _compare(
    case: Case, expected: dict[str, np.ndarray], found: dict[str, np.ndarray], finding: Finding
) -> None:
    scale = max(np.abs(gradient).max(initial=0.0) for gradient in expected.values())
    for name, gradient in expected.items():
        there = ~np.isnan(found[name])
        if not there.all() and np.abs(gradient[~there]).max() > 1e-12 * scale:
            finding.folded.append(name)
            if not any(fnmatchcase(name, pattern) for pattern in case.constant):
                finding.wrong.append(f"'{name}' is not a parameter of the file")
        error = np.abs(found[name] - gradient)[there].max(initial=0.0)
        error /= max(np.abs(gradient).max(initial=0.0), FLOOR * scale, 1e-30)
        finding.worst = max(finding.worst, float(error))
        if error > RELATIVE:
            finding.wrong.append(f"gradient of '{name}' off by {error:.1e}")


def _check_blocks(engine: ke.Engine, result: ke.Result, finding: Finding) -> None:
    if set(result.natural_gradients) != set(engine.parameters):
        finding.wrong.append("natural gradients are missing")
    for name, natural in result.natural_gradients.items():
        if not np.isfinite(natural).all():
            finding.wrong.append(f"natural gradient of '{name}' is not finite")
    blocked = set()
    for report in engine.layers:
        finding.kinds[report.kind] = finding.kinds.get(report.kind, 0) + len(report.parameters)
        blocked |= set(report.parameters)
    if blocked != set(engine.parameters):
        finding.wrong.append(f"without a block: {sorted(set(engine.parameters) - blocked)}")
