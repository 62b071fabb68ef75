"""Operator sets that are newer than the runtime's: replaced by definitions, or refused."""

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from kfac_engine.errors import ModelError
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.passes.canonicalize import NEWEST_OPSET
from tests.graph.running import run_graph

# One operator in float32, by two programs.
CLOSE = 1e-5
RNG = np.random.default_rng(0)


def one_operator(op, version, shapes, *, domain="", outputs=("y",), **attributes):
    names = [f"x{i}" for i in range(len(shapes))]
    node = helper.make_node(op, names, outputs, domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        op,
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in zip(names, shapes, strict=True)
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    domains = {"": version, **({domain: 1} if domain else {})}
    imports = [helper.make_opsetid(name, number) for name, number in domains.items()]
    return helper.make_model(graph, opset_imports=imports)


HEADS = [(2, 2, 3, 4)] * 3
CASES = {
    "new_operator": one_operator("SwiGLU", 28, [(2, 3), (2, 3)], alpha=1.5),
    "new_operator_in_context": one_operator(
        "LinearAttention",
        27,
        [(1, 3, 8)] * 3,
        outputs=("y", "state"),
        q_num_heads=2,
        kv_num_heads=2,
        update_rule="linear",
    ),
    "new_mode": one_operator("SpaceToDepth", 28, [(1, 2, 4, 4)], blocksize=2, mode="CRD"),
    "more_types": one_operator("Einsum", 28, [(2, 3), (3, 4)], equation="ij,jk->ik"),
    "unchanged": one_operator("Relu", 28, [(2, 3)]),
    "new_form_without_kernel": one_operator("Attention", 25, HEADS),
    "other_domain": one_operator("FlexAttention", 26, HEADS, domain="ai.onnx.preview"),
}


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
    with pytest.raises(ModelError, match=r"SwiGLU that computes 'y' is of operator set 28"):
        load_graph(CASES["new_operator"])


def test_huge_version_number_raises_error():
    model = one_operator("Relu", 28, [(2, 3)])
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 2**40))
    model.graph.node.append(helper.make_node("Scaler", ["x0"], ["z"], domain="ai.onnx.ml"))
    with pytest.raises(ModelError):
        load_graph(model)
