"""Operator sets that are newer than the runtime's: replaced by definitions, or refused."""

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from kfac_engine.errors import ModelError
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.passes.canonicalize import NEWEST_OPSET
from tests.graph.running import run_graph
from tests.models import one_operator

# One operator in float32, by two programs.
CLOSE = 1e-5
RNG = np.random.default_rng(0)


PAIR = {"x": "float[2,3]", "x1": "float[2,3]"}
ROWS, HEADS = (dict.fromkeys(("x", "x1", "x2"), f"float[{n}]") for n in ("1,3,8", "2,2,3,4"))
CASES = {
    "new_operator": one_operator("SwiGLU", PAIR, opsets='"": 28', alpha=1.5),
    "new_operator_in_context": one_operator(
        "LinearAttention", ROWS, results=("y", "state"), opsets='"": 27', q_num_heads=2,
        kv_num_heads=2, update_rule="linear"),
    "new_mode": one_operator(
        "SpaceToDepth", {"x": "float[1,2,4,4]"}, opsets='"": 28', blocksize=2, mode="CRD"),
    "more_types": one_operator(
        "Einsum", {"x": "float[2,3]", "x1": "float[3,4]"}, opsets='"": 28', equation="ij,jk->ik"),
    "unchanged": one_operator("Relu", {"x": "float[2,3]"}, opsets='"": 28'),
    "new_form_without_kernel": one_operator("Attention", HEADS, opsets='"": 25'),
    "other_domain": one_operator(
        "FlexAttention", HEADS, opsets='"": 26, "ai.onnx.preview": 1', domain="ai.onnx.preview"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_newer_operator_set_equals_reference(name):
    model = CASES[name]
    graph = load_graph(model)
    feeds = {entry.name: RNG.normal(size=entry.shape).astype(np.float32) for entry in graph.inputs}
    assert graph.opset <= NEWEST_OPSET
    (expected,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(run_graph(graph, feeds)["y"], expected, CLOSE, CLOSE)


def test_newer_operator_without_definition_raises_error(monkeypatch):
    monkeypatch.setattr("kfac_engine.graph.passes.newer_opsets.is_defined", lambda *_: False)
    with pytest.raises(ModelError, match=r"SwiGLU node 'node' is of operator set 28"):
        load_graph(CASES["new_operator"])


def test_huge_version_number_raises_error():
    model = one_operator("Relu", {"x": "float[2,3]"}, opsets='"": 28')
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 2**40))
    model.graph.node.append(helper.make_node("Scaler", ["x"], ["z"], domain="ai.onnx.ml"))
    with pytest.raises(ModelError):
        load_graph(model)
