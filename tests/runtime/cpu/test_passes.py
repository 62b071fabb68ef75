"""Graph passes: each has an effect, can be turned off, and leaves the results as they are."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.autodiff.rules import convolution
from kfac_engine.graph.structure import Node
from kfac_engine.runtime import model_sessions
from kfac_engine.runtime.cpu.graph_passes import (
    BLOCKED_LAYOUT,
    FUSED_TRANSPOSES,
    PASSES,
    WEIGHT_GRADIENTS,
    channel_block,
    chosen_passes,
)
from kfac_engine.runtime.cpu.nchwc_layout import DOMAIN
from tests import models
from tests.comparing import assert_near

# Float32 sums of some thousand products in another order, relative to the largest entry. Inverses
# of the factors, which are such sums too, enlarge the difference in natural gradients.
GRADIENTS, NATURAL = 1e-5, 1e-4

rng = np.random.default_rng(0)
X = {"input": rng.standard_normal((4, 3, 8, 9)).astype(np.float32)}
Y = rng.integers(5, size=4)


def network():
    """Convolutions with a residual sum, attention over their positions, and a dense layer."""
    net, same = models.Net(), {"pads": [1, 1, 1, 1]}
    x = net.op("Relu", net.conv("first", "input", 3, 32, 3, **same), to="x")
    y = net.op("Relu", net.conv("second", x, 32, 32, 3, **same), to="y")
    y = net.op("Relu", net.op("Add", x, net.conv("third", y, 32, 32, 3, **same), to="+"), to="z")
    y = net.conv("fourth", y, 32, 32, 3, strides=[2, 2], **same)
    rows = net.op("Reshape", y, net.constant("rows", np.array([0, 32, 20])), to="rows_of_y")
    turned = net.op("Transpose", rows, to="turned", perm=[0, 2, 1])
    p = net.op("Softmax", net.op("MatMul", rows, turned, to="scores"), to="p", axis=-1)
    axis = net.constant("axis", np.array([2]))
    mixed = net.op("MatMul", p, rows, to="mixed")
    mean = net.op("ReduceMean", mixed, axis, to="mean", keepdims=0)
    net.op("MatMul", mean, net.weight("dense", 32, 5), to="output")
    return net.model({"input": ["batch", 3, 8, 9]}, {"output": ["batch", 5]})


def engine(passes):
    return ke.Engine.from_onnx(
        network(),
        loss="categorical",
        estimation_mode="exact",
        damping=0.1,
        backend="numpy",
        threads=2,
        graph_passes=passes,
    )


def step(passes):
    return engine(passes).step(X, Y)


@pytest.fixture
def _kernels_of_any_size(monkeypatch):
    monkeypatch.setattr(convolution, "_LEAST_MULTIPLIED", 0)


of_any_size = pytest.mark.usefixtures("_kernels_of_any_size")

CHOICES = {
    "all": None,
    **{f"without {name}": [other for other in PASSES if other != name] for name in PASSES},
    **{f"only {name}": [name] for name in PASSES},
}


@of_any_size
@pytest.mark.parametrize("passes", CHOICES.values(), ids=CHOICES)
def test_all_subsets_of_passes_give_equal_results(passes):
    plain, result = step([]), step(passes)
    np.testing.assert_allclose(result.loss, plain.loss, rtol=GRADIENTS)
    assert len(plain.gradients) == 9
    for name, expected in plain.gradients.items():
        assert_near(result.gradients[name], expected, GRADIENTS)
        assert_near(result.natural_gradients[name], plain.natural_gradients[name], NATURAL)


class Opened(NamedTuple):
    """Backward sessions: all their nodes, and the gradients computed outside."""

    nodes: list[Node]
    outside: list[str]

    def convert_to_blocked(self):
        return any(node.domain == DOMAIN for node in self.nodes)

    def reads_transposed(self):
        swapped = {node.outputs[0] for node in self.nodes if node.op == "Transpose"}
        return any(node.op == "MatMul" and swapped & {*node.inputs} for node in self.nodes)


# What is true of sessions with a pass, and of no sessions without it.
MARKS = {
    BLOCKED_LAYOUT: Opened.convert_to_blocked,
    FUSED_TRANSPOSES: lambda opened: not opened.reads_transposed(),
    WEIGHT_GRADIENTS: lambda opened: len(opened.outside) == 3,
}


@pytest.fixture
def opened(monkeypatch):
    """The backward sessions that are opened during a test."""
    recorded = Opened([], [])
    compact, finishing = model_sessions.compact_model, model_sessions.WeightGradientSession

    def compact_model(nodes, *arguments, **options):
        if options["name"].endswith("_backward"):
            recorded.nodes.extend(nodes)
        return compact(nodes, *arguments, **options)

    def finishing_session(session, parts, *arguments):
        recorded.outside.extend(parts.finished)
        return finishing(session, parts, *arguments)

    monkeypatch.setattr(model_sessions, "compact_model", compact_model)
    monkeypatch.setattr(model_sessions, "WeightGradientSession", finishing_session)
    return recorded


@of_any_size
@pytest.mark.parametrize("name", PASSES)
def test_each_pass_changes_sessions_and_can_be_disabled(name, opened):
    if name == BLOCKED_LAYOUT and not channel_block():
        pytest.skip("no layout in blocks on this machine")
    step([name])
    assert MARKS[name](opened)
    for record in opened:
        record.clear()
    step([other for other in PASSES if other != name])
    assert not MARKS[name](opened)


@of_any_size
def test_memory_report_depends_on_chosen_passes():
    """The gradients of outputs of convolutions are kept for the products outside the session."""
    names = [*PASSES]
    announced = {passes: engine(passes).memory(64).activations for passes in [(), *zip(names)]}
    assert announced[WEIGHT_GRADIENTS,] != announced[()]
    if channel_block():
        assert announced[BLOCKED_LAYOUT,] != announced[()]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [(None, set(PASSES)), ([], set()), ((FUSED_TRANSPOSES,) * 2, {FUSED_TRANSPOSES})],
    ids=["None", "none", "twice"],
)
def test_passes_are_selected_by_name(names, chosen):
    assert chosen_passes(names) == chosen


def test_page_lists_exactly_all_passes():
    page = Path(__file__).parents[3] / "docs" / "performance.md"
    text = page.read_text(encoding="utf-8").split("### Graph passes")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == [*PASSES]


def test_command_line_rejects_unknown_pass(tmp_path, capsys):
    path = tmp_path / "model.onnx"
    path.write_bytes(network().SerializeToString())
    assert main(["inspect", str(path), "--graph-passes", "masks"]) == 2
    assert "unknown graph pass 'masks'" in capsys.readouterr().err
