"""Fused operators of ONNX Runtime: results and gradients are those of its own kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.autodiff.lowering import load_lowerings
from kfac_engine.autodiff.rules import load_rules
from kfac_engine.graph.structure import Graph, Input, Node
from kfac_engine.graph.write import build_model
from scripts.node_tests import check

DOMAIN = "com.microsoft"
RNG = np.random.default_rng(0)


def real(*sides, low=-1.0, high=1.0):
    return RNG.uniform(low, high, sides).astype(np.float32)


def whole(values, dtype="int32"):
    return np.asarray(values, dtype)


def nibbles(*sides):
    return RNG.integers(0, 256, sides).astype(np.uint8)


@dataclass(frozen=True)
class Fused:
    """A node: its operands (None where one is left out), and which results it has."""

    op: str
    label: str
    operands: Sequence[np.ndarray | None]
    attributes: Mapping[str, object] = field(default_factory=dict)
    results: Sequence[str] = ("y",)
    domain: str = DOMAIN

    def __str__(self):
        return f"{self.op}-{self.label}"

    @property
    def graph(self):
        names = [f"operand_{i}" if o is not None else "" for i, o in enumerate(self.operands)]
        arrays = dict(zip(names, self.operands, strict=True))
        inputs = [
            Input(n, a.dtype, a.shape) for n, a in arrays.items() if n and a.dtype.kind == "f"
        ]
        return Graph(
            (Node(self.op, tuple(names), tuple(self.results), self.attributes, "n", self.domain),),
            tuple(inputs),
            tuple(name for name in self.results if name),
            {n: a for n, a in arrays.items() if n and a.dtype.kind != "f"},
            20,
            domains={DOMAIN: 1},
        )

    @property
    def feeds(self):
        named = {f"operand_{i}": o for i, o in enumerate(self.operands) if o is not None}
        return {name: array for name, array in named.items() if array.dtype.kind == "f"}


def case(op, label, *operands, results=("y",), domain=DOMAIN, **attributes):
    return Fused(op, label, operands, attributes, results, domain)


X, Q, K, V = real(2, 3, 8), real(2, 3, 8), real(2, 4, 8), real(2, 4, 8)
NORM = (real(8), real(8))
COS, SIN = np.cos(real(6, 2)), np.sin(real(6, 2))
LENGTHS = {"seqlens_k": whole([2, 2]), "total": whole(3)}
GROUPED = (None, None, LENGTHS["seqlens_k"], LENGTHS["total"])
HEADS = ("y", "present_k", "present_v")

CASES = (
    case("Gelu", "erf", X),
    case("BiasGelu", "erf", X, real(8)),
    case("FastGelu", "alone", X),
    case("FastGelu", "bias", X, real(8)),
    case("QuickGelu", "alpha", X, alpha=1.5),
    case("FusedMatMul", "plain", real(2, 3, 4), real(2, 4, 5)),
    case("FusedMatMul", "turned", real(4, 3), real(2, 5, 4), transA=1, transB=1, alpha=0.3),
    case("FusedMatMul", "vector", real(4), real(4, 2), alpha=2.0),
    case("FusedMatMul", "batch-behind", real(3, 2, 4), real(2, 4, 5), transBatchA=1),
    case("FusedMatMul", "both", real(3, 2, 4), real(4, 2, 5), transBatchA=1, transBatchB=1),
    case("FusedMatMul", "all", real(3, 2, 4), real(2, 3, 5), transBatchA=1, transA=1),
    case("TransposeMatMul", "turned", real(4, 3), real(4, 5), transA=1),
    *(
        case("FusedGemm", activation, real(2, 3), real(4, 3), real(4), transB=1, alpha=0.7,
             activation=activation, **extra)
        for activation, extra in {
            "Relu": {}, "Tanh": {}, "Sigmoid": {}, "LeakyRelu": {"activation_alpha": 0.2},
            "HardSigmoid": {"activation_alpha": 0.3, "activation_beta": 0.4},
            "Elu": {"activation_alpha": 1.5}, "Softplus": {}, "Softsign": {},
        }.items()
    ),
    case("FusedGemm", "no-bias", real(2, 3), real(3, 4), activation="Relu"),
    *(
        case("FusedConv", activation, real(2, 3, 5, 5), real(4, 3, 3, 3), real(4),
             pads=(1, 1, 1, 1), activation=activation, **extra)
        for activation, extra in {
            "Relu": {}, "Tanh": {}, "Sigmoid": {}, "LeakyRelu": {"activation_params": (0.2,)},
            "HardSigmoid": {"activation_params": (0.3, 0.4)},
            "Clip": {"activation_params": (-0.5, 0.7)},
        }.items()
    ),
    case("FusedConv", "residual", real(1, 2, 4, 4), real(2, 2, 3, 3), None, real(1, 2, 4, 4),
         pads=(1, 1, 1, 1), activation="Relu"),
    case("SkipLayerNormalization", "plain", X, real(2, 3, 8), *NORM, epsilon=1e-3),
    case("SkipLayerNormalization", "all", X, real(2, 3, 8), *NORM, real(8), epsilon=1e-3,
         results=("y", "", "", "sum")),
    case("SkipLayerNormalization", "shared-skip", X, real(1, 3, 8), NORM[0], epsilon=1e-3),
    case("SimplifiedLayerNormalization", "last", X, NORM[0], domain="", epsilon=1e-3, axis=-1),
    case("SkipSimplifiedLayerNormalization", "all", X, real(2, 3, 8), NORM[0], real(8),
         epsilon=1e-3, results=("y", "", "", "sum")),
    case("EmbedLayerNormalization", "segments", whole([[1, 4, 0], [2, 2, 3]]),
         whole([[0, 1, 1], [0, 0, 1]]), real(5, 8), real(6, 8), real(2, 8), *NORM,
         epsilon=1e-3, results=("y", "", "sum")),
    case("EmbedLayerNormalization", "mask", whole([[1, 4, 0], [2, 2, 3]]), None, real(5, 8),
         real(6, 8), None, *NORM, whole([[1, 1, 0], [1, 1, 1]]), whole([[2, 1, 0], [0, 1, 3]]),
         epsilon=1e-3, results=("y", "counts")),
    case("Attention", "plain", real(2, 3, 6), real(6, 24), real(24), num_heads=2),
    case("Attention", "causal", real(2, 3, 6), real(6, 24), real(24), num_heads=2,
         unidirectional=1, results=("y", "present")),
    case("Attention", "padding", real(2, 3, 6), real(6, 24), real(24),
         whole([[1, 1, 0], [1, 1, 1]]), num_heads=2, scale=0.3),
    case("Attention", "padding-and-causal", real(2, 3, 6), real(6, 24), real(24),
         whole([[1, 1, 0], [1, 1, 1]]), num_heads=2, unidirectional=1),
    case("Attention", "lengths", real(2, 3, 6), real(6, 24), real(24), whole([2, 3]), num_heads=2),
    case("Attention", "masks-of-queries", real(2, 3, 6), real(6, 24), real(24),
         whole(np.tril(np.ones((2, 3, 3)))), num_heads=2),
    case("Attention", "added", real(2, 3, 6), real(6, 24), real(24), None, None,
         real(1, 2, 3, 3), num_heads=2),
    case("Attention", "other-sides", real(2, 3, 6), real(6, 20), real(20), num_heads=2,
         qkv_hidden_sizes=(8, 8, 4)),
    case("MultiHeadAttention", "plain", Q, K, V, num_heads=2),
    case("MultiHeadAttention", "bias", Q, K, real(2, 4, 6), real(22), num_heads=2),
    case("MultiHeadAttention", "padding", Q, K, V, None, whole([[1, 1, 0, 0], [1, 1, 1, 1]]),
         num_heads=2, mask_filter_value=-5.0),
    case("MultiHeadAttention", "added", Q, K, V, None, None, real(2, 1, 3, 4), num_heads=2),
    case("MultiHeadAttention", "causal", Q, real(2, 3, 8), real(2, 3, 8), num_heads=2,
         unidirectional=1, scale=0.7),
    case("MultiHeadAttention", "past", Q, real(2, 3, 8), real(2, 3, 8), None, None, None,
         real(2, 2, 2, 4), real(2, 2, 2, 4), num_heads=2, results=HEADS),
    case("MultiHeadAttention", "keys-in-heads", Q, real(2, 2, 4, 4), real(2, 2, 4, 4), num_heads=2),
    case("GroupQueryAttention", "plain", real(2, 3, 32), real(2, 3, 16), real(2, 3, 16), *GROUPED,
         num_heads=4, kv_num_heads=2, results=HEADS),
    case("GroupQueryAttention", "packed", real(2, 3, 64), None, None, *GROUPED, num_heads=4,
         kv_num_heads=2, scale=0.3, results=HEADS),
    case("GroupQueryAttention", "window", real(2, 3, 32), real(2, 3, 16), real(2, 3, 16), *GROUPED,
         num_heads=4, kv_num_heads=2, local_window_size=2, results=HEADS),
    case("GroupQueryAttention", "softcap", real(2, 3, 32), real(2, 3, 16), real(2, 3, 16), *GROUPED,
         num_heads=4, kv_num_heads=2, softcap=0.5, results=HEADS),
    case("GroupQueryAttention", "rotary", real(2, 3, 64), real(2, 3, 32), real(2, 3, 32), *GROUPED,
         np.cos(real(6, 8)), np.sin(real(6, 8)), num_heads=4, kv_num_heads=2, do_rotary=1,
         results=HEADS),
    case("GroupQueryAttention", "padding", real(2, 3, 32), real(2, 3, 16), real(2, 3, 16),
         None, None, whole([2, 0]), whole(3), num_heads=4, kv_num_heads=2, results=HEADS),
    case("GroupQueryAttention", "padding-window", real(2, 5, 32), real(2, 5, 16), real(2, 5, 16),
         None, None, whole([4, 0]), whole(5), num_heads=4, kv_num_heads=2, local_window_size=2,
         results=HEADS),
    case("GroupQueryAttention", "padding-both-ways", real(2, 3, 32), real(2, 3, 16),
         real(2, 3, 16), None, None, whole([1, 2]), whole(3), num_heads=4, kv_num_heads=2,
         causal=0),
    case("GroupQueryAttention", "padding-packed-rotary", real(2, 3, 128), None, None, None, None,
         whole([1, 2]), whole(3), np.cos(real(6, 8)), np.sin(real(6, 8)), num_heads=4,
         kv_num_heads=2, do_rotary=1),
    case("GroupQueryAttention", "all", real(2, 3, 64), real(2, 3, 32), real(2, 3, 32), None, None,
         whole([1, 2]), whole(3), np.cos(real(6, 8)), np.sin(real(6, 8)),
         whole([[1, 2, 3], [3, 1, 2]], "int64"), real(2, 4, 3, 3), num_heads=4, kv_num_heads=2,
         do_rotary=1, softcap=0.5),
    case("RotaryEmbedding", "flat", X, whole([[0, 1, 2], [3, 4, 5]], "int64"), COS, SIN),
    case("RotaryEmbedding", "heads", real(2, 2, 3, 4), whole([1], "int64"), COS, SIN),
    case("RotaryEmbedding", "interleaved", real(2, 3, 8), whole([0], "int64"), COS, SIN,
         interleaved=1),
    case("RotaryEmbedding", "partial", real(2, 3, 12), whole([0], "int64"), COS, SIN, num_heads=2,
         rotary_embedding_dim=4),
    case("GatherND", "last", real(3, 4), whole([[2, 1], [0, 0], [2, 1]], "int64")),
    case("Trilu", "lower", real(3, 3), upper=0),
    case("GridSample", "bilinear", real(1, 2, 4, 4), real(1, 3, 3, 2, low=-0.7, high=0.7)),
    case("MatMulNBits", "four-bits", real(2, 40), nibbles(3, 2, 16), real(3, 2, low=0.1),
         K=40, N=3, bits=4, block_size=32),
    case("MatMulNBits", "zero-points", real(2, 2, 70), nibbles(3, 3, 16), real(9, low=0.1),
         nibbles(6), None, real(3), K=70, N=3, bits=4, block_size=32),
    case("MatMulNBits", "eight-bits", real(2, 32), nibbles(3, 2, 16), real(3, 2, low=0.1),
         nibbles(3, 2), K=32, N=3, bits=8, block_size=16),
    case("MatMulNBits", "real-zero-points", real(2, 32), nibbles(3, 2, 8), real(3, 2, low=0.1),
         real(3, 2, low=6.0, high=9.0), K=32, N=3, bits=4, block_size=16),
    case("Inverse", "batch", real(2, 3, 3) + 3 * np.eye(3, dtype=np.float32)),
)  # fmt: skip


@pytest.mark.parametrize("fused", CASES, ids=str)
def test_fused_operator_has_results_and_gradient_of_kernel(fused):
    check(fused.graph, fused.feeds)


def test_all_fused_operators_have_cases():
    table = {*load_lowerings(), *load_rules()}
    covered = {f"{fused.domain}::{fused.op}" for fused in CASES}
    assert {op for op in table if op.startswith(f"{DOMAIN}::")} == covered - {
        "::SimplifiedLayerNormalization"
    }


def test_file_with_runtime_operator_is_loaded():
    (fused,) = [fused for fused in CASES if fused.op == "SimplifiedLayerNormalization"]
    graph = fused.graph
    model = build_model(
        graph.nodes, graph.inputs, graph.outputs, graph.constants, graph.opset, domains={DOMAIN: 1}
    )
    gradient = ke.differentiate(model, wrt=["operand_0"])
    assert {node.domain for node in gradient.graph.node} == {""}


REFUSED = (
    case("Attention", "past", real(2, 3, 6), real(6, 24), real(24), None, real(2, 2, 2, 2, 4),
         num_heads=2, results=("y", "present")),
    case("MultiHeadAttention", "shapes", Q, K, V, None, whole(np.ones(8)), num_heads=2),
    case("GroupQueryAttention", "sink", real(2, 3, 32), real(2, 3, 16), real(2, 3, 16), *GROUPED,
         *[None] * 4, real(4), num_heads=4, kv_num_heads=2, results=HEADS),
    case("CDist", "unknown", real(3, 4), real(2, 4), metric="euclidean"),
)  # fmt: skip


@pytest.mark.parametrize("fused", REFUSED, ids=str)
def test_unsupported_option_error_names_node(fused):
    with pytest.raises(ke.UnsupportedOpError, match=f"{DOMAIN}::{fused.op}.*'n'"):
        check(fused.graph, fused.feeds)
