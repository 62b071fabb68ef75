"""Operators that ONNX defines by others: their definition serves batches of every size."""

import numpy as np
import onnxruntime as ort
import pytest

import kfac_engine as ke
from kfac_engine.graph.load import load_graph
from kfac_engine.runtime.lower import lowered
from scripts.node_tests import check
from tests.models import one_operator

RNG = np.random.default_rng(0)
BATCHES = (2, 5)


def model_of(op, version, sides, constants=(), **attributes):
    """One operator on inputs with ``sides`` after the batch, and on constants."""
    inputs = {
        f"x{i}": f"float[{','.join(map(str, ('batch', *rest)))}]" for i, rest in enumerate(sides)
    }
    fixed = {f"c{i}": value for i, value in enumerate(constants)}
    return one_operator(op, inputs, fixed, opsets=f'"": {version}', **attributes)


SCALE = np.linspace(0.5, 1.5, 4).astype(np.float32)
CASES = {
    "Attention-heads": model_of("Attention", 23, [(2, 3, 4)] * 3, is_causal=1),
    "Attention-flat": model_of("Attention", 24, [(3, 8)] * 3, q_num_heads=2, kv_num_heads=2),
    "Attention-grouped": model_of("Attention", 23, [(4, 3, 2), (2, 3, 2), (2, 3, 2)], softcap=2.0),
    "Attention-windowed": model_of("Attention", 25, [(2, 3, 4)] * 3, is_causal=1),
    "CenterCropPad": model_of("CenterCropPad", 18, [(3, 5)], [np.array([2, 6])], axes=[1, 2]),
    "MeanVarianceNormalization": model_of("MeanVarianceNormalization", 18, [(2, 3, 3)]),
    "Mish": model_of("Mish", 18, [(3,)]),
    "RMSNormalization": model_of("RMSNormalization", 23, [(3, 4)], [SCALE], epsilon=1e-3),
    "RotaryEmbedding": model_of("RotaryEmbedding", 23, [(2, 3, 8), (3, 4), (3, 4)]),
    "Shrink": model_of("Shrink", 18, [(3,)], lambd=0.3, bias=0.1),
    "SwiGLU": model_of("SwiGLU", 28, [(3,), (3,)], alpha=1.2),
    "Swish": model_of("Swish", 24, [(3,)], alpha=0.7),
    "ThresholdedRelu": model_of("ThresholdedRelu", 22, [(3,)], alpha=0.4),
}  # fmt: skip


def drawn(graph, batch):
    return {
        entry.name: RNG.normal(size=(batch, *entry.shape[1:])).astype(np.float32)
        for entry in graph.inputs
    }


@pytest.mark.parametrize("name", CASES)
def test_definition_has_gradient_of_kernel_for_other_batch_sizes(name):
    graph = load_graph(CASES[name])
    sample, larger = (drawn(graph, batch) for batch in BATCHES)
    check(graph, larger, sample=sample)


# Targets of three classes; the second is ignored where a case says so.
TARGETS = np.array([0, 1, 2, 1])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [None, 1], ids=["all", "ignored"])
@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_loss_definition_has_gradient_of_formula(op, ignored, reduction):
    extra = {} if ignored is None else {"ignore_index": ignored}
    model = model_of(op, 18, [(3,)], [TARGETS], reduction=reduction, **extra)
    z = RNG.normal(size=(4, 3))
    kept = np.ones(4) if ignored is None else (ignored != TARGETS).astype(float)
    weights = kept / (kept.sum() if reduction == "mean" else 1)
    one_hot = np.eye(3)[TARGETS]
    softmax = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    slope = softmax - one_hot if op.startswith("Softmax") else -one_hot
    feeds = {"x0": z.astype(np.float32)}
    gradient = ke.differentiate(model, wrt=["x0"], sample_inputs=feeds)
    cotangent = np.ones(4 if reduction == "none" else (), np.float32)
    session = ort.InferenceSession(gradient.SerializeToString())
    (found,) = session.run(["gradient/x0"], {**feeds, "cotangent": cotangent})
    np.testing.assert_allclose(found, weights[:, None] * slope, atol=1e-6)


def test_definition_contains_only_operators_with_rules():
    graph = load_graph(CASES["Attention-heads"])
    rewritten, _ = lowered(graph, ["x0"])
    assert "Attention" not in {node.op for node in rewritten.nodes}
    assert rewritten.outputs == graph.outputs
    assert len({node.name for node in rewritten.nodes}) == len(rewritten.nodes)
